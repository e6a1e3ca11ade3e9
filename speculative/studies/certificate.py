"""A certificate, for any pair and task, that speculative outputs are the target's own.

It is the audit of this program's own samples: a whole text of each prompt and, above temperature 0,
the beginnings of many more.
"""

import dataclasses
import json
import pathlib

import numpy as np

from speculative import disk
from speculative.measurement.goodness import GTest
from speculative.pair import Request
from speculative.progress import OnProgress
from speculative.rows.workload import Workload
from speculative.studies.audit import BEGINNING, FEWEST, Audit, Sample, audit

BATCH = 64  # Beginnings that are drawn at a time, where there is room for so many rows.


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was found in the outputs of a row.

    Attributes:
        config: the effective configuration.
        gamma: guesses a step.
        audit: of the outputs; the first texts are the whole ones, in the order of the prompts.
    """

    config: str
    gamma: int
    audit: Audit

    def verdict(self) -> str:
        """In a sentence or two."""
        return self.audit.verdict("EXACT", "NOT EXACT")

    def save(self, path: pathlib.Path) -> None:
        """Writes everything as JSON."""
        fields = {"config": self.config, "gamma": self.gamma} | self.audit.fields()
        fields["verdict"] = self.verdict()
        disk.write(path, json.dumps(fields, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: pathlib.Path) -> "Certificate":
        """The certificate that `save` wrote; raises ValueError if the file holds none."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            own = {field.name: fields[field.name] for field in dataclasses.fields(Audit)}
            own["tests"] = [GTest(**test) for test in own["tests"]]
            own["impossible"] = [tuple(place) for place in own["impossible"]]
            return cls(fields["config"], fields["gamma"], Audit(**own))
        except (TypeError, KeyError, AttributeError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is no certificate: {error!r}") from error


def certify(
    work: Workload,
    gamma: int,
    samples: int,
    batch: int,
    false_alarm: float,
    on_progress: OnProgress,
) -> Certificate:
    """Audits a text of each prompt of a workload and `samples` beginnings, `batch` at a time.

    An exact decoder fails with probability `false_alarm`.

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
    result = audit(work.pair, found, config.sampling, false_alarm, on_progress, config.seed)
    return Certificate(config.gin(), gamma, result)


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
