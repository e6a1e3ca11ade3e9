"""The baseline: the target alone, one token a call, in the very loop that speculation uses."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from speculative.decoding import speculative
from speculative.decoding.settings import Decoding, Output
from speculative.types import Inputs, PyTree


def generate(
    target: speculative.Model, params: PyTree, inputs: Inputs, draws: Array, config: Decoding
) -> Output:
    """Decodes a batch with the target alone, in one dispatch.

    A step without guesses is a step of ordinary decoding, so both sides of a comparison share
    loop, caches and sampling.

    Args:
        target: the model.
        params: its parameters.
        inputs: [B, S] source tokens, 0 is padding.
        draws: [B, capacity, 3] from `random_draws`, at least of this generation's capacity.
        config: sampling and lengths; gamma is ignored.
    """
    config = dataclasses.replace(config, gamma=0, adaptive=None)
    speculative.check_draws(draws, config)
    models = speculative.Models(target, None)
    return speculative._generate(
        models, speculative.Params(params), jnp.asarray(inputs), draws, config
    )
