"""The measured examples of a row, kept on disk as they come, so that a row can go on.

A folder holds `config.gin`, what they were measured with, and `examples.jsonl`, one a line.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from speculative.measurement.exactness import Difference
from speculative.rows import lines
from speculative.rows.config import changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One example of a task, by its number from 0, decoded both ways.

    Attributes:
        source: the text that was decoded, its task's prefix included.
        reference: what a person wrote for it.
        autoregressive: the output of autoregressive decoding.
        speculative: the output of speculative decoding.
        lengths: tokens of both outputs.
        seconds: of both ways, the median of the rounds, prefill included.
        target_calls: passes of the target in speculative decoding.
        betas: the rule's acceptance at each token of the autoregressive output; empty where
            earlier examples gave enough tokens for alpha.
        difference: where the outputs part; None too where they need not be equal.
    """

    number: int
    source: str
    reference: str
    autoregressive: str
    speculative: str
    lengths: tuple[int, int]
    seconds: tuple[float, float]
    target_calls: int
    tested: int
    accepted: int
    betas: list[float]
    difference: Difference | None


class KeptExamples:
    """The examples of a row, in a folder or, without one, in memory alone."""

    def __init__(self, folder: pathlib.Path | None = None, config: str = "") -> None:
        """Reads what an earlier run left; `config` is the effective configuration.

        Raises:
            ValueError: the folder holds examples of another configuration, or a damaged line.
        """
        self._folder, self._config = folder, config
        self._examples: dict[int, Example] = {}
        if folder is None:
            return
        file = folder / "config.gin"
        if file.is_file() and (other := changed(file.read_text(encoding="utf-8"), config)):
            raise ValueError(
                f"{folder} holds examples of another configuration ({'; '.join(other)}); give "
                "another --output_dir, or delete that folder to measure anew."
            )
        self._examples = {example.number: example for example in read(folder)}

    def __contains__(self, number: int) -> bool:
        return number in self._examples

    def __iter__(self) -> Iterator[Example]:
        """In the order of the task."""
        return iter(sorted(self._examples.values(), key=lambda example: example.number))

    def add(self, example: Example) -> None:
        """Keeps an example; it is on disk when this returns."""
        self._examples[example.number] = example
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "config.gin"
        if not config.is_file():
            config.write_text(self._config, encoding="utf-8")
        lines.append(self._folder / "examples.jsonl", dataclasses.asdict(example))


def read(folder: pathlib.Path) -> list[Example]:
    """The examples in a row's folder, as they were written; none where there is no file.

    Raises:
        ValueError: a line is damaged.
    """
    return lines.read(folder / "examples.jsonl", _example, "measured example")


def _example(fields: dict[str, Any]) -> Example:
    difference = fields["difference"]
    fields["difference"] = Difference(**difference) if difference else None
    for name in ("lengths", "seconds"):
        fields[name] = tuple(fields[name])
    return Example(**fields)
