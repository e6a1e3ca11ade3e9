"""Compiled decoding: nothing as large as a cache is copied within its loop."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

from speculative.backends import prepack
from speculative.decoding import Decoding, Params
from speculative.decoding.loop import Models, decode
from speculative.drafts import TransformerDraft
from speculative.models import DecoderOnly, DecoderOnlyConfig, FlaxModel
from speculative.sampling import Sampling
from tests import saved, tiny

CACHE = 48
"""Positions of the one cache size that is compiled."""


def copies(program: str, least: int) -> list[str]:
    """The copies of `least` numbers or more in the loops of a compiled program."""
    found, inside = [], False
    for line in program.splitlines():
        if line.endswith("{"):
            inside = not line.startswith("ENTRY")
        copied = re.search(r"= \w+\[([\d,]*)\]\S* copy\(", line)
        if inside and copied:
            if math.prod(map(int, filter(None, copied[1].split(",")))) >= least:
                found.append(line.strip())
    return found


def compiled(model: FlaxModel, gamma: int, temperature: float) -> str:
    """Decoding by a model that is its own draft."""
    params = prepack(saved.random(model.config, 0))
    config = Decoding(50, Sampling(temperature), gamma, 32)
    assert config.cache_lengths() == [CACHE]
    source, draws = jax.device_put(tiny.sources(1)), config.draws(0, jnp.zeros(1, int))
    models = Models(model, TransformerDraft(model) if gamma else None)
    program = decode.lower(models, Params(params, params), source, draws, config)
    return program.compile().as_text() or ""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize(
    "model",
    [tiny.TARGET, DecoderOnly(DecoderOnlyConfig(64, 16, 2, 8, 32, 2, max_positions=96))],
    ids=["t5", "gpt"],
)
def test_no_cache_is_copied_in_the_loop(model: FlaxModel, gamma: int, temperature: float) -> None:
    program = compiled(model, gamma, temperature)
    assert " while(" in program
    assert copies(program, CACHE * model.config.num_heads * model.config.head_dim) == []


def test_a_loop_that_copies_is_found() -> None:
    """Two arrays are exchanged in each iteration, which needs copies."""

    @jax.jit
    def loop(a: Array, b: Array) -> tuple[Array, Array]:
        def body(i: Array, both: tuple[Array, Array]) -> tuple[Array, Array]:
            return both[1], both[0].at[i].add(1.0)

        return lax.fori_loop(0, a.shape[0], body, (a, b))

    program = loop.lower(jnp.zeros(1024), jnp.ones(1024)).compile().as_text() or ""
    assert copies(program, 1024)
    assert not copies(program, 1025)
