"""Many texts: in batches, several of each prompt, into a file that can be resumed."""

import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from speculative import disk

if TYPE_CHECKING:
    from speculative.pair import Pair, Request, Result

COUNTS = ("draft_tokens", "tested_by_position", "accepted_by_position", "accepted_lengths")
FIELDS = ("text", "tokens", "target_calls", "accepted", "tokens_per_call", *COUNTS)

Place = tuple[int, int]  # The number of a prompt, from 0, and that of a sample of it.


class Asked(NamedTuple):
    """A prompt, prefix included, and the settings that its results are told to be of."""

    text: str
    told: dict[str, Any]


def line(asked: Asked, result: "Result") -> dict[str, Any]:
    """What is said of a result in JSON, and with which settings it came about."""
    found = {name: getattr(result, name) for name in FIELDS}
    if result.logprobs is not None:
        found["logprobs"] = result.logprobs
    return found | {"prompt": asked.text, "finish_reason": result.finish_reason} | asked.told


class Results:
    """A file of results, a JSON object a line; an interrupted run's file is gone on with."""

    def __init__(
        self, path: str | pathlib.Path, prompts: Sequence[Asked], fields: Sequence[str] = ()
    ) -> None:
        """Reads the file, if there is one, whose results must have these `fields`.

        Raises:
            ValueError: a line is no result for these prompts and settings; its number is named.
            OSError: the file cannot be written.
        """
        self.path, self.prompts, self._fields = disk.writable(path), prompts, fields
        try:
            self._found = dict(disk.entries(self.path, self._checked, "result"))
        except ValueError as error:
            raise ValueError(f"{error} Write elsewhere, or delete that file.") from error

    def _checked(self, line: dict[str, Any]) -> tuple[Place, dict[str, Any]]:
        place = line["number"], line["sample"]
        if not 0 <= place[0] < len(self.prompts):
            raise ValueError(f"there is no prompt {place[0] + 1}.")
        text, told = self.prompts[place[0]]
        for name in (*told, *self._fields):
            if name not in line:
                raise ValueError(f"it does not say its {name}.")
        for name, value in told.items():
            if line[name] != value:
                raise ValueError(f"its {name} is {line[name]!r}, not {value!r}.")
        if line["prompt"] != text:
            raise ValueError(f"its prompt is not prompt {place[0] + 1}.")
        return place, line

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, place: Place) -> bool:
        return place in self._found

    def lines(self) -> Iterator[dict[str, Any]]:
        """Those that there are, in the order of prompts and samples."""
        return (self._found[at] for at in sorted(self._found))

    def add(self, place: Place, line: dict[str, Any]) -> None:
        """Writes a result, which is on disk when this returns."""
        disk.append(self.path, line)
        self._found[place] = line

    def finish(self) -> None:
        """Puts the file's lines in order."""
        disk.write(self.path, "".join(f"{disk.json_line(line)}\n" for line in self.lines()))


def decode(
    pair: "Pair", requests: Sequence["Request"], places: Sequence[Place], batch_size: int
) -> Iterator[tuple[Place, "Result"]]:
    """The results of some samples of prompts, as they end."""
    asked = [requests[number].sample(sample) for number, sample in places]
    return ((places[at], result) for at, result in pair.serve(asked, batch_size))


def into_file(
    pair: "Pair",
    found: Results,
    requests: Sequence["Request"],
    places: Sequence[Place],
    batch_size: int,
) -> None:
    """Decodes what results still lack; a KeyboardInterrupt says what there is."""
    from speculative import progress

    total, file = len(places), str(found.path)
    lacking = [place for place in places if place not in found]
    began, tokens = time.perf_counter(), 0
    with progress.bar(file) as on_progress:
        try:
            for place, result in decode(pair, requests, lacking, batch_size):
                told = line(found.prompts[place[0]], result)
                found.add(place, told | {"number": place[0], "sample": place[1]})
                tokens += len(result.tokens)
                rate = tokens / (time.perf_counter() - began)
                on_progress(f"{rate:,.0f} tokens a second", len(found) / total)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"; {len(found)} of {total} texts are in {file}, the same command goes on"
            ) from None
    found.finish()


def in_order(
    places: Sequence[Place], found: Iterator[tuple[Place, "Result"]]
) -> Iterator[tuple[Place, "Result"]]:
    """The same in the order of `places`, each as soon as those before it are there."""
    kept: dict[Place, Result] = {}
    waiting = iter(places)
    awaited = next(waiting, None)
    for place, result in found:
        kept[place] = result
        while awaited in kept:
            yield awaited, kept.pop(awaited)
            awaited = next(waiting, None)
