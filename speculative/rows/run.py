"""Measures a row of a table: one pair, one task, one way of sampling, at batch size 1."""

import dataclasses
import datetime
import itertools
import operator
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from speculative import theory
from speculative.decoding.rules import EXACT, Simulated
from speculative.drafts import Draft, MixedDraft
from speculative.measurement import quality
from speculative.measurement.alpha import alpha_on_target_text
from speculative.measurement.blocks import tokens_on_target_text
from speculative.measurement.bootstrap import interval
from speculative.measurement.exactness import compare_greedy
from speculative.measurement.timing import TURNS, Costs
from speculative.models import FlaxModel, abstract_params
from speculative.pair import Pair, lengths_accepted
from speculative.progress import OnProgress
from speculative.rows import environment
from speculative.rows.categories import by_category
from speculative.rows.config import RANDOM, RowConfig, gamma_of, paper_numbers
from speculative.rows.kept import Example, KeptExamples
from speculative.rows.records import Record
from speculative.rows.workload import Workload, workload
from speculative.tasks.prompts import Prompt
from speculative.tree import Growth
from speculative.types import PyTree


def run_row(
    pair: Pair,
    config: RowConfig,
    prompts: Sequence[Prompt] | None,
    experiment: str = "row",
    kept: KeptExamples | None = None,
    on_progress: OnProgress = lambda what, share: None,
    share: tuple[int, int] = (0, 1),
) -> Record:
    """Measures a row on its texts or, without any, on random sources.

    Both ways of decoding run in the same loop, one after the other on each example, and take turns
    in going first. A time is the wall-clock time of a whole generation, prefill included but not
    compilation. At temperature 0 the rounds of an example are alike, and its time is their median;
    above it each round draws another sample. Costs are timed between the examples, because a
    machine's speed changes within minutes. Examples in `kept`, from an earlier run, are not
    measured again; this run's are added to them. With a `share` (K, N), this is one of N processes:
    it measures only the texts whose number modulo N is K, and its record covers only these. Raises
    ValueError if the row has no gamma or no prompts, or if logits are not finite.
    """
    gamma = gamma_of(config, experiment)
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    kept = KeptExamples() if kept is None else kept
    work = workload(pair, config, prompts)
    count = len(work.sources)
    on_progress("compiling", 0)
    lengths, own = [example.lengths[0] for example in kept], range(share[0], count, share[1])

    def scored() -> bool:
        """Whether alpha has been measured on as many tokens as requested.

        The alpha of trees is counted as they are decoded.
        """
        return (
            bool(config.tree)
            or sum(len(example.betas) for example in kept if example.number in own)
            >= config.alpha_tokens
        )

    with ThreadPoolExecutor() as pool:  # Programs are compiled in parallel.
        compiled: list[Future[Any]] = [pool.submit(work.decode, 0, gamma)]
        outputs = [work.decode(number, 0)[0] for number in range(min(4, count))]
        if not scored():
            tokens = pair.results(outputs[0])[0].tokens
            compiled.append(pool.submit(_scores, work, gamma, 0, tokens))
        meter = work.meter((gamma,), [*lengths, *(int(output.lengths[0]) for output in outputs)])
        for one in compiled:
            one.result()
    for number in own:
        on_progress("decoding", number / count)
        lacking = [i for i in range(config.samples) if (number, i) not in kept]
        for sample in lacking:
            kept.add(_measure(work, gamma, number, sample, sample == 0 and not scored()))
        if lacking:
            meter.tick()
    while meter.turns < TURNS:  # There were few examples left.
        on_progress("timing", meter.turns / TURNS)
        meter.turn()
    on_progress("resampling", 0)
    examples = [example for example in kept if example.number in own]
    return _record(work, gamma, examples, meter.costs(), experiment, began)


