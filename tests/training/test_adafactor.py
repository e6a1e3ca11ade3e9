"""The optimizer, step by step, against T5X's arithmetic written again in NumPy (float64).

It follows the description of T5X's Adafactor (t5x/adafactor.py) and the paper (Shazeer and Stern,
arXiv 1804.04235, algorithms 4 to 6), with T5X's defaults: no momentum, second moments that decay by
1 - t^-0.8, factored over the two axes of a matrix if both have 128 numbers or more, updates clipped
at a root mean square of 1 and scaled by the parameter's, of 1e-3 at least.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import tiny

Array = np.ndarray
RATE, STEPS = 1e-2, 6
SHAPES = {
    "wide": (130, 200),
    "tall": (200, 130),
    "square": (128, 128),
    "narrow": (127, 300),  # One axis is too short to be factored.
    "scale": (160,),
    "table": (12, 32),
}


def clipped(gradients: dict[str, Array], limit: float) -> dict[str, Array]:
    """A gradient of at most this global norm; 0 sets no limit."""
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {k: g * min(1.0, limit / norm) if limit else g for k, g in gradients.items()}


class Adafactor:
    """One parameter's optimizer, in float64."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.factored = len(shape) == 2 and min(shape) >= 128
        self.long = 1 if self.factored and shape[1] >= shape[0] else 0
        self.moments = [0.0, 0.0] if self.factored else [0.0]

    def __call__(self, step: int, parameter: Array, gradient: Array) -> Array:
        """The parameter after a step, counted from 0."""
        decay = 1.0 - (step + 1.0) ** -0.8
        squares = gradient**2 + 1e-30
        if self.factored:
            means = [squares.mean(axis) for axis in (self.long, 1 - self.long)]
            both = zip(self.moments, means, strict=True)
            self.moments = [decay * before + (1 - decay) * now for before, now in both]
            of_rows, of_columns = self.moments
            estimate = np.outer(of_rows, of_columns) / of_rows.mean()
            estimate = estimate if self.long == 1 else estimate.T
        else:
            self.moments = [decay * self.moments[0] + (1 - decay) * squares]
            (estimate,) = self.moments
        update = gradient / np.sqrt(estimate)
        update /= max(1.0, np.sqrt((update**2).mean()))
        return parameter - RATE * max(1e-3, np.sqrt((parameter**2).mean())) * update


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_steps_are_those_of_t5x(limit: float) -> None:
    """Relative to each parameter's size; float32 has 6e-8, and six steps are compared."""
    random = np.random.default_rng(0)
    sizes = {"wide": 1.0, "tall": 30.0, "square": 1e-2, "narrow": 0.3, "scale": 1e-5, "table": 2.0}
    wanted = {k: sizes[k] * random.normal(size=shape) for k, shape in SHAPES.items()}
    wanted = {k: x.astype(np.float32).astype(np.float64) for k, x in wanted.items()}
    found = {k: jnp.asarray(x, jnp.float32) for k, x in wanted.items()}
    config = dataclasses.replace(
        tiny.CONFIG, clip_norm=limit, learning_rate=RATE, decay="constant", warmup_steps=0
    )
    ours = config.optimizer()
    state, theirs = ours.init(found), {k: Adafactor(shape) for k, shape in SHAPES.items()}
    update = jax.jit(ours.update)
    for step in range(STEPS):
        # Rows and columns differ in size, as a factored estimate assumes, and steps do.
        gradients = {
            k: (0.1 + step) * random.normal(size=shape) * random.lognormal(size=shape[-1])
            for k, shape in SHAPES.items()
        }
        gradients = {k: g.astype(np.float32) for k, g in gradients.items()}
        updates, state = update(gradients, state, found)
        found = {name: x + updates[name] for name, x in found.items()}
        exact = clipped({k: g.astype(np.float64) for k, g in gradients.items()}, limit)
        wanted = {k: theirs[k](step, x, exact[k]) for k, x in wanted.items()}
        for name, x in wanted.items():
            off = np.abs(np.asarray(found[name], np.float64) - x).max()
            assert off < 1e-6 * np.sqrt((x**2).mean()) + 1e-9, (name, step)


def test_a_decay_that_is_a_step_late_is_seen() -> None:
    """By far more than the tolerance above: an optimizer that has seen a gradient of 0 before."""
    random = np.random.default_rng(1)
    x = {"x": jnp.asarray(random.normal(size=(130, 200)), jnp.float32)}
    ours = dataclasses.replace(
        tiny.CONFIG, clip_norm=0.0, learning_rate=RATE, decay="constant", warmup_steps=0
    ).optimizer()
    theirs, wanted = Adafactor((130, 200)), np.asarray(x["x"], np.float64)
    update = jax.jit(ours.update)
    _, late = update(jax.tree.map(jnp.zeros_like, x), ours.init(x), x)
    for step in range(2):
        gradient = jnp.asarray(random.normal(size=(130, 200)), jnp.float32)
        updates, late = update({"x": gradient}, late, x)
        x = {"x": x["x"] + updates["x"]}
        wanted = theirs(step, wanted, np.asarray(gradient, np.float64))
    assert np.abs(np.asarray(x["x"]) - wanted).max() > 1e-4
