"""Which parameters a decoding step reads, counted by hand."""

import jax
import pytest

from speculative.backends import prepack
from speculative.models import DecoderOnlyConfig, T5Config, abstract_params, read_by_step

NORMS, BUCKETS = 3, 32


def numbers(params: object) -> int:
    return sum(leaf.size for leaf in read_by_step(params))


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_t5(tied: bool) -> None:
    config = T5Config(64, 32, 2, 16, 64, 3, 2, logits_via_embedding=tied)
    # Queries, keys, values, out of itself; queries and out of the source; the gated layer.
    layer = 4 * 32 * 32 + 2 * 32 * 32 + 3 * 32 * 64 + NORMS * 32
    expected = 2 * layer + 32 + 2 * BUCKETS + 32 * 64
    assert numbers(abstract_params(config)) == expected
    # Sizes are whole panels here, so that laying kernels out adds nothing.
    assert numbers(jax.eval_shape(prepack, abstract_params(config))) == expected


def test_of_a_gpt() -> None:
    config = DecoderOnlyConfig(64, 32, 2, 16, 128, 2, max_positions=48)
    layer = 4 * 32 * 32 + 4 * 32 + 2 * 32 * 128 + 128 + 32 + 2 * 2 * 32
    assert numbers(abstract_params(config)) == 2 * layer + 2 * 32 + 32 * 64
