"""Tokenised examples: their .npz files, and rows of fixed lengths into which they are packed.

Packing depends only on (seed, epoch), so a resumed run sees the batches of an unbroken one.
"""

import concurrent.futures
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from speculative import disk
from speculative.types import PAD_ID

Batch = dict[str, np.ndarray]
"""The fields of seqio's packing encoder-decoder converter, without positions; all int32:
`encoder_input_tokens`, `encoder_segment_ids` [B, S]; `decoder_input_tokens`,
`decoder_target_tokens`, `decoder_segment_ids`, `decoder_loss_weights` [B, L]."""

OPEN_ROWS = 24  # Rows that may still take an example; more leave less padding but are slower.
MOST_PROMPT = 23  # Most tokens that `prompts` takes from a text, without the start token.


@dataclasses.dataclass(frozen=True)
class Examples:
    """Ragged token ids: example i is the slice between offsets [n + 1] i and i + 1.

    The tokens include the end of sequence. An item is an example's source and target.
    """

    inputs: np.ndarray
    inputs_offsets: np.ndarray
    targets: np.ndarray
    targets_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs_offsets) - 1

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        source = self.inputs[self.inputs_offsets[i] : self.inputs_offsets[i + 1]]
        return source, self.targets[self.targets_offsets[i] : self.targets_offsets[i + 1]]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return map(self.__getitem__, range(len(self)))

    def save(self, path: disk.Path) -> None:
        """Writes a .npz file for `load`, whole or not at all."""
        with disk.written(path) as part, part.open("wb") as file:
            np.savez_compressed(file, **vars(self))


def ragged(inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Examples:
    """Examples from the token ids of each source and each target."""
    columns: list[np.ndarray] = []
    for rows in (inputs, targets):
        flat = np.concatenate(rows) if rows else np.zeros(0)
        columns.append(flat.astype(np.int16 if flat.max(initial=0) < 2**15 else np.int32))
        columns.append(np.cumsum([0, *map(len, rows)], dtype=np.int64))
    return Examples(*columns)


def load(path: disk.Path) -> Examples:
    """Reads tokenised examples; raises ValueError if the file is missing, damaged or empty."""
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path} does not exist; make it with scripts/export_tokenized.py.")
    try:
        with np.load(path) as arrays:
            examples = Examples(*(arrays[f.name] for f in dataclasses.fields(Examples)))
    except Exception as error:  # NumPy raises many kinds for a damaged archive.
        raise ValueError(f"{path} is no .npz of tokenised examples: {error}.") from error
    for name in ("inputs", "targets"):
        flat, offsets = getattr(examples, name), getattr(examples, f"{name}_offsets")
        ends_fit = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(flat)
        if not ends_fit or len(offsets) != len(examples) + 1:
            raise ValueError(f"{path} has no examples, or offsets that do not fit its {name}.")
    return examples


def load_all(folder: disk.Path, names: Iterable[str]) -> dict[str, Examples]:
    """The examples of files in a folder, which are named without `.npz`; see `load`."""
    return {name: load(pathlib.Path(folder, f"{name}.npz")) for name in names}


