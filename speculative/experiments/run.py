"""A row of the tables: one pair, one task, one way of sampling, measured at batch size 1."""

import dataclasses
import datetime
import functools
import statistics
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from speculative import theory
from speculative.experiments import environment, paper
from speculative.experiments.examples import Example, Examples
from speculative.experiments.records import Record
from speculative.experiments.settings import RowConfig
from speculative.experiments.tuning import TURNS, OnProgress, predict, tune
from speculative.experiments.weights import RANDOM
from speculative.experiments.workload import Workload, workload
from speculative.measurement import quality
from speculative.measurement.alpha import alpha_on_target_text
from speculative.measurement.bootstrap import interval
from speculative.measurement.exactness import Difference, compare_greedy
from speculative.measurement.timing import CostMeter, Costs
from speculative.pair import Pair
from speculative.tasks import TASKS
from speculative.tasks.prompts import Prompt

GAMMAS = (3, 5, 7)
"""Numbers of guesses that the program chooses from, those of the paper's tables. The speed-up is
flat about its largest value, and timing each takes two compiled loops."""

TUNED_ON = 8
"""Examples on which gamma is chosen."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What a run gives: the numbers, and the examples that they are of."""

    record: Record
    examples: list[Example]

    @property
    def differences(self) -> list[Difference | None]:
        """Of each example, where its greedy outputs part."""
        return [example.difference for example in self.examples]


def run_row(
    pair: Pair,
    config: RowConfig,
    prompts: Sequence[Prompt] | None,
    experiment: str = "row",
    kept: Examples | None = None,
    on_progress: OnProgress = lambda what, share: None,
) -> Row:
    """Measures a row.

    Both ways of decoding run in the same loop and take turns on each example, first one and
    then the other ahead; a time is the wall-clock of a whole generation, its prefill included,
    and each example's is the median of its rounds. Programs are compiled before that. Costs are
    timed between the examples, for a machine's speed changes within minutes.

    Args:
        pair: target and draft.
        config: all settings; where gamma is None the best one of `GAMMAS` is taken.
        prompts: the texts; None makes sources up.
        experiment: what the row belongs to.
        kept: examples that an earlier run measured, to which this one's are added.
        on_progress: told what is being done, and the share of the row that is done.

    Raises:
        ValueError: there is no prompt, or logits are not finite.
    """
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    kept = Examples() if kept is None else kept
    work = workload(pair, config, prompts)
    lengths = [example.lengths[0] for example in kept]
    tuning_share = 0.0
    if config.gamma is None:
        tuning_share = 0.2
        few = dataclasses.replace(work, sources=work.sources[:TUNED_ON])
        tuning = tune(few, GAMMAS, lambda what, part: on_progress(what, tuning_share * part))
        config = dataclasses.replace(config, gamma=tuning.gamma)
        work = dataclasses.replace(work, config=config)
        lengths += tuning.lengths
    gamma = config.gamma
    assert gamma is not None
    on_progress("compilation", tuning_share)
    if not tuning_share:  # Else plain decoding is compiled, and its lengths are known.
        some = range(min(4, len(work.sources)))
        lengths += [int(work.decode(number, 0)[0].lengths[0]) for number in some]
    work.decode(0, gamma)
    meter = work.meter((gamma,), lengths)
    count = len(work.sources)
    for number in range(count):
        if number not in kept:
            enough = sum(len(example.betas) for example in kept) >= config.alpha_tokens
            kept.add(_measure(work, gamma, number, not enough, meter))
        on_progress("examples", 1 - (1 - tuning_share) * (count - number - 1) / count)
    while meter.turns < TURNS:  # There were few examples left.
        meter.turn()
    return Row(_record(work, gamma, list(kept), meter.costs(), experiment, started_at), list(kept))


def _measure(
    work: Workload, gamma: int, number: int, with_alpha: bool, meter: CostMeter
) -> Example:
    """Decodes an example both ways, some times each, and compares what came out."""
    pair, config, prompt = work.pair, work.config, work.prompts[number]
    seconds: tuple[list[float], list[float]] = [], []
    results = {}
    for turn in range(config.rounds):
        # The way that goes first finds other data in the processor's caches.
        for way in (0, 1) if (number + turn) % 2 == 0 else (1, 0):
            output, took = work.decode(number, gamma if way else 0)
            seconds[way].append(took)
            results[way] = pair.result(output)
    meter.tick()
    plain, guessed = results[0], results[1]
    source = work.sources[number]
    betas = []
    if with_alpha and config.simulated_alpha is None:
        betas = alpha_on_target_text(
            pair, [source], [plain.tokens], config.sampling, config.max_length, config.lenience
        )[0].tolist()
    difference = None
    if config.sampling.greedy and config.exact:
        difference = compare_greedy(pair, source, plain.tokens, guessed.tokens, work.dtype)
    return Example(
        number=number,
        source=prompt.source,
        reference=prompt.reference,
        autoregressive=plain.text,
        speculative=guessed.text,
        lengths=(len(plain.tokens), len(guessed.tokens)),
        seconds=(statistics.median(seconds[0]), statistics.median(seconds[1])),
        target_calls=guessed.target_calls,
        tested=guessed.tested,
        accepted=guessed.accepted,
        betas=betas,
        difference=difference,
    )


