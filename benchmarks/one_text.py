"""Checks that a seed's text is the target's own, for any guesses, any number of them, any batch.

    python -m benchmarks.one_text --rows=debian_draft --temperatures 0 0.7 1

It takes rows of the bundled models' Table 3, with all prompts of their tasks. The target decodes
alone, by `coupled` verification, whose noise belongs to the text; then with chains and trees of
guesses, one by one and in batches. Texts that differ are listed. Tokens per call are compared with
those of chains by the usual rules. The record is `one_text.json`.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.compare_peers import recorded
from speculative import progress
from speculative.pair import Pair, Result
from speculative.rows import memory
from speculative.rows.weights import Loader
from speculative.studies import sweep
from speculative.tasks.prompts import load_prompts
from speculative.types import QUANTIZE

# Each is gamma, and the guesses in a tree.
CHAINS, TREES = ((3, 0), (7, 0)), ((3, 15), (7, 7), (7, 15), (7, 63))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare texts decoded with drafts and the target's own.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="results/one_text", metavar="DIR", help="(%(default)s)")
    add("--rows", default="", metavar="WORD", help="rows whose names have this word (all)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], metavar="T")
    add("--batch_sizes", type=int, nargs="+", default=[1, 8], metavar="N", help="(1 8)")
    add("--quantize", choices=QUANTIZE, default="none", help="how the target is held (none)")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N", help="(0)")
    return parser.parse_args(arguments)


def decoded(
    pair: Pair, texts: list[str], seeds: Sequence[int], size: int, **given: Any
) -> list[Result]:
    """The results of all texts with each seed."""
    results: list[Result] = []
    for seed in seeds:
        results += pair.generate(texts, seed=seed, batch_size=size, **given)
    return results


def per_call(results: Sequence[Result]) -> float:
    """Tokens per target call."""
    calls = sum(one.target_calls for one in results)
    return round(sum(len(one.tokens) for one in results) / calls, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    output, load = pathlib.Path(options.output_dir), Loader()
    output.mkdir(parents=True, exist_ok=True)
    # One row of Table 3 for each draft and task; the options set the temperatures.
    chosen = {(row.task, row.draft): row for row in sweep.shipped_rows("3").values()}
    chosen = {key: row for key, row in chosen.items() if options.rows in "/".join(key)}
    if not chosen:
        raise SystemExit(f"No draft or task has {options.rows!r} in its name (--rows).")
    rows: list[dict[str, Any]] = []
    with progress.bar("drafts") as on_progress:
        for number, ((task, draft), config) in enumerate(chosen.items()):
            on_progress(f"{draft}, {task}", number / len(chosen))
            config = dataclasses.replace(config, quantize=options.quantize)
            pair, prompts = load(config), load_prompts(config.texts)
            texts = [prompt.source for prompt in prompts]
            for temperature in options.temperatures:
                memory.spare_maps()
                how = {"temperature": temperature, "max_length": config.max_length}
                inputs = texts, options.seeds
                usual = {
                    rule: per_call(decoded(pair, *inputs, 8, gamma=7, verification=rule, **how))
                    for rule in ("token", "block")
                }
                how["verification"] = "coupled"
                own = decoded(pair, *inputs, 8, gamma=0, **how)
                for gamma, tree in (*CHAINS, *(TREES if pair.draft.grows else ())):
                    for size in options.batch_sizes:
                        results = decoded(pair, *inputs, size, gamma=gamma, tree=tree, **how)
                        pairs = enumerate(zip(results, own, strict=True))
                        row = {
                            "task": task,
                            "draft": draft,
                            "temperature": temperature,
                            "gamma": gamma,
                            "tree": tree,
                            "batch_size": size,
                            "texts": len(own),
                            "others": [i for i, (a, b) in pairs if a.tokens != b.tokens],
                            "tokens_per_call": per_call(results),
                            "tokens_per_call_of_chains": usual,
                        }
                        rows.append(row)
                (output / "one_text.json").write_text(recorded(options, rows=rows))
    others = sum(len(row["others"]) for row in rows)
    count = sum(row["texts"] for row in rows)
    print(f"{count} texts in {len(rows)} ways of decoding: {others} are not the target's own.")
    print(f"Written: {output / 'one_text.json'}.")


if __name__ == "__main__":
    main()
