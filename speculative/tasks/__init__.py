"""The tasks by name; seqio, and with it TensorFlow, is imported only when one is asked for."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import seqio

MODULES = {
    "debian_ende": "speculative.tasks.debian",
    "debian_synopsis": "speculative.tasks.debian",
}


def get_task(name: str) -> "seqio.Task":
    """Returns a registered seqio task.

    Args:
        name: One of `MODULES`.

    Raises:
        ValueError: if no task has that name, or seqio is not installed.
    """
    if name not in MODULES:
        raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(sorted(MODULES))}")
    try:
        import seqio
    except ImportError as error:
        raise ValueError(
            f"task {name!r} needs seqio, which is not installed: pip install 'speculative[tasks]'"
        ) from error
    importlib.import_module(MODULES[name])
    return seqio.TaskRegistry.get(name)
