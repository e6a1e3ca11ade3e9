"""A draft's own settings: the parts of its target that it reads, and the tokens it guesses."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Reads:
    """The parts of its target that a draft reads; by default none, as in a target itself.

    An impossible value raises ValueError.
    """

    # Features of the target; 0: none are read. An encoder-decoder reads the target's encoder in
    # place of its own.
    source_dim: int = 0
    # The hidden states of the target's decoder that are read, as `interface.Model` names them.
    target_layers: tuple[str, ...] = ()
    # The tokens that have logits, as `packed` writes them; no other is guessed. Empty: all.
    draft_vocabulary: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layers", tuple(self.target_layers))
        if type(self.source_dim) is not int or not 0 <= self.source_dim < 2**31:
            wanted = "a non-negative whole number below 2^31"
            raise ValueError(f"Reads.source_dim must be {wanted}, not {self.source_dim!r}.")
        if self.target_layers and not self.source_dim:
            raise ValueError(
                "Reads.source_dim must be the target's emb_dim where there are target_layers, "
                f"not {self.source_dim}."
            )
        if self.draft_vocabulary and not len(unpacked(self.draft_vocabulary)):
            raise ValueError(
                "Reads.draft_vocabulary must be of at least one token, or empty for all, not "
                f"{self.draft_vocabulary!r}."
            )

    @property
    def hidden_dim(self) -> int:
        """Features of all `target_layers` side by side."""
        return len(self.target_layers) * self.source_dim

    def require_none(self, name: str) -> None:
        """Raises ValueError if the model of that name is a draft that reads its target."""
        if self.source_dim:
            read = "decoder" if self.target_layers else "encoder"
            raise ValueError(
                f"{name} reads its target's {read}, so it can be a draft only; take the target."
            )


def packed(tokens: Sequence[int] | np.ndarray) -> str:
    """A set of tokens as text: a bit for each token from 0 on, in hexadecimal."""
    index = np.asarray(tokens, np.int64)
    mask = np.zeros(index.max(initial=-1) + 1, bool)
    mask[index] = True
    return np.packbits(mask).tobytes().hex()


@functools.cache
def unpacked(text: str) -> np.ndarray:
    """The tokens, ascending, that `packed` wrote; raises ValueError for any other text."""
    try:
        mask = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))
    except (ValueError, TypeError) as error:
        raise ValueError(f"draft_vocabulary must be hexadecimal digits, not {text!r}.") from error
    return np.flatnonzero(mask).astype(np.int32)
