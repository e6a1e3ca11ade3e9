"""Pairs of toy models, whose probabilities NumPy can compute."""

import types
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from speculative.decoding import Params
from speculative.drafts import Draft, TransformerDraft
from speculative.pair import Pair
from tests import saved, toy

SOURCE = jnp.ones((1, 1), jnp.int32)


class Target(toy.MarkovModel):
    """The toy with what an audit asks of a target's configuration."""

    config: ClassVar = saved.TARGET.replace(num_decoder_layers=1)


MODEL_DRAFT = TransformerDraft(toy.MarkovModel())


def toy_pair(draft: Draft, draft_params: Any, table: np.ndarray | None = None) -> Pair:
    """A `toy.MarkovModel` with a draft; `table` [V, V, V] are the target's logits."""
    table = toy.target_table() if table is None else table
    parts: dict[str, Any] = {
        "target": Target(),
        "vocabulary": types.SimpleNamespace(
            size=toy.VOCABULARY, eos_ids=toy.ENDS, decode=lambda tokens, special: str(tokens)
        ),
    }
    params = Params(toy.params(table), draft_params)
    return Pair(draft=draft, params=params, names=("toy target", "toy draft"), **parts)
