"""The prompts that ship with the package, one file a task."""

import dataclasses
import json

from speculative import checkpoints

PREFIXES = {
    "debian_ende": "translate English to German: ",
    "debian_synopsis": "summarize: ",
}
"""What tells the target its task, by the task's name."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to decode.

    Attributes:
        source: the task's prefix and the text.
        reference: what a person wrote for it.
    """

    source: str
    reference: str


def prefix(task: str) -> str:
    """The prefix of a task.

    Raises:
        ValueError: there is no such task; the message lists them.
    """
    if task not in PREFIXES:
        raise ValueError(f"There is no task {task!r}; the tasks are {', '.join(PREFIXES)}.")
    return PREFIXES[task]


def load_prompts(task: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a task, or all.

    Raises:
        ValueError: there is no such task, its file is missing, or the limit is below 1.
    """
    start = prefix(task)
    if limit is not None and limit < 1:
        raise ValueError(f"The limit on prompts must be at least 1, not {limit}.")
    path = checkpoints.ASSETS / "prompts" / f"{task}.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing; install the package again.")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prompt(start + row["inputs"], row["targets"]) for row in rows[:limit]]
