"""A record and a row made by hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from speculative.measurement.exactness import Difference
from speculative.measurement.timing import Costs
from speculative.rows import workload
from speculative.rows.kept import Example
from speculative.rows.records import Record
from speculative.studies import tune


def record(**changes: Any) -> Record:
    """A record with a value of its own in every field that a report shows."""
    fields: dict[str, Any] = {
        "experiment": "made",
        "task": "debian_ende",
        "target": "the_target",
        "draft": "the_draft",
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "lenience": 1.0,
        "gamma": 6,
        "batch_size": 1,
        "num_examples": 6,
        "num_tokens": 90,
        "num_target_calls": 20,
        "tokens_per_call": 4.5,
        "tokens_per_call_expected": 4.6,
        "alpha": 0.81,
        "alpha_accepted": 0.8,
        "alpha_low": 0.7,
        "alpha_high": 0.9,
        "c": 0.09,
        "verify_cost": 1.36,
        "ms_target_step": 2.5,
        "ms_verify": 3.4,
        "ms_draft_step": 0.2,
        "ms_per_token_autoregressive": 2.7,
        "ms_per_token_speculative": 1.0,
        "speedup": 2.71,
        "speedup_low": 2.52,
        "speedup_high": 2.93,
        "speedup_expected": 3.14,
        "speedup_predicted": 2.66,
        "outputs_identical": 6,
        "near_ties": 0,
        "metric": "bleu",
        "quality_autoregressive": 25.4,
        "quality_speculative": 26.3,
        "quality_difference": 0.9,
        "quality_difference_low": -1.25,
        "quality_difference_high": 3.05,
        "paper_alpha": 0.75,
        "paper_speedup": 3.4,
        "seed": 5,
        "commit": "abc1234",
        "device": "a processor, 2 cores",
        "jax_version": "0.10.2",
        "dtype": "float32",
        "gin": "",
        "started_at": "2026-01-02T03:04:05+00:00",
        "ms_prefill": 4.0,
        "ms_prefill_draft": 1.0,
        "speedup_long": 2.9,
        "tested": 80,
        "accepted": 64,
    }
    return Record(**(fields | changes))


def example(difference: Difference | None = None, number: int = 0) -> Example:
    return Example(
        number=number,
        source="a text",
        reference="a word",
        autoregressive="one",
        speculative="one",
        lengths=(4, 4),
        seconds=(0.02, 0.01),
        target_calls=2,
        tested=4,
        accepted=2,
        betas=[0.5, 0.75],
        difference=difference,
    )


def no_timing(monkeypatch: pytest.MonkeyPatch, costs: Costs) -> list[tuple[int, ...]]:
    """Meters have timed already and found `costs`; gives the gammas that they are asked for."""
    asked: list[tuple[int, ...]] = []

    def calls(pair: Any, config: Any, gammas: Sequence[int], *_: Any) -> tuple[int, ...]:
        asked.append(tuple(gammas))
        return asked[-1]

    @dataclasses.dataclass
    class Meter:
        gammas: tuple[int, ...]
        turns: int = tune.TURNS

        def turn(self) -> None:
            pass

        tick = turn

        def costs(self) -> Costs:
            verify = {gamma: costs.ms_verify[gamma] for gamma in self.gammas}
            return dataclasses.replace(costs, ms_verify=verify)

    monkeypatch.setattr(workload, "timed_calls", calls)
    monkeypatch.setattr(workload, "CostMeter", Meter)
    return asked
