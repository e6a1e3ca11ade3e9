"""Compares other programs with this one, on the same weights and sources, one after the other.

    pip install -e '.[peers]'
    python -m benchmarks.compare_peers --output_dir=results/peers
    python -m benchmarks.compare_peers --models=SmolLM2-135M-Instruct --draft=my_draft+copy

The extra installs transformers, CTranslate2 and llama.cpp; T5X is compared if a checkout is on
PYTHONPATH. A missing program is named and left out. A model may be a Hugging Face folder of a
decoder-only chat model. The run takes half an hour on two cores, and 8 GB each of memory and disk;
leave the machine idle and the files unchanged meanwhile.
"""

import argparse
import contextlib
import json
import math
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from benchmarks.peers import settings as made
from benchmarks.peers.system import PROGRAMS, Process, Setting
from speculative import checks, progress
from speculative.commands import whole
from speculative.models import abstract_params, named, t5
from speculative.progress import OnProgress
from speculative.rows import environment, memory

OURS = "speculative"
MEASURE = "transformers"  # All outputs are compared with its autoregressive ones.
MODELS = (*made.SHIPPED, "t5_1_1_base")  # The ones that are compared unless others are named.
PREFILLS = (64, 512, 2048)  # Tokens of the sources whose prefill is timed.
PACKAGES = {"llama.cpp": "llama_cpp_python"}  # Those of other names than the program's.
TIE = 1e-3  # If two logits differ by less than this, rounding decides which one is larger.

Way = tuple[str, str]  # A program and how it decodes.


class Difference(NamedTuple):
    """The first difference from `MEASURE`'s output, by the numbers of the source and of the token.

    `margin` is the difference of the two tokens' logits; None where one output has ended.
    """

    source: int
    token: int
    margin: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin < TIE


@dataclass(frozen=True)
class Comparison:
    """The measurements of one pair.

    Attributes:
        sources: how many sources were decoded and compared token by token.
        timed: how many of them, the first ones, were decoded in each round.
        seconds: for all timed sources by way, one number per round.
        tokens: those of their outputs, by way.
        prefill: seconds by program and tokens of the source, one number per round.
        differences: differences from `MEASURE` by way; None if it was not run.
        missing: programs that were not run, each with the missing module or its error.
    """

    setting: Setting
    sources: int
    timed: int
    seconds: dict[Way, list[float]]
    tokens: dict[Way, int]
    prefill: dict[tuple[str, int], list[float]]
    differences: dict[Way, list[Difference]] | None
    missing: dict[str, str]

    @property
    def own(self) -> list[str]:
        """This package's ways of decoding."""
        return [way for program, way in self.seconds if program == OURS]

    def ms_per_token(self, way: Way) -> float:
        """Milliseconds per token in the median round, including the prefill."""
        return 1e3 * statistics.median(self.seconds[way]) / self.tokens[way]

    def ratio(self, way: Way, ours: str) -> float:
        """The time per token of a way, over that of one of ours."""
        return self.ms_per_token(way) / self.ms_per_token((OURS, ours))

    def to_json(self) -> dict[str, Any]:
        """All measurements, with every round."""
        setting, differences = self.setting, self.differences
        return {
            "target": pathlib.PurePath(setting.target).name,
            "draft": setting.draft and pathlib.PurePath(setting.draft).name,
            "gamma": setting.gamma,
            "max_length": setting.max_length,
            "random": setting.random,
            "sources": self.sources,
            "timed": self.timed,
            "ways": [
                {
                    "program": way[0],
                    "way": way[1],
                    "seconds": seconds,
                    "tokens": self.tokens[way],
                    "ms_per_token": self.ms_per_token(way),
                    "over": {name: self.ratio(way, name) for name in self.own},
                    "differences": differences and [one._asdict() for one in differences[way]],
                }
                for way, seconds in self.seconds.items()
            ],
            "prefill": [
                {"program": name, "source_tokens": tokens, "seconds": seconds}
                for (name, tokens), seconds in self.prefill.items()
            ],
            "missing": self.missing,
        }


