"""What a draft should learn from, and by which loss: the target's text or its own, KL or TV.

    python -m benchmarks.distillation --data_dir=data/tokenized --work_dir=work/distillation

Drafts that begin as the shipped `debian_draft` learn for equally many steps, several times each way
(DistillSpec, arXiv 2310.08461, compares such ways). Then each guesses for the validation texts of
both tasks, seven guesses a step. The records go into `distillation.jsonl`; runs that are done are
not repeated, and a run that was killed goes on.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from speculative import disk, loading
from speculative.checkpoints import SHIPPED
from speculative.commands import whole
from speculative.rows import environment
from speculative.training import examples

TARGET, BEGIN = SHIPPED["debian_target"], SHIPPED["debian_draft"]
TASKS = ("debian_ende", "debian_synopsis")
GAMMA, BATCH = 7, 16

# In words, weights of KL and TV, and the share of the draft's own text. The first is the recipe in
# use.
ARMS = {
    "both_target": ("KL + TV, target's text", 1.0, 1.0, 0.0),
    "kl_target": ("KL, target's text", 1.0, 0.0, 0.0),
    "tv_target": ("TV, target's text", 0.0, 1.0, 0.0),
    "kl_own": ("KL, draft's text", 1.0, 0.0, 1.0),
    "tv_own": ("TV, draft's text", 0.0, 1.0, 1.0),
}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare ways to distil a draft.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--data_dir", required=True, metavar="DIR", help="the tokenised files")
    add("--work_dir", required=True, metavar="DIR", help="the runs, and their texts")
    add("--output_dir", default="results/distillation", metavar="DIR", help="(%(default)s)")
    add("--steps", type=whole(100, 10**6), default=2000, metavar="N", help="of each run (2000)")
    add("--ways", nargs="+", default=list(ARMS), choices=ARMS, metavar="WAY", help=", ".join(ARMS))
    add("--seeds", type=int, nargs="+", default=[11, 12, 13], metavar="N", help="(11 12 13)")
    return parser.parse_args(arguments)


def train(arm: str, seed: int, steps: int, data_dir: str, work_dir: pathlib.Path) -> pathlib.Path:
    """The draft of a run, which is made if it is not there; all runs read the same texts."""
    _, kl, tv, own = ARMS[arm]
    folder = work_dir / f"{arm}_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (work_dir / "texts").mkdir(exist_ok=True)
    if not (folder / "texts").exists():
        (folder / "texts").symlink_to((work_dir / "texts").absolute())
    bindings = {
        "loop.TrainConfig.steps": steps,
        "loop.TrainConfig.learning_rate": 0.01,
        "loop.TrainConfig.warmup_steps": 50,
        "loop.TrainConfig.evaluate_every": steps,
        "loop.TrainConfig.checkpoint_every": 100,
        "loop.TrainConfig.seed": seed,
        "distil.distil.references": "{}",
        "distil.distil.kl_weight": kl,
        "distil.distil.variation_weight": tv,
        "distil.distil.own_share": own,
    }
    given = {
        "config": "configs/training/draft.gin",
        "data_dir": data_dir,
        "target_dir": TARGET,
        "init_from": BEGIN,
        "work_dir": folder,
        "out_dir": folder / "out",
    }
    command = [sys.executable, "scripts/distil.py", *(f"--{k}={v}" for k, v in given.items())]
    subprocess.run([*command, *(f"--gin={k}={v}" for k, v in bindings.items())], check=True)
    return folder / "out"


def acceptance(draft: pathlib.Path, data_dir: str) -> list[dict[str, Any]]:
    """Guesses tested and accepted by position, for each task at T = 0 and 1."""
    pair, found = loading.load(TARGET, draft), list[dict[str, Any]]()
    for task in TASKS:
        held_out = examples.load(pathlib.Path(data_dir, f"{task}_validation.npz"))
        texts = [pair.vocabulary.decode(source) for source, _ in held_out]
        for temperature in (0.0, 1.0):
            settings: dict[str, Any] = {"temperature": temperature, "max_length": 72}
            results = pair.generate(texts, batch_size=BATCH, gamma=GAMMA, truncate=True, **settings)
            tested, accepted = (
                np.sum([getattr(x, f"{name}_by_position") for x in results], axis=0).tolist()
                for name in ("tested", "accepted")
            )
            of = {"task": task, "temperature": temperature, "texts": len(results)}
            of |= {"tokens": sum(len(result.tokens) for result in results)}
            of |= {"calls": sum(result.target_calls for result in results)}
            found.append(of | {"tested": tested, "accepted": accepted})
    return found


def show(records: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints each way's tokens a call, and the gain over the first with a 95% t interval."""

    def values(arm: str, task: str, temperature: float) -> np.ndarray:
        chosen = sorted((r for r in records if r["arm"] == arm), key=lambda r: r["seed"])
        return np.array([
            one["tokens"] / one["calls"]
            for record in chosen
            for one in record["acceptance"]
            if (one["task"], one["temperature"]) == (task, temperature)
        ])  # fmt: skip

    columns = [(task, t) for task in TASKS for t in (0.0, 1.0)]
    table = Table("tokens a call", *(f"{task}, T = {t:g}" for task, t in columns), box=None)
    begun = {record["arm"] for record in records}
    first, *others = (arm for arm in ARMS if arm in begun)
    table.add_row(ARMS[first][0], *(f"{values(first, *column).mean():.3f}" for column in columns))
    for arm in others:
        cells = []
        for column in columns:
            own, of_first = values(arm, *column), values(first, *column)
            cell = f"{own.mean():.3f}"
            if len(own) == len(of_first) > 1:
                ratio = own / of_first  # Of equal seeds.
                half = stats.t.ppf(0.975, len(ratio) - 1) * ratio.std(ddof=1) / len(ratio) ** 0.5
                cell += f" ({100 * (ratio.mean() - 1):+.1f} ± {100 * half:.1f}%)"
            cells.append(cell)
        table.add_row(ARMS[arm][0], *cells)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    output, work_dir = pathlib.Path(options.output_dir), pathlib.Path(options.work_dir)
    file = output / "distillation.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    done = disk.entries(file, lambda line: (line["arm"], line["seed"]), "record")
    for seed in options.seeds:
        for arm in options.ways:
            if (arm, seed) in done:
                continue
            draft = train(arm, seed, options.steps, options.data_dir, work_dir)
            log = (draft.parent / "log.jsonl").read_text().splitlines()
            record = {"arm": arm, "seed": seed, "steps": options.steps}
            record |= {"held_out": json.loads(log[-1])}
            record |= {"acceptance": acceptance(draft, options.data_dir)} | environment.here()
            disk.append(file, record)
    show(disk.entries(file, dict, "record"), Console(width=140))
    print(f"Written: {file}.")


if __name__ == "__main__":
    main()
