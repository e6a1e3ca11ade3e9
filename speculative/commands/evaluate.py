"""`evaluate`: decodes a task's texts in batches, and scores them by its metric."""

import argparse
import json
import pathlib
from typing import Any

from speculative import disk
from speculative.commands import SETTINGS, Command, add_options, chosen, many, option, rows
from speculative.commands.prompts import Asked
from speculative.settings import Settings


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    add_options(parser, "--batch_size")
    option(parser, "--output_dir DIR", "(results/evaluate and the row's name)")


def _evaluate(options: argparse.Namespace) -> None:
    from speculative import progress
    from speculative.measurement import quality
    from speculative.models import model_of
    from speculative.rows import environment, memory, weights
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
    prompts = load_prompts(config.texts, config.num_examples)
    found = weights.resolve(config)
    require(prompts, metric, model_of(found.target.config).decoder_only)
    quality.require_seen(metric, [prompt.reference for prompt in prompts])
    folder = pathlib.Path(options.output_dir or f"results/evaluate/{name}")
    texts, scores = folder / "texts.jsonl", folder / "scores.json"
    memory.require(config, found.configs)
    shape = config.gamma, config.max_length, config.batch_size, config.tree
    memory.require_batch((config.target, config.draft), found.configs, *shape)
    given: dict[str, Any] = chosen(config, SETTINGS) | {"gamma": gamma}
    settings = Settings(**given)
    asked = [Asked(prompt.source, settings) for prompt in prompts]
    with disk.owned(folder):
        of_lines = found.labels | {"source_length": config.source_length}
        kept = many.Results(texts, asked, of_lines, found.fingerprints)
        with progress.bar(config.target) as on_progress:
            on_progress("loading", 0)
            pair = found.load()
        requests = pair.requests([prompt.source for prompt in prompts], settings)
        truncated = pair.truncated([prompt.source for prompt in prompts], config.source_length)
        places = {(i, 0): request for i, request in enumerate(requests)}
        lines = kept.complete(pair, places, config.batch_size)
        references, said = [p.reference for p in prompts], [line["text"] for line in lines]
        score, low, high = quality.score(metric, references, said)
        tokens = sum(len(line["tokens"]) for line in lines)
        calls = sum(line["target_calls"] for line in lines)
        fields = {"task": config.task, "metric": metric, "score": score, "low": low, "high": high}
        fields |= {
            "texts": len(lines),
            "tokens": tokens,
            "target_calls": calls,
            "truncated": truncated,
        }
        fields |= {"batch_size": config.batch_size, **found.labels, "gin": config.gin()}
        fields["fingerprints"] = found.fingerprints | {"texts": fingerprint(prompts)}
        disk.write(scores, json.dumps(fields | environment.here(), indent=1) + "\n")
    print(
        f"{config.task}: {metric} {score:.2f} ({low:.2f} to {high:.2f}) of {len(lines)} texts, "
        f"{tokens:,} tokens, {tokens / calls:.2f} a target call."
    )
    if truncated:
        print(f"Sources cut to {config.source_length} tokens: {truncated}.")
    print(f"Written: {texts} and {scores}.")


COMMANDS = {
    "evaluate": Command("score a task's texts, decoded in batches", _add_evaluate, _evaluate)
}
