"""A tiny T5 and a task it learns in seconds: say the source backwards."""

import jax
import jax.numpy as jnp
import numpy as np

from speculative.models import T5, T5Config
from speculative.training import data
from speculative.training.loop import TrainConfig

Batch = dict[str, jax.Array]

VOCABULARY, SOURCE, TARGET = 24, 24, 24
MODEL = T5(T5Config(VOCABULARY, 32, 2, 16, 48, 1, 1, dropout_rate=0.1))
CONFIG = TrainConfig(
    steps=12,
    batch_size=8,
    source_length=SOURCE,
    target_length=TARGET,
    learning_rate=0.05,
    warmup_steps=2,
    log_every=2,
    evaluate_every=6,
    checkpoint_every=4,
)


def examples(count: int, seed: int) -> data.Examples:
    random = np.random.default_rng(seed)
    words = [random.integers(2, VOCABULARY, random.integers(2, 6)) for _ in range(count)]
    return data.ragged([np.r_[w, 1] for w in words], [np.r_[w[::-1], 1] for w in words])


def mixture(count: int = 300, seed: int = 0) -> data.Mixture:
    return data.Mixture([(examples(count, seed), 1.0)], CONFIG.batch_size, SOURCE, TARGET)


def on_device(batches: list[data.Batch]) -> list[Batch]:
    return jax.tree.map(jnp.asarray, batches)
