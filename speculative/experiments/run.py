"""A row of the tables: one pair, one task, one way of sampling, measured at batch size 1."""

import dataclasses
import datetime
import functools
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import speculative
from speculative import theory
from speculative.decoding import Decoding, Output, random_draws
from speculative.experiments import paper
from speculative.experiments.records import Record
from speculative.measurement import quality
from speculative.measurement.alpha import alpha_on_target_text
from speculative.measurement.bootstrap import interval
from speculative.measurement.exactness import Difference, compare_greedy
from speculative.measurement.prompts import Prompt
from speculative.measurement.timing import ITERATIONS, CostMeter, Costs
from speculative.pair import Pair, Result
from speculative.sampling import Sampling

OnProgress = Callable[[str, float], None]
"""Told what is being done, and the share of the row that is done, from 0 to 1."""

GAMMAS = (3, 5, 7)
"""Numbers of guesses that the program chooses from, those of the paper's tables. The speed-up is
flat about its largest value, and timing each takes two compiled loops."""

TURNS = 3
"""Of timing costs before gamma is chosen; more of it follows, between the examples."""

PAPER_TASKS = {"debian_ende": "ende", "debian_synopsis": "cnndm"}
"""The paper's task that is of the same kind as ours."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """One example, decoded both ways."""

    source: str
    reference: str
    autoregressive: str
    speculative: str


@dataclasses.dataclass(frozen=True)
class Row:
    """What a run gives.

    Attributes:
        record: the numbers.
        texts: of each example.
        differences: of each example at temperature 0, where its outputs part; None where they
            are equal. Empty at other temperatures.
    """

    record: Record
    texts: list[Texts]
    differences: list[Difference | None]


def run_row(
    pair: Pair,
    task: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    gamma: int | None = None,
    seed: int = 0,
    max_length: int = 128,
    experiment: str = "row",
    on_progress: OnProgress = lambda what, share: None,
    rounds: int = 3,
) -> Row:
    """Measures a row.

    Both ways of decoding run in the same loop and take turns on each example, first one and
    then the other ahead; a time is the wall-clock of a whole generation, its prefill included,
    and each example's is the median of its rounds. Programs are compiled before that.

    Args:
        pair: target and draft.
        task: by which metric and paper's numbers are chosen.
        prompts: the examples.
        sampling: temperature, top-k, top-p.
        gamma: guesses a step; None chooses the best one for the measured alpha, c and v.
        seed: of the random numbers of decoding, and of the intervals.
        max_length: tokens after which an output ends.
        experiment: what the row belongs to.
        on_progress: see `OnProgress`.
        rounds: how often each example is decoded each way.

    Raises:
        ValueError: a setting is out of range, there is no prompt, or logits are not finite.
    """
    if not prompts:
        raise ValueError("A row needs at least one prompt.")
    if rounds < 1:
        raise ValueError(f"A row needs at least 1 round, not {rounds}.")
    if gamma is not None and gamma < 1:
        raise ValueError(f"gamma must be at least 1 for a row of the table, not {gamma}.")
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    plain = Decoding(pair.vocabulary.size, sampling, 0, max_length)
    sources = _one_width([pair.encode(prompt.source) for prompt in prompts])

    share = functools.partial(_within, on_progress)
    outputs = _decode_all(pair, sources, seed, plain, share("autoregressive", 0.0, 0.15))
    lengths = [len(output.tokens) for output in outputs]
    on_progress("acceptance", 0.15)
    betas = alpha_on_target_text(pair, sources, [o.tokens for o in outputs], sampling)
    alpha = _alpha(betas, np.arange(len(betas)))
    on_progress("costs", 0.25)
    meter = CostMeter(
        pair,
        sampling,
        GAMMAS if gamma is None else (gamma,),
        sources[0].shape[1],
        _cache_length(plain, lengths, gamma or max(GAMMAS)),
    )
    for _ in range(TURNS):
        meter.turn()
    gamma = gamma or best_gamma(alpha, meter.costs(), lengths)
    config = dataclasses.replace(plain, gamma=gamma)
    timing = share("timing", 0.45, 0.55)
    seconds, guessed = _time(pair, sources, seed, (plain, config), rounds, meter, timing)
    costs = meter.costs()
    differences = []
    if sampling.greedy:
        differences = [
            compare_greedy(pair, source, a.tokens, b.tokens)
            for source, a, b in zip(sources, outputs, guessed, strict=True)
        ]

    tokens = np.array([lengths, [len(output.tokens) for output in guessed]])

    def speedup(chosen: NDArray[np.intp]) -> float:
        a, b = 1e3 * seconds[:, chosen].sum(axis=1) / tokens[:, chosen].sum(axis=1)
        return float(a / b)

    everything = np.arange(len(prompts))
    ms = 1e3 * seconds.sum(axis=1) / tokens.sum(axis=1)
    alpha_low, alpha_high = interval(functools.partial(_alpha, betas), len(prompts), seed)
    speedup_low, speedup_high = interval(speedup, len(prompts), seed)
    calls = sum(output.target_calls for output in guessed)
    tested, accepted = (sum(getattr(o, name) for o in guessed) for name in ("tested", "accepted"))
    c, v, step = costs.c(gamma), costs.verify_cost(gamma), costs.ms_target_step
    references = [prompt.reference for prompt in prompts]
    metric, quality_plain = measure_quality(task, references, [o.text for o in outputs])
    _, quality_guessed = measure_quality(task, references, [o.text for o in guessed])
    paper_alpha, paper_speedup = paper_numbers(task, pair.names[1], sampling)
    settings = {
        "experiment": experiment,
        "task": task,
        "target": pair.names[0],
        "draft": pair.names[1],
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "lenience": 1.0,
        "gamma": gamma,
        "batch_size": 1,
        "num_examples": len(prompts),
        "seed": seed,
        "dtype": pair.target.config.dtype,
    }
    record = Record(
        **settings,
        num_tokens=int(tokens[1].sum()),
        num_target_calls=calls,
        tokens_per_call=float(tokens[1].sum() / calls),
        tokens_per_call_expected=theory.expected_tokens(alpha, gamma),
        alpha=alpha,
        alpha_accepted=accepted / tested if tested else None,
        alpha_low=alpha_low,
        alpha_high=alpha_high,
        c=c,
        verify_cost=v,
        ms_target_step=step,
        ms_verify=costs.ms_verify[gamma],
        ms_draft_step=costs.ms_draft_step(gamma),
        ms_per_token_autoregressive=float(ms[0]),
        ms_per_token_speculative=float(ms[1]),
        speedup=speedup(everything),
        speedup_low=speedup_low,
        speedup_high=speedup_high,
        speedup_expected=theory.speedup(alpha, gamma, c),
        speedup_predicted=predict(alpha, gamma, costs, lengths),
        outputs_identical=differences.count(None) if sampling.greedy else None,
        near_ties=sum(d is not None and d.near_tie for d in differences)
        if sampling.greedy
        else None,
        metric=metric,
        quality_autoregressive=quality_plain,
        quality_speculative=quality_guessed,
        paper_alpha=paper_alpha,
        paper_speedup=paper_speedup,
        commit=commit(),
        device=device(),
        jax_version=jax.__version__,
        gin="\n".join(
            f"{key} = {value!r}"
            for key, value in {**settings, "max_length": max_length, "rounds": rounds}.items()
        ),
        started_at=started_at,
        ms_prefill=costs.ms_prefill_target,
        ms_prefill_draft=costs.ms_prefill_draft,
        speedup_long=theory.speedup(alpha, gamma, c, v),
        tested=tested,
        accepted=accepted,
    )
    texts = [
        Texts(prompt.source, prompt.reference, a.text, b.text)
        for prompt, a, b in zip(prompts, outputs, guessed, strict=True)
    ]
    return Row(record, texts, differences)


def predict(alpha: float, gamma: int, costs: Costs, lengths: Sequence[int]) -> float:
    """The speed-up that measured costs promise for texts of given lengths."""
    return theory.predicted_speedup(
        alpha,
        gamma,
        costs.c(gamma),
        costs.verify_cost(gamma),
        lengths,
        costs.ms_prefill_target / costs.ms_target_step,
        costs.ms_prefill_draft / costs.ms_target_step,
    )


def best_gamma(alpha: float, costs: Costs, lengths: Sequence[int]) -> int:
    """The gamma, of those that were timed, with the largest speed-up for such texts."""
    return max(costs.ms_verify, key=lambda gamma: predict(alpha, gamma, costs, lengths))


def measure_quality(
    task: str, references: list[str], outputs: list[str]
) -> tuple[str | None, float | None]:
    """The task's metric and its value in percent; None for a task without one."""
    if task == "debian_ende":
        return "bleu", quality.bleu(references, outputs)["bleu"]
    if task == "debian_synopsis":
        return "rougeL", quality.rouge(references, outputs)["rougeL"]
    return None, None


