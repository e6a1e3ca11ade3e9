"""The demo: both tasks at temperature 0 and 1, measured, traced and reported."""

import itertools
import pathlib

from rich.console import Console

from speculative.drafts.named import MODEL_FREE
from speculative.experiments import progress, records, report, traces
from speculative.experiments.run import Row, run_row
from speculative.experiments.settings import RowConfig
from speculative.pair import load
from speculative.sampling import Sampling
from speculative.tasks.prompts import load_prompts

TASKS = ("debian_ende", "debian_synopsis")
TEMPERATURES = (0.0, 1.0)
ROUNDS = 2
"""Of timing each example: the demo is to be short, and has many examples."""

PAPER_DRAFTS = {name: name if name in ("unigram", "bigram") else None for name in MODEL_FREE}
"""The paper's draft that stands beside ours; beside a model it is T5-small."""


def run(
    target: str,
    draft: str | None,
    dtype: str | None,
    vocabulary_file: str | None,
    output_dir: pathlib.Path,
    seed: int,
    max_length: int,
    limit: int | None,
) -> None:
    """Measures and prints; writes `records.jsonl`, a row as soon as it is done, and `report.md`.

    Args:
        target: a checkpoint's folder or name.
        draft: likewise, or one of the model-free drafts; None is the shipped one.
        dtype: of weights and products; None is as the checkpoints say.
        vocabulary_file: for checkpoints that come without a vocabulary.
        output_dir: of both files; those of an earlier run are replaced.
        seed: of all random numbers.
        max_length: tokens after which an output is cut.
        limit: prompts of each task; None is all.

    Raises:
        ValueError: as `pair.load` and `Pair.encode`.
        KeyboardInterrupt: says which records are kept.
    """
    console = Console()
    pair = load(target, draft, dtype, vocabulary_file)
    prompts = {task: load_prompts(task, limit) for task in TASKS}
    output_dir.mkdir(parents=True, exist_ok=True)
    file, written = output_dir / "records.jsonl", output_dir / "report.md"
    for old in (file, written):
        old.unlink(missing_ok=True)
    rows: list[Row] = []
    try:
        with progress.bar() as bar:
            total = len(TASKS) * len(TEMPERATURES)
            shown = bar.add_task("", total=total)
            for task, temperature in itertools.product(TASKS, TEMPERATURES):
                setting = f"{task}, T = {temperature:g}"
                config = RowConfig(
                    task=task,
                    target=target,
                    draft=draft or "debian_draft",
                    temperature=temperature,
                    dtype=dtype,
                    max_length=max_length,
                    num_examples=limit,
                    rounds=ROUNDS,
                    seed=seed,
                    paper_draft=PAPER_DRAFTS.get(draft or "", "small"),
                    vocabulary=vocabulary_file,
                )
                told = progress.row(bar, shown, len(rows), setting)
                row = run_row(pair, config, prompts[task], "demo", on_progress=told)
                records.append(file, row.record)
                rows.append(row)
            bar.update(shown, description="traces", completed=total)
            traced = [
                traces.trace(
                    pair,
                    prompts[row.record.task][0].source,
                    row.record.gamma,
                    Sampling(row.record.temperature),
                    max_length,
                    seed,
                )
                for row in rows
            ]
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; {len(rows)} finished rows are in {file}") from None
    written.write_text(report.markdown(rows, traced), encoding="utf-8")
    report.show(rows, traced, console)
    console.print(f"Written: {file} and {written}.", soft_wrap=True)
