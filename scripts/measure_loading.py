"""How much host memory loading a checkpoint takes beyond the arrays it ends in.

    python scripts/measure_loading.py --format=t5x --folder=/tmp/big

Writes a random T5 (by default of 4 GB in float32) into the folder, unless it is there, and loads
it as bfloat16 in a process of its own, on CPU, where the final arrays are in host memory too.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from speculative import checkpoints
from speculative.checkpoints.checkpoint import Checkpoint, Tensor, by_name
from speculative.models import Config, abstract_params, named

MIB = 2**20


def random_checkpoint(config: Config) -> Checkpoint:
    """Tensors are drawn as they are written."""
    rng = np.random.default_rng(0)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return Tensor(shape, "float32", lambda: rng.standard_normal(shape, np.float32))

    tensors = {name: tensor(leaf.shape) for name, leaf in by_name(abstract_params(config)).items()}
    return Checkpoint("random", "native", config, tensors)


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this runs on Linux alone.")


def load(folder: str) -> None:
    """Loads and prints what it took."""
    import jax

    checkpoint = checkpoints.open(folder)
    with tempfile.TemporaryDirectory() as small:  # The libraries' code is not what is measured.
        path = pathlib.Path(small) / "model"
        config = named("t5_1_1_small", vocab_size=64, emb_dim=16, mlp_dim=16)
        checkpoints.FORMATS[checkpoint.format].write(path, random_checkpoint(config), "float32")
        checkpoints.open(path).load("bfloat16")
    largest = max(4 * int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
    before = peak()
    params = checkpoint.load("bfloat16")
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    above = peak() - before - arrays
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
    parser.add_argument("--load", action="store_true", help="only load what is there")
    options = parser.parse_args()
    if options.load:
        return load(str(options.folder))
    if not options.folder.exists():
        checkpoints.FORMATS[options.format].write(
            options.folder,
            random_checkpoint(named("t5_1_1_large", num_decoder_layers=options.layers)),
            "float32",
        )
    command = [sys.executable, __file__, f"--format={options.format}", f"--folder={options.folder}"]
    subprocess.run([*command, "--load"], check=True)


if __name__ == "__main__":
    main()