def paper_numbers(task: str, draft: str, sampling: Sampling) -> tuple[float | None, float | None]:
    """Alpha and speed-up that the paper prints for the row of the same kind.

    A model as a draft stands beside the paper's T5-small, a bigram table beside its own.
    """
    if (sampling.top_k, sampling.top_p) != (0, 1.0) or task not in PAPER_TASKS:
        return None, None
    kind = "bigram" if draft == "bigram" else "small"
    if draft == "uniform":
        return None, None
    row = paper.alpha_row(PAPER_TASKS[task], kind, sampling.temperature)
    timed = paper.speedup_row(PAPER_TASKS[task], kind, sampling.temperature)
    return row.alpha if row else None, timed.speedup if timed else None


def commit() -> str:
    """The checkout's commit, marked where files differ from it, or else the version."""
    root = pathlib.Path(speculative.__file__).parent.parent
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    return speculative.__version__


def device() -> str:
    """What computes, for people: an accelerator's kind, or the processor's name and cores."""
    kind = jax.devices()[0]
    if kind.platform != "cpu":
        return kind.device_kind
    name = platform.processor() or platform.machine()
    information = pathlib.Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _alpha(betas: Sequence[NDArray[np.float32]], chosen: NDArray[np.intp]) -> float:
    """The mean over all tokens of the chosen examples."""
    return float(np.concatenate([betas[i] for i in chosen]).mean(dtype=np.float64))


