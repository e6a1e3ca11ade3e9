"""The measured examples of a row, kept on disk as they come, so that a row can go on.

A folder holds `config.gin`, what they were measured with, and `examples.jsonl`, one a line.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from speculative import disk
from speculative.measurement.exactness import Difference
from speculative.rows.config import changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One example of a task, by its number from 0, decoded both ways; or another sample of it."""

    number: int
    sample: int = 0  # Its number, of `RowConfig.samples`.
    source: str  # The text that was decoded, its task's prefix included.
    reference: str  # What a person wrote for it.
    autoregressive: str  # The output of autoregressive decoding.
    speculative: str  # The output of speculative decoding.
    lengths: tuple[int, int]  # Tokens of both outputs.
    seconds: tuple[float, float]  # Of both ways, prefill included; at T = 0 the rounds' median.
    target_calls: int  # In speculative decoding, as are the next two.
    tested: int
    accepted: int
    # The rule's acceptance at each token of the autoregressive output; empty of a second sample,
    # and where earlier examples gave enough tokens for alpha.
    betas: list[float]
    difference: Difference | None  # Where the outputs part; None too where they need not be equal.
    prefix: str = ""  # What of the source the task, and not the text's author, said.
    draft_tokens: int = 0  # Guesses proposed.
    # Of `tested` and `accepted`, by position in a step.
    tested_by_position: list[int] = dataclasses.field(default_factory=list)
    accepted_by_position: list[int] = dataclasses.field(default_factory=list)
    # The tokens expected of a step that begins at each token, where alpha does not predict them: by
    # the rule, and by token verification of the same guesses.
    step_tokens: list[list[float]] = dataclasses.field(default_factory=list)


class KeptExamples:
    """The examples of a row, in the task's order, in a folder or, without one, in memory alone."""

    def __init__(self, folder: pathlib.Path | None = None, config: str = "") -> None:
        """Reads what an earlier run left; ValueError if it had another effective `config`."""
        self._folder, self._config = folder, config
        self._examples: dict[tuple[int, int], Example] = {}
        if folder is None:
            return
        file = folder / "config.gin"
        # A run that was killed may have left it empty.
        before = disk.text(file) if file.is_file() else ""
        if before and (other := changed(before, config)):
            raise ValueError(
                f"{folder} holds examples of another configuration ({'; '.join(other)}); give "
                "another --output_dir, or delete that folder to measure anew."
            )
        self._config = "" if before else config  # Which is still to be written.
        self._examples = {(example.number, example.sample): example for example in read(folder)}

    def __contains__(self, number_and_sample: tuple[int, int]) -> bool:
        return number_and_sample in self._examples

    def __iter__(self) -> Iterator[Example]:
        return (example for _, example in sorted(self._examples.items()))

    def add(self, example: Example) -> None:
        """Keeps an example; it is on disk when this returns."""
        self._examples[example.number, example.sample] = example
        if self._folder:
            if self._config:
                disk.write(self._folder / "config.gin", self._config)
                self._config = ""
            disk.append(self._folder / "examples.jsonl", dataclasses.asdict(example))


def read(folder: pathlib.Path) -> list[Example]:
    """The examples in a row's folder, as they were written; ValueError if a line is damaged."""
    return disk.entries(folder / "examples.jsonl", _example, "measured example")


def _example(fields: dict[str, Any]) -> Example:
    if fields["difference"]:
        fields["difference"] = Difference(**fields["difference"])
    for name in ("lengths", "seconds"):
        fields[name] = tuple(fields[name])
    return Example(**fields)
