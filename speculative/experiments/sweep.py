"""The rows of a table, from their gin files, resumably: what is measured is not measured again."""

import pathlib
from collections.abc import Mapping

from speculative import checkpoints
from speculative.experiments import (
    certificate,
    environment,
    lines,
    plan,
    progress,
    records,
    settings,
    weights,
)
from speculative.experiments.adaptation import Adaptation, adapt
from speculative.experiments.certificate import Certificate
from speculative.experiments.examples import Examples
from speculative.experiments.records import Record
from speculative.experiments.run import run_row
from speculative.experiments.settings import RowConfig
from speculative.experiments.tuning import Tuning, tune
from speculative.experiments.workload import Workload, workload
from speculative.gin_files import CONFIGS
from speculative.measurement.independence import Independence, independence
from speculative.tasks import TASKS
from speculative.tasks.prompts import Prompt, load_prompts

GAMMA = 5
"""Guesses a step with which a pair is certified, where its row names none."""


def rows(table: str) -> list[pathlib.Path]:
    """The gin files of a table's rows, in order.

    Raises:
        ValueError: there is no such table; the message lists those there are.
    """
    folder = CONFIGS / "runs"
    files = list((folder / f"table{table}").glob("*.gin"))
    if not files:
        known = sorted(path.name.removeprefix("table") for path in folder.glob("table*"))
        raise ValueError(
            f"There is no table {table!r} in {folder}; the tables are 1, {', '.join(known)}."
        )
    return sorted(files, key=_place_in_paper)


def _place_in_paper(file: pathlib.Path) -> tuple[bool, int, float, int, float, str]:
    """The paper's order: tasks, temperatures, drafts by size, lenience; the shipped pair last."""
    config = settings.parse(file)
    tasks = ("ende", "cnndm", "lm1b")
    drafts = ("unigram", "bigram", "small", "base", "large")

    def place(name: str | None, names: tuple[str, ...]) -> int:
        return names.index(name) if name in names else len(names)

    return (
        shipped(config),
        place(TASKS[config.task].paper, tasks),
        config.temperature,
        place(config.paper_draft, drafts),
        -config.lenience,
        file.stem,
    )


def experiment(file: pathlib.Path) -> str:
    """A row's name: its table's folder and its file."""
    return f"{file.parent.name}/{file.stem}"


def shipped(config: RowConfig) -> bool:
    """Whether a row is of the pair that ships with the package."""
    return config.target in checkpoints.SHIPPED


def require(name: str, config: RowConfig) -> None:
    """Raises ValueError where a row cannot be run, before anything is loaded."""
    if config.gamma is None:
        raise ValueError(
            f"{name} has no gamma; set RowConfig.gamma (speculative tune finds the best one)."
        )
    plan.require(config)


def run(configs: Mapping[str, RowConfig], output_dir: pathlib.Path) -> list[Record]:
    """Measures the rows that have no record yet, and gives the records of all.

    Args:
        configs: of the rows, by name.
        output_dir: of `records.jsonl` and, in `rows`, the examples of each row.

    Raises:
        ValueError: a row has a record or examples with other settings, its texts cannot be read,
            or as `require`, `weights.Loader` and `run_row`.
        KeyboardInterrupt: says what is kept.
    """
    path, folder = output_dir / "records.jsonl", output_dir / "rows"
    done = {record.experiment: record for record in records.read(path)}
    kept, texts, here = {}, {}, environment.gin()
    for name, config in configs.items():
        if name in done and done[name].gin != config.gin():
            raise ValueError(
                f"{path} has a record of {name} with other settings; give another --output_dir, "
                "or delete that record's line to measure anew."
            )
        if name not in done:
            require(name, config)
            texts[name] = _prompts(config)
            kept[name] = Examples(folder / name, config.gin() + here)
    load = weights.Loader()
    try:
        with progress.bar() as bar:
            task = bar.add_task("", total=len(configs))
            for finished, (name, config) in enumerate(configs.items()):
                if name not in done:
                    told = progress.row(bar, task, finished, name)
                    row = run_row(load(config), config, texts[name], name, kept[name], told)
                    done[name] = row.record
                    records.append(path, row.record)
    except KeyboardInterrupt:
        finished = sum(name in done for name in configs)
        raise KeyboardInterrupt(
            f"; {finished} finished rows are in {path}, the examples of the one under way in "
            f"{folder}; the same command goes on"
        ) from None
    return [done[name] for name in configs]


TUNED = (1, 2, 3, 4, 5, 6, 7, 8, 10)
"""Numbers of guesses that `tune` compares."""


def tuning(config: RowConfig) -> tuple[Tuning, Independence]:
    """Measures what decides about gamma for a row's pair, and how its guesses fared at the best.

    Raises:
        ValueError: acceptance is simulated, or as `weights.Loader` and `workload`.
    """
    work = _work(config, "A simulated alpha is nothing to tune by; give real models.")
    with progress.alone(config.task) as told:
        found = tune(work, TUNED, told)
        steps = []
        for number in range(len(work.sources)):
            steps += work.steps(number, found.gamma)
            told("acceptances", (number + 1) / len(work.sources))
    accepted = [int(step.accepted[0]) for step in steps]
    emitted = [int(step.count[0]) for step in steps]
    return found, independence(accepted, emitted, found.gamma)


def adaptation(config: RowConfig, output: pathlib.Path) -> Adaptation:
    """Compares an adaptive gamma with every fixed one on a row's texts; adds a line to a file.

    Raises:
        ValueError: acceptance is simulated, or as `weights.Loader` and `workload`.
    """
    work = _work(config, "A simulated alpha is nothing to adapt to; give real models.")
    with progress.alone(config.task) as told:
        found = adapt(work, told)
    lines.append(output, found.to_json())
    return found


def certify(config: RowConfig, samples: int, false_alarm: float) -> Certificate:
    """Checks that a row's speculative outputs are the target's own.

    Raises:
        ValueError: acceptance is simulated or lenient, or as `weights.Loader` and `workload`.
    """
    if config.lenience < 1:
        raise ValueError(
            f"Lenient outputs are not the target's own, and lenience is {config.lenience}; only "
            "at 1 is there anything to prove."
        )
    refusal = "Where acceptance is simulated, outputs are not exact; give real models."
    work = _work(config, refusal)
    with progress.alone(config.task) as told:
        batch = plan.batch(config, certificate.BATCH)
        gamma = config.gamma or GAMMA
        return certificate.certify(work, gamma, samples, batch, false_alarm, told)


def _work(config: RowConfig, refusal: str) -> Workload:
    """A row ready to decode; `refusal` is said where its acceptance is simulated."""
    if config.simulated_alpha is not None:
        raise ValueError(refusal)
    plan.require(config)
    prompts = _prompts(config)
    return workload(weights.Loader()(config), config, prompts)


def _prompts(config: RowConfig) -> list[Prompt] | None:
    """A row's texts; None where there is no vocabulary to read them with."""
    if config.checkpoints == weights.RANDOM and config.vocabulary is None:
        return None
    return load_prompts(config.task, config.num_examples, config.data_file)
