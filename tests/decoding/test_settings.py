"""A generation's settings and random numbers."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from speculative.decoding import Decoding, Params, loop, queue, rules
from speculative.decoding.queue import Request
from speculative.drafts import UniformDraft
from speculative.sampling import Sampling
from tests import tiny

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", -1),
        ("gamma", 1.5),
        ("max_length", 0),
        ("max_length", -3),
        ("max_length", 4.0),
        ("gamma", True),
        ("vocab_size", 0),
        ("eos_ids", (-2,)),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{np.ravel(value)[0]}"):
        dataclasses.replace(Decoding(10), **{field: value})


def test_numpys_numbers_are_numbers() -> None:
    """They become Python's, so that equal settings are compiled once."""
    numbers: list[Any] = [np.float32(0.5), np.int32(3), np.uint8(2), np.int64(9)]
    given = Decoding(10, Sampling(*numbers[:2]), *numbers[2:])
    assert given == Decoding(10, Sampling(0.5, 3), 2, 9)
    assert [type(x) for x in (given.gamma, given.max_length, given.sampling.top_k)] == [int] * 3
    assert type(given.sampling.temperature) is float


@pytest.mark.parametrize(("field", "value"), [("sampling", 1.0), ("rule", "token")])
def test_parts_of_another_type_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be of type {field.title()}.*{value!r}"):
        dataclasses.replace(Decoding(10), **{field: value})


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5])
def test_seeds_do_not_wrap_around(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"seed must .* from 0 to 4294967295, not {seed}"):
        Decoding(10).draws(seed, np.arange(1))


@pytest.mark.parametrize("gamma", [0, 1, 7, 62, 63, 100, 300])
@pytest.mark.parametrize("max_length", [1, 40, 62, 128, 250, 2000])
def test_cache_lengths_ascend_to_one_that_holds_everything(gamma: int, max_length: int) -> None:
    """The last step starts with max_length - 1 tokens and appends gamma + 1."""
    config = Decoding(10, gamma=gamma, max_length=max_length)
    sizes = config.cache_lengths()
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= config.room  # Of a whole step.
    longest = next(2**n for n in range(20) if 2**n >= max_length)  # Of the same program.
    assert longest + gamma <= sizes[-1] <= longest + gamma + 18


def test_short_answers_get_short_caches() -> None:
    assert Decoding(10, gamma=7, max_length=20).cache_lengths() == [48]
    assert Decoding(10, gamma=7, max_length=128).cache_lengths() == [144]
    assert Decoding(10, gamma=7, max_length=500).cache_lengths() == [64, 528]
    assert Decoding(10, gamma=7, max_length=1000).cache_lengths() == [64, 256, 1040]
    longest = [64, 256, 1024, 4096, 32784]
    assert Decoding(10, gamma=7, max_length=20_000).cache_lengths() == longest


@pytest.mark.parametrize("gamma", [0, 3])
def test_new_values_need_no_new_program(gamma: int) -> None:
    """Of temperature, top-k, top-p, min-p, lenience, seed and a maximum below the same power of 2.

    Neither for a text alone, nor step by step, nor in batches.
    """
    compiled: list[str] = []  # Also what is only traced.
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: compiled.append(event)
    )
    target, draft = tiny.TARGET, UniformDraft()
    given = target, draft, Params(tiny.target_params())
    source = jax.device_put(tiny.sources(1))

    def decode(sampling: Sampling, max_length: int, lenience: float, seed: int) -> None:
        rule = rules.Token(lenience) if gamma else rules.EXACT
        config = Decoding(tiny.VOCABULARY, sampling, gamma, max_length, rule=rule)
        draws = config.draws(seed, np.arange(1))
        jax.block_until_ready(loop.generate(*given, source, draws, config))
        list(loop.stream(*given, source, draws, config))
        texts = [(i, Request(source, config, seed, i)) for i in range(2)]
        list(queue.generate(*given, texts, sampling.kinds, 2))

    decode(Sampling(0.7, 9, 0.9, 0.01), 17, 0.5, 0)
    assert COMPILED in compiled
    compiled.clear()
    decode(Sampling(1.3, 4, 0.5, 0.3), 30, 0.9, 1)
    decode(Sampling(1, 40, 0.95, 0.1), 32, 0.1, 2)
    assert COMPILED not in compiled


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0, 5, 0.5), Sampling(1.0), Sampling(0.5, 3, 0.9, 0.1)], ids=str
)
def test_settings_survive_a_program(sampling: Sampling) -> None:
    """Unused values are what means so, and those that shape programs are known inside of them."""
    config, greedy = Decoding(10, sampling, 3, 20, rule=rules.Token(0.5)), sampling.greedy

    @jax.jit
    def inside(config: Decoding) -> Decoding:
        sizes = config.gamma, config.capacity, config.cache_lengths(), config.eos_ids
        assert sizes == (3, 37, [48], (1,))
        assert not config.rule.exact
        assert config.sampling.greedy == greedy
        return config

    found = inside(config)
    kept = Sampling(0.0) if greedy else sampling
    for field in dataclasses.fields(Sampling):
        of_program = getattr(found.sampling, field.name)
        np.testing.assert_allclose(of_program, getattr(kept, field.name), rtol=1e-6)
    assert found.max_length == 20
    assert isinstance(found.rule, rules.Token)
    assert found.rule.lenience == 0.5


@pytest.mark.usefixtures("optimized")  # The function itself: conftest cuts few texts' from more.
def test_draws_depend_on_seed_example_and_position_alone() -> None:
    config, examples = Decoding(10, max_length=38), np.array([3, 8, 2**31 - 1])
    every = np.asarray(config.draws(5, examples))
    assert every.shape == (3, 80, 3)
    np.testing.assert_array_equal(config.draws(5, examples[1:2])[0], every[1])
    shorter = dataclasses.replace(config, max_length=20, gamma=3)
    np.testing.assert_array_equal(shorter.draws(5, examples), every[:, :48])
    other = np.asarray(config.draws(6, examples))
    # 1,440 numbers of 23 bits: a coincidence is rarer than 1 in 8, and fixed.
    assert len(np.unique([every, other])) == 1440


def test_draws_are_uniform_and_independent() -> None:
    draws = np.asarray(Decoding(10, max_length=48).draws(0, np.arange(400))[:, :50], np.float64)
    assert 0 <= draws.min()
    assert draws.max() < 1
    flat = draws.reshape(-1, 3)
    # 20,000 rows: 5 standard errors.
    np.testing.assert_allclose(flat.mean(axis=0), 0.5, atol=5 * np.sqrt(1 / 12 / 20_000))
    np.testing.assert_allclose(np.corrcoef(flat.T), np.eye(3), atol=5 / np.sqrt(20_000))
    following = draws[:, 1:].reshape(-1), draws[:, :-1].reshape(-1)
    assert abs(np.corrcoef(*following)[0, 1]) < 5 / np.sqrt(60_000)