def _within(
    on_progress: OnProgress, what: str, first: float, width: float
) -> Callable[[float], None]:
    """Reports the share of a part as a share of the row."""
    return lambda part: on_progress(what, first + width * part)


def _cache_length(config: Decoding, lengths: list[int], gamma: int) -> int:
    """The cache in which the median output ends, of those that decoding would use."""
    config = dataclasses.replace(config, gamma=gamma)
    needed = max(int(statistics.median_high(lengths)), ITERATIONS) + config.room
    sizes = config.cache_lengths()
    return next((size for size in sizes if size >= needed), needed)


def _one_width(sources: Sequence[jax.Array]) -> list[jax.Array]:
    """Sources [1, S] padded to the widest, so that each way of decoding is compiled once."""
    width = max(source.shape[1] for source in sources)
    return [jnp.pad(source, ((0, 0), (0, width - source.shape[1]))) for source in sources]


def _draws(seed: int, example: int, config: Decoding) -> jax.Array:
    return random_draws(seed, np.array([example]), config.capacity)


def _decode_all(
    pair: Pair,
    sources: Sequence[jax.Array],
    seed: int,
    config: Decoding,
    on_progress: Callable[[float], None],
) -> list[Result]:
    """Every example once, which also compiles what timing needs."""
    results = []
    for example, source in enumerate(sources):
        output = pair.run(source, _draws(seed, example, config), config)
        results.append(pair.result(output))
        on_progress((example + 1) / len(sources))
    return results


def _time(
    pair: Pair,
    sources: Sequence[jax.Array],
    seed: int,
    configs: tuple[Decoding, Decoding],
    rounds: int,
    meter: CostMeter,
    on_progress: Callable[[float], None],
) -> tuple[NDArray[np.float64], list[Result]]:
    """Seconds [2, examples] of each way on each example, the median of its rounds.

    Costs go on being timed between the examples, for a machine's speed changes within minutes.
    With the seconds come the outputs of the second way.
    """
    seconds = np.zeros((2, len(sources), rounds))
    results: dict[int, Result] = {}
    jax.block_until_ready(pair.run(sources[0], _draws(seed, 0, configs[1]), configs[1]))
    for turn in range(rounds):
        for example, source in enumerate(sources):
            draws = [jax.block_until_ready(_draws(seed, example, config)) for config in configs]
            # The way that goes first finds other data in the processor's caches.
            for way in (0, 1) if (example + turn) % 2 == 0 else (1, 0):
                began = time.perf_counter()
                output: Output = pair.run(source, draws[way], configs[way])
                jax.block_until_ready(output)
                seconds[way, example, turn] = time.perf_counter() - began
                if way == 1:
                    results[example] = pair.result(output)
            meter.tick()
            on_progress((turn * len(sources) + example + 1) / (rounds * len(sources)))
    return np.median(seconds, axis=-1), [results[example] for example in range(len(sources))]
