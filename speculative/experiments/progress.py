"""The bar that long work shows on standard error, where that is a terminal."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from speculative.experiments.tuning import OnProgress


def bar() -> Progress:
    """A bar with the time gone and the time to come; nothing of it stays."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:36}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("to go"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def alone(setting: str) -> Iterator[OnProgress]:
    """A bar for one row's work."""
    with bar() as progress:
        yield row(progress, progress.add_task("", total=1), 0, setting)


def row(progress: Progress, task: TaskID, done: int, setting: str) -> OnProgress:
    """Shows a row's progress after so many rows that are done."""

    def show(what: str, share: float) -> None:
        progress.update(task, description=f"{setting}: {what}", completed=done + share)

    return show
