"""`evaluate`: decodes a task's texts in batches and scores them by its metric."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speculative import disk
from speculative.commands import SETTINGS, Command, add_options, chosen, many, option, rows
from speculative.commands.prompts import Asked
from speculative.settings import Settings

if TYPE_CHECKING:
    from jax import Array

    from speculative.loading import Resolved
    from speculative.pair import Pair, Request
    from speculative.rows.config import RowConfig
    from speculative.tasks.prompts import Prompt


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    add_options(parser, "--batch_size")
    text = "compare a target in int8 with the unquantized target (memory must hold both): their "
    text += "scores, how far their probabilities diverge and how often their likeliest tokens agree"
    parser.add_argument("--compare", action="store_true", help=text)
    text = "folder for the results (results/evaluate and the row's name)"
    option(parser, "--output_dir DIR", text)


def _evaluate(options: argparse.Namespace) -> None:
    from speculative.measurement import quality
    from speculative.models import model_of
    from speculative.rows import chats, environment, memory, weights
    from speculative.rows.config import RANDOM, gamma_of
    from speculative.tasks.prompts import fingerprint, load_prompts, require

    name, config = rows.row(options)
    gamma, metric = gamma_of(config, name), config.texts.metric
    if metric is None:
        raise ValueError(
            f"Task {config.task} has no metric to score outputs with; name one (--metric)."
        )
    if config.simulated_alpha is not None or config.checkpoints == RANDOM:
        raise ValueError(
            "A simulated alpha or random weights leave nothing to score; give real models."
        )
    if options.compare and config.quantize in (None, "none"):
        raise ValueError("--compare is for a target in int8; add --quantize=int8, or leave it out.")
    prompts = load_prompts(config.texts, config.num_examples)
    resolved = weights.resolve(config)
    prompts = chats.rendered(prompts, config, resolved.vocabulary.special)
    chats.require_whole(prompts)
    whole = None
    if options.compare:
        whole = weights.resolve(dataclasses.replace(config, quantize="none"))
    require(prompts, metric, model_of(resolved.target.config).decoder_only)
    references = [prompt.reference for prompt in prompts]
    quality.require_seen(metric, references)
    folder = pathlib.Path(options.output_dir or f"results/evaluate/{name}")
    scores = folder / "scores.json"
    models = resolved.configs + ([whole.target.config] if whole else [])
    memory.require(config, models, size=config.batch_size)
    values: dict[str, Any] = chosen(config, SETTINGS) | {"gamma": gamma}
    settings = Settings(**values)
    with disk.owned(folder):
        pair, _, lines = _decoded(resolved, config, settings, prompts, folder / "texts.jsonl")
        truncated = pair.truncated([prompt.source for prompt in prompts], config.source_length)
        texts = [line["text"] for line in lines]
        score, low, high = quality.score(metric, references, texts)
        tokens = sum(len(line["tokens"]) for line in lines)
        calls = sum(line["target_calls"] for line in lines)
        fields = {"task": config.task, "metric": metric, "score": score, "low": low, "high": high}
        fields |= {
            "texts": len(lines),
            "tokens": tokens,
            "target_calls": calls,
            "truncated": truncated,
        }
        cost: dict[str, Any] = {}
        if whole:
            file = folder / "texts_unquantized.jsonl"
            other, requests, others = _decoded(whole, config, settings, prompts, file)
            sources = [request.source for request in requests]
            cost = _cost(pair, lines, other, others, sources, references, config)
        fields |= {"batch_size": config.batch_size, **resolved.labels, **cost, "gin": config.gin()}
        fields["fingerprints"] = resolved.fingerprints | {"texts": fingerprint(prompts)}
        disk.write(scores, json.dumps(fields | environment.here(), indent=1) + "\n")
    print(
        f"{config.task}: {metric} {score:.2f} ({low:.2f} to {high:.2f}) of {len(lines)} texts, "
        f"{tokens:,} tokens, {tokens / calls:.2f} per target call."
    )
    if cost:
        print(
            f"Without {config.quantize}: {metric} {cost['unquantized']:.2f}; with it "
            f"{cost['difference']:+.2f} ({cost['difference_low']:+.2f} to "
            f"{cost['difference_high']:+.2f}). On the unquantized target's texts, the "
            f"probabilities diverge by {cost['divergence']:.4f} nats per token, and the likeliest "
            f"token is the same at {cost['same_choices']:.2%} of them."
        )
    if truncated:
        print(f"Sources cut to {config.source_length} tokens: {truncated}.")
    print(f"Written: {folder / 'texts.jsonl'} and {scores}.")


def _decoded(
    resolved: "Resolved",
    config: "RowConfig",
    settings: Settings,
    prompts: "Sequence[Prompt]",
    file: pathlib.Path,
) -> "tuple[Pair, list[Request], list[dict[str, Any]]]":
    """The loaded pair, its requests, and their lines, some of which the file may already hold."""
    from speculative import progress

    sources = [prompt.source for prompt in prompts]
    entries = [Asked(source, settings) for source in sources]
    of_lines = resolved.labels | {"source_length": config.source_length}
    kept = many.Results(file, entries, of_lines, resolved.fingerprints)
    with progress.bar(config.target) as on_progress:
        on_progress("loading", 0)
        pair = resolved.load()
    requests = pair.requests(sources, settings)
    places = {(i, 0): request for i, request in enumerate(requests)}
    return pair, requests, kept.complete(pair, places, config.batch_size)


def _cost(
    pair: "Pair",
    lines: list[dict[str, Any]],
    whole: "Pair",
    of_whole: list[dict[str, Any]],
    sources: "Sequence[Array]",
    references: Sequence[str],
    config: "RowConfig",
) -> dict[str, Any]:
    """The cost of holding the target in int8, compared with the unquantized target (`whole`)."""
    from speculative.measurement import quality
    from speculative.measurement.divergence import divergence

    assert (metric := config.texts.metric) is not None
    one, other = ([line["text"] for line in each] for each in (of_whole, lines))
    numbers = range(len(references))
    above, low, high = quality.difference(metric, references, one, other, config.seed, numbers)
    texts = [line["tokens"] for line in of_whole]
    divergences, same = divergence(whole, pair, sources, texts, config.batch_size)
    return {
        "unquantized": quality.measure(metric, references, one),
        "difference": above,
        "difference_low": low,
        "difference_high": high,
        "divergence": float(divergences.mean()),
        "same_choices": float(same.mean()),
    }


COMMANDS = {
    "evaluate": Command("score a task's texts, decoded in batches", _add_evaluate, _evaluate)
}
