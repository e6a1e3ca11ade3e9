"""The measured examples of a row, kept on disk as they come, so that a row can go on.

A folder holds `config.gin`, the settings they were measured with, `fingerprints.json`, of which
models and texts they are, and `examples.jsonl`, one a line; or, of several workers, a file
`examples.<worker>.jsonl` of each.
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
    # Of trees, those accepted by position and by rank among the successors of the same token.
    accepted_by_rank: list[list[int]] | None = None
    # The tokens expected of a step that begins at each token, where alpha does not predict them: by
    # the rule, and by token verification of the same guesses.
    step_tokens: list[list[float]] = dataclasses.field(default_factory=list)
    category: str = ""  # Of a question, and its name, which its turns share.
    question: str = ""


class KeptExamples:
    """The examples of a row, in the task's order, in a folder or, without one, in memory alone."""

    def __init__(
        self,
        folder: pathlib.Path | None = None,
        config: str = "",
        made_with: Mapping[str, str] | None = None,
        worker: int | None = None,
    ) -> None:
        """Reads what an earlier run left, and other workers; this one adds to a file of its own.

        ValueError is raised if it had another effective `config` or other fingerprints than
        `made_with`, which are those of models and texts. Examples of before these were kept are
        taken to be of what is there now, with a warning.
        """
        self._folder, self._file = folder, of_worker("examples", worker)
        self._examples: dict[tuple[int, int], Example] = {}
        self._unwritten: dict[str, str] = {}  # What is still to be written, by file.
        if folder is None:
            return
        files = {
            "config.gin": config,
            "fingerprints.json": json.dumps(dict(made_with or {}), indent=1) + "\n",
        }
        # A run that was killed may have left one empty.
        before = {name: disk.text(folder / name) for name in files if (folder / name).is_file()}
        self._unwritten = {name: said for name, said in files.items() if not before.get(name)}
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
        """Keeps an example; it is on disk when this returns."""
        self._examples[example.number, example.sample] = example
        if self._folder:
            for name, said in self._unwritten.items():
                disk.write(self._folder / name, said)
            self._unwritten = {}
            disk.append(self._folder / self._file, dataclasses.asdict(example))


def read(folder: pathlib.Path) -> list[Example]:
    """The examples in a row's folder, in order; ValueError if a line is damaged."""
    found = {
        (one.number, one.sample): one
        for file in sorted(folder.glob("examples*.jsonl"))
        for one in disk.entries(file, _example, "measured example")
    }
    return [found[place] for place in sorted(found)]


def of_worker(name: str, worker: int | None) -> str:
    """A file of lines of results that a worker has for itself, by its number, if it has one."""
    return f"{name}.jsonl" if worker is None else f"{name}.{worker}.jsonl"


def _example(fields: dict[str, Any]) -> Example:
    if fields["difference"]:
        fields["difference"] = Difference(**fields["difference"])
    for name in ("lengths", "seconds"):
        fields[name] = tuple(fields[name])
    return Example(**fields)
