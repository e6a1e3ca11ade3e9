"""Audits the samples of other programs, and of this one, on the shipped pair.

    pip install -e '.[peers]'
    python -m benchmarks.audit_peers --temperature=1 --output_dir=results/audit

Each way of sampling draws as many texts of the same sources; they are kept as JSON lines, which
`speculative audit --samples` reads, and the verdicts in `audits.json`. A missing program is named
and left out. Assisted generation draws one text at a time: 512 texts take some five minutes a way.
With --max_length=3 and more --samples, texts are beginnings, which show a wrong correction soonest.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.compare_peers import machine, settings, shipped, show_missing, table
from benchmarks.peers.system import PROGRAMS, Process
from speculative import loading, progress
from speculative.checks import MAX_GAMMA
from speculative.commands import MAX_LENGTH, whole
from speculative.decoding import Decoding
from speculative.progress import OnProgress
from speculative.reporting.tables import show_power
from speculative.sampling import Sampling
from speculative.studies.audit import Audit, audit, read
from speculative.studies.power import powers

FALSE_ALARM = 0.001
SHOWN = 20  # Impossible tokens, and unexplained log-probabilities, that the record names.


def draw(
    process: Process,
    way: str,
    sources: list[list[int]],
    sampling: Sampling,
    count: int,
    file: pathlib.Path,
    on_progress: OnProgress,
) -> None:
    """Writes `count` samples of each source to a file, a JSON object a line, as they come."""
    with file.open("w", encoding="utf-8") as lines:
        for number, source in enumerate(sources):
            on_progress(way, number / len(sources))
            for fields in process.sample(way, source, sampling, count, number):
                lines.write(json.dumps({"prompt_tokens": source} | fields) + "\n")
            lines.flush()


def show(audits: dict[str, Audit], missing: dict[str, str], console: Console) -> None:
    """Prints what each test says of each way."""
    names = [test.name for found in audits.values() for test in found.tests]
    columns = list(dict.fromkeys(names))
    heads = [name.replace(" by the one before", ", pairs") for name in columns]
    shown = table("p-values of the tests", "program, way", "texts", *heads, "verdict")
    for way, found in audits.items():
        values = {test.name: f"{test.p_value:.2g}" for test in found.tests}
        cells = [values.get(name, "–") for name in columns]
        verdict = "passed" if found.passed else "failed"
        if found.impossible:
            verdict += f", {len(found.impossible)} impossible"
        if found.unexplained:
            verdict += f", {len(found.unexplained)} log-probabilities unexplained"
        shown.add_row(way, str(found.texts), *cells, verdict)
    console.print(shown)
    show_missing(missing, console)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Audit the samples of other programs on the shipped pair.", allow_abbrev=False
    )
    add, programs = parser.add_argument, [name for name in PROGRAMS if name != "t5x"]
    add("--output_dir", default="results/audit", metavar="DIR", help="(%(default)s)")
    add("--programs", nargs="+", default=programs, choices=programs, help="(all)")
    add("--temperature", type=float, default=1.0, metavar="T", help="(1)")
    add("--top_k", type=int, default=0, metavar="K", help="the K likeliest tokens; 0 is all (0)")
    add("--top_p", type=float, default=1.0, metavar="P", help="nucleus, in (0, 1] (1)")
    add("--limit", type=whole(1, 10**4), default=8, help="sources of each task (8)")
    add("--samples", type=whole(1, 10**4), default=32, help="of each source (32)")
    length = whole(1, MAX_LENGTH)
    add("--max_length", type=length, default=128, metavar="TOKENS", help="of a text (128)")
    add("--gamma", type=whole(1, MAX_GAMMA), default=5, help="guesses a step (5)")
    add("--power", action="store_true", help="as of audit, of the first way that passes")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    output = pathlib.Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    pair, audits, missing = loading.load(), {}, {}
    contents: dict[str, Any] = machine() | {"settings": settings(options), "audits": {}}
    own = options.gamma, options.max_length, pair.vocabulary.eos_ids
    config = Decoding(pair.vocabulary.size, sampling, *own)
    power = []
    for name in options.programs:
        if lacks := PROGRAMS[name].missing():
            missing[name] = lacks
            continue
        with tempfile.TemporaryDirectory() as exports, progress.bar(name) as on_progress:
            on_progress("loading", 0)
            setting, sources = shipped(options.limit, options.gamma, pathlib.Path(exports))
            setting = dataclasses.replace(setting, max_length=options.max_length)
            process = Process(name, setting)
            for way in process.sampled:
                file = output / f"{name}_{way.replace(', ', '_').replace(' ', '_')}.jsonl"
                draw(process, way, sources, sampling, options.samples, file, on_progress)
                samples = read(file, pair.vocabulary.encode, config)
                found = audit(pair, samples, sampling, FALSE_ALARM, on_progress)
                audits[f"{name}, {way}"] = found
                fields = found.fields()
                for fault in ("impossible", "unexplained"):
                    fields |= {f"{fault}_count": len(fields[fault]), fault: fields[fault][:SHOWN]}
                contents["audits"][f"{name}, {way}"] = fields
                if options.power and found.passed and not power:
                    power = powers(pair, samples, found, config, on_progress=on_progress)
                    contents["power"] = [dataclasses.asdict(one) for one in power]
                (output / "audits.json").write_text(json.dumps(contents, indent=1) + "\n")
            process.close()
    show(audits, missing, Console())
    if power:
        show_power(power, pair.names[1], options.gamma)
    print(f"Written: {output / 'audits.json'}, and samples beside it.", flush=True)


if __name__ == "__main__":
    main()
