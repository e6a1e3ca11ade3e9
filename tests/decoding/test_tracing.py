"""The traced loop in float64 and the device loop in float32 emit the same tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.backends import prepack
from speculative.decoding import Decoding, Params, rules, tracing
from speculative.decoding import loop as fast
from speculative.decoding.loop import Model
from speculative.drafts import CopyDraft, Draft, HiddenDraft, MixedDraft, TransformerDraft
from speculative.sampling import Sampling
from tests import tiny, toy

TOY = toy.MarkovModel()
TOY_DRAFT = TransformerDraft(TOY)
SAMPLINGS = [Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.3, top_p=0.8)]
ROWS = 4


def check_same_tokens(
    target: Model, draft: Draft, params: Params, inputs: np.ndarray, config: Decoding, seed: int
) -> list[tracing.Trace]:
    rows = len(inputs)
    draws = config.draws(seed, np.arange(rows))
    output = fast.generate(target, draft, params, jax.device_put(inputs), draws, config)
    output = jax.tree.map(np.asarray, output)
    traces = []
    for row in range(rows):
        draws_row = np.asarray(draws[row])
        trace = tracing.generate(target, draft, params, inputs[row], draws_row, config)
        assert trace.tokens == output.tokens[row, : output.lengths[row]].tolist()
        assert len(trace.steps) == output.target_calls[row]
        standing = sum(min(step.accepted, len(step.emitted)) for step in trace.steps)
        assert standing == output.accepted[row]
        traces.append(trace)
    return traces


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("draft", "table"),
    [
        (TOY_DRAFT, toy.near_table),
        (TOY_DRAFT, toy.disjoint_table),
        (toy.CertainDraft(), toy.certain_table),
    ],
    ids=["near", "disjoint", "deterministic"],
)
def test_on_toy_models(draft: Draft, table: Callable[[], np.ndarray], sampling: Sampling) -> None:
    config = Decoding(toy.VOCABULARY, sampling, 4, max_length=20, eos_ids=toy.ENDS)
    dtype = np.int32 if table is toy.certain_table else np.float32
    params = Params(toy.params(toy.target_table()), jnp.asarray(table(), dtype))
    inputs = np.ones((ROWS, 1), np.int32)
    for seed in range(5):
        check_same_tokens(TOY, draft, params, inputs, config, seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_t5(dtype: str) -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(1.0), gamma=4, max_length=40, eos_ids=(7,))
    stored = tiny.stored_params(), tiny.near(tiny.stored_params())
    params = Params(*(prepack(tiny.rounded(one, dtype)) for one in stored))
    model = tiny.in_dtype(tiny.TARGET, dtype)
    draft = TransformerDraft(model)
    traces = check_same_tokens(model, draft, params, tiny.sources(ROWS), config, seed=0)
    steps = [step for trace in traces for step in trace.steps]
    assert 0 < sum(step.accepted for step in steps) < 4 * len(steps)


@pytest.mark.long
def test_blocks_on_t5() -> None:
    """200 texts, by a sampled draft that is close to the target and by one that is not."""
    config = Decoding(tiny.VOCABULARY, Sampling(1.0), 4, 24, eos_ids=(7,), rule=rules.Block())
    draft = TransformerDraft(tiny.TARGET)
    for number, drafting in enumerate((tiny.near_params(), tiny.target_params())):
        params = Params(tiny.target_params(), drafting)
        sources = tiny.sources(100)
        traces = check_same_tokens(tiny.TARGET, draft, params, sources, config, seed=number)
        accepted = {step.accepted for trace in traces for step in trace.steps}
        assert 4 in accepted and (number or accepted == set(range(5)))


@pytest.mark.parametrize("rule", [rules.Token(), rules.Block()], ids=str)
def test_with_hidden_states(rule: rules.Rule) -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(0.5), 4, 24, eos_ids=(7,), rule=rule)
    params = Params(tiny.target_params(), tiny.hidden_params())
    draft = HiddenDraft(tiny.HIDDEN)
    traces = check_same_tokens(tiny.TARGET, draft, params, tiny.sources(6), config, seed=0)
    assert {0, 1, 2} <= {step.accepted for trace in traces for step in trace.steps}


def test_with_hidden_states_or_copies() -> None:
    config = Decoding(tiny.VOCABULARY, Sampling(0.5), 4, 24, eos_ids=(7,))
    params = Params(tiny.target_params(), (tiny.hidden_params(), ()))
    draft = MixedDraft(HiddenDraft(tiny.HIDDEN), CopyDraft(longest=1))
    traces = check_same_tokens(tiny.TARGET, draft, params, tiny.sources(6), config, seed=0)
    q = np.concatenate([step.q for trace in traces for step in trace.steps])
    assert 0.2 < (q.max(axis=-1) == 1).mean() < 0.8  # Of copies.


def test_a_trace_holds_the_distributions_that_algorithm_1_used() -> None:
    """Against the enumerable model: p and q at each prefix."""
    config = Decoding(toy.VOCABULARY, Sampling(1.3, top_p=0.8), 4, max_length=20, eos_ids=toy.ENDS)
    params = Params(toy.params(toy.target_table()), toy.params(toy.near_table()))
    p = toy.distribution(toy.target_table(), config.sampling)
    q = toy.distribution(toy.near_table(), config.sampling)
    for seed in range(4):
        draws = np.asarray(config.draws(seed, np.arange(1)))[0]
        inputs = np.ones(1, np.int32)
        trace = tracing.generate(TOY, TOY_DRAFT, params, inputs, draws, config)
        said = [0, 0]
        for step in trace.steps:
            context = [*said, *step.guesses]
            here = [tuple(context[len(said) - 2 + i : len(said) + i]) for i in range(5)]
            np.testing.assert_allclose(step.p, [p[c] for c in here], atol=1e-6)
            np.testing.assert_allclose(step.q, [q[c] for c in here[:4]], atol=1e-6)
            assert (
                step.emitted
                == [*step.guesses[: step.accepted], step.next_token][: len(step.emitted)]
            )
            said += step.emitted
        assert said[2:] == trace.tokens


def test_the_reference_needs_guesses() -> None:
    config = Decoding(toy.VOCABULARY, gamma=0)
    with pytest.raises(ValueError, match="gamma.*0"):
        tracing.generate(TOY, TOY_DRAFT, Params(()), np.ones(1), np.ones((9, 3)), config)
