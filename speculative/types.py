"""The one alphabet of axis letters, the array types spelled with it, and T5's special tokens.

B batch · S source · T cache · L chunk · V vocabulary · D features · N heads ·
H head size · G guesses (gamma)
"""

import typing
from types import NoneType
from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int

# A nest of dicts, tuples and dataclasses with arrays as leaves: parameters or a state.
PyTree = Any

PAD_ID = 0  # T5's padding; also the token from which decoding starts.
EOS_ID = 1  # T5's end of sequence.
# Of feed-forward layers, in the order of `Activation` in kernels.cc.
ACTIVATIONS = ("gelu", "relu", "linear")

Tokens = Int[Array, "B L"]
Inputs = Int[Array, "B S"]
Guesses = Int[Array, "B G"]
Rows = Int[Array, "B"]
Flags = Bool[Array, "B"]
Logits = Float[Array, "B L V"]


def check_types(settings: Any) -> None:
    """Checks a dataclass of numbers and texts by its annotations; ValueError names a field.

    A whole number will do for a float, no truth value for a number, and no number is infinite.
    """
    words = {int: "a whole number", float: "a finite number", str: "a text", NoneType: "None"}
    for name, kind in typing.get_type_hints(type(settings)).items():
        value, kinds = getattr(settings, name), typing.get_args(kind) or (kind,)
        if float in kinds and isinstance(value, int | float) and abs(value) < 1e300:
            fits = not isinstance(value, bool)
        else:
            fits = isinstance(value, kinds) and not isinstance(value, bool | float)
        if not fits:
            known = " or ".join(words[kind] for kind in kinds)
            raise ValueError(f"{type(settings).__name__}.{name} must be {known}, not {value!r}.")
