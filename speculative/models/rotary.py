"""The configuration that families with rotary positions share."""

import dataclasses
from typing import ClassVar

from speculative.models.config import Config
from speculative.models.rope import Rope
from speculative.types import Fields


@dataclasses.dataclass(frozen=True)
class RotaryConfig(Config):
    """The sizes of a model with rotary positions; by default its layers are Llama's."""

    _: dataclasses.KW_ONLY
    mlp_activations: tuple[str, ...] = ("silu", "linear")
    positions: str = "rotary"
    scaled_attention: bool = True
    norm_epsilon: float = 1e-6  # What a norm adds to the variance.
    rope_base: float = 10_000.0  # These three as of `Rope`.
    rope_factor: float = 1.0
    rope_bounds: tuple[float, ...] = ()
    # Of the layers in turn: the keys that a query sees, its own the last of them; 0: all before it.
    # After the last of these layers come some of the first kind again.
    windows: tuple[int, ...] = (0,)
    window_rope_base: float = 0.0  # Of layers with a window; 0: the same, and so for the factor.
    query_scalar: float = 0.0  # Scores are divided by its root; 0: by that of the head's size.

    fixed: ClassVar[Fields] = {"positions": "rotary", "biases": False, "shared_embedding": True}

    @property
    def epsilon(self) -> float:
        """As the model's own configuration has it."""
        return self.norm_epsilon

    @property
    def score_scale(self) -> float:
        """By the size of a head, or `query_scalar`."""
        return (self.query_scalar or self.head_dim) ** -0.5

    def rope(self, layer: int) -> Rope:
        """By the base and the factor of such a layer."""
        if self.window(layer) and self.window_rope_base:
            return Rope(self.window_rope_base)
        return Rope(self.rope_base, self.rope_factor, self.rope_bounds)

    def window(self, layer: int) -> int:
        """As `windows` say."""
        return self.windows[layer % len(self.windows)]

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = all(type(window) is int and window >= 0 for window in self.windows)
        for wrong, field, wanted in (
            (not 0 < self.norm_epsilon < 1, "norm_epsilon", "between 0 and 1"),
            (not self.rope_base > 0, "rope_base", "positive"),
            (not self.rope_factor > 0, "rope_factor", "positive"),
            (len(self.rope_bounds) not in (0, 3), "rope_bounds", "empty or three numbers"),
            (not self.windows or not whole, "windows", "whole numbers, 0 for no window"),
            (self.window_rope_base < 0, "window_rope_base", "positive, or 0"),
            (self.query_scalar < 0, "query_scalar", "positive, or 0"),
            (self.score_cap < 0, "score_cap", "positive, or 0"),
            (self.logits_cap < 0, "logits_cap", "positive, or 0"),
            (self.head_dim % 2, "head_dim", "even"),
        ):
            if wrong:
                self._refuse(field, wanted)
