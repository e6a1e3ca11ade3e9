"""The one alphabet of axis letters, the array types spelled with it, and T5's special tokens.

B batch · S source · T cache · L chunk · V vocabulary · D features · N heads ·
H head size · G guesses (gamma)
"""

from collections.abc import Mapping
from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int

# A nest of dicts, tuples and dataclasses with arrays as leaves: parameters or a state.
PyTree = Any
State = PyTree  # What a model or a draft remembers between calls.
# Values by name, as of a JSON object or of gin's bindings.
Fields = Mapping[str, Any]

PADDING = -1  # Fills inputs up: every token from 0 on may stand in a text.
PAD_ID = 0  # T5's padding; also the token from which decoding starts.
EOS_ID = 1  # T5's end of sequence.
# Of feed-forward layers, in the order of `Activation` in kernels.cc.
ACTIVATIONS = ("gelu", "silu", "relu", "linear")
ROUNDED = "int8-activations"  # Kernels in int8, which meet inputs that are rounded to int8 too.
QUANTIZE = ("none", "int8", ROUNDED)  # How kernels may be held in memory.

Tokens = Int[Array, "B L"]
Inputs = Int[Array, "B S"]
Guesses = Int[Array, "B G"]
Rows = Int[Array, "B"]
Flags = Bool[Array, "B"]
Logits = Float[Array, "B L V"]
# Of packed sources [B, S] and texts [B, L]: examples' numbers in their row from 1; 0 is padding.
Segments = tuple[Array, Array] | None
