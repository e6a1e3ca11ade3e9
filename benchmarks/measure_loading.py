"""Measures the host memory that loading a checkpoint takes beside the final arrays.

    python -m benchmarks.measure_loading --format=t5x --folder=/tmp/big

Writes a random T5 (by default of 4 GB in float32) into the folder, unless it exists, and loads it
as bfloat16 in a process of its own, on CPU, where the final arrays are in host memory too.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
from functools import partial

import jax
import numpy as np

from speculative import checkpoints
from speculative.checkpoints.checkpoint import Checkpoint, Tensor, by_name
from speculative.models import Config, abstract_params, named

MIB = 2**20


def random_checkpoint(config: Config) -> Checkpoint:
    """A checkpoint whose tensors are drawn when they are read."""
    rng = np.random.default_rng(0)
    tensors = {
        name: Tensor(leaf.shape, "float32", partial(rng.standard_normal, leaf.shape, np.float32))
        for name, leaf in by_name(abstract_params(config)).items()
    }
    return Checkpoint("random", "native", config, tensors)


def resident(which: str = "VmRSS") -> int:
    """The resident size of this process in bytes, or its largest so far (VmHWM), on Linux only."""
    file = pathlib.Path("/proc/self/status")
    status = file.read_text() if file.is_file() else ""
    if f"{which}:" not in status:
        raise ValueError(f"/proc/self/status has no {which}; this runs on Linux alone.")
    return int(status.partition(f"{which}:")[2].split()[0]) * 1024


def load(folder: str) -> None:
    """Loads a checkpoint and prints the memory that it took."""
    checkpoint = checkpoints.open(folder)
    with tempfile.TemporaryDirectory() as small:  # Loads the libraries' code before measuring.
        path = pathlib.Path(small) / "model"
        config = named("t5_1_1_small", vocab_size=64, emb_dim=16, mlp_dim=16)
        checkpoints.FORMATS[checkpoint.format].write(path, random_checkpoint(config), "float32")
        checkpoints.open(path).load("bfloat16")
    largest = max(4 * int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
    before = resident("VmHWM")
    params = checkpoint.load("bfloat16")
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    above = resident("VmHWM") - before - arrays
    print(
        f"{checkpoint.format}: {checkpoint.parameters / 1e6:.0f} M parameters, final arrays "
        f"{arrays / MIB:.0f} MiB, largest tensor {largest / MIB:.0f} MiB in float32; peak above "
        f"the final arrays {above / MIB:.0f} MiB = {above / largest:.2f} largest tensors"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--format", choices=list(checkpoints.FORMATS), required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--layers", type=int, default=40, help="decoder layers; 40 make 4.2 GB")
    parser.add_argument("--load", action="store_true", help="only load; write nothing")
    options = parser.parse_args()
    if options.load:
        return load(str(options.folder))
    if not options.folder.exists():
        checkpoint = random_checkpoint(named("t5_1_1_large", num_decoder_layers=options.layers))
        checkpoints.FORMATS[options.format].write(options.folder, checkpoint, "float32")
    command = [sys.executable, "-m", "benchmarks.measure_loading", *sys.argv[1:], "--load"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
