"""Damages files of every format that the package reads, and counts the outcomes of reading them.

python scripts/fuzz_formats.py --variants=10000 --seed=0

A variant is one damaged file: bytes changed, cut, added or repeated, a value of its JSON replaced,
or the file removed. Reading it may give the original content, or raise a ValueError that names the
file or its folder. Formats without checksums may also give other content; ours (native) may not.
Anything else is a fault: another exception, a message without the file, no answer for a minute (the
process hangs, or has ended). Faults are printed with the variant's number, which `--only` reruns.
The exit code is 1 if there are any.
"""

import argparse
import collections
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = pathlib.Path(__file__).parents[1]
DATA, ASSETS = ROOT / "tests" / "data", ROOT / "speculative" / "assets"
SECONDS = 60
OUTCOMES = ("same", "refused", "other", "wrong", "unnamed", "exception", "hang")
FAULTS = OUTCOMES[3:]
ODD = json.loads(
    '[null, true, -1, 0, 1.5, 100000000, 9223372036854775808, Infinity, "", "x", "../x", '
    '[], [[]], {}, {"a": 1}]'
)


def make(folder: pathlib.Path) -> None:
    """Writes small files of every format, each in a separate folder."""
    import jax
    import numpy as np

    from speculative import checkpoints
    from speculative.drafts import ngram, suffix
    from speculative.models import T5Config, random_params
    from speculative.vocabulary import SentencePiece

    config = T5Config(8192, 8, 1, 8, 16, 1, 1)
    params = jax.device_get(random_params(config))
    vocabulary = ASSETS / "debian.model"
    for storage in ("float32", "int8"):
        made = folder / f"native {storage}"
        checkpoints.native.save(made, config, params, vocabulary, storage)
    for name in ("t5x", "huggingface"):
        checkpoints.convert(folder / "native float32", folder / name, name)
    for golden in ("transformers_gpt2", "transformers_v1_1"):
        shutil.copytree(DATA / golden, folder / golden)
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 8000, 12) for _ in range(20)]
    pieces = SentencePiece(vocabulary)
    (folder / "tables").mkdir()
    table = ngram.count_ngrams(texts, 3, pieces.size)
    ngram.TABLE.save(folder / "tables" / "a.npz", pieces, table)
    suffix.save(folder / "tables" / "b.npz", texts, pieces)
    (folder / "text").mkdir()
    (folder / "text" / "a.tsv").write_text("a cat\teine Katze\na dog\tein Hund\n")
    (folder / "text" / "a.jsonl").write_text('{"source": "a", "reference": "b"}\n' * 3)
    shutil.copy(ASSETS / "prompts" / "debian_ende.jsonl", folder / "text" / "b.jsonl")
    (folder / "rows").mkdir()
    shutil.copy(DATA / "record.jsonl", folder / "rows" / "records.jsonl")
    (folder / "rows" / "row.gin").write_text(
        "RowConfig.task = 'debian_ende'\nRowConfig.target = 'debian_target'\n"
        "RowConfig.draft = 'debian_draft'\nRowConfig.gamma = 5\nRowConfig.temperature = 0.0\n"
    )


def digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def read_checkpoint(folder: pathlib.Path, _: pathlib.Path) -> str:
    from speculative import checkpoints

    checkpoint = checkpoints.open(folder)
    tensors = [(name, checkpoint.read(name).tobytes()) for name in sorted(checkpoint.tensors)]
    vocabulary = checkpoint.open_vocabulary()
    return digest(checkpoint.config, tensors, vocabulary and vocabulary.fingerprint)


def read_table(folder: pathlib.Path, damaged: pathlib.Path) -> str:
    import jax
    import numpy as np

    from speculative.drafts import ngram, suffix
    from speculative.vocabulary import SentencePiece

    pieces = SentencePiece(ASSETS / "debian.model")
    counts = damaged.name == "a.npz"
    read = ngram.load(damaged, pieces, 3) if counts else suffix.load(damaged, pieces)
    return digest([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(read)])


def read_text(folder: pathlib.Path, damaged: pathlib.Path) -> str:
    from speculative.tasks.prompts import read_pairs

    return digest(read_pairs(str(damaged)))


def read_rows(folder: pathlib.Path, damaged: pathlib.Path) -> str:
    from speculative.rows import records
    from speculative.rows.config import read_row

    return digest(read_row(damaged) if damaged.suffix == ".gin" else records.read(damaged))


