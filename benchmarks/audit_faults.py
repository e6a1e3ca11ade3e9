"""Measures how often audits of the bundled pair find each planted fault, and the stated power.

    python -m benchmarks.audit_faults --output_dir=results/audit_faults

It audits exact samples, with the power against each fault; then the samples of each faulty decoder,
with `--seeds` seeds, and as many exact ones. The record is `faults.json`.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from benchmarks.compare_peers import recorded
from benchmarks.verdicts import FALSE_ALARM
from speculative import checks, loading, progress
from speculative.commands import whole
from speculative.decoding.rules import EXACT
from speculative.settings import Settings
from speculative.studies.audit import audit
from speculative.studies.power import faults, powers
from speculative.studies.verify import decoded
from speculative.tasks.prompts import load_prompts

TASKS = ("debian_ende", "debian_synopsis")
NONE = "none"  # The fault of the exact decoder.
POWER_TEXTS = 1024  # Texts simulated for each fault, to state the power.


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Audit faulty decoders of the bundled pair.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="results/audit_faults", metavar="DIR", help="(%(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="(1)")
    add("--top_p", type=float, default=1.0, metavar="P", help="nucleus, in (0, 1] (1)")
    add("--limit", type=whole(1, 10**4), default=8, help="sources of each task (8)")
    add("--samples", type=whole(1, 10**4), default=16, help="of each source (16)")
    length = whole(1, checks.MAX_TOKENS)
    add("--max_length", type=length, default=128, metavar="TOKENS", help="of a text (128)")
    add("--gamma", type=whole(1, checks.MAX_GAMMA), default=5, help="guesses per step (5)")
    add("--seeds", type=whole(1, 10**4), default=20, help="audits of each fault (20)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    output = pathlib.Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    pair = loading.load()
    encode = pair.vocabulary.encode
    prompts = [prompt for task in TASKS for prompt in load_prompts(task, options.limit)]
    sources = [tuple(encode(prompt.source).tolist()) for prompt in prompts] * options.samples
    names = "gamma", "max_length", "temperature", "top_p"
    settings = Settings(**{name: getattr(options, name) for name in names})
    config = settings.decoding(pair.vocabulary.size, pair.vocabulary.eos_ids)
    sampling = config.sampling
    with progress.bar("faults") as on_progress:
        samples = decoded(pair, sources, config, options.seeds)
        passed = audit(pair, samples, sampling, FALSE_ALARM)
        seed = options.seeds + 1
        stated = powers(pair, samples, passed, config, POWER_TEXTS, on_progress, seed)
        results = {one.fault: dataclasses.asdict(one) | {"failed": 0} for one in stated}
        results[NONE] = {"fault": NONE, "power": None, "failed": 0}
        for number, (name, (rule, wrong)) in enumerate(
            (faults(sampling) | {NONE: (EXACT, sampling)}).items()
        ):
            faulty = dataclasses.replace(config, sampling=wrong, rule=rule)
            for seed in range(options.seeds):
                on_progress(name, (number + seed / options.seeds) / len(results))
                made = decoded(pair, sources, faulty, seed)
                failed = not audit(pair, made, sampling, FALSE_ALARM).passed
                results[name]["failed"] += failed
            found = {"exact_passed": passed.passed, "faults": list(results.values())}
            record = recorded(options, texts=len(sources), **found)
            (output / "faults.json").write_text(record)
    print(f"{options.seeds} audits of {len(sources)} texts for each fault:")
    for one in results.values():
        stated = "" if one["power"] is None else f" (power stated: {one['power']:.2f})"
        print(f"{one['failed']:>4} failed{stated}, fault: {one['fault']}")
    print(f"Written: {output / 'faults.json'}.", flush=True)


if __name__ == "__main__":
    main()