def _measure(work: Workload, gamma: int, number: int, sample: int, with_alpha: bool) -> Example:
    """Decodes a sample of an example both ways and compares the outputs."""
    pair, config, prompt = work.pair, work.config, work.prompts[number]
    seconds: tuple[list[float], list[float]] = [], []
    results = {}
    for turn in range(config.rounds // config.samples):
        # The way that goes first finds other data in the processor's caches.
        for way in (0, 1) if (number + sample + turn) % 2 == 0 else (1, 0):
            output, took = work.decode(number, gamma if way else 0, sample)
            seconds[way].append(took)
            results[way] = pair.results(output)[0]
    alone, guessed = results[0], results[1]
    betas, blocks = _scores(work, gamma, number, alone.tokens) if with_alpha else ([], [])
    difference = None
    if config.sampling.greedy and config.rule.exact:
        difference = compare_greedy(pair, work.source(number), alone.tokens, guessed.tokens)
    return Example(
        number=number,
        sample=sample,
        source=prompt.source,
        reference=prompt.reference,
        autoregressive=alone.text,
        speculative=guessed.text,
        lengths=(len(alone.tokens), len(guessed.tokens)),
        seconds=(statistics.median(seconds[0]), statistics.median(seconds[1])),
        target_calls=guessed.target_calls,
        tested=guessed.tested,
        accepted=guessed.accepted,
        betas=betas,
        difference=difference,
        prefix=prompt.prefix,
        draft_tokens=guessed.draft_tokens,
        tested_by_position=guessed.tested_by_position,
        accepted_by_position=guessed.accepted_by_position,
        accepted_by_rank=guessed.accepted_by_rank,
        step_tokens=blocks,
        category=prompt.category,
        question=prompt.question,
    )


def _scores(
    work: Workload, gamma: int, number: int, tokens: list[int]
) -> tuple[list[float], list[list[float]]]:
    """`Example.betas` and `step_tokens` of the target's own output; simulated rows have none."""
    pair, source, config = work.pair, work.source(number), work.decoding(gamma)
    if work.config.simulated_alpha is not None:
        return [], []
    (betas,) = alpha_on_target_text(pair, [source], [tokens], config)
    if config.rule.by_guess:
        return betas.tolist(), []
    how = config, (gamma,), (config.rule, EXACT), work.config.seed + number
    return betas.tolist(), tokens_on_target_text(pair, source, tokens, *how)[:, 0].tolist()


def _record(
    work: Workload, gamma: int, examples: list[Example], costs: Costs, experiment: str, began: str
) -> Record:
    """The record of a row, from its examples and costs."""
    pair, config = work.pair, work.config
    settings: dict[str, Any] = {}
    for name in ("task", "draft", "top_k", "verification", "tree", "seed", "simulated_alpha"):
        settings[name] = getattr(config, name)
    for name in ("temperature", "top_p", "min_p", "lenience"):
        settings[name] = float(getattr(config, name))
    paper_alpha, paper_speedup = paper_numbers(config, experiment)
    return Record(
        experiment=experiment,
        target=config.target + (" (random weights)" if config.checkpoints == RANDOM else ""),
        gamma=gamma,
        batch_size=1,
        dtype=pair.target.config.dtype,
        quantize=pair.target.config.quantize,
        mesh=config.mesh,
        paper_alpha=paper_alpha,
        paper_speedup=paper_speedup,
        gin=config.gin(),
        started_at=began,
        truncated=work.truncated,
        draft_parameters=_parameters(pair.draft, pair.params.draft),
        draft_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(pair.params.draft)),
        draft_training_minutes=pair.training_minutes,
        **settings,
        **environment.here(),
        **_statistics(config, gamma, examples, costs),
    )


