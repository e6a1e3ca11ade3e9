"""The progress bar of long work, on standard error if that is a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from rich import progress as columns
from rich.console import Console
from rich.progress import Progress, Task
from rich.table import Column
from rich.text import Text

# Called with the name of the current work and the share of it that is done, from 0 to 1.
OnProgress = Callable[[str, float], None]


class _ToGo(columns.TimeRemainingColumn):
    """The remaining time with its label, if it is known."""

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        return super().render(task).append(" to go") if task.time_remaining else Text()


@contextlib.contextmanager
def bar(setting: str, console: Console | None = None) -> Iterator[OnProgress]:
    """Shows the phases of some work one after another, and is removed at the end.

    Each phase has its own bar, with elapsed and remaining time. The bar moves back and forth while
    the share that is done is 0, because the remaining time is not known yet.
    """
    console = console or Console(stderr=True)
    wide = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    shown = Progress(
        columns.TextColumn("{task.description}", markup=False, table_column=wide),
        columns.BarColumn(12),
        columns.TaskProgressColumn(),
        columns.TimeElapsedColumn(),
        _ToGo(),
        console=console,
        transient=True,
        expand=True,
        disable=not console.is_terminal,
    )

    def show(what: str, share: float) -> None:
        phase = f"{what}: {setting}"
        if [task.description for task in shown.tasks] != [phase]:
            for earlier in shown.task_ids:
                shown.remove_task(earlier)
            shown.add_task(phase, total=None)
        shown.update(shown.task_ids[0], total=1 if share else None, completed=share)

    with shown:
        yield show
