"""Many texts: in batches, several of each prompt, into a file that can be resumed."""

import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from speculative import disk
from speculative.commands import OF_RUN, SETTINGS
from speculative.commands.prompts import Asked

if TYPE_CHECKING:
    from speculative.pair import Pair, Request, Result

COUNTS = ("draft_tokens", "tested_by_position", "accepted_by_position", "accepted_lengths")
FIELDS = ("text", "tokens", "target_calls", "accepted", "tokens_per_call", *COUNTS)


def told(asked: Asked) -> dict[str, Any]:
    """The settings of a prompt that its lines tell."""
    found = {name: getattr(asked.settings, name) for name in SETTINGS if name not in OF_RUN}
    return found | {"stop": list(asked.settings.stop)}


def line(asked: Asked, result: "Result", of_pair: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a result in JSON, and of which pair and settings it is."""
    found = {name: getattr(result, name) for name in FIELDS}
    if result.logprobs is not None:
        found["logprobs"] = result.logprobs
    found |= {"prompt": asked.text, "finish_reason": result.finish_reason}
    said = {**of_pair, **told(asked)}
    last = {name: said.pop(name) for name in ("dtype", "stop")}  # They come last.
    return found | said | last


class Results:
    """A file of results, a JSON object a line; an interrupted run's file is gone on with.

    A result's place is the numbers of its prompt and its sample, from 0.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        prompts: Sequence[Asked],
        of_pair: Mapping[str, Any],
        fields: Sequence[str] = (),
    ) -> None:
        """Reads the file, if there is one, whose results must be of this pair and have `fields`.

        Raises:
            ValueError: a line is no result for these prompts and settings; its number is named.
            OSError: the file cannot be written.
        """
        self.path, self.prompts, self.of_pair = disk.writable(path), prompts, of_pair
        self._fields = fields
        try:
            self._found = dict(disk.entries(self.path, self._checked, "result"))
        except ValueError as error:
            raise ValueError(f"{error} Write elsewhere, or delete that file.") from error

    def _checked(self, line: dict[str, Any]) -> tuple[tuple[int, int], dict[str, Any]]:
        place = line["number"], line["sample"]
        if not 0 <= place[0] < len(self.prompts):
            raise ValueError(f"there is no prompt {place[0] + 1}.")
        asked = self.prompts[place[0]]
        must = {**self.of_pair, **told(asked)}
        for name in (*must, *self._fields):
            if name not in line:
                raise ValueError(f"it does not say its {name}.")
        for name, value in must.items():
            if line[name] != value:
                raise ValueError(f"its {name} is {line[name]!r}, not {value!r}.")
        if line["prompt"] != asked.text:
            raise ValueError(f"its prompt is not prompt {place[0] + 1}.")
        return place, line

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, place: tuple[int, int]) -> bool:
        return place in self._found

    def lines(self) -> Iterator[dict[str, Any]]:
        """Those that there are, in the order of prompts and samples."""
        return (self._found[at] for at in sorted(self._found))

    def add(self, place: tuple[int, int], line: dict[str, Any]) -> None:
        """Writes a result, which is on disk when this returns."""
        disk.append(self.path, line)
        self._found[place] = line

    def finish(self) -> None:
        """Puts the file's lines in order."""
        disk.write(self.path, "".join(f"{disk.json_line(line)}\n" for line in self.lines()))


def decode(
    pair: "Pair", requests: Mapping[tuple[int, int], "Request"], batch_size: int
) -> "Iterator[tuple[tuple[int, int], Result]]":
    """The results of requests by their places, as they end."""
    places = list(requests)
    served = pair.serve(list(requests.values()), batch_size=batch_size)
    return ((places[at], result) for at, result in served)


def into_file(
    pair: "Pair",
    found: Results,
    requests: Mapping[tuple[int, int], "Request"],
    batch_size: int,
) -> None:
    """Decodes what results still lack; a KeyboardInterrupt says what there is."""
    from speculative import progress

    total, file = len(requests), str(found.path)
    lacking = {place: one for place, one in requests.items() if place not in found}
    began, tokens = time.perf_counter(), 0
    with progress.bar(file) as on_progress:
        try:
            for place, result in decode(pair, lacking, batch_size):
                said = line(found.prompts[place[0]], result, found.of_pair)
                found.add(place, said | {"number": place[0], "sample": place[1]})
                tokens += len(result.tokens)
                rate = tokens / (time.perf_counter() - began)
                on_progress(f"{rate:,.0f} tokens a second", len(found) / total)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"; {len(found)} of {total} texts are in {file}, the same command goes on"
            ) from None
    found.finish()


def in_order(
    places: Iterable[tuple[int, int]], found: "Iterable[tuple[tuple[int, int], Result]]"
) -> "Iterator[tuple[tuple[int, int], Result]]":
    """The same in the order of `places`, each as soon as those before it are there."""
    kept: dict[tuple[int, int], Result] = {}
    waiting = iter(places)
    awaited = next(waiting, None)
    for place, result in found:
        kept[place] = result
        while awaited in kept:
            yield awaited, kept.pop(awaited)
            awaited = next(waiting, None)
