"""Texts of this program, drawn so that an audit shows whether they are the target's own.

They are a whole text of each prompt and, above temperature 0, the beginnings of many more.
"""

import dataclasses

import numpy as np

from speculative.pair import Request
from speculative.progress import OnProgress
from speculative.rows.workload import Workload
from speculative.studies.audit import BEGINNING, FEWEST, Audit, Sample, audit

BATCH = 64  # Beginnings that are drawn at a time, where there is room for so many rows.


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
        ValueError: logits are not finite, or so few samples decide nothing.
    """
    config, prompts = work.config, len(work.sources)
    most = prompts * (config.max_length + samples * min(BEGINNING, config.max_length))
    if not config.sampling.greedy and most < FEWEST:
        raise ValueError(
            f"{samples} beginnings of {prompts} prompts decide nothing: with their texts they are "
            f"at most {most} tokens, and it takes {FEWEST}; take more (--samples)."
        )
    texts = []
    for number in range(prompts):
        on_progress("decoding", number / prompts)
        texts += [(number, work.pair.results(work.decode(number, gamma)[0])[0].tokens)]
    if not config.sampling.greedy:
        texts += _beginnings(work, gamma, samples, batch, on_progress)
    pad, sources = work.pair.target.pad_id, np.asarray(work.sources)
    without = [tuple(row[row != pad].tolist()) for row in sources]
    found = [Sample(i, without[number], text) for i, (number, text) in enumerate(texts, 1)]
    return audit(work.pair, found, config.sampling, false_alarm, on_progress, config.seed)


def _beginnings(
    work: Workload, gamma: int, samples: int, batch: int, on_progress: OnProgress
) -> list[tuple[int, list[int]]]:
    """The first tokens of independent generations, with the numbers of their prompts."""
    decoding = work.decoding(gamma)
    config = dataclasses.replace(decoding, max_length=min(BEGINNING, decoding.max_length))
    prompts = np.repeat(np.arange(len(work.sources)), samples).tolist()
    sources = [work.source(number) for number in range(len(work.sources))]
    # Numbers of examples that no text of the workload has.
    asked = [
        Request(sources[number], config, work.config.seed, 2**20 + i)
        for i, number in enumerate(prompts)
    ]
    found = []
    for place, result in work.pair.serve(asked, batch):
        on_progress("beginnings", len(found) / len(prompts))
        found.append((prompts[place], result.tokens))
    return found
