"""A row's workload: a pair, its settings, and sources of one width."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from speculative.decoding import Decoding, Output
from speculative.measurement.timing import ITERATIONS, CostMeter, timed_calls
from speculative.models import FlaxModel
from speculative.pair import Pair, Request
from speculative.rows import chats, memory
from speculative.rows.config import RowConfig
from speculative.tasks.prompts import Prompt

RANDOM_EXAMPLES = 8  # The number of random sources, if a row does not set it.


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sources to decode with a pair; gamma 0 decodes with the target alone."""

    pair: Pair
    config: RowConfig
    prompts: list[Prompt]  # The texts [N]; those of random sources are empty.
    sources: jax.Array  # [N, S] of one width, so that each way of decoding is compiled once.
    truncated: int = 0  # The number of sources that were cut.

    def decoding(self, gamma: int) -> Decoding:
        """The settings of a generation."""
        vocabulary = self.pair.vocabulary
        return self.config.decoding(vocabulary.size, gamma, vocabulary.eos_ids)

    def source(self, number: int) -> jax.Array:
        """The source [1, S] of an example, numbered from 0."""
        return jax.device_put(np.asarray(self.sources)[[number]])

    def request(self, number: int, gamma: int, sample: int = 0) -> Request:
        """A sample of an example."""
        one = Request(self.source(number), self.decoding(gamma), self.config.seed, number)
        return one.sample(sample)

    def decode(self, number: int, gamma: int, sample: int = 0) -> tuple[Output, float]:
        """Decodes a sample; also returns the seconds that it took, prefill included."""
        one = self.request(number, gamma, sample)
        source, draws = jax.block_until_ready((one.source, one.draws))
        began = time.perf_counter()
        output = jax.block_until_ready(self.pair.run(source, draws, one.config))
        return output, time.perf_counter() - began

    def meter(self, gammas: Sequence[int], lengths: Sequence[int]) -> CostMeter:
        """A meter of costs, with a source as long as the sources are on average.

        Its cache is as large as decoding needs for an output of the median of `lengths`.
        """
        config = self.decoding(max(gammas))
        needed = max(int(statistics.median_high(lengths)), ITERATIONS) + config.room
        size = next((size for size in config.cache_lengths() if size >= needed), needed)
        sources, pad = np.asarray(self.sources), self.pair.target.pad_id
        tokens = round((sources != pad).sum(axis=1).mean())
        source = np.full_like(sources[:1], pad)
        source[:, :tokens] = self.pair.vocabulary.size - 1
        return CostMeter(timed_calls(self.pair, config, gammas, jax.device_put(source), size))


def workload(pair: Pair, config: RowConfig, prompts: Sequence[Prompt] | None) -> Workload:
    """Encodes the first `config.num_examples` prompts; None gives random sources.

    Sources longer than the row's `source_length` are cut, with a warning. An empty source raises
    ValueError, and so do sources that do not fit the device's memory.
    """
    if prompts is None:
        rng = np.random.default_rng(config.seed)
        shape = (config.num_examples or RANDOM_EXAMPLES, config.random_length)
        sources = jax.device_put(rng.integers(2, pair.vocabulary.size, shape, dtype=np.int32))
        return Workload(pair, config, [Prompt("", "")] * len(sources), sources)
    prompts = chats.answered(pair, config, prompts[: config.num_examples])
    if not prompts:
        raise ValueError("A row needs at least one prompt.")
    texts, most = [prompt.source for prompt in prompts], config.source_length
    sources, truncated = pair.encode(texts, most), pair.truncated(texts, most)
    models = [pair.target, getattr(pair.draft, "model", None)]
    sizes = [model.config for model in models if isinstance(model, FlaxModel)]
    memory.require(config, sizes, sources.shape[1])
    if truncated:
        logging.warning("Of %d sources %d are cut to %d tokens.", len(texts), truncated, most)
    return Workload(pair, config, prompts, sources, truncated)
