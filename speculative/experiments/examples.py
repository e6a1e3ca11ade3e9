"""The measured examples of a row, kept on disk as they come, so that a row can go on.

A folder holds `config.gin`, what they were measured with, and `examples.jsonl`, one a line.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

from speculative.experiments import lines
from speculative.measurement.exactness import Difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One example, decoded both ways.

    Attributes:
        number: of the example in its task, from 0.
        source: the text that was decoded, its task's prefix included.
        reference: what a person wrote for it.
        autoregressive: the output of plain decoding.
        speculative: the output of speculative decoding.
        lengths: tokens of both outputs.
        seconds: of both ways, the median of the rounds, prefill included.
        target_calls: passes of the target in speculative decoding.
        tested: guesses tested.
        accepted: guesses accepted.
        betas: sum of min(p / l, q) at each token of the plain output; none where alpha had enough.
        difference: where the outputs part, at temperature 0 and l = 1.
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

    @classmethod
    def from_json(cls, line: str) -> "Example":
        """An example as `to_json` writes it.

        Raises:
            ValueError: the line is none.
        """
        try:
            fields = json.loads(line)
            difference = fields.pop("difference")
            fields["difference"] = None if difference is None else Difference(**difference)
            for name in ("lengths", "seconds"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no measured example: {error}") from error

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


class Examples:
    """The examples of a row, in a folder or, without one, in memory alone."""

    def __init__(self, folder: pathlib.Path | None = None, config: str = "") -> None:
        """Reads what an earlier run left; `config` is the effective configuration.

        Raises:
            ValueError: the folder holds examples of another configuration, or a damaged line.
        """
        self._folder = folder
        self._examples: dict[int, Example] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._require_same(folder / "config.gin", config)
        self._path = folder / "examples.jsonl"
        self._examples = {example.number: example for example in read(folder)}

    @staticmethod
    def _require_same(path: pathlib.Path, config: str) -> None:
        if not path.is_file():
            path.write_text(config, encoding="utf-8")
            return
        before, now = (text.splitlines() for text in (path.read_text(encoding="utf-8"), config))
        changed = [line for line in before if line not in now]
        if before != now:
            raise ValueError(
                f"{path.parent} holds examples of another configuration "
                f"({'; '.join(changed) or 'fewer settings'}); give another --output_dir, or delete "
                "that folder to measure anew."
            )

    def __contains__(self, number: int) -> bool:
        return number in self._examples

    def __iter__(self) -> Iterator[Example]:
        """In the order of the task."""
        return iter(sorted(self._examples.values(), key=lambda example: example.number))

    def add(self, example: Example) -> None:
        """Keeps an example; it is on disk when this returns."""
        self._examples[example.number] = example
        if self._folder is not None:
            lines.append(self._path, example.to_json())


def read(folder: pathlib.Path) -> list[Example]:
    """The examples in a row's folder, as they were written; none where there is no file.

    Raises:
        ValueError: a line is damaged.
    """
    found, path = [], folder / "examples.jsonl"
    for number, line in enumerate(lines.read(path), 1):
        try:
            found.append(Example.from_json(line))
        except ValueError as error:
            raise ValueError(f"Line {number} of {path} is {error}.") from error
    return found
