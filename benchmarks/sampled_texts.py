"""Scores and audits the bundled models' sampled texts, which should be the target's own.

    python -m benchmarks.sampled_texts

It takes rows of the bundled models' Table 3 at T = 1, by default those of drafts that read hidden
states, and draws several samples of each prompt by the target alone and, with the draft, by each
rule of verification. The score of one sample of each says little, because it varies by more than
one BLEU. The record is `sampled.json`.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.compare_peers import recorded, table
from benchmarks.verdicts import FALSE_ALARM
from speculative import progress
from speculative.commands import whole
from speculative.decoding.rules import RULES
from speculative.measurement import quality
from speculative.pair import Pair, Request, Result
from speculative.rows import memory
from speculative.rows.config import gamma_of
from speculative.rows.weights import Loader
from speculative.studies import sweep
from speculative.studies.audit import audit
from speculative.studies.samples import Sample
from speculative.tasks.prompts import Prompt, load_prompts

ALONE = "target alone"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Score and audit samples of the bundled models.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="results/sampled_texts", metavar="DIR", help="(%(default)s)")
    rows, size = ["hidden_t1", "lm_mixed_t1"], whole(1, 1024)
    add("--rows", nargs="+", default=rows, metavar="WORD", help="endings of row names")
    add("--samples", type=size, default=16, metavar="N", help="of each prompt (%(default)s)")
    add("--limit", type=size, metavar="N", help="prompts of each task (all)")
    return parser.parse_args(arguments)


def drawn(pair: Pair, requests: Sequence[Request], samples: int) -> list[Result]:
    """The samples of each request, one request after the other."""
    return pair.decode_all([x.sample(i) for x in requests for i in range(samples)])


def compared(
    metric: str, prompts: Sequence[Prompt], alone: Sequence[str], texts: Sequence[str], seed: int
) -> dict[str, Any]:
    """The score of texts, and its difference from the target's own, with its interval."""
    samples = len(texts) // len(prompts)
    numbers = [number for number in range(len(prompts)) for _ in range(samples)]
    references = [prompts[number].reference for number in numbers]
    score = quality.measure(metric, references, texts)
    above = quality.difference(metric, references, alone, texts, seed, numbers)
    return {"metric": metric, "score": score, "above_alone": above}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    output, load = pathlib.Path(options.output_dir), Loader()
    output.mkdir(parents=True, exist_ok=True)
    configs = {
        name: config
        for name, config in sweep.shipped_rows("3").items()
        if name.endswith(tuple(options.rows)) and not config.sampling.greedy
    }
    if not configs:
        ends = " or ".join(options.rows)
        raise SystemExit(f"No row of the bundled models above T = 0 ends with {ends} (--rows).")
    ways = [(name, way) for name in configs for way in (ALONE, *RULES)]
    alone: dict[str, list[str]] = {}  # By task, because the target is the same.
    rows: list[dict[str, Any]] = []
    with progress.bar("ways") as on_progress:
        for number, (name, way) in enumerate(ways):
            config = configs[name]
            if way == ALONE and config.task in alone:
                continue
            on_progress(f"{name}, {way}", number / len(ways))
            memory.spare_maps()
            pair, prompts = load(config), load_prompts(config.texts, options.limit)
            gamma, rule = (0, "token") if way == ALONE else (gamma_of(config, name), way)
            vocabulary = pair.vocabulary
            ruled = dataclasses.replace(config, verification=rule)
            decoding = ruled.decoding(vocabulary.size, gamma, vocabulary.eos_ids)
            sources = [pair.encode(prompt.source, source_length=512) for prompt in prompts]
            requests = [Request(x, decoding, config.seed, i) for i, x in enumerate(sources)]
            results = drawn(pair, requests, options.samples)
            texts = [result.text for result in results]
            alone.setdefault(config.task, texts)
            without = [tuple(x[x != pair.target.pad_id].tolist()) for x in map(np.ravel, sources)]
            samples = [
                Sample(i + 1, without[i // options.samples], result.tokens)
                for i, result in enumerate(results)
            ]
            audited = audit(pair, samples, config.sampling, FALSE_ALARM, seed=config.seed)
            calls = sum(result.target_calls for result in results)
            row = {"row": name, "way": way, "gamma": gamma}
            row |= {"draft": config.draft} if gamma else {}
            row |= {"tokens_per_call": audited.tokens / calls}
            if metric := config.texts.metric:
                row |= compared(metric, prompts, alone[config.task], texts, config.seed)
            rows.append(row | {"audit": audited.fields()})
            (output / "sampled.json").write_text(recorded(options, rows=rows))
    show(rows, Console())
    print(f"Written: {output / 'sampled.json'}.")


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints a line for each row and way."""
    heads = "texts", "per call", "score", "above alone", "95%", "least p", "audit"
    shown = table("Samples at T = 1", "draft, way", *heads)
    for row in rows:
        score = above = interval = "–"
        if "score" in row:
            middle, low, high = row["above_alone"]
            score = f"{row['metric']} {row['score']:.1f}"
            above, interval = f"{middle:+.2f}", f"{low:.2f} to {high:.2f}"
        name = row["row"].removeprefix("table3/").removesuffix("_t1")
        if row["way"] == ALONE:
            name = name.rpartition("_")[0]
            above = interval = "–"
        audited = row["audit"]
        least = min((f"{test['p_value']:.2g}" for test in audited["tests"]), key=float, default="–")
        shown.add_row(
            f"{name}, {row['way']}", f"{audited['texts']:,}", f"{row['tokens_per_call']:.2f}",
            score, above, interval, least,
            "passed" if audited["passed"] else "FAILED",
        )  # fmt: skip
    console.print(shown)


if __name__ == "__main__":
    main()
