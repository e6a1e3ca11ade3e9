"""The axis letters used everywhere, array types spelled with them, and T5's special tokens.

B batch · S source · T cache · L chunk · V vocabulary · D features, or the depth of a tree ·
N heads · H head size · G guesses (gamma, or all those of a tree)
"""

from collections.abc import Mapping
from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int

# Nested dicts, tuples and dataclasses with arrays as leaves: parameters or a state.
PyTree = Any
State = PyTree  # A model's or a draft's memory between calls.
# Values by name, as in a JSON object or in gin's bindings.
Fields = Mapping[str, Any]

PADDING = -1  # Pads inputs, because every token from 0 on may occur in a text.
PAD_ID = 0  # T5's padding; also the token from which decoding starts.
EOS_ID = 1  # T5's end of sequence.
# Activations of feed-forward layers, in the order of `Activation` in product.h.
ACTIVATIONS = ("gelu", "silu", "relu", "linear")
ROUNDED = "int8-activations"  # Kernels in int8, multiplied by inputs rounded to int8.
QUANTIZE = ("none", "int8", ROUNDED)  # How kernels may be held in memory.

Tokens = Int[Array, "B L"]
Inputs = Int[Array, "B S"]
Guesses = Int[Array, "B G"]
Rows = Int[Array, "B"]
Flags = Bool[Array, "B"]
Logits = Float[Array, "B L V"]
# For packed sources [B, S] and texts [B, L]: the examples' numbers from 1; 0 is padding.
Segments = tuple[Array, Array] | None