def compare(
    setting: Setting,
    sources: Sequence[list[int]],
    programs: Sequence[str],
    rounds: int,
    timed: int,
    on_progress: OnProgress,
) -> Comparison:
    """Decodes all sources in every way, then times the first `timed` of them, way after way.

    Programs that lack a module or cannot load the pair are left out and named; if one fails later
    on, RuntimeError is raised.
    """
    timed = min(timed, len(sources))
    programs = [name for name in programs if setting.decoder_only in PROGRAMS[name].kinds]
    missing = {name: lacks for name in programs if (lacks := PROGRAMS[name].missing())}
    present = [name for name in programs if name not in missing]
    running: dict[str, Process] = {}
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(present):
            on_progress(f"loading {name}", 0.2 * number / len(present))
            try:
                running[name] = stack.enter_context(contextlib.closing(Process(name, setting)))
            except RuntimeError as error:
                if name == OURS:
                    raise
                missing[name] = str(error).strip().splitlines()[-1]
        ways = [(name, way) for name, process in running.items() for way in process.ways]
        outputs: dict[Way, list[list[int]]] = {}
        for number, (name, way) in enumerate(ways):  # This also compiles, before anything is timed.
            on_progress(f"{name}, {way}", 0.2 + 0.2 * number / len(ways))
            outputs[name, way] = [running[name].decode(way, source)[0] for source in sources]
        seconds: dict[Way, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            # The order changes with each round, so that every way follows different ones.
            for index in np.random.default_rng(turn).permutation(len(ways)):
                name, way = ways[index]
                took = [running[name].decode(way, source)[1] for source in sources[:timed]]
                seconds[name, way].append(sum(took))
                on_progress(f"round {turn + 1}: {name}, {way}", 0.4 + 0.4 * (turn + 1) / rounds)
        prefill = _prefill(running, longest(setting.exported), rounds, on_progress)
        differences = None
        if measure := running.get(MEASURE):
            expected = outputs[MEASURE, measure.ways[0]]
            differences = {
                way: _differences(measure, sources, expected, decoded)
                for way, decoded in outputs.items()
            }
    tokens = {way: sum(map(len, decoded[:timed])) for way, decoded in outputs.items()}
    return Comparison(setting, len(sources), timed, seconds, tokens, prefill, differences, missing)


def longest(exported: str) -> float:
    """The positions that a folder's model has for a prompt; unlimited for T5."""
    file = pathlib.Path(exported) / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    limited = "n_positions" if config.get("model_type") == "gpt2" else "max_position_embeddings"
    return config.get(limited, math.inf)


def _prefill(
    running: Mapping[str, Process], positions: float, rounds: int, on_progress: OnProgress
) -> dict[tuple[str, int], list[float]]:
    """Seconds of a prefill by program and tokens of a random source, one number per round."""
    source = np.random.default_rng(0).integers(2, 1000, max(PREFILLS)).tolist()
    seconds: dict[tuple[str, int], list[float]] = {}
    for number, tokens in enumerate(PREFILLS):
        if tokens >= positions:
            continue
        on_progress(f"prefill of {tokens}", 0.8 + 0.2 * number / len(PREFILLS))
        for turn in range(rounds + 1):
            for name in np.random.default_rng(turn).permutation(list(running)).tolist():
                took = running[name].prefill(source[:tokens])
                if turn:  # The first turn compiles.
                    seconds.setdefault((name, tokens), []).append(took)
    return seconds


def _differences(
    measure: Process,
    sources: Sequence[list[int]],
    expected: Sequence[list[int]],
    found: Sequence[list[int]],
) -> list[Difference]:
    differences = []
    for number, (source, one, other) in enumerate(zip(sources, expected, found, strict=True)):
        if one != other:
            both = list(zip(one, other, strict=False))
            at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
            margin = measure.margin(source, one[:at], *both[at]) if at < len(both) else None
            differences.append(Difference(number, at, margin))
    return differences


def show(found: Comparison, console: Console) -> None:
    """Prints the times of decoding and of the prefill."""
    setting = found.setting
    pair = f" with {setting.draft}, γ = {setting.gamma}" * bool(setting.draft)
    title = f"{setting.target}{pair}: {found.timed} sources, float32 unless noted"
    # Ratios to our int8 ways are only in the record: they would not fit a terminal.
    own = [way for way in found.own if "int8" not in way]
    numbers = {(OURS, way): number for number, way in enumerate(own, 1)}
    ratios = (f"over ({number})" for number in numbers.values())
    shown = table(title, "program and way", "ms/token", *ratios, "same")
    for way in found.seconds:
        same = "–"
        if found.differences is not None:
            ties = sum(one.near_tie for one in found.differences[way])
            same = f"{found.sources - len(found.differences[way])}/{found.sources}"
            same += f", {ties} ties" * bool(ties)
        ratios = (f"{found.ratio(way, name):.3g}" for name in own)
        name = ", ".join(way) + (f" ({numbers[way]})" if way in numbers else "")
        shown.add_row(name, f"{found.ms_per_token(way):.3f}", *ratios, same)
    console.print(shown)
    widths = list(dict.fromkeys(tokens for _, tokens in found.prefill))
    prefill = table("Prefill, ms by tokens of the source", "program", *map(str, widths))
    for name in dict.fromkeys(name for name, _ in found.prefill):
        times = (1e3 * statistics.median(found.prefill[name, tokens]) for tokens in widths)
        prefill.add_row(name, *(f"{ms:.1f}" for ms in times))
    console.print(prefill)
    if setting.random:
        console.print("Random weights magnify rounding: their tokens cannot be compared.")
    console.print(
        "same: equal to transformers, token by token. Our draft's kernels are int8. Prefill reads "
        "a prompt, or computes the encoder and cross-attention's projections; ctranslate2 adds a "
        "decoding step, t5x leaves the projections to its steps.",
        highlight=False,
    )
    show_missing(found.missing, console)


def show_missing(missing: Mapping[str, str], console: Console) -> None:
    """Prints which programs were left out, what each lacks, and how to install it."""
    for name, lacks in missing.items():
        message = f"{name} was left out ({lacks}); {PROGRAMS[name].remedy}."
        console.print(message, highlight=False, markup=False)


def table(title: str, first: str, *heads: str) -> Table:
    """An empty table; all columns but the first hold numbers."""
    numbers = (Column(head, justify="right", no_wrap=True) for head in heads)
    return Table(Column(first, no_wrap=True), *numbers, title=title, box=None, pad_edge=False)


def machine() -> dict[str, Any]:
    """The commit, the device and the versions of installed programs; checkouts have none."""
    versions: dict[str, str | None] = dict.fromkeys(("jax", "torch", *PROGRAMS))
    for name in versions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(PACKAGES.get(name, name))
    here = {"commit": environment.commit(), "device": environment.device()}
    return here | {"versions": versions}


def recorded(options: argparse.Namespace, **found: Any) -> str:
    """A record as JSON: the machine, the options except the folder, and what was found."""
    kept = {name: value for name, value in vars(options).items() if name != "output_dir"}
    return json.dumps(machine() | {"settings": kept} | found, indent=1) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare other programs with this one.", allow_abbrev=False
    )
    add, many = parser.add_argument, whole(1, 10**4)
    programs = list(PROGRAMS)
    which = f"{' and '.join(made.SHIPPED)} are bundled, {', '.join(t5.SIZES)} have random weights; "
    which += "or a Hugging Face folder of a decoder-only chat model (%(default)s)"
    add("--output_dir", default="results/peers", metavar="DIR", help="(%(default)s)")
    add("--models", nargs="+", default=list(MODELS), metavar="MODEL", help=which)
    add("--draft", default="copy", metavar="NAME", help="of a chat model's folder (%(default)s)")
    add("--programs", nargs="+", default=programs, choices=programs, help="(all)")
    add("--rounds", type=many, default=5, help="rounds of timing each way (5)")
    add("--limit", type=many, help="sources of each task, or random ones (all, or 4)")
    add("--timed", type=many, default=18, help="number of them decoded in each round (18)")
    add(
        "--length",
        type=whole(1, checks.MAX_TOKENS),
        default=64,
        help="of random weights' outputs (64)",
    )
    add("--gamma", type=whole(1, checks.MAX_GAMMA), default=5, help="guesses per step (5)")
    options = parser.parse_args()
    for model in options.models:
        if model in made.SHIPPED or pathlib.Path(model).is_dir():
            continue
        if model not in t5.SIZES:
            known = ", ".join([*made.SHIPPED, *t5.SIZES])
            parser.error(f"--models: {model!r} is not a folder, nor one of {known}.")
        parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(named(model))))
        # Each program holds it in float32, CTranslate2 also in int8, and converts a whole export.
        needed = 4 * parameters * (len(PROGRAMS) + 2)
        name, available = memory.device_bytes()
        if needed > available:
            parser.error(
                f"Comparing {model} needs {needed / 2**30:.0f} GiB, but {name} has "
                f"{available / 2**30:.0f}: take a smaller model (--models)."
            )
    return options


def main() -> None:
    options = _options()
    limit, output = options.limit, pathlib.Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    counts = options.rounds, options.timed
    for model in options.models:
        with tempfile.TemporaryDirectory() as exports, progress.bar(model) as on_progress:
            folder = pathlib.Path(exports)
            if model in made.SHIPPED:
                setting, sources = made.SHIPPED[model](limit, options.gamma, folder)
            elif model in t5.SIZES:
                setting, sources = made.random(model, limit, options.length, folder)
            else:
                arguments = options.draft, limit, options.gamma
                setting, sources = made.chat_model(model, *arguments, folder)
            comparison = compare(setting, sources, options.programs, *counts, on_progress)
        contents = machine() | comparison.to_json()
        # Each model's results are written at once, so that a later failure loses nothing.
        file = output / f"{pathlib.Path(model).name}.json"
        file.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        show(comparison, Console())
        print(f"Written: {file}.", flush=True)


if __name__ == "__main__":
    main()
