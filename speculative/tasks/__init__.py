"""The tasks by name. seqio, and with it TensorFlow, is imported only when a task is used."""

import dataclasses
import importlib
import os
import sys
from typing import TYPE_CHECKING

from speculative.checkpoints import ASSETS

if TYPE_CHECKING:
    import seqio


@dataclasses.dataclass(frozen=True)
class Task:
    """A task as data: the texts to decode, and how outputs are judged."""

    name: str
    prefix: str = ""  # The words before each text that tell the target its task.
    metric: str | None = None  # One of `measurement.quality.METRICS`; None compares nothing.
    # Where its texts are, see `prompts.KINDS`; None is seqio's task of the same name.
    data: str | None = None
    columns: str | None = None  # SOURCE,REFERENCE or SOURCE: their names there, if not the usual.
    split: str | None = None  # The split in TFDS or seqio; None is test or else validation.
    paper: str | None = None  # The name in `paper` of the task that it is compared with, if any.
    module: str | None = None  # The module that registers it with seqio when imported, if any.


_TO_GERMAN, _SUMMARIZE = "translate English to German: ", "summarize: "
_T5, _DEBIAN = f"{__name__}.t5", f"{__name__}.debian"


def _shipped(name: str, prefix: str, metric: str | None, paper: str) -> Task:
    file = str(ASSETS / "prompts" / f"{name}.jsonl")
    return Task(name, prefix, metric, file, split="test", paper=paper, module=_DEBIAN)


TASKS = {
    known.name: known
    for known in (
        _shipped("debian_ende", _TO_GERMAN, "bleu", "ende"),
        _shipped("debian_synopsis", _SUMMARIZE, "rougeL", "cnndm"),
        Task("wmt_t2t_ende_v003", _TO_GERMAN, "bleu", split="test", paper="ende", module=_T5),
        Task(
            "cnn_dailymail_v002", _SUMMARIZE, "rougeLsum", split="test", paper="cnndm", module=_T5
        ),
        Task("lm1b", split="test", paper="lm1b", module=_T5),
        _shipped("debian_lm", "", None, "lm1b"),
        Task("questions", data=str(ASSETS / "prompts" / "questions.jsonl")),
    )
}


def register(task: Task) -> None:
    """Adds a user's task to `TASKS`; raises ValueError if another has its name."""
    if TASKS.setdefault(task.name, task) != task:
        raise ValueError(f"There is another task {task.name!r} already; choose another name.")


def task(name: str) -> Task:
    """The task of a name, in `TASKS` or, if a module has imported seqio, in its registry.

    Raises ValueError, which lists `TASKS`, if there is none.
    """
    if name in TASKS:
        return TASKS[name]
    if in_seqio(name):
        return Task(name)
    raise ValueError(
        f"There is no task {name!r}; the tasks are {', '.join(TASKS)}. A task of your own has a "
        "prefix and a data file (--prefix, --data_file), or is registered by a module (--module)."
    )


def in_seqio(name: str) -> bool:
    """Whether seqio, if it is imported already, has a task of this name."""
    seqio = sys.modules.get("seqio")
    return seqio is not None and name in seqio.TaskRegistry.names()


def import_module(name: str) -> None:
    """Imports a module that registers tasks, by `register` or with seqio.

    The working folder is searched too. The module's error becomes a ValueError of one sentence.
    """
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ValueError(f"The module {name!r} cannot be imported ({reason}); fix it.") from error
    finally:
        sys.path.pop(0)


def get_task(name: str) -> "seqio.Task":
    """The task in seqio's registry; its data is read when a dataset is requested.

    Raises ValueError if there is no such task, or if seqio or what it needs cannot be imported.
    """
    module = task(name).module
    try:
        import seqio
    except ImportError as error:
        raise ValueError(
            f"Task {name!r} needs seqio, which cannot be imported ({error}); "
            "install it with pip install 'speculative[tasks]'."
        ) from error
    if module:
        importlib.import_module(module)
    return seqio.TaskRegistry.get(name)
