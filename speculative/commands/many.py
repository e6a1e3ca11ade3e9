"""Decodes many texts: in batches, several per prompt, into a file that can be resumed."""

import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from speculative import disk, fingerprints
from speculative.commands import OF_RUN, SETTINGS
from speculative.commands.prompts import Asked

if TYPE_CHECKING:
    from speculative.pair import Pair, Request, Result

COUNTS = ("draft_tokens", "tested_by_position", "accepted_by_position", "accepted_lengths")
FIELDS = ("text", "tokens", "target_calls", "accepted", "tokens_per_call", *COUNTS)

SHOWN = ("tree", "show_special")  # Settings that lines hold unless they are the defaults.

Place = tuple[int, int]  # The numbers of a prompt and a sample, from 0.


def line_settings(asked: Asked) -> dict[str, Any]:
    """The settings of a prompt that its lines hold."""
    names = [name for name in SETTINGS if name not in {*OF_RUN, *SHOWN}]
    values = {name: getattr(asked.settings, name) for name in names}
    shown = {name: value for name in SHOWN if (value := getattr(asked.settings, name))}
    return values | {"stop": list(asked.settings.stop)} | shown


def line(asked: Asked, result: "Result", of_pair: Mapping[str, Any]) -> dict[str, Any]:
    """A result as a JSON object, with its pair and settings."""
    fields = {name: getattr(result, name) for name in FIELDS}
    for name in ("logprobs", "accepted_by_rank"):
        if getattr(result, name) is not None:
            fields[name] = getattr(result, name)
    fields |= {"prompt": asked.text, "finish_reason": result.finish_reason, **of_pair}
    fields |= line_settings(asked)
    for name in ("dtype", "stop"):  # They come last.
        fields[name] = fields.pop(name)
    return fields


class Results:
    """A file of results, one JSON object per line, which an interrupted run resumes.

    A line also keeps the `fingerprints` of the pair that made it, see `Resolved.fingerprints`.

    Attributes:
        found: the file's lines by their places.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        prompts: Sequence[Asked],
        of_pair: Mapping[str, Any],
        made_with: Mapping[str, str],
    ) -> None:
        """Reads the file, if there is one; raises OSError if it cannot be written.

        ValueError names a line that is not a result of this pair for these prompts. Older lines,
        without fingerprints, are assumed to be of the present pair, with a warning.
        """
        self.path, self.prompts, self.of_pair = disk.writable(path), prompts, of_pair
        self.made_with = dict(made_with)
        try:
            self.found = dict(disk.entries(self.path, self._checked, "result"))
        except ValueError as error:
            message = str(error).rstrip(".")
            raise ValueError(f"{message}; write elsewhere, or delete that file.") from error
        if not all("fingerprints" in line for line in self.found.values()):
            logging.warning(fingerprints.UNKNOWN, self.path)

    def _checked(self, line: dict[str, Any]) -> tuple[Place, dict[str, Any]]:
        place = line["number"], line["sample"]
        if not 0 <= place[0] < len(self.prompts):
            raise ValueError(f"there is no prompt {place[0] + 1}.")
        asked = self.prompts[place[0]]
        expected = {**self.of_pair, **line_settings(asked)}
        names = [*expected, "logprobs"] if asked.settings.logprobs else expected
        for name in names:
            if name not in line:
                raise ValueError(f"it has no {name}.")
        for name, value in expected.items():
            if line[name] != value:
                raise ValueError(f"its {name} is {line[name]!r}, not {value!r}.")
        for name in SHOWN:
            if line.get(name, SETTINGS[name]) != getattr(asked.settings, name):
                raise ValueError(f"it was written with another --{name}.")
        for name, usual in ("quantize", "none"), ("mesh", None):
            if line.get(name, usual) != self.of_pair.get(name, usual):
                raise ValueError(f"it was written with another --{name}.")
        if line["prompt"] != asked.text:
            raise ValueError(f"its prompt is not prompt {place[0] + 1}.")
        if other := fingerprints.changed(line.get("fingerprints", {}), self.made_with):
            raise ValueError(f"its {other} changed since it was written, under the same name.")
        return place, line

    def complete(
        self, pair: "Pair", requests: Mapping[Place, "Request"], batch_size: int
    ) -> list[dict[str, Any]]:
        """Decodes the missing texts, saves each as it ends, and returns all lines in order.

        A KeyboardInterrupt says how many texts the file holds.
        """
        from speculative import progress

        done, total = self.found, len(requests)
        lacking = [place for place in requests if place not in done]
        listed = [requests[place] for place in lacking]
        began, tokens = time.perf_counter(), 0
        with progress.bar(str(self.path)) as on_progress:
            try:
                for at, result in pair.serve(listed, batch_size=batch_size):
                    number, sample = lacking[at]
                    entry = line(self.prompts[number], result, self.of_pair)
                    entry |= {"number": number, "sample": sample, "fingerprints": self.made_with}
                    disk.append(self.path, entry)
                    done[number, sample] = entry
                    tokens += len(result.tokens)
                    rate = tokens / (time.perf_counter() - began)
                    on_progress(f"{rate:,.0f} tokens per second", len(done) / total)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"; {len(done)} of {total} texts are in {self.path}; rerun to resume"
                ) from None
        lines = [done[place] for place in sorted(done)]
        disk.write(self.path, "".join(f"{disk.json_line(line)}\n" for line in lines))
        return lines


def in_order(served: "Iterable[tuple[int, Result]]") -> "Iterator[Result]":
    """Yields results in the order of numbers from 0, each once those before it are there."""
    kept: dict[int, Result] = {}
    awaited = 0
    for place, result in served:
        kept[place] = result
        while awaited in kept:
            yield kept.pop(awaited)
            awaited += 1
