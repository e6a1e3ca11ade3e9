"""The tasks by name; seqio, and with it TensorFlow, is imported only when one is asked for."""

import dataclasses
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import seqio


@dataclasses.dataclass(frozen=True)
class Task:
    """What is known of a task without its data.

    Attributes:
        name: the task's, here and in seqio's registry.
        prefix: what tells the target its task, put before each source.
        metric: one of `measurement.quality.METRICS`; None where nothing is compared.
        paper: the paper's task, by its name in `experiments.paper`, that is of the same kind.
        split: the one that is evaluated.
        module: of this package; importing it registers the task with seqio.
    """

    name: str
    prefix: str
    metric: str | None
    paper: str
    split: str
    module: str


_TO_GERMAN, _SUMMARIZE = "translate English to German: ", "summarize: "
_ALL = (
    Task("debian_ende", _TO_GERMAN, "bleu", "ende", "test", "debian"),
    Task("debian_synopsis", _SUMMARIZE, "rougeL", "cnndm", "test", "debian"),
    Task("wmt_t2t_ende_v003", _TO_GERMAN, "bleu", "ende", "test", "wmt"),
    Task("cnn_dailymail_v002", _SUMMARIZE, "rougeLsum", "cnndm", "test", "cnn_dailymail"),
    Task("lm1b", "", None, "lm1b", "test", "lm1b"),
    Task("debian_lm", "", None, "lm1b", "test", "debian"),
)
TASKS = {known.name: known for known in _ALL}
"""Every task, by name."""


def task(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is no such task; the message lists them.
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}; the tasks are {', '.join(TASKS)}.")
    return TASKS[name]


def get_task(name: str) -> "seqio.Task":
    """The task as seqio knows it; its data is read when a dataset is asked for.

    Raises:
        ValueError: there is no such task, or seqio or what it needs cannot be imported.
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
