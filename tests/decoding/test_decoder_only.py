"""Speculative decoding of decoder-only models: equal to decoding alone, to the reference, streamed.

Prompts of different lengths share a batch.
"""

import copy
import functools

import jax
import numpy as np
import pytest

from speculative.backends import prepack
from speculative.decoding import Decoding, Output, Params
from speculative.decoding import loop as fast
from speculative.drafts import CopyDraft, HiddenDraft, TransformerDraft
from speculative.grouping import filled, padded
from speculative.models import DecoderOnly, DecoderOnlyConfig
from speculative.models.gpt import LAMDA as FIELDS
from speculative.models.reads import Reads
from speculative.sampling import Sampling
from speculative.types import ROUNDED
from tests import saved
from tests.decoding.test_loop import check_stream
from tests.decoding.test_tracing import check_same_tokens

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
    target = saved.drawn(TARGETS[name].config, 0, 0.5)
    if near:
        rng = np.random.default_rng(2)
        off = lambda x: (x * (1 + rng.normal(0.0, 0.1, x.shape))).astype(np.float32)  # noqa: E731
        return Params(prepack(target), prepack(jax.tree.map(off, target)))
    small = DRAFTS[name].model
    assert isinstance(small, DecoderOnly)
    return Params(prepack(target), prepack(saved.drawn(small.config, 1, 0.5), ROUNDED))


def prompts() -> np.ndarray:
    """[4, 8], of 1, 8, 3 and 6 tokens."""
    inputs = np.random.default_rng(3).integers(0, VOCABULARY, (ROWS, 8)).astype(np.int32)
    return np.where(np.arange(8) < np.array([[1], [8], [3], [6]]), inputs, -1)


def draft_of(name: str, near: bool) -> TransformerDraft:
    return TransformerDraft(TARGETS[name]) if near else DRAFTS[name]


def decode(name: str, config: Decoding, near: bool = False) -> Output:
    draws, inputs = config.draws(0, np.arange(ROWS)), jax.device_put(prompts())
    models, given = (TARGETS[name], draft_of(name, near)), params(name, near)
    return jax.device_get(fast.generate(*models, given, inputs, draws, config))


@functools.cache
def alone(name: str) -> Output:
    return decode(name, Decoding(VOCABULARY, Sampling(0.0), 0, LENGTH, eos_ids=(7,)))


@pytest.mark.parametrize(("name", "gamma"), [("GPT", 1), ("GPT", 4), ("GPT", 7), ("LaMDA", 4)])
def test_greedy_outputs_are_those_of_the_target_alone(name: str, gamma: int) -> None:
    """Up to the last learned position, while guesses go beyond it."""
    config = Decoding(VOCABULARY, Sampling(0.0), gamma, LENGTH, eos_ids=(7,))
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
    for prompt, tokens, length in zip(prompts(), output.tokens, output.lengths, strict=True):
        prompt = prompt[prompt >= 0]
        text = np.concatenate([prompt, tokens[:length]])
        fed = np.zeros((1, POSITIONS), np.int32)
        fed[0, : len(text)] = text
        logits = saved.forward(target, given, fed, fed)[0, len(prompt) - 1 : len(text) - 1]
        np.testing.assert_array_equal(logits[:, :VOCABULARY].argmax(axis=-1), tokens[:length])


@pytest.mark.parametrize(("name", "temperature"), [("GPT", 0.0), ("GPT", 1.0), ("LaMDA", 1.0)])
def test_the_device_loop_is_the_reference(name: str, temperature: float) -> None:
    config = Decoding(VOCABULARY, Sampling(temperature), 4, LENGTH, eos_ids=(7,))
    models, given = (TARGETS[name], draft_of(name, True)), params(name, near=True)
    # All prompts have the batch's width: one compilation, and padding that must not count.
    traces = check_same_tokens(*models, given, prompts(), config, seed=0)
    steps = [step for trace in traces for step in trace.steps]
    assert 0 < sum(step.accepted for step in steps) < 4 * len(steps)


def test_streamed_tokens_are_the_same() -> None:
    """With caches that grow: the first one holds 64 tokens."""
    config = Decoding(VOCABULARY, Sampling(1.0), 4, max_length=80, eos_ids=())
    output = decode("LaMDA", config)
    draws, inputs = config.draws(0, np.arange(ROWS)), jax.device_put(prompts())
    given = TARGETS["LaMDA"], DRAFTS["LaMDA"], params("LaMDA"), inputs, draws, config
    check_stream(output, list(fast.stream(*given)), config)
    assert output.finite.all()


HIDDEN = Reads(16, ("decoder/layers_0", "decoder/decoder_norm"))
OF_CHATS = {
    "copies": CopyDraft(decoder_only=True),
    "a model": DRAFTS["LaMDA"],
    "hidden states": HiddenDraft(
        DecoderOnly(LAMDA.replace(num_layers=1, logits_via_embedding=False, reads=HIDDEN))
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", OF_CHATS)
def test_the_turns_of_a_chat_are_as_if_read_anew(name: str, temperature: float) -> None:
    """The third turn changes the second one's words; the second one's text is left half-way."""
    draft, rng = OF_CHATS[name], np.random.default_rng(5)
    own = saved.drawn(draft.model.config, 1, 0.5) if hasattr(draft, "model") else ()
    models, both = (TARGETS["LaMDA"], draft), Params(params("LaMDA").target, own)
    config = Decoding(VOCABULARY, Sampling(temperature), 3, 90, eos_ids=())
    earlier, text, known = fast.Earlier(), rng.integers(0, VOCABULARY, 70), []
    for turn in range(4):
        inputs = jax.device_put(filled([text], padded(len(text)), -1))
        given = *models, both, inputs, config.draws(turn, np.arange(1)), config
        want = told(list(fast.stream(*given)))
        known.append(int(copy.copy(earlier).taken(np.asarray(inputs)[0])[1]))
        steps = fast.stream(*given, earlier)
        got = told([next(steps) for _ in range(5)] if turn == 1 else list(steps))
        np.testing.assert_array_equal(got, want[: len(got)])
        steps.close()  # pyright: ignore[reportAttributeAccessIssue]
        read = len(text) if name == "hidden states" else len(earlier.tokens)
        assert len(earlier.tokens) == read >= len(text)
        said = rng.integers(0, VOCABULARY, 20)
        text = text[:100] if turn == 2 else np.concatenate([text, got])
        text = np.concatenate([text, said])
    assert known[0] == 0 and known[3] == 100 and 70 <= known[1] < known[2]


def told(steps: list[fast.Step]) -> np.ndarray:
    """The tokens of a streamed text."""
    return np.concatenate([step.tokens[0, : step.count[0]] for step in steps])