READERS = {"tables": read_table, "text": read_text, "rows": read_rows}
"""Readers by folder; every other folder is a checkpoint."""


def damage(content: bytes, file: pathlib.Path, rng: random.Random) -> bytes | None:
    """The content of a damaged file; None if the file is removed."""
    kind = rng.choice(["json"] * 3 + ["bytes", "bytes", "cut", "added", "repeated", "gone"])
    if kind == "json":
        try:
            return json.dumps(_replaced(json.loads(content), rng)).encode()
        except ValueError:
            kind = "bytes"
    if kind == "gone":
        return None
    at, many = rng.randrange(len(content) + 1), rng.choice([1, 1, 2, 8, 64])
    if kind == "bytes":
        changed = bytearray(content)
        for _ in range(many if content else 0):
            # Half of the changes are near the beginning, where headers are.
            limit = len(content) if rng.random() < 0.5 else min(len(content), 512)
            changed[rng.randrange(limit)] = rng.randrange(256)
        return bytes(changed)
    if kind == "cut":
        return content[:at]
    added = rng.randbytes(many) if kind == "added" else content[at : at + many]
    return content[:at] + added + content[at:]


def _replaced(value: Any, rng: random.Random) -> Any:
    """A JSON value in which one value, at any depth, is replaced by an odd one or removed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = _replaced(value[key], rng)
        return value
    return rng.choice(ODD)


@functools.cache
def undamaged(reader: Callable[..., str], folder: pathlib.Path, file: pathlib.Path) -> str:
    return reader(folder, file)


def outcome(original: pathlib.Path, seed: int, number: int) -> tuple[str, str, str]:
    """The folder, the outcome and the message of one variant."""
    rng = random.Random(f"{seed} {number}")
    folder = pathlib.Path(shutil.copytree(original, original.parent / f"copy {os.getpid()}"))
    try:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file = rng.choice(files)
        damaged = damage(file.read_bytes(), file, rng)
        if damaged is None:
            file.unlink()
        else:
            file.write_bytes(damaged)
        reader = READERS.get(original.name, read_checkpoint)
        try:
            content = reader(folder, file)
        except ValueError as error:
            message = str(error)
            named = file.name in message or str(folder) in message
            return original.name, "refused" if named else "unnamed", f"{file.name}: {message}"
        except Exception:
            return original.name, "exception", f"{file.name}: {traceback.format_exc()}"
        if content == undamaged(reader, original, original / file.relative_to(folder)):
            return original.name, "same", ""
        kind = "wrong" if original.name.startswith("native") else "other"
        return original.name, kind, f"{file.name} was read as something else"
    finally:
        shutil.rmtree(folder)


def run(folder: pathlib.Path, seed: int, numbers: list[int]) -> dict[int, tuple[str, str, str]]:
    """The outcomes of variants, from a process that is replaced if it ends or hangs."""
    context = multiprocessing.get_context("spawn")
    originals = sorted(folder.iterdir())
    outcomes: dict[int, tuple[str, str, str]] = {}
    pool = context.Pool(1)
    for number in track(numbers, "Variants", console=Console(stderr=True)):
        original = originals[number % len(originals)]
        try:  # The first waits for imports.
            outcomes[number] = pool.apply_async(outcome, (original, seed, number)).get(SECONDS)
        except multiprocessing.TimeoutError:
            outcomes[number] = (original.name, "hang", "")
            pool.terminate()
            pool = context.Pool(1)
    pool.terminate()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Damages files of every format and reads them.")
    parser.add_argument("--variants", type=int, default=10_000, help="damaged files (10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage (0)")
    parser.add_argument("--only", type=int, metavar="N", help="run only variant N")
    options = parser.parse_args()
    numbers = list(range(options.variants)) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder)
        make(made)
        outcomes = run(made, options.seed, numbers)
    counts = collections.Counter((name, kind) for name, kind, _ in outcomes.values())
    table = Table("files", *OUTCOMES)
    for name in sorted({name for name, _, _ in outcomes.values()}):
        table.add_row(name, *(str(counts[name, kind] or "") for kind in OUTCOMES))
    faults = {number: each for number, each in outcomes.items() if each[1] in FAULTS}
    for number, (name, kind, message) in faults.items():
        print(f"variant {number}, {name}, {kind}: {message}")
    Console().print(table)
    print(f"{len(outcomes)} variants, {len(faults)} faults.")
    parser.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
