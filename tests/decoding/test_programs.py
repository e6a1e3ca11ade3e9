"""Compiled programs: which are kept."""

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from speculative.backends import compiler_options, options
from speculative.decoding import programs
from speculative.decoding.loop import Models
from speculative.decoding.programs import Program
from speculative.drafts import TransformerDraft
from tests import tiny
from tests.conftest import EMITTERS, known


def test_what_was_not_used_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "KEPT", 2)
    traced = []

    def double(models: Models, params: Array, x: Array) -> Array:
        traced.append(x.shape[0])
        return 2 * x

    program, models = Program(double), Models(tiny.TARGET, None)
    for size in (1, 2, 1, 3, 1, 2):
        assert (program(models, jnp.ones(1), jnp.ones(size)) == 2 * jnp.ones(size)).all()
    assert traced == [1, 2, 3, 2]


def test_all_programs_share_what_is_kept_and_static_arguments_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Program, "KEPT", 2)
    traced = []

    def times(models: Models, params: Array, x: Array, factor: int) -> Array:
        traced.append(factor)
        return factor * x

    one, other, models = (
        Program(times, static=1),
        Program(times, static=1),
        Models(tiny.TARGET, None),
    )
    for program, factor in ((one, 2), (one, 3), (one, 2), (other, 2), (one, 2), (one, 3)):
        assert program(models, jnp.ones(1), jnp.ones(1), factor) == factor
    assert traced == [2, 3, 2, 3]


def test_options_are_those_that_the_compiler_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_options(False) == (tuple(options.QUICK.items()) if known(EMITTERS) else ())
    monkeypatch.setattr(options, "QUICK", {"xla_cpu_of_a_later_release": True})
    compiler_options.cache_clear()
    assert compiler_options(False) == ()
    compiler_options.cache_clear()


def test_what_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model is read ahead by itself too; large kernels of int8 have wide windows."""
    monkeypatch.setattr(programs, "compiler_options", lambda *given: {"given": given})
    both, alone = Models(tiny.TARGET, TransformerDraft(tiny.DRAFT)), Models(tiny.TARGET, None)
    large, small = (
        jax.ShapeDtypeStruct((options.LARGE // 4 + more,), "float32") for more in (1, 0)
    )
    wide, narrow = (jax.ShapeDtypeStruct((options.WIDE + more,), "int8") for more in (1, 0))
    for models, params, told in (
        (both, [], (True, False)),
        (alone, [large], (True, False)),
        (alone, [small], (False, False)),
        (alone, [narrow], (False, False)),
        (alone, [wide], (False, True)),
    ):
        assert programs._options(models, params) == {"given": (*told, None)}
