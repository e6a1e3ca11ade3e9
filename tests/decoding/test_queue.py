"""Texts in the rows of a batch yield what each yields alone, whenever they begin and beside whom.

In every field of the output, to the last bit where kernels for CPU are compiled.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import Decoding, Output, Params, loop, queue, rules
from speculative.decoding.programs import Program
from speculative.decoding.queue import Request
from speculative.drafts import (
    CopyDraft,
    Draft,
    HiddenDraft,
    MixedDraft,
    TransformerDraft,
    UniformDraft,
)
from speculative.sampling import Kinds, Sampling
from speculative.types import PyTree
from tests import tiny

COUNT = 11
FIELDS = ("tokens", "lengths", "target_calls", "drafted", "by_position")
SOURCES = [jnp.asarray(row[None]) for row in tiny.sources(COUNT)]
TARGET = tiny.target_params()


def settings(temperature: float, rule: rules.Rule = rules.EXACT, gamma: int = 3) -> Decoding:
    sampling = Sampling(temperature)
    return Decoding(tiny.VOCABULARY, sampling, gamma, max_length=20, rule=rule)


def decoded(
    draft: Draft, params: PyTree, config: Decoding, batch_size: int, order: list[int]
) -> dict[int, Output]:
    configs = {i: config for i in order}
    return decoded_as(draft, params, configs, batch_size)


def decoded_as(
    draft: Draft, params: PyTree, configs: dict[int, Decoding], batch_size: int
) -> dict[int, Output]:
    texts = [(i, Request(SOURCES[i], config, 7, i)) for i, config in configs.items()]
    kinds = Kinds.of(config.sampling for config in configs.values())
    both = Params(TARGET, params)
    return dict(queue.generate(tiny.TARGET, draft, both, iter(texts), kinds, batch_size))


def alone(draft: Draft, params: PyTree, config: Decoding) -> dict[int, Output]:
    return alone_as(draft, params, dict.fromkeys(range(COUNT), config))


def alone_as(draft: Draft, params: PyTree, configs: dict[int, Decoding]) -> dict[int, Output]:
    both = Params(TARGET, params)
    return {
        i: loop.generate(
            tiny.TARGET, draft, both, SOURCES[i], config.draws(7, np.array([i])), config
        )
        for i, config in configs.items()
    }


def require_equal(found: dict[int, Output], expected: dict[int, Output]) -> None:
    assert sorted(found) == sorted(expected)
    for number, output in expected.items():
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(found[number], name), getattr(output, name))


NEAR = TransformerDraft(tiny.TARGET), tiny.near_params
MIXED = MixedDraft(HiddenDraft(tiny.HIDDEN), CopyDraft(longest=1))
SHUFFLED = np.random.default_rng(1).permutation(COUNT).tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "params", "rule", "temperature"),
    [
        (*NEAR, rules.Token(), 0.0),
        (*NEAR, rules.Token(), 1.0),
        (*NEAR, rules.Block(), 1.0),
        (CopyDraft(), tuple, rules.Token(), 1.0),
        (UniformDraft(), tuple, rules.Block(), 1.0),
        (TransformerDraft(tiny.READER, True), tiny.reader_params, rules.Token(), 1.0),
        (HiddenDraft(tiny.HIDDEN), tiny.hidden_params, rules.Token(), 1.0),
        (MIXED, lambda: (tiny.hidden_params(), ()), rules.Token(), 1.0),
    ],
    ids=["greedy", "token", "block", "copy", "uniform", "reader", "hidden", "mixed"],
)
def test_texts_are_as_if_alone(
    draft: Draft, params: Callable[[], PyTree], rule: rules.Rule, temperature: float
) -> None:
    given = draft, params(), settings(temperature, rule)
    expected = alone(*given)
    require_equal(decoded(*given, 4, list(range(COUNT))), expected)
    require_equal(decoded(*given, 4, SHUFFLED), expected)


SAMPLINGS = [
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.6, top_k=7),
    Sampling(1.3, top_p=0.8),
    Sampling(0.0, top_k=3),
    Sampling(0.9, top_k=9, top_p=0.7, min_p=0.05),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "params", "rules_of"),
    [
        (*NEAR, [rules.Token()]),
        (*NEAR, [rules.Block()]),
        (*NEAR, [rules.Token(0.3), rules.Token(0.7)]),
        (MIXED, lambda: (tiny.hidden_params(), ()), [rules.Token()]),
        (CopyDraft(), tuple, [rules.Block()]),
    ],
    ids=["token", "block", "lenient", "mixed", "copy"],
)
def test_texts_of_a_batch_have_settings_of_their_own(
    draft: Draft, params: Callable[[], PyTree], rules_of: list[rules.Rule]
) -> None:
    """A text at temperature 0 beside sampled ones, each with limits and values of its own."""
    configs = {
        i: Decoding(
            tiny.VOCABULARY,
            SAMPLINGS[i % len(SAMPLINGS)],
            3,
            max_length=(17, 20, 32)[i % 3],
            rule=rules_of[i % len(rules_of)],
        )
        for i in SHUFFLED
    }
    assert len({config.program for config in configs.values()}) == 1
    found, expected = decoded_as(draft, params(), configs, 4), alone_as(draft, params(), configs)
    require_equal(found, expected)
    assert {int(output.lengths[0]) for output in expected.values()} >= {17, 20, 32}


def test_autoregressive_texts_are_as_if_alone_in_batches_of_any_size() -> None:
    given = UniformDraft(), (), settings(1.0, gamma=0)
    expected = alone(*given)
    assert len({int(output.lengths[0]) for output in expected.values()}) > 3  # They end apart.
    for batch_size in (1, 3, 16):
        require_equal(decoded(*given, batch_size, SHUFFLED), expected)


def test_texts_of_one_source_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And texts are taken as rows become free, not before."""
    config, read, taken = settings(1.0), [], []
    begin = loop.begin

    def noted(models: Any, params: Any, inputs: Any, *more: Any) -> Any:
        read.append(inputs)
        return begin(models, params, inputs, *more)

    def texts() -> Iterator[tuple[int, Request]]:
        for i in range(9):
            taken.append(i)
            yield i, Request(SOURCES[i // 3], config, 7, i)

    monkeypatch.setattr(loop, "begin", noted)
    both = Params(TARGET, tiny.near_params())
    found = queue.generate(tiny.TARGET, NEAR[0], both, texts(), config.sampling.kinds, 4)
    next(found)
    assert len(taken) < 9
    outputs = dict(found)
    assert len(outputs) == 8 and len(taken) == 9
    assert len(read) == 3
    assert len({tuple(output.tokens[0]) for output in outputs.values()}) == 8


def test_no_texts_are_no_outputs() -> None:
    both, kinds = Params(TARGET, tiny.near_params()), settings(1.0).sampling.kinds
    assert list(queue.generate(tiny.TARGET, NEAR[0], both, [], kinds, 4)) == []


@pytest.mark.long
@pytest.mark.usefixtures("recompiled")
def test_batches_of_many_sizes_fit_the_programs_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`speculative bench --batch_sizes` times a second round, which must compile nothing."""
    sizes, traced = (1, 2, 4), list[int]()
    monkeypatch.setattr(Program, "KEPT", 2 * len(sizes) + 2)  # To decode at each; to begin texts.
    step = loop.step

    def noted(models: Any, params: Any, progress: loop.Progress, *given: Any) -> Any:
        traced.append(len(progress.last))
        return step(models, params, progress, *given)

    monkeypatch.setattr(loop, "step", noted)
    for _ in range(2):
        for size in sizes:
            for gamma in (0, 2):
                decoded(UniformDraft(), (), settings(1.0, gamma=gamma), size, SHUFFLED)
        assert sorted(traced) == [1, 1, 2, 2, 4, 4]
