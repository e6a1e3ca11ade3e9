"""The tasks by name. seqio, and with it TensorFlow, is imported only when a task is used."""

import dataclasses
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import seqio


@dataclasses.dataclass(frozen=True)
class Task:
    """A task without its data."""

    name: str  # Its name here and in seqio's registry.
    prefix: str  # The words before each source that tell the target its task.
    metric: str | None  # One of `measurement.quality.METRICS`; None without references to compare.
    paper: str  # The name in `paper` of the paper's task of the same kind.
    split: str  # The split that is evaluated.
    module: str  # The module of this package that registers it with seqio when imported.


_TO_GERMAN, _SUMMARIZE = "translate English to German: ", "summarize: "
_ALL = (
    Task("debian_ende", _TO_GERMAN, "bleu", "ende", "test", "debian"),
    Task("debian_synopsis", _SUMMARIZE, "rougeL", "cnndm", "test", "debian"),
    Task("wmt_t2t_ende_v003", _TO_GERMAN, "bleu", "ende", "test", "t5"),
    Task("cnn_dailymail_v002", _SUMMARIZE, "rougeLsum", "cnndm", "test", "t5"),
    Task("lm1b", "", None, "lm1b", "test", "t5"),
    Task("debian_lm", "", None, "lm1b", "test", "debian"),
)
TASKS = {known.name: known for known in _ALL}


def task(name: str) -> Task:
    """The task of a name; raises ValueError, which lists all names, if there is none."""
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}; the tasks are {', '.join(TASKS)}.")
    return TASKS[name]


def get_task(name: str) -> "seqio.Task":
    """The task in seqio's registry; its data is read when a dataset is requested.

    Raises ValueError if there is no such task, or if seqio or what it needs cannot be imported.
    """
    module = f"{__name__}.{task(name).module}"
    try:
        import seqio
    except ImportError as error:
        raise ValueError(
            f"Task {name!r} needs seqio, which cannot be imported ({error}); "
            "install it with pip install 'speculative[tasks]'."
        ) from error
    importlib.import_module(module)
    return seqio.TaskRegistry.get(name)
