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
    norm_epsilon: float = 1e-6  # Added to a norm's variance.
    rope_base: float = 10_000.0  # These three are as in `Rope`.
    rope_factor: float = 1.0
    rope_bounds: tuple[float, ...] = ()
    # For the layers in turn, the number of keys, up to its own, that a query sees; 0: all up to its
    # own. Further layers repeat the sequence.
    windows: tuple[int, ...] = (0,)
    window_rope_base: float = 0.0  # For layers with a window, unstretched; 0: as in the others.
    query_scalar: float = 0.0  # Scores are divided by its square root; 0: the head size's.

    fixed: ClassVar[Fields] = {"positions": "rotary", "biases": False, "shared_embedding": True}

    @property
    def epsilon(self) -> float:
        """The model's own `norm_epsilon`."""
        return self.norm_epsilon

    @property
    def score_scale(self) -> float:
        """The inverse square root of `query_scalar` or the head size."""
        return (self.query_scalar or self.head_dim) ** -0.5

    def rope(self, layer: int) -> Rope:
        """The rotation with the base and the factor of a layer."""
        if self.window(layer) and self.window_rope_base:
            return Rope(self.window_rope_base)
        return Rope(self.rope_base, self.rope_factor, self.rope_bounds)

    def window(self, layer: int) -> int:
        """A layer's entry in `windows`."""
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


@dataclasses.dataclass(frozen=True)
class GemmaLayersConfig(RotaryConfig):
    """The sizes of a model of Gemma's layers, which norm what each part reads and what it gives."""

    _: dataclasses.KW_ONLY
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    norm: str = "rms_of_1"
    post_norms: bool = True
    logits_via_embedding: bool = True

    scales_embedding = True
    fixed: ClassVar[Fields] = {
        **RotaryConfig.fixed,
        "norm": "rms_of_1",
        "post_norms": True,
        "qkv_biases": False,
    }
