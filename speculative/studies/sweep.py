"""Measures, tunes and verifies the rows of a table, as set in their gin files."""

import contextlib
import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from speculative import checkpoints, disk, fingerprints, gin_files, paper, progress
from speculative.loading import Resolved
from speculative.measurement import quality
from speculative.models import model_of
from speculative.pair import BATCH
from speculative.progress import OnProgress
from speculative.rows import chats, environment, memory, records, weights
from speculative.rows.config import (
    RANDOM,
    RowConfig,
    addresses,
    changed,
    experiment,
    gamma_of,
    read_row,
)
from speculative.rows.kept import KeptExamples, of_worker
from speculative.rows.records import Record
from speculative.rows.run import beside, run_row
from speculative.rows.workload import RANDOM_EXAMPLES, Workload, workload
from speculative.studies import bench
from speculative.studies import verify as verifying
from speculative.studies.audit import Audit
from speculative.studies.bench import Batches
from speculative.studies.tune import Tuning, tune
from speculative.tasks.prompts import Prompt, fingerprint, load_prompts, require

RUNS = "configs/runs"  # Where the tables are.
WORKERS = "workers.txt"  # The number of workers that share a folder, and a digest of their rows.
GAMMA = 5  # Guesses per step for verifying a pair whose row names none.


def rows(table: str) -> list[str]:
    """The rows of a table for `read_row`, in the paper's order, the bundled pair's last.

    If there is no such table, ValueError lists the existing ones.
    """
    file = gin_files.find(f"{RUNS}/table{table}.gin")
    if not file.is_file():
        known = [path.stem.removeprefix("table") for path in gin_files.listed(RUNS, "table*.gin")]
        number, _, family = table.partition("_")
        if family and number in known:
            families = [name.partition("_")[2] for name in known if name.startswith(f"{number}_")]
            raise ValueError(
                f"There is no family {family!r} of table {number} in {RUNS}; "
                f"{'known are ' + ', '.join(families) if families else 'it has none'} (--family)."
            )
        numbers = ", ".join(name for name in known if "_" not in name)
        raise ValueError(f"There is no table {table!r} in {RUNS}; the tables are 1, {numbers}.")
    own = [str(path) for path in gin_files.listed(f"{RUNS}/table{table}", "*.gin")]
    return [*sorted(own, key=_place_in_paper), *addresses(file)]


def _place_in_paper(address: str) -> tuple[int, str]:
    """The place of a row in Tables 2 and 4, and its address to order the rows that have none."""
    config = read_row(address)
    task, rows = config.texts.paper, paper.TABLES_2_AND_4
    row = paper.find(rows, task=task, draft=config.paper_draft, temperature=config.temperature)
    return rows.index(row) if row else len(rows), address


def shipped(config: RowConfig) -> bool:
    """Whether a row uses the pair that is bundled with the package."""
    return config.target in checkpoints.SHIPPED


def shipped_rows(table: str) -> dict[str, RowConfig]:
    """The rows of a table that use the bundled pair, by name; see `rows`."""
    configs = {experiment(address): read_row(address) for address in rows(table)}
    return {name: config for name, config in configs.items() if shipped(config)}


def run(
    configs: Mapping[str, RowConfig],
    output_dir: pathlib.Path,
    load: weights.Loader | None = None,
    earlier: Sequence[pathlib.Path] = (),
) -> list[Record]:
    """Measures the rows, given by name, that have no record yet, and returns the records of all.

    The output folder holds `records.jsonl` and, in `rows`, the examples of each row. ValueError is
    raised if these have other settings, if models or texts changed under the same name, or if
    another process writes there. Files and folders of an `earlier` run are removed first. A
    KeyboardInterrupt reports the results that are kept.
    """
    with disk.owned(output_dir):
        for old in earlier:
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        return finish(configs, output_dir, load)