def prompts(texts: Examples, start_id: int = PAD_ID) -> Examples:
    """Prompts for a decoder-only model: the start token and the beginning of each target.

    Their lengths cycle from 4 to `MOST_PROMPT` tokens, but none exceeds half of its text.
    """
    beginnings = [
        np.append(start_id, target[: min(4 + i % (MOST_PROMPT - 3), len(target) // 2)])
        for i, (_, target) in enumerate(texts)
    ]
    return ragged(beginnings, [np.zeros(0, np.int32)] * len(beginnings))


def whole_texts(written: Examples) -> Examples:
    """Examples without inputs, whose targets are each prompt and its continuation joined."""
    texts = [np.concatenate([prompt[1:], target]) for prompt, target in written]
    return ragged([np.zeros(0, np.int32)] * len(texts), texts)


class _Fitted(NamedTuple):
    """Examples of an epoch, each with its row, its number in the row and where its sides begin."""

    chosen: np.ndarray
    rows: np.ndarray
    segments: np.ndarray
    sources: np.ndarray
    targets: np.ndarray


class Mixture:
    """Several files of examples, mixed and packed into rows of S source and L target tokens.

    `sources` are each file's examples and passes per epoch; 1.5 passes show every example once, and
    a random half of them a second time. The decoder reads `start_id` before each target. Raises
    ValueError if a weight is not positive or no example fits a row.

    Attributes:
        left_out: the examples of each file that have no target or do not fit a row.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Examples, float]],
        batch_size: int,
        source_length: int,
        target_length: int,
        start_id: int = PAD_ID,
    ) -> None:
        weights = [weight for _, weight in sources]
        if not weights or min(weights) <= 0:
            raise ValueError(f"A mixture needs files of positive weight, not {weights}.")
        self.batch_size, self._start_id = batch_size, start_id
        self._lengths = (source_length, target_length)
        # The tokens of all files, and each example's start and size; for sources, then for targets.
        self._sides: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for side in ("inputs", "targets"):
            tokens = np.concatenate([getattr(part, side) for part, _ in sources])
            offsets = [getattr(part, f"{side}_offsets") for part, _ in sources]
            sizes = np.concatenate([np.diff(ends) for ends in offsets])
            self._sides.append((tokens, np.cumsum(sizes) - sizes, sizes))
        input_sizes, target_sizes = (sizes for _, _, sizes in self._sides)
        # A shortened example would teach the model to stop early, so it is left out instead.
        fits = (input_sizes <= source_length) & (target_sizes <= target_length) & (target_sizes > 0)
        if not fits.any():
            raise ValueError(
                f"None of {len(fits)} examples has a target and fits a row of {source_length} "
                f"source and {target_length} target tokens; ask for longer rows."
            )
        ends = np.cumsum([len(part) for part, _ in sources])
        members = np.split(np.arange(len(fits)), ends[:-1])
        self._parts = [(m[fits[m]], weight) for m, weight in zip(members, weights, strict=True)]
        self.left_out = [int((~fits[m]).sum()) for m in members]

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Number of batches of every epoch: as many as the first epoch of seed 0 fills."""
        return max(1, int(self._fitted(0, 0).rows.max() + 1) // self.batch_size)

    def batches(
        self, seed: int, start_step: int = 0, rows: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Endless batches from step `start_step` on; a thread packs the next epoch meanwhile.

        If `rows` is given, each batch has only these, for which the process has devices: all
        processes agree on every example's place, and each fills in its own rows.
        """
        epoch, first = divmod(start_step, self.steps_per_epoch)
        own = np.arange(self.batch_size) if rows is None else rows

        def packed(epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
            fitted = self._fitted(seed, epoch)
            # An epoch may fill a few rows more or fewer than the first: surplus rows are dropped,
            # missing ones are copied from its beginning.
            order = np.resize(
                np.arange(fitted.rows.max() + 1), self.steps_per_epoch * self.batch_size
            )
            chosen = order.reshape(-1, self.batch_size)[:, own]
            kept = np.unique(chosen)
            return np.searchsorted(kept, chosen), self._filled(fitted, kept)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            coming = pool.submit(packed, epoch)
            while True:
                order, columns = coming.result()
                epoch += 1
                coming = pool.submit(packed, epoch)
                for chosen in order[first:]:
                    yield self._batch(*(column[chosen] for column in columns))
                first = 0

    def once(self) -> list[Batch]:
        """Batches with every example once; the last batch is filled up with empty rows."""
        fitted = self._fitted(0, None)
        rows = self._filled(fitted, np.arange(fitted.rows.max() + 1))
        padding = (0, -len(rows[0]) % self.batch_size), (0, 0)
        columns = [np.pad(x, padding).reshape(-1, self.batch_size, x.shape[1]) for x in rows]
        return [self._batch(*parts) for parts in zip(*columns, strict=True)]

    def _fitted(self, seed: int, epoch: int | None) -> "_Fitted":
        """The places of an epoch's examples; None places every example once, in order."""
        if epoch is None:
            chosen = np.concatenate([members for members, _ in self._parts])
        else:
            random = np.random.default_rng((seed, epoch))
            passes = []
            for members, weight in self._parts:
                passes += [members] * int(weight)
                passes.append(random.permutation(members)[: round(len(members) * (weight % 1))])
            chosen = np.concatenate(passes)
            random.shuffle(chosen)
        sizes = [sizes[chosen] for _, _, sizes in self._sides]
        return _Fitted(chosen, *first_fit(sizes[0], sizes[1], self._lengths))

    def _filled(self, fitted: "_Fitted", kept: np.ndarray) -> list[np.ndarray]:
        """Source tokens and segments [R, S] and the target's [R, L], of ascending rows `kept`."""
        here = np.isin(fitted.rows, kept)
        chosen, rows, segments, *begins = (column[here] for column in fitted)
        rows = np.searchsorted(kept, rows)
        columns: list[np.ndarray] = []
        for (tokens, starts, sizes), begin, length in zip(
            self._sides, begins, self._lengths, strict=True
        ):
            # A single flat copy: token k of an example goes to index begin + k of its row.
            size = sizes[chosen]
            within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
            to = np.repeat(rows * length + begin, size) + within
            values = np.zeros(len(kept) * length, np.int32)
            values[to] = tokens[np.repeat(starts[chosen], size) + within]
            numbers = np.zeros_like(values)
            numbers[to] = np.repeat(segments, size)
            columns += [values.reshape(-1, length), numbers.reshape(-1, length)]
        return columns

    def _batch(self, *rows: np.ndarray) -> Batch:
        source, source_segments, target, segments = rows
        shifted = np.full_like(target, self._start_id)
        same = segments[:, 1:] == segments[:, :-1]
        shifted[:, 1:] = np.where(same, target[:, :-1], self._start_id)
        return {
            "encoder_input_tokens": source,
            "encoder_segment_ids": source_segments,
            "decoder_input_tokens": shifted,
            "decoder_target_tokens": target,
            "decoder_segment_ids": segments,
            "decoder_loss_weights": (segments > 0).astype(np.int32),
        }


def first_fit(
    input_sizes: np.ndarray, target_sizes: np.ndarray, lengths: tuple[int, int]
) -> np.ndarray:
    """Packs each example, in order, into the first open row that both sides fit into.

    The result [4, n] has each example's row, its number within the row from 1, and the indices in
    the row at which its source and its target begin.
    """
    # Each is [row, examples, source tokens, target tokens]; lists are fastest in this loop, where
    # almost all the time of packing is spent.
    open_rows: list[list[int]] = []
    placed: list[list[int]] = []
    count, (source_room, target_room) = 0, lengths
    for source, target in zip(input_sizes.tolist(), target_sizes.tolist(), strict=True):
        for row in open_rows:
            if row[2] + source <= source_room and row[3] + target <= target_room:
                break
        else:
            if len(open_rows) == OPEN_ROWS:
                open_rows.remove(max(open_rows, key=lambda row: row[2] + row[3]))
            row = [count, 0, 0, 0]
            open_rows.append(row)
            count += 1
        row[1] += 1
        placed.append(row.copy())
        row[2] += source
        row[3] += target
    return np.array(placed, np.int64).T