def _statistics(
    config: RowConfig, gamma: int, examples: list[Example], costs: Costs
) -> dict[str, Any]:
    """The fields of a record that follow from examples and costs."""
    rule = config.rule

    def counts(one: Example) -> tuple[float, ...]:
        return *one.seconds, *one.lengths, one.accepted, one.tested, one.target_calls

    # A text is resampled with all of its samples.
    groups = itertools.groupby(examples, operator.attrgetter("number"))
    texts = [list(samples) for _, samples in groups]
    summed = np.array([np.sum([*map(counts, samples)], axis=0) for samples in texts]).T
    seconds, tokens, (accepted, tested, calls) = np.split(summed, (2, 4))
    by_rank = np.zeros((len(texts), gamma, 1 + Growth.BRANCHES), int)  # Tested guesses are first.
    if config.tree:
        for text, samples in zip(by_rank, texts, strict=True):
            for one in samples:
                text += np.column_stack([one.tested_by_position, np.array(one.accepted_by_rank)])
    betas = [np.array(example.betas) for example in _scored(config, examples)]
    if isinstance(rule, Simulated):
        betas = [np.array([rule.accepts(config.sampling)])]
    blocks = [np.array(x.step_tokens) for x in _scored(config, examples) if x.step_tokens]

    def speedup(chosen: NDArray[np.intp]) -> float:
        a, b = 1e3 * seconds[:, chosen].sum(axis=1) / tokens[:, chosen].sum(axis=1)
        return float(a / b)

    def alpha(chosen: NDArray[np.intp]) -> float:
        if config.tree:
            reached, first, *_ = by_rank[chosen].sum(axis=(0, 1))
            return float(first / reached)
        return float(np.concatenate([betas[i] for i in chosen]).mean(dtype=np.float64))

    def predicted(chosen: NDArray[np.intp]) -> float:
        if config.tree:  # Relative to the depth before: a path may end where no guess follows.
            stood = by_rank[chosen, :, 1:].sum(axis=(0, 2))
            reached = np.maximum([calls[chosen].sum(), *stood[:-1]], 1)
            return theory.tree_tokens(stood / reached)
        if rule.by_guess:
            return theory.expected_tokens(alpha(chosen), gamma)
        return float(np.concatenate([blocks[i] for i in chosen])[:, 0].mean())

    def gain(chosen: NDArray[np.intp]) -> float:
        own, token = np.concatenate([blocks[i] for i in chosen]).mean(axis=0)
        return float(own / token)

    # By field of the record: the number of its texts, and its value for a selection of them.
    count, scored = len(calls), len(calls) if config.tree else len(betas)
    measures: dict[str, tuple[int, Callable[[NDArray[np.intp]], float]]] = {
        "speedup": (count, speedup),
        "alpha": (scored, alpha),
        "alpha_accepted": (count, lambda i: float(accepted[i].sum() / tested[i].sum())),
        "tokens_per_call": (count, lambda i: float(tokens[1, i].sum() / calls[i].sum())),
        "tokens_per_call_predicted": (scored, predicted),
    }
    if blocks:
        measures["gain_over_token"] = len(blocks), gain
    fields: dict[str, Any] = {}
    for name, (size, of) in measures.items():
        low, high = interval(of, size, config.seed)
        fields |= {name: of(np.arange(size)), f"{name}_low": low, f"{name}_high": high}
    fields |= _qualities(config, examples)
    ms = 1e3 * seconds.sum(axis=1) / tokens.sum(axis=1)
    by_position = {
        name: np.sum([getattr(example, name) for example in examples], axis=0, dtype=int).tolist()
        for name in ("tested_by_position", "accepted_by_position")
    }
    rate = fields["alpha"]
    if config.tree or not rule.by_guess:
        rate = theory.acceptance_rate(fields["tokens_per_call_predicted"], gamma)
    c, v = costs.c(gamma), costs.verify_cost(gamma)

    def of_chain(value: float) -> float | None:
        return None if config.tree else value

    compared = config.sampling.greedy and rule.exact
    differences = [example.difference for example in examples]
    return (
        fields
        | by_position
        | {
            "num_examples": count,
            "num_tokens": int(tokens[1].sum()),
            "num_target_calls": int(calls.sum()),
            "nodes": sum(one.draft_tokens for one in examples) / calls.sum()
            if config.tree
            else None,
            "tokens_per_call_expected": of_chain(theory.expected_tokens(fields["alpha"], gamma)),
            "c": c,
            "verify_cost": v,
            "ms_target_step": costs.ms_target_step,
            "ms_verify": costs.ms_verify[gamma],
            "ms_draft_step": costs.ms_draft_step(gamma),
            "ms_prefill": costs.ms_prefill_target,
            "ms_prefill_draft": costs.ms_prefill_draft,
            "ms_per_token_autoregressive": float(ms[0]),
            "ms_per_token_speculative": float(ms[1]),
            "speedup_expected": of_chain(theory.speedup(rate, gamma, c)),
            "speedup_predicted": costs.speedup(rate, gamma, [one.lengths[0] for one in examples]),
            "speedup_long": of_chain(theory.speedup(rate, gamma, c, v)),
            "outputs_identical": differences.count(None) if compared else None,
            "near_ties": sum(d is not None and d.near_tie for d in differences)
            if compared
            else None,
            "categories": by_category(examples, config.seed),
            "tested": int(tested.sum()),
            "accepted": int(accepted.sum()),
            "draft_tokens": sum(one.draft_tokens for one in examples),
            "accepted_lengths": lengths_accepted(
                int(calls.sum()), by_position["accepted_by_position"]
            ),
            "accepted_by_rank": by_rank[..., 1:].sum(axis=0).tolist() if config.tree else None,
        }
    )


