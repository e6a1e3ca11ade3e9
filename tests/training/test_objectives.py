"""The losses against float64 NumPy, and packing against examples one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speculative.models import T5, DecoderOnly, DecoderOnlyConfig
from speculative.models.gpt import LAMDA
from speculative.models.reads import Reads
from speculative.training import data
from speculative.training.distil import Distillation
from speculative.training.train import CrossEntropy, teacher_forced
from tests import saved
from tests.training import tiny

DRAFT = T5(tiny.MODEL.config.replace(emb_dim=16, dropout_rate=0.0))
LAYERS = ("decoder/layers_0", "decoder/decoder_norm")
HIDDEN = DRAFT.config.replace(num_encoder_layers=0, reads=Reads(32, LAYERS))


@pytest.fixture(scope="module")
def params() -> dict:
    return saved.random(tiny.MODEL.config, 1)


@pytest.fixture(scope="module")
def draft_params() -> dict:
    return saved.random(DRAFT.config, 2)


@pytest.fixture(scope="module")
def batch() -> tiny.Batch:
    return tiny.on_device(tiny.mixture(30, 5).once())[-1]


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: T5, params: dict, batch: tiny.Batch) -> jax.Array:
    return teacher_forced(model, params, batch, None)[0]


def log_softmax(logits: jax.Array) -> np.ndarray:
    exact = np.asarray(logits, np.float64)
    exact -= exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def test_cross_entropy_is_the_log_likelihood(params: dict, batch: tiny.Batch) -> None:
    logits = logits_of(tiny.MODEL, params, batch)
    log_p = log_softmax(logits)
    log_z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    loss = z = right = 0.0
    segments = np.asarray(batch["decoder_segment_ids"])
    for r, row in enumerate(np.asarray(batch["decoder_target_tokens"])):
        for t, token in enumerate(row):
            if segments[r, t]:
                loss -= log_p[r, t, token]
                z += log_z[r, t] ** 2
                right += log_p[r, t].argmax() == token
    total, metrics = jax.jit(CrossEntropy(tiny.MODEL))(params, (), batch, None)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["accuracy"] == right
    assert total - metrics["loss"] == pytest.approx(1e-4 * z, rel=1e-2)


def test_a_smoothed_loss_is_that_of_t5x(params: dict, batch: tiny.Batch) -> None:
    """The cross entropy of soft targets less their entropy, with T5X's z-loss, token by token."""
    share, weight, size = 0.1, 1e-3, tiny.VOCABULARY
    logits = logits_of(tiny.MODEL, params, batch)
    log_p, log_z = log_softmax(logits), np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    low, total = share / (size - 1), 0.0
    entropy = -((1 - share) * np.log(1 - share) + (size - 1) * low * np.log(low))
    segments = np.asarray(batch["decoder_segment_ids"])
    for r, row in enumerate(np.asarray(batch["decoder_target_tokens"])):
        for t, token in enumerate(row):
            if segments[r, t]:
                soft = np.full(size, low)
                soft[token] = 1 - share
                total += -(soft * log_p[r, t]).sum() - entropy + weight * log_z[r, t] ** 2
    smoothed = jax.jit(CrossEntropy(tiny.MODEL, share, weight))
    found, metrics = smoothed(params, (), batch, None)
    assert float(found) == pytest.approx(total, rel=1e-5)
    plain = jax.jit(CrossEntropy(tiny.MODEL))(params, (), batch, None)[1]
    assert float(metrics["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-6)  # As without it.


def test_packing_changes_no_example(params: dict) -> None:
    examples = tiny.examples(20, 7)
    batches = data.Mixture([(examples, 1.0)], 8, tiny.SOURCE, tiny.TARGET).once()
    cross_entropy = jax.jit(CrossEntropy(tiny.MODEL))
    packed = sum(
        float(cross_entropy(params, (), batch, None)[1]["loss"])
        for batch in tiny.on_device(batches)
    )
    alone = 0.0
    for source, target in examples:
        # One example, no segments: padding in the source is masked, in the target it is later.
        inputs = np.full((1, 8), -1, np.int32)
        inputs[0, : len(source)] = source
        targets = np.zeros((1, 8), np.int32)
        targets[0, : len(target)] = target
        shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        log_p = log_softmax(saved.forward(tiny.MODEL, params, inputs, shifted))
        alone -= sum(log_p[0, t, token] for t, token in enumerate(target))
    assert packed == pytest.approx(alone, rel=1e-5)


def test_distillation_is_divergence_and_rejection(
    params: dict, draft_params: dict, batch: tiny.Batch
) -> None:
    log_p = log_softmax(logits_of(tiny.MODEL, params, batch))
    log_q = log_softmax(logits_of(DRAFT, draft_params, batch))
    seen = np.asarray(batch["decoder_segment_ids"]) > 0
    p, q = np.exp(log_p[seen]), np.exp(log_q[seen])
    divergence = (p * (log_p[seen] - log_q[seen])).sum()
    variation = np.abs(p - q).sum() / 2
    total, metrics = jax.jit(Distillation(DRAFT, tiny.MODEL, tiny.VOCABULARY))(
        draft_params, params, batch, None
    )
    assert total == pytest.approx(divergence + variation, rel=1e-4)
    assert metrics["alpha"] == pytest.approx(float(seen.sum() - variation), rel=1e-4)
    assert metrics["agreement"] == (p.argmax(-1) == q.argmax(-1)).sum()


def test_every_guess_of_a_draft_that_reads_the_decoder_counts(params: dict) -> None:
    """Of packed texts: each guess as in the text alone, less and less, and none before a text."""
    draft = T5(HIDDEN)
    hidden_params = saved.random(HIDDEN, 3)
    examples = tiny.examples(20, 7)
    batches = data.Mixture([(examples, 1.0)], 8, tiny.SOURCE, tiny.TARGET).once()
    scored = jax.jit(Distillation(draft, tiny.MODEL, tiny.VOCABULARY))
    found = [scored(hidden_params, params, b, None) for b in tiny.on_device(batches)]
    loss = sum(float(total) for total, _ in found)

    @jax.jit
    def alone(source: jax.Array, fed: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        encoded = tiny.MODEL.encode(params, source)
        logits, hidden = tiny.MODEL.forward_with_hidden(params, source, fed, layers=LAYERS)
        of_target = jnp.concatenate([hidden[name] for name in LAYERS], axis=-1)
        segments = (source >= 0).astype(int), jnp.ones_like(fed)
        return logits, draft.unroll(hidden_params, fed, segments, encoded, of_target, 3)

    expected, alphas, counts = 0.0, np.zeros(3), np.zeros(3)
    for source, target in examples:
        # Padding in the source is masked, in the text it is later.
        source = np.pad(source, (0, tiny.SOURCE - len(source)), constant_values=-1)
        length = len(target)
        fed = np.pad(target[:-1], (1, tiny.TARGET - length))
        logits, drafts = alone(source[None], fed[None])
        log_p = log_softmax(logits)[0, :length]
        for k, own in enumerate(drafts):
            log_q = log_softmax(own)[0, k:length]
            p, q = np.exp(log_p[k:]), np.exp(log_q)
            variation = np.abs(p - q).sum() / 2
            divergence = (p * (log_p[k:] - log_q)).sum()
            expected += 0.8**k * (divergence + variation)
            counts[k] += len(p)
            alphas[k] += len(p) - variation
    assert loss == pytest.approx(expected, rel=1e-4)
    # A batch's metrics are scaled to all of its tokens.
    assert sum(float(m["alpha"]) for _, m in found) == pytest.approx(alphas[0], rel=1e-4)
    for k in (1, 2):
        scaled = sum(float(m[f"alpha_{k + 1}"]) for _, m in found)
        assert scaled / counts[0] == pytest.approx(alphas[k] / counts[k], rel=0.02)


def test_only_the_draft_is_pulled(params: dict, draft_params: dict, batch: tiny.Batch) -> None:
    def loss(draft: dict, target: dict) -> jax.Array:
        return Distillation(DRAFT, tiny.MODEL, tiny.VOCABULARY)(draft, target, batch, None)[0]

    of_draft, of_target = jax.jit(jax.grad(loss, argnums=(0, 1)))(draft_params, params)
    assert all(np.abs(leaf).max() == 0 for leaf in jax.tree.leaves(of_target))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(of_draft))


@pytest.mark.parametrize("positions", [tiny.TARGET, 0], ids=["GPT", "LaMDA"])
def test_a_decoder_only_model_learns_its_texts(positions: int, batch: tiny.Batch) -> None:
    """It learns packed rows by heart, and reads their targets alone."""
    fields: dict[str, Any] = {"max_positions": positions} if positions else LAMDA
    model = DecoderOnly(DecoderOnlyConfig(tiny.VOCABULARY, 32, 2, 16, 48, 1, **fields))
    objective, optimiser = CrossEntropy(model), optax.adam(0.01)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda p: objective(p, (), batch, None)[0])(params)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss, gradient

    params = saved.random(model.config, 0)
    state, losses = optimiser.init(params), []
    for _ in range(60):
        params, state, loss, gradient = step(params, state)
        losses.append(float(loss))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert losses[-1] < losses[0] / 2
