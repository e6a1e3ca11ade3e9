"""Many texts: in batches, several of each prompt, into a file that can be resumed."""

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

SHOWN = ("tree", "show_special")  # Settings that lines tell where they are not the usual ones.

Place = tuple[int, int]  # The numbers of a prompt and a sample, from 0.


def told(asked: Asked) -> dict[str, Any]:
    """The settings of a prompt that its lines tell."""
    names = [name for name in SETTINGS if name not in {*OF_RUN, *SHOWN}]
    found = {name: getattr(asked.settings, name) for name in names}
    shown = {name: value for name in SHOWN if (value := getattr(asked.settings, name))}
    return found | {"stop": list(asked.settings.stop)} | shown


def line(asked: Asked, result: "Result", of_pair: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a result in JSON, and of which pair and settings it is."""
    found = {name: getattr(result, name) for name in FIELDS}
    for name in ("logprobs", "accepted_by_rank"):
        if getattr(result, name) is not None:
            found[name] = getattr(result, name)
    found |= {"prompt": asked.text, "finish_reason": result.finish_reason, **of_pair, **told(asked)}
    for name in ("dtype", "stop"):  # They come last.
        found[name] = found.pop(name)
    return found


class Results:
    """A file of results, a JSON object a line; an interrupted run's file is gone on with.

    A line also keeps the `fingerprints` of what it was made with, see `Resolved.fingerprints`.

    Attributes:
        found: its lines by their places.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        prompts: Sequence[Asked],
        of_pair: Mapping[str, Any],
        made_with: Mapping[str, str],
    ) -> None:
        """Reads the file, if there is one; OSError is raised if it cannot be written.

        ValueError names a line that is no result of this pair for these prompts. Lines of before
        fingerprints were kept are taken to be of what is there now, with a warning.
        """
        self.path, self.prompts, self.of_pair = disk.writable(path), prompts, of_pair
        self.made_with = dict(made_with)
        try:
            self.found = dict(disk.entries(self.path, self._checked, "result"))
        except ValueError as error:
            said = str(error).rstrip(".")
            raise ValueError(f"{said}; write elsewhere, or delete that file.") from error
        if not all("fingerprints" in line for line in self.found.values()):
            logging.warning(fingerprints.UNKNOWN, self.path)

    def _checked(self, line: dict[str, Any]) -> tuple[Place, dict[str, Any]]:
        place = line["number"], line["sample"]
        if not 0 <= place[0] < len(self.prompts):
            raise ValueError(f"there is no prompt {place[0] + 1}.")
        asked = self.prompts[place[0]]
        must = {**self.of_pair, **told(asked)}
        names = [*must, "logprobs"] if asked.settings.logprobs else must
        for name in names:
            if name not in line:
                raise ValueError(f"it does not say its {name}.")
        for name, value in must.items():
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
        """Decodes what is lacking, each on disk as it ends, and gives the lines, now in order.

        A KeyboardInterrupt says what there is.
        """
        from speculative import progress

        found, total = self.found, len(requests)
        lacking = [place for place in requests if place not in found]
        listed = [requests[place] for place in lacking]
        began, tokens = time.perf_counter(), 0
        with progress.bar(str(self.path)) as on_progress:
            try:
                for at, result in pair.serve(listed, batch_size=batch_size):
                    number, sample = lacking[at]
                    said = line(self.prompts[number], result, self.of_pair)
                    said |= {"number": number, "sample": sample, "fingerprints": self.made_with}
                    disk.append(self.path, said)
                    found[number, sample] = said
                    tokens += len(result.tokens)
                    rate = tokens / (time.perf_counter() - began)
                    on_progress(f"{rate:,.0f} tokens a second", len(found) / total)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"; {len(found)} of {total} texts are in {self.path}, the same command goes on"
                ) from None
        lines = [found[place] for place in sorted(found)]
        disk.write(self.path, "".join(f"{disk.json_line(line)}\n" for line in lines))
        return lines


def in_order(served: "Iterable[tuple[int, Result]]") -> "Iterator[Result]":
    """What is served, in the order of numbers from 0, each as soon as those before it are there."""
    kept: dict[int, Result] = {}
    awaited = 0
    for place, result in served:
        kept[place] = result
        while awaited in kept:
            yield kept.pop(awaited)
            awaited += 1
