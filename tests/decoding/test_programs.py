"""Compiled programs: which are kept."""

import jax.numpy as jnp
import pytest
from jax import Array

from speculative.decoding.loop import Models
from speculative.decoding.programs import Program
from tests import tiny


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
