"""Audits this program's decoding: a text per prompt and, above T = 0, more texts' beginnings."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from speculative.decoding import Decoding
from speculative.grouping import filled, padded
from speculative.pair import BATCH, Pair, Request
from speculative.progress import OnProgress
from speculative.rows.workload import Workload
from speculative.studies.audit import BEGINNING, FEWEST, Audit, audit
from speculative.studies.samples import Sample

ROWS = 64  # The most beginnings that are decoded at a time; fewer if memory is short.


def verify(
    work: Workload,
    gamma: int,
    samples: int,
    batch: int,
    false_alarm: float,
    on_progress: OnProgress,
) -> Audit:
    """Audits a text of each prompt of a workload and `samples` beginnings, `batch` at a time.

    The first texts of the audit are the whole ones, in the order of the prompts. An exact decoder
    fails with probability `false_alarm`.

    Raises:
        ValueError: logits are not finite, or samples are too few to test.
    """
    config, prompts = work.config, len(work.sources)
    most = prompts * (config.max_length + samples * min(BEGINNING, config.max_length))
    if not config.sampling.greedy and most < FEWEST:
        raise ValueError(
            f"{samples} beginnings of {prompts} prompts are too few to test: with their texts they "
            f"are at most {most} tokens, and it takes {FEWEST}; take more (--samples)."
        )
    pad, texts = work.pair.target.pad_id, list[Sample]()
    for number, row in enumerate(np.asarray(work.sources)):
        on_progress("decoding", number / prompts)
        (result,) = work.pair.results(work.decode(number, gamma)[0])
        texts.append(Sample(number + 1, tuple(row[row != pad].tolist()), result.tokens))
    if not config.sampling.greedy:
        short = work.decoding(gamma)
        short = dataclasses.replace(short, max_length=min(BEGINNING, short.max_length))
        sources = [sample.source for sample in texts for _ in range(samples)]
        # No text of the workload has an example number of 2**20 or more.
        inputs = work.pair, sources, short, config.seed, 2**20, batch
        texts += decoded(*inputs, lambda share: on_progress("beginnings", share))
        texts = [dataclasses.replace(one, number=i) for i, one in enumerate(texts, 1)]
    return audit(work.pair, texts, config.sampling, false_alarm, on_progress, config.seed)


def decoded(
    pair: Pair,
    sources: Sequence[tuple[int, ...]],
    config: Decoding,
    seed: int,
    first: int = 0,
    batch_size: int = BATCH,
    on_progress: Callable[[float], None] = lambda share: None,
) -> list[Sample]:
    """Decodes a text from each source, with the random numbers of examples from `first` on."""
    rows = {
        source: jax.device_put(filled([source], padded(len(source)), pair.target.pad_id))
        for source in set(sources)
    }
    requests = [Request(rows[source], config, seed, first + i) for i, source in enumerate(sources)]
    samples = dict[int, Sample]()
    for place, result in pair.serve(requests, batch_size=batch_size):
        on_progress(len(samples) / len(requests))
        samples[place] = Sample(place + 1, sources[place], result.tokens)
    return [samples[place] for place in range(len(requests))]
