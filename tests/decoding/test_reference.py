"""The host loop in float64 and the device loop in float32 emit the same tokens."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from speculative.decoding import Decoding, Params, random_draws, reference
from speculative.decoding import speculative as fast
from speculative.drafts import Draft, TransformerDraft, UniformDraft
from speculative.sampling import Sampling
from speculative.types import PyTree
from tests import tiny, toy

TARGET = toy.MarkovModel()
MODEL_DRAFT = TransformerDraft(TARGET)  # pyright: ignore[reportArgumentType]
SAMPLINGS = [
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.7, top_k=2),
    Sampling(1.3, top_p=0.8),
]
ROWS = 6


def near() -> PyTree:
    return toy.params(toy.near_table())


def disjoint() -> PyTree:
    return toy.params(toy.disjoint_table())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("draft", "draft_params", "gamma"),
    [
        (MODEL_DRAFT, near, 4),
        (MODEL_DRAFT, disjoint, 4),
        (toy.CertainDraft(), toy.certain_table, 2),
        (UniformDraft(), tuple, 1),
    ],
)
def test_the_fast_path_emits_the_reference_s_tokens(
    draft: Draft, draft_params: Callable[[], PyTree], gamma: int, sampling: Sampling
) -> None:
    config = Decoding(toy.VOCABULARY, sampling, gamma, max_length=20, eos_id=toy.EOS)
    params = Params(toy.params(toy.target_table()), jax.numpy.asarray(draft_params()))
    inputs = np.ones((ROWS, 1), np.int32)
    for seed in (0, 1):
        draws = random_draws(seed, np.arange(ROWS), config.capacity)
        output = jax.tree.map(
            np.asarray, fast.generate(TARGET, draft, params, inputs, draws, config)
        )
        for row in range(ROWS):
            trace = reference.generate(
                TARGET, draft, params, inputs[row], np.asarray(draws[row]), config
            )
            assert trace.tokens == output.tokens[row, : output.lengths[row]].tolist()
            assert len(trace.steps) == output.target_calls[row]
            standing = [min(step.accepted, len(step.emitted)) for step in trace.steps]
            assert sum(standing) == output.accepted[row]
