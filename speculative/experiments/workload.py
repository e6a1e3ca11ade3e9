"""What a row decodes, ready for it: a pair, its settings, and sources of one width."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from speculative.decoding import Adaptive, Decoding, Output, random_draws
from speculative.decoding.speculative import Models, Step, stream
from speculative.experiments.settings import RowConfig
from speculative.measurement.timing import ITERATIONS, CostMeter, begin
from speculative.pair import Pair
from speculative.tasks.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sources to decode with a pair.

    Attributes:
        pair: target and draft.
        config: the row's settings.
        prompts: the texts; those of made-up sources are empty.
        sources: of each prompt [1, S], one width, so that each way of decoding is compiled once.
    """

    pair: Pair
    config: RowConfig
    prompts: list[Prompt]
    sources: list[jax.Array]

    @property
    def dtype(self) -> str:
        """Of the target's products."""
        return self.config.dtype or self.pair.target.config.dtype

    def decoding(self, gamma: int | Adaptive) -> Decoding:
        """The settings of a generation; gamma 0 decodes plainly."""
        vocabulary = self.pair.vocabulary
        most = max(gamma.gammas) if isinstance(gamma, Adaptive) else gamma
        config = self.config.decoding(vocabulary.size, most, vocabulary.eos_id)
        return dataclasses.replace(config, adaptive=None if most == gamma else gamma)

    def decode(
        self,
        number: int,
        gamma: int | Adaptive,
        sample: int = 0,
        counts: jax.Array | None = None,
    ) -> tuple[Output, float]:
        """Decodes a source and gives the seconds that it took, its prefill included.

        Each sample has random numbers of its own. Counts are as in `Pair.run`.
        """
        config = self.decoding(gamma)
        numbers = np.array([number + sample * len(self.sources)])
        draws = jax.block_until_ready(random_draws(self.config.seed, numbers, config.capacity))
        began = time.perf_counter()
        output = jax.block_until_ready(self.pair.run(self.sources[number], draws, config, counts))
        return output, time.perf_counter() - began

    def prefill(self, number: int, gamma: int) -> float:
        """The seconds in which both models read a source, to guess so many tokens a step."""
        models, config = Models(self.pair.target, self.pair.draft), self.decoding(gamma)
        began = time.perf_counter()
        jax.block_until_ready(begin(models, self.pair.params, self.sources[number], config))
        return time.perf_counter() - began

    def steps(self, number: int, gamma: int) -> list[Step]:
        """What each step of decoding a source did."""
        config, draft = self.decoding(gamma), self.pair.draft if gamma else None
        draws = random_draws(self.config.seed, np.array([number]), config.capacity)
        source = self.sources[number]
        return [
            step
            for step in stream(self.pair.target, draft, self.pair.params, source, draws, config)
            if step.count[0]
        ]

    def meter(self, gammas: Sequence[int], lengths: Sequence[int]) -> CostMeter:
        """Times costs in the cache in which the median of such outputs ends."""
        config = self.decoding(max(gammas))
        needed = max(int(statistics.median_high(lengths)), ITERATIONS) + config.room
        size = next((size for size in config.cache_lengths() if size >= needed), needed)
        width = self.sources[0].shape[1]
        return CostMeter(self.pair, self.config.sampling, gammas, width, size)


def workload(pair: Pair, config: RowConfig, prompts: Sequence[Prompt] | None) -> Workload:
    """Encodes the first `config.num_examples` prompts; without any, makes sources up.

    A source that is too long is cut, as T5's own preprocessing does.

    Raises:
        ValueError: there is no prompt, or one is empty.
    """
    if prompts is None:
        rng = np.random.default_rng(config.seed)
        count = config.num_examples or 8
        shape = (count, 1, config.source_length)
        made = rng.integers(2, pair.vocabulary.size, shape, dtype=np.int32)
        return Workload(pair, config, [Prompt("", "")] * count, [jnp.asarray(x) for x in made])
    prompts = list(prompts[: config.num_examples])
    if not prompts:
        raise ValueError("A row needs at least one prompt.")
    sources = [pair.encode(prompt.source, truncate=True) for prompt in prompts]
    width = max(source.shape[1] for source in sources)
    sources = [
        jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=pair.target.pad_id)
        for x in sources
    ]
    return Workload(pair, config, prompts, sources)
