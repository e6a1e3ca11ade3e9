"""The measured examples of a row, written to disk one by one so that a row can resume.

A folder holds `config.gin` with the settings, `fingerprints.json` with those of models and texts,
and `examples.jsonl` with one example per line, or one `examples.<worker>.jsonl` per worker.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from speculative import disk, fingerprints
from speculative.measurement.exactness import Difference
from speculative.rows.config import changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One example of a task, or another sample of it, decoded both ways."""

    number: int  # From 0.
    sample: int = 0  # From 0, below `RowConfig.samples`.
    source: str  # The text that was decoded, including the task's prefix.
    reference: str  # The human reference.
    autoregressive: str  # The output of autoregressive decoding.
    speculative: str  # The output of speculative decoding.
    lengths: tuple[int, int]  # Tokens of both outputs.
    seconds: tuple[float, float]  # Each way, prefill included; at T = 0 the rounds' median.
    target_calls: int  # In speculative decoding, as are the next two.
    tested: int
    accepted: int
    # The rule's acceptance at each token of the autoregressive output; empty for further samples,
    # and where earlier examples gave enough tokens for alpha.
    betas: list[float]
    difference: Difference | None  # Also None where the outputs need not be equal.
    prefix: str = ""  # The part of the source that the task added.
    draft_tokens: int = 0  # Guesses proposed.
    # `tested` and `accepted` by position in a step.
    tested_by_position: list[int] = dataclasses.field(default_factory=list)
    accepted_by_position: list[int] = dataclasses.field(default_factory=list)
    # For trees, accepted guesses by position and by rank among the successors of the same token.
    accepted_by_rank: list[list[int]] | None = None
    # The expected tokens of a step that begins at each token, where alpha does not predict them: by
    # the rule, and by token verification of the same guesses.
    step_tokens: list[list[float]] = dataclasses.field(default_factory=list)
    category: str = ""  # The question's category.
    question: str = ""  # The question's name, which its turns share.


class KeptExamples:
    """The examples of a row in the task's order, in a folder or, without one, only in memory."""

    def __init__(
        self,
        folder: pathlib.Path | None = None,
        config: str = "",
        made_with: Mapping[str, str] | None = None,
        worker: int | None = None,
    ) -> None:
        """Reads the examples of earlier runs and other workers; this worker adds to its own file.

        Raises ValueError if they had another effective `config`, or fingerprints of models and
        texts other than `made_with`. Examples that predate fingerprints are assumed to match, with
        a warning.
        """
        self._folder, self._file = folder, of_worker("examples", worker)
        self._examples: dict[tuple[int, int], Example] = {}
        self._unwritten: dict[str, str] = {}  # Contents still to be written, by file.
        if folder is None:
            return
        files = {
            "config.gin": config,
            "fingerprints.json": json.dumps(dict(made_with or {}), indent=1) + "\n",
        }
        # A killed run may have left one empty.
        before = {name: disk.text(folder / name) for name in files if (folder / name).is_file()}
        self._unwritten = {name: text for name, text in files.items() if not before.get(name)}
        if (gin := before.get("config.gin")) and (other := changed(gin, config)):
            raise ValueError(
                f"{folder} holds examples of another configuration ({'; '.join(other)}); give "
                "another --output_dir, or delete that folder to measure anew."
            )
        kept = (
            disk.read_json(folder / "fingerprints.json") if before.get("fingerprints.json") else {}
        )
        if other := fingerprints.changed(kept, made_with or {}):
            raise ValueError(
                f"{folder} holds examples whose {other} changed since they were measured, under "
                "the same name; give another --output_dir, or delete that folder to measure anew."
            )
        self._examples = {(example.number, example.sample): example for example in read(folder)}
        if self._examples and not kept and made_with:
            logging.warning(fingerprints.UNKNOWN, folder)

    def __contains__(self, number_and_sample: tuple[int, int]) -> bool:
        return number_and_sample in self._examples

    def __iter__(self) -> Iterator[Example]:
        return (example for _, example in sorted(self._examples.items()))

    def add(self, example: Example) -> None:
        """Adds an example, which is on disk when this returns."""
        self._examples[example.number, example.sample] = example
        if self._folder:
            for name, text in self._unwritten.items():
                disk.write(self._folder / name, text)
            self._unwritten = {}
            disk.append(self._folder / self._file, dataclasses.asdict(example))


def read(folder: pathlib.Path) -> list[Example]:
    """The examples in a row's folder, in order; ValueError if a line is damaged."""
    examples = {
        (one.number, one.sample): one
        for file in sorted(folder.glob("examples*.jsonl"))
        for one in disk.entries(file, _example, "measured example")
    }
    return [examples[place] for place in sorted(examples)]


def of_worker(name: str, worker: int | None) -> str:
    """The name of a file of results, with the worker's number, if any."""
    return f"{name}.jsonl" if worker is None else f"{name}.{worker}.jsonl"


def _example(fields: dict[str, Any]) -> Example:
    if fields["difference"]:
        fields["difference"] = Difference(**fields["difference"])
    for name in ("lengths", "seconds"):
        fields[name] = tuple(fields[name])
    return Example(**fields)
