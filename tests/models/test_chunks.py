"""Chunks that branch: each branch as decoded alone, and caches of which one branch is kept."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.backends import for_decoding, prepack
from speculative.models import FlaxModel, LlamaConfig, model_of
from speculative.models.interface import Chunk
from speculative.types import PyTree
from tests import saved, tiny

# Two branches behind a common token: places 0, 1, 3, 5 and 0, 2, 4 of the chunk.
BRANCHES = [[0, 1, 3, 5], [0, 2, 4]]
PARENTS = [-1, 0, 0, 1, 2, 3]
POSITIONS = np.array([0, 1, 1, 2, 2, 3])
ROWS = 3

UMT5 = saved.TARGET.replace(shared_positions=False)
LLAMA = LlamaConfig(8192, 16, 4, 8, 24, 3, num_kv_heads=2, windows=(4, 0), head_norms=True)
LAYOUTS: dict[str, Callable[[PyTree], PyTree]] = {
    "kernels": prepack,
    "XLA": lambda params: params,
    "TPU": functools.partial(for_decoding, platform="tpu"),
    "TPU's draft": functools.partial(for_decoding, draft=True, platform="tpu"),
}


def ancestors() -> np.ndarray:
    """Which tokens of the chunk each sees: itself and those on its way."""
    mask = np.eye(len(PARENTS), dtype=bool)
    for place, parent in enumerate(PARENTS):
        if parent >= 0:
            mask[place] |= mask[parent]
    return mask


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config", [saved.TARGET, UMT5, saved.GPT, LLAMA], ids=["T5", "umT5", "GPT", "Llama"]
)
def test_a_branch_is_what_it_is_alone(config: Any, layout: str) -> None:
    """Logits behind a ragged text, in caches that hold stale tokens; then one branch is kept."""
    model = model_of(config)
    params = LAYOUTS[layout](saved.random(config, 0))
    rng = np.random.default_rng(5)
    texts = jnp.asarray(rng.integers(2, tiny.VOCABULARY, (ROWS, 9)), jnp.int32)
    state = begun(model, params, rng)
    _, state, _ = extend(model, params, state, Chunk(texts))
    state = model.rewind(state, jax.device_put(np.array([2, 5, 3], np.int32)))
    tokens = jnp.asarray(rng.integers(2, tiny.VOCABULARY, (ROWS, len(PARENTS))), jnp.int32)
    branching = Chunk(tokens, jnp.asarray(POSITIONS)[None], jnp.asarray(ancestors())[None])
    logits, both, hidden = extend(model, params, state, branching)
    np.testing.assert_array_equal(both.lengths, state.lengths + len(PARENTS))
    for branch in BRANCHES:
        alone, expected, of_branch = extend(
            model, params, state, Chunk(tokens[:, np.array(branch)])
        )
        np.testing.assert_allclose(np.asarray(logits)[:, branch], alone, atol=1e-5)
        for name, wanted in of_branch.items():
            np.testing.assert_allclose(np.asarray(hidden[name])[:, branch], wanted, atol=1e-4)
        for count in (np.full(ROWS, len(branch)), np.array([1, 3, 2])):
            path = np.pad(branch, (0, 1))  # What is beyond the count may be any place.
            kept = keep(model, both, len(PARENTS), np.tile(path, (ROWS, 1)), count)
            np.testing.assert_array_equal(kept.lengths, state.lengths + count)
            compare(model, params, kept, model.rewind(expected, state.lengths + count))
    chain = np.tile(np.arange(len(PARENTS)), (ROWS, 1))
    compare(
        model,
        params,
        keep(model, both, len(PARENTS), chain, np.array([1, 0, 1])),
        model.rewind(both, state.lengths + np.array([1, 0, 1])),
    )


def begun(model: FlaxModel, params: PyTree, rng: np.random.Generator) -> Any:
    """The state behind sources, or prompts, of several lengths."""
    inputs = rng.integers(2, tiny.VOCABULARY, (ROWS, 7)).astype(np.int32)
    for row in range(ROWS):
        inputs[row, 4 + row :] = model.pad_id
    return start(model, params, inputs, 32)


@functools.partial(jax.jit, static_argnums=(0, 3))
def start(model: FlaxModel, params: PyTree, inputs: Any, size: int) -> Any:
    return model.start(params, inputs, size).state


@functools.partial(jax.jit, static_argnums=0)
def extend(model: FlaxModel, params: PyTree, state: Any, chunk: Chunk) -> Any:
    return model.extend(params, state, chunk, layers=model.extend_layers)


keep = jax.jit(lambda model, *given: model.keep(*given), static_argnums=(0, 2))


def compare(model: FlaxModel, params: PyTree, found: Any, expected: Any) -> None:
    """Caches up to each row's length, and the logits of a token behind them."""
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    prompts = np.zeros(ROWS, int) if found.prompt is None else np.asarray(found.prompt)
    for one, other in zip(found.keys + found.values, expected.keys + expected.values, strict=True):
        for row, length in enumerate(np.asarray(found.lengths) + prompts):
            np.testing.assert_allclose(one[row, :, :length], other[row, :, :length], atol=1e-5)
    newest = Chunk(jnp.full((ROWS, 1), 7, jnp.int32))
    logits = [extend(model, params, state, newest).logits for state in (found, expected)]
    np.testing.assert_allclose(*logits, atol=1e-5)