def _record(
    work: Workload,
    gamma: int,
    examples: list[Example],
    costs: Costs,
    experiment: str,
    started_at: str,
) -> Record:
    """What a row's examples and costs amount to."""
    config, count = work.config, len(examples)
    sampling, simulated = config.sampling, config.simulated_alpha
    seconds = np.array([example.seconds for example in examples]).T
    tokens = np.array([example.lengths for example in examples]).T
    guesses = np.array([(example.accepted, example.tested) for example in examples]).T
    with_alpha = [np.array(example.betas) for example in examples if example.betas]

    def speedup(chosen: NDArray[np.intp]) -> float:
        a, b = 1e3 * seconds[:, chosen].sum(axis=1) / tokens[:, chosen].sum(axis=1)
        return float(a / b)

    def alpha_of(chosen: NDArray[np.intp]) -> float:
        """The mean over all tokens of the chosen examples."""
        return float(np.concatenate([with_alpha[i] for i in chosen]).mean(dtype=np.float64))

    def alpha_accepted(chosen: NDArray[np.intp]) -> float:
        accepted, tested = guesses[:, chosen].sum(axis=1)
        return float(accepted / tested)

    everything = np.arange(count)
    if simulated is None:
        alpha = alpha_of(np.arange(len(with_alpha)))
        alpha_low, alpha_high = interval(alpha_of, len(with_alpha), config.seed)
    else:
        alpha = alpha_low = alpha_high = float(simulated)
    ms = 1e3 * seconds.sum(axis=1) / tokens.sum(axis=1)
    speedup_low, speedup_high = interval(speedup, count, config.seed)
    accepted_low, accepted_high = interval(alpha_accepted, count, config.seed)
    calls = sum(example.target_calls for example in examples)
    c, v = costs.c(gamma), costs.verify_cost(gamma)
    compared = sampling.greedy and config.exact
    differences = [example.difference for example in examples]
    metric, qualities = _qualities(config, examples)
    paper_alpha, paper_speedup = paper_numbers(config, experiment)
    random = " (random weights)" if config.checkpoints == RANDOM else ""
    return Record(
        experiment=experiment,
        task=config.task,
        target=config.target + random,
        draft=config.draft,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        lenience=float(config.lenience),
        gamma=gamma,
        batch_size=1,
        num_examples=count,
        seed=config.seed,
        dtype=work.dtype,
        num_tokens=int(tokens[1].sum()),
        num_target_calls=calls,
        tokens_per_call=float(tokens[1].sum() / calls),
        tokens_per_call_expected=theory.expected_tokens(alpha, gamma),
        alpha=alpha,
        alpha_accepted=alpha_accepted(everything),
        alpha_accepted_low=accepted_low,
        alpha_accepted_high=accepted_high,
        alpha_low=alpha_low,
        alpha_high=alpha_high,
        simulated_alpha=simulated,
        c=c,
        verify_cost=v,
        ms_target_step=costs.ms_target_step,
        ms_verify=costs.ms_verify[gamma],
        ms_draft_step=costs.ms_draft_step(gamma),
        ms_per_token_autoregressive=float(ms[0]),
        ms_per_token_speculative=float(ms[1]),
        speedup=speedup(everything),
        speedup_low=speedup_low,
        speedup_high=speedup_high,
        speedup_expected=theory.speedup(alpha, gamma, c),
        speedup_predicted=predict(alpha, gamma, costs, tokens[0].tolist()),
        outputs_identical=differences.count(None) if compared else None,
        near_ties=sum(d is not None and d.near_tie for d in differences) if compared else None,
        metric=metric,
        quality_autoregressive=qualities[0],
        quality_speculative=qualities[1],
        paper_alpha=paper_alpha,
        paper_speedup=paper_speedup,
        commit=environment.commit(),
        device=environment.device(),
        jax_version=jax.__version__,
        gin=config.gin(),
        started_at=started_at,
        ms_prefill=costs.ms_prefill_target,
        ms_prefill_draft=costs.ms_prefill_draft,
        speedup_long=theory.speedup(alpha, gamma, c, v),
        tested=int(guesses[1].sum()),
        accepted=int(guesses[0].sum()),
    )


def _qualities(
    config: RowConfig, examples: list[Example]
) -> tuple[str | None, tuple[float | None, float | None]]:
    """The task's metric and its value, in percent, for both ways; none without references."""
    metric = TASKS[config.task].metric
    references = [example.reference for example in examples]
    if metric is None or config.simulated_alpha is not None or not all(references):
        return None, (None, None)
    measure = functools.partial(quality.measure, metric, references)
    plain = measure([example.autoregressive for example in examples])
    return metric, (plain, measure([example.speculative for example in examples]))


def paper_numbers(config: RowConfig, experiment: str = "row") -> tuple[float | None, float | None]:
    """Alpha and speed-up that the paper prints for the row of the same kind, if there is one.

    Lenient rows, and the rows of Table 5 that are exact, stand beside Table 5, whose speed-ups at
    l = 1 are not those of Table 2.
    """
    sampling, task = config.sampling, TASKS[config.task].paper
    if config.checkpoints == RANDOM and config.simulated_alpha is None:
        return None, None
    if config.paper_draft is None or (sampling.top_k, sampling.top_p) != (0, 1.0):
        return None, None
    if config.lenience < 1 or experiment.startswith("table5/"):
        if task != "ende":
            return None, None
        lenient = paper.lenience_row(config.paper_draft, sampling.temperature, config.lenience)
        return (lenient.alpha, lenient.speedup) if lenient else (None, None)
    row = paper.alpha_row(task, config.paper_draft, sampling.temperature)
    timed = paper.speedup_row(task, config.paper_draft, sampling.temperature)
    return row.alpha if row else None, timed.speedup if timed else None
