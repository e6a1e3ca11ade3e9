"""Speculative decoding of decoder-only models: equal to decoding alone, to the reference, streamed.

Prompts of different lengths share a batch.
"""

import functools

import jax
import numpy as np
import pytest

from speculative.backends import prepack
from speculative.decoding import Decoding, Output, Params, random_draws, reference
from speculative.decoding import loop as fast
from speculative.drafts import TransformerDraft
from speculative.models import DecoderOnly, DecoderOnlyConfig
from speculative.models.gpt import LAMDA as FIELDS
from speculative.sampling import Sampling
from speculative.types import PyTree

VOCABULARY, ROWS, LENGTH = 50, 4, 40
POSITIONS = 8 + LENGTH
"""No more than the longest prompt and its output need."""
# Untied: with random tied embeddings a model repeats one token.
GPT = DecoderOnlyConfig(64, 16, 2, 8, 32, 2, max_positions=POSITIONS, logits_via_embedding=False)
LAMDA = DecoderOnlyConfig(64, 16, 2, 12, 32, 1, **FIELDS)
SMALL = {"vocab_size": 56, "emb_dim": 8, "num_heads": 1, "head_dim": 8, "num_layers": 1}
TARGETS = {"GPT": DecoderOnly(GPT), "LaMDA": DecoderOnly(LAMDA)}
DRAFTS = {
    "GPT": TransformerDraft(DecoderOnly(GPT.replace(**SMALL))),
    "LaMDA": TransformerDraft(DecoderOnly(LAMDA.replace(**SMALL))),
}


@functools.cache
def params(name: str, near: bool = False) -> Params:
    """Of target and draft; if `near`, the draft's are the target's with some noise."""

    def drawn(model: DecoderOnly, seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        fresh = jax.eval_shape(model.init, jax.random.key(0))
        return jax.tree.map(lambda x: rng.normal(0.0, 0.5, x.shape).astype(np.float32), fresh)

    target = drawn(TARGETS[name], 0)
    if near:
        rng = np.random.default_rng(2)
        off = lambda x: (x * (1 + rng.normal(0.0, 0.1, x.shape))).astype(np.float32)  # noqa: E731
        return Params(prepack(target), prepack(jax.tree.map(off, target)))
    small = DRAFTS[name].model
    assert isinstance(small, DecoderOnly)
    return Params(prepack(target), prepack(drawn(small, 1), quantized=True))


def prompts() -> np.ndarray:
    """[4, 8], of 1, 8, 3 and 6 tokens."""
    inputs = np.random.default_rng(3).integers(0, VOCABULARY, (ROWS, 8)).astype(np.int32)
    return np.where(np.arange(8) < np.array([[1], [8], [3], [6]]), inputs, -1)


def draft_of(name: str, near: bool) -> TransformerDraft:
    return TransformerDraft(TARGETS[name]) if near else DRAFTS[name]


def decode(name: str, config: Decoding, near: bool = False) -> Output:
    draws = random_draws(0, np.arange(ROWS), config.capacity)
    target, given, inputs = TARGETS[name], params(name, near), jax.device_put(prompts())
    if config.gamma:
        output = fast.generate(target, draft_of(name, near), given, inputs, draws, config)
    else:
        output = fast.generate(target, None, Params(given.target), inputs, draws, config)
    return jax.tree.map(np.asarray, output)


@functools.cache
def alone(name: str) -> Output:
    return decode(name, Decoding(VOCABULARY, Sampling(0.0), 0, LENGTH, eos_id=7))


@pytest.mark.parametrize(("name", "gamma"), [("GPT", 1), ("GPT", 4), ("GPT", 7), ("LaMDA", 4)])
def test_greedy_outputs_are_those_of_the_target_alone(name: str, gamma: int) -> None:
    """Up to the last learned position, while guesses go beyond it."""
    config = Decoding(VOCABULARY, Sampling(0.0), gamma, LENGTH, eos_id=7)
    output = decode(name, config)
    assert output.finite.all()
    np.testing.assert_array_equal(output.tokens, alone(name).tokens)
    np.testing.assert_array_equal(output.lengths, alone(name).lengths)
    assert (alone(name).lengths == LENGTH).any()


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_alone_emits_the_argmax_of_each_whole_text(name: str) -> None:
    """Each row by itself, without padding and without a cache."""
    target, given = TARGETS[name], params(name).target
    output = alone(name)
    forward = jax.jit(target.forward)
    for prompt, tokens, length in zip(prompts(), output.tokens, output.lengths, strict=True):
        prompt = prompt[prompt >= 0]
        text = np.concatenate([prompt, tokens[:length]])
        fed = np.zeros((1, POSITIONS), np.int32)
        fed[0, : len(text)] = text
        logits = np.asarray(forward(given, fed, fed))[0, len(prompt) - 1 : len(text) - 1]
        np.testing.assert_array_equal(logits[:, :VOCABULARY].argmax(axis=-1), tokens[:length])


@pytest.mark.parametrize(("name", "temperature"), [("GPT", 0.0), ("GPT", 1.0), ("LaMDA", 1.0)])
def test_the_device_loop_is_the_reference(name: str, temperature: float) -> None:
    config = Decoding(VOCABULARY, Sampling(temperature), 4, LENGTH, eos_id=7)
    output = decode(name, config, near=True)
    draws = np.asarray(random_draws(0, np.arange(ROWS), config.capacity))
    target, draft, given = TARGETS[name], draft_of(name, True), params(name, near=True)
    for row, prompt in enumerate(prompts()):
        # All prompts have the batch's width: one compilation, and padding that must not count.
        trace = reference.generate(target, draft, given, prompt, draws[row], config)
        assert trace.tokens == output.tokens[row, : output.lengths[row]].tolist()
        assert len(trace.steps) == output.target_calls[row]
    assert 0 < output.accepted.sum() < output.tested.sum()


def test_streamed_tokens_are_the_same() -> None:
    """With caches that grow: the first one holds 64 tokens."""
    config = Decoding(VOCABULARY, Sampling(1.0), 4, max_length=80, eos_id=-1)
    output = decode("LaMDA", config)
    draws = random_draws(0, np.arange(ROWS), config.capacity)
    inputs, both = jax.device_put(prompts()), params("LaMDA")
    rows: list[list[int]] = [[] for _ in range(ROWS)]
    for step in fast.stream(TARGETS["LaMDA"], DRAFTS["LaMDA"], both, inputs, draws, config):
        for row, tokens, count in zip(rows, step.tokens, step.count, strict=True):
            row += tokens[:count].tolist()
    assert rows == output.tokens.tolist()
    assert output.finite.all()
