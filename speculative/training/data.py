"""Tokenised examples, mixed and packed into rows of fixed lengths.

Packing is a function of (seed, epoch), which makes every step's batch known from its number
alone: a run that was stopped resumes with the batch it would have seen.
"""

import concurrent.futures
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from speculative.training.examples import Examples

Batch = dict[str, np.ndarray]
"""What seqio's packing encoder-decoder converter gives, without positions; all int32:
`encoder_input_tokens`, `encoder_segment_ids` [B, S]; `decoder_input_tokens`,
`decoder_target_tokens`, `decoder_segment_ids`, `decoder_loss_weights` [B, L].
"""

OPEN_ROWS = 24
"""Rows that may still take an example; more pack tighter and search longer."""


class Mixture:
    """Several files of examples, mixed and packed.

    Args:
        sources: the examples, each with its passes an epoch; 1.5 is every example once and a
            random half of them twice.
        batch_size: B rows.
        source_length: S tokens a row.
        target_length: L tokens a row.

    Raises:
        ValueError: a weight is not positive, or no example fits a row.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Examples, float]],
        batch_size: int,
        source_length: int,
        target_length: int,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = (source_length, target_length)
        self._weights = [weight for _, weight in sources]
        if not sources or min(self._weights) <= 0:
            raise ValueError(f"A mixture needs files of positive weight, not {self._weights}.")
        parts = [part for part, _ in sources]
        self._inputs, input_starts, input_sizes = _joined(
            [(part.inputs, part.inputs_offsets) for part in parts]
        )
        self._targets, target_starts, target_sizes = _joined(
            [(part.targets, part.targets_offsets) for part in parts]
        )
        self._starts = (input_starts, target_starts)
        self._sizes = (input_sizes, target_sizes)
        # An example cut to fit would teach to stop early, so one that does not fit is left out.
        fits = (input_sizes <= source_length) & (target_sizes <= target_length)
        fits &= target_sizes > 0
        bounds = np.cumsum([0, *map(len, parts)])
        self._members = [
            np.flatnonzero(fits[low:high]) + low
            for low, high in zip(bounds, bounds[1:], strict=False)
        ]
        self.kept, self.left_out = int(fits.sum()), int((~fits).sum())
        if not self.kept:
            raise ValueError(
                f"None of {len(fits)} examples has a target and fits a row of {source_length} "
                f"source and {target_length} target tokens; ask for longer rows."
            )

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Batches an epoch; the first epoch's packing decides it for all."""
        return max(1, len(self._packed(0, 0)[0]) // self.batch_size)

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Batch]:
        """Endless batches from step `start_step` (from 0) of the run of this seed.

        The next epoch is packed in a thread while this one is used.
        """
        epoch, first = divmod(start_step, self.steps_per_epoch)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self._packed, seed, epoch)
            while True:
                rows = coming.result()
                epoch += 1
                coming = pool.submit(self._packed, seed, epoch)
                # Epochs pack a little better or worse: rows too many are dropped, rows
                # missing are taken from the beginning.
                order = np.resize(np.arange(len(rows[0])), self.steps_per_epoch * self.batch_size)
                for step in range(first, self.steps_per_epoch):
                    chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
                    yield _batch(*(column[chosen] for column in rows))
                first = 0

    def once(self) -> list[Batch]:
        """Every example once; the last batch is filled up with empty rows."""
        rows = self._packed(0, None)
        missing = -len(rows[0]) % self.batch_size
        rows = [np.pad(column, ((0, missing), (0, 0))) for column in rows]
        return [
            _batch(*(column[i : i + self.batch_size] for column in rows))
            for i in range(0, len(rows[0]), self.batch_size)
        ]

    def _packed(self, seed: int, epoch: int | None) -> list[np.ndarray]:
        """An epoch's rows: source tokens and segments [R, S], target ones [R, L]."""
        if epoch is None:
            chosen = np.concatenate(self._members)
        else:
            random = np.random.default_rng((seed, epoch))
            chosen = np.concatenate(
                [
                    part
                    for members, weight in zip(self._members, self._weights, strict=True)
                    for part in [members] * int(weight)
                    + [random.permutation(members)[: round(len(members) * (weight % 1))]]
                ]
            )
            random.shuffle(chosen)
        sizes = [size[chosen] for size in self._sizes]
        rows, segments, *places = first_fit(sizes[0], sizes[1], self.lengths)
        packed: list[np.ndarray] = []
        for tokens, starts, size, place, length in zip(
            (self._inputs, self._targets), self._starts, sizes, places, self.lengths, strict=True
        ):
            # One flat copy an epoch: token k of an example goes to its row's place + k.
            within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
            to = np.repeat(rows * length + place, size) + within
            values = np.zeros((rows.max() + 1) * length, np.int32)
            values[to] = tokens[np.repeat(starts[chosen], size) + within]
            numbers = np.zeros_like(values)
            numbers[to] = np.repeat(segments, size)
            packed += [values.reshape(-1, length), numbers.reshape(-1, length)]
        return packed


def first_fit(
    input_sizes: np.ndarray, target_sizes: np.ndarray, lengths: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Packs examples, in their order, each into the first open row with room for both sides.

    Returns:
        For each example: its row, its number within the row from 1, and the places where its
        source and its target begin.
    """
    # [row, examples, source tokens, target tokens], plain lists: this loop is the whole cost.
    open_rows: list[list[int]] = []
    made = 0
    source_room, target_room = lengths
    out: list[tuple[int, int, int, int]] = []
    for source, target in zip(input_sizes.tolist(), target_sizes.tolist(), strict=True):
        for row in open_rows:
            if row[2] + source <= source_room and row[3] + target <= target_room:
                break
        else:
            if len(open_rows) == OPEN_ROWS:
                open_rows.remove(max(open_rows, key=lambda row: row[2] + row[3]))
            row = [made, 0, 0, 0]
            open_rows.append(row)
            made += 1
        row[1] += 1
        out.append((row[0], row[1], row[2], row[3]))
        row[2] += source
        row[3] += target
    found = np.array(out, np.int64).T
    return found[0], found[1], found[2], found[3]


def _joined(
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All tokens, and each example's start and size among them."""
    before = np.cumsum([0, *(len(flat) for flat, _ in parts)])
    starts = [offsets[:-1] + b for (_, offsets), b in zip(parts, before, strict=False)]
    sizes = [np.diff(offsets) for _, offsets in parts]
    flat = np.concatenate([flat for flat, _ in parts])
    return flat, np.concatenate(starts), np.concatenate(sizes)


def _batch(
    source: np.ndarray, source_segments: np.ndarray, target: np.ndarray, segments: np.ndarray
) -> Batch:
    shifted = np.zeros_like(target)
    same = segments[:, 1:] == segments[:, :-1]
    shifted[:, 1:] = np.where(same, target[:, :-1], 0)
    return {
        "encoder_input_tokens": source,
        "encoder_segment_ids": source_segments,
        "decoder_input_tokens": shifted,
        "decoder_target_tokens": target,
        "decoder_segment_ids": segments,
        "decoder_loss_weights": (segments > 0).astype(np.int32),
    }