def finish(
    configs: Mapping[str, RowConfig],
    output_dir: pathlib.Path,
    load: weights.Loader | None = None,
    share: tuple[int, int] | None = None,
) -> list[Record]:
    """Like `run`, in a folder that the caller owns; `share` (K, N) is for worker K of N."""
    worker = share and share[0]
    path, folder = output_dir / of_worker("records", worker), output_dir / "rows"
    done = {record.experiment: record for record in records.read(path)}
    # Rows whose texts are all measured, as a worker may find them after an interruption.
    of_all = records.read(output_dir / of_worker("records", None)) if share else []
    whole = {record.experiment for record in of_all}
    todo: dict[str, tuple[list[Prompt] | None, str, KeptExamples]] = {}
    load = load or weights.Loader()
    here = "".join(f"{name} = {value!r}\n" for name, value in environment.here().items())
    made_with: dict[str, dict[str, str]] = {}
    for name, config in configs.items():
        gin, record = config.gin(), done.get(name)
        if record and changed(record.gin, gin):
            raise ValueError(
                f"{path} has a record of {name} with other settings; give another "
                "--output_dir, or delete that record's line to measure anew."
            )
        gamma_of(config, name)
        resolved = load.resolve(config)
        if not record:
            memory.require(config, resolved.configs)
        prompts = _prompts(config, resolved, scored=True)
        made_with[name] = resolved.fingerprints
        if prompts is not None:
            made_with[name]["texts"] = fingerprint(prompts)
        if share is not None or not record:
            kept = KeptExamples(folder / name, gin + here, made_with[name], worker)
            # A worker's record may be from another number of workers, and so for other texts.
            first, step = share or (0, 1)
            own = range(first, number_of_texts(config, prompts), step)
            lacking = any((n, i) not in kept for n in own for i in range(config.samples))
            if name not in whole and own and (lacking or not record):
                todo[name] = prompts, name, kept
        elif record.fingerprints is None:
            logging.warning(fingerprints.UNKNOWN, f"The record of {name} in {path}")
        elif other := fingerprints.changed(record.fingerprints, made_with[name]):
            raise ValueError(
                f"{path} has a record of {name} whose {other} changed since it was measured, "
                "under the same name; give another --output_dir, or delete that record's line "
                "and its folder in rows to measure anew."
            )
    if share is not None:
        inputs = [configs[name].gin() + here + str(made_with[name]) for name in configs]
        _require_same(output_dir, f"{share[1]} {fingerprints.of_value(inputs)}")
    try:
        for number, (name, config) in enumerate(configs.items(), 1):
            if name in todo:
                memory.spare_maps()
                row = f"{number} of {len(configs)}, {name.rpartition('/')[2]}"
                with progress.bar(row) as on_progress:
                    on_progress("loading", 0)
                    more = *todo[name], on_progress, share or (0, 1)
                    record = run_row(load(config), config, *more)
                fields = {"fingerprints": made_with[name]}
                fields |= _beside(output_dir, name) if share is None else {}
                done[name] = dataclasses.replace(record, **fields)
                disk.append(path, dataclasses.asdict(done[name]))
    except KeyboardInterrupt:
        finished = sum(name in done for name in configs)
        raise KeyboardInterrupt(
            f"; {finished} finished rows are in {path}, the examples of the one under way in "
            f"{folder}; rerun to resume"
        ) from None
    return [done[name] for name in configs if name in done]


def work(
    configs: Mapping[str, RowConfig],
    output_dir: pathlib.Path,
    worker: int,
    of: int,
    here: Sequence[int] = (),
) -> None:
    """Measures a worker's texts of all rows, and then those of workers that have stopped.

    It takes over only from workers of this host, whose numbers are `here`, by default all. Raises
    ValueError where `run` does, if another process is this worker already, or if rows, settings,
    files or the commit differ from those of the other workers.
    """
    output_dir.mkdir(parents=True, exist_ok=True)  # For the lock.
    load = weights.Loader()
    numbers = here or range(of)
    for number in [worker, *(other for other in numbers if other != worker)]:
        with disk.locked(output_dir / f".lock.{number}") as ours:
            if ours:
                finish(configs, output_dir, load, (number, of))
            elif number == worker:
                raise ValueError(
                    f"Another process is worker {worker} of {output_dir}; wait for its end, or "
                    "choose another folder."
                )


def begin_workers(output_dir: pathlib.Path, of: int) -> None:
    """Prepares a folder for workers that are all started by one command.

    The digest of earlier workers is removed, and so are the records of their shares if there were
    more or fewer of them; examples stay.
    """
    file = output_dir / WORKERS
    before = file.read_text().partition(" ")[0] if file.is_file() else ""
    file.unlink(missing_ok=True)
    if before and before != str(of):
        for records_of_share in output_dir.glob("records.*.jsonl"):
            records_of_share.unlink()