def merged(of_workers: Sequence[Record], config: RowConfig, examples: list[Example]) -> Record:
    """Merges the records of workers that shared a row's texts, given all of its examples.

    Costs are the medians of the workers', measured side by side.
    """
    first = of_workers[0]

    def median(field: str) -> float:
        return statistics.median(getattr(record, field) for record in of_workers)

    costs = Costs(
        ms_prefill_target=median("ms_prefill"),
        ms_prefill_draft=median("ms_prefill_draft"),
        ms_target_step=median("ms_target_step"),
        ms_verify={first.gamma: median("ms_verify")},
        ms_proposal={first.gamma: first.gamma * median("ms_draft_step")},
    )
    fields = _statistics(config, first.gamma, examples, costs)
    return dataclasses.replace(first, **fields, **beside(of_workers))


def beside(of_workers: Sequence[Record]) -> dict[str, Any]:
    """The fields of a record about the workers that shared its texts."""
    costs = {"c_beside": "c", "verify_cost_beside": "verify_cost"}
    return {"workers": len(of_workers)} | {
        name: statistics.median(getattr(record, field) for record in of_workers)
        for name, field in costs.items()
    }


def _scored(config: RowConfig, examples: list[Example]) -> list[Example]:
    """The first examples with enough tokens for alpha; workers may have scored more."""
    tokens = np.cumsum([len(example.betas) for example in examples])
    enough = int((tokens < config.alpha_tokens).sum()) + 1
    return [example for example in examples[:enough] if example.betas]


def _qualities(config: RowConfig, examples: list[Example]) -> dict[str, Any]:
    """The task's metric, its value for both ways and their difference; none without references."""
    names = ["metric", "quality_autoregressive", "quality_speculative"]
    names += [f"quality_difference{end}" for end in ("", "_low", "_high")]
    references, metric = [example.reference for example in examples], config.texts.metric
    if metric is None or not all(references) or config.simulated_alpha is not None:
        return dict.fromkeys(names)
    ways = [one.autoregressive for one in examples], [one.speculative for one in examples]
    scores = [quality.measure(metric, references, texts) for texts in ways]
    numbers = [example.number for example in examples]
    above = quality.difference(metric, references, *ways, config.seed, numbers)
    return dict(zip(names, (metric, *scores, *above), strict=True))


def _parameters(draft: Draft, params: PyTree) -> int:
    """The number of a draft's parameters, without the padding of its layout for decoding."""
    if isinstance(draft, MixedDraft):
        return _parameters(draft.model, params[0]) + _parameters(draft.lookup, params[1])
    if isinstance(model := getattr(draft, "model", None), FlaxModel):
        params = abstract_params(model.config)
    return sum(leaf.size for leaf in jax.tree.leaves(params))