def number_of_texts(config: RowConfig, prompts: Sequence[Prompt] | None) -> int:
    """The number of texts on which a row is measured."""
    if prompts is None:
        return config.num_examples or RANDOM_EXAMPLES
    return len(prompts[: config.num_examples])


def _beside(output_dir: pathlib.Path, name: str) -> dict[str, Any]:
    """The fields about workers, if there were any, for the record of a row over all their texts."""
    of_row = [one for one in records.of_workers(output_dir) if one.experiment == name]
    return beside(of_row) if of_row else {}


def _require_same(output_dir: pathlib.Path, digest: str) -> None:
    """Raises ValueError unless all workers of a folder have the same digest."""
    file = disk.writable(output_dir / WORKERS)
    with contextlib.suppress(FileExistsError), file.open("x") as first:
        first.write(digest + "\n")
    before = ""
    for _ in range(20):  # Another worker may just be writing it.
        if before := file.read_text().strip():
            break
        time.sleep(0.1)
    if before != digest:
        raise ValueError(
            f"The workers of {output_dir} have other rows, settings, models, texts, another "
            f"number of workers or another commit; start all by one command, or delete {file} if "
            "none of them runs any more."
        )


def tuning(config: RowConfig) -> Tuning:
    """Finds the best gamma for a row's pair."""
    if config.simulated_alpha is not None:
        raise ValueError("A simulated alpha is nothing to tune by; give real models.")
    config = dataclasses.replace(config, tree=0)  # Trees of several sizes are compared.
    with progress.bar(config.task) as on_progress:
        work, batch = _work(config, on_progress)
        return tune(work, on_progress, batch(BATCH))


def verify(config: RowConfig, samples: int, false_alarm: float) -> Audit:
    """Tests whether a row's speculative outputs are the target's own, if its rule is exact."""
    config = dataclasses.replace(config, gamma=config.gamma or GAMMA)  # This checks a tree.
    if not config.rule.exact:
        why = f"Outputs of {config.verification} verification are not the target's own; there is "
        why += "nothing to test."
        if config.simulated_alpha is not None:
            why = "Where acceptance is simulated, outputs are not exact; give real models."
        if config.lenience < 1:
            why = f"Lenient outputs are not the target's own, and lenience is {config.lenience}; "
            why += "set it to 1 to test them."
        raise ValueError(why)
    with progress.bar(config.task) as on_progress:
        work, batch = _work(config, on_progress)
        settings = config.gamma or GAMMA, samples, batch(verifying.ROWS), false_alarm
        return verifying.verify(work, *settings, on_progress)


def batches(config: RowConfig, sizes: Sequence[int], on_progress: OnProgress) -> Batches:
    """Measures a row's pair and texts at several batch sizes, from 1 on."""
    config = dataclasses.replace(config, gamma=config.gamma or GAMMA)  # This checks a tree.
    work, _ = _work(config, on_progress, max(sizes))
    return bench.batches(work, sizes, config.gamma or GAMMA, on_progress)


def _work(
    config: RowConfig, on_progress: OnProgress, batch_size: int = 1
) -> tuple[Workload, Callable[[int], int]]:
    """A row's workload, and a function that gives the largest batch, up to a size, that fits."""
    on_progress("loading", 0)
    resolved = weights.resolve(config)
    memory.require(config, resolved.configs, size=batch_size)
    settings = resolved.configs, config.gamma, config.max_length
    prompts = _prompts(config, resolved)
    return workload(resolved.load(), config, prompts), functools.partial(
        memory.batch, *settings, tree=config.tree, shards=config.shards
    )


def _prompts(config: RowConfig, resolved: Resolved, scored: bool = False) -> list[Prompt] | None:
    """A row's texts; None without a vocabulary to read them with.

    ValueError names a text that the target cannot read or the metric cannot judge. The metric is
    the row's own or, if outputs are `scored`, the task's, unless there is no reference at all.
    """
    if config.checkpoints == RANDOM and config.vocabulary is None:
        return None
    prompts, metric = load_prompts(config.texts, config.num_examples), config.metric
    prompts = chats.rendered(prompts, config, resolved.vocabulary.special)
    if scored and config.simulated_alpha is None and any(prompt.reference for prompt in prompts):
        metric = config.texts.metric
    require(prompts, metric, model_of(resolved.target.config).decoder_only)
    if metric:
        quality.require_seen(metric, [prompt.reference for prompt in prompts])
    return prompts
