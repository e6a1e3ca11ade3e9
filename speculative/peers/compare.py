"""Programs side by side on the same weights and sources: rounds in turn, medians, ratios."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from speculative import checkpoints
from speculative.checkpoints import huggingface
from speculative.checkpoints.checkpoint import in_memory
from speculative.experiments import environment, plan
from speculative.experiments.tuning import OnProgress
from speculative.models import abstract_params, named, random_params
from speculative.peers.process import Process
from speculative.peers.system import PROGRAMS, Setting
from speculative.tasks.prompts import load_prompts
from speculative.types import EOS_ID
from speculative.vocabulary import open_vocabulary

OURS = "speculative"

MEASURE = "transformers"
"""The program whose plain outputs are the measure of all."""

PREFILLS = (64, 512, 2048)
"""Tokens of the sources whose prefill is timed."""

TASKS = ("debian_ende", "debian_synopsis")
"""Whose texts the shipped pair decodes."""

TIE = 1e-3
"""Logits nearer to each other than this may change places by rounding alone."""

Way = tuple[str, str]
"""A program and how it decodes."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where an output first differs from `MEASURE`'s.

    Attributes:
        source: the source's number.
        token: the token's number in the output.
        margin: by how much the two tokens' logits differ, there; None where one has ended.
    """

    source: int
    token: int
    margin: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin < TIE


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was measured of one pair.

    Attributes:
        setting: the pair, and how it decodes.
        sources: how many were decoded, and compared token by token.
        timed: how many of them, the first, were decoded in each round.
        seconds: of all timed sources, by way, one number a round.
        tokens: of their outputs, by way.
        prefill: seconds by program and tokens of the source, one number a round.
        differences: by way; None where `MEASURE` was not there.
        missing: programs that could not be run, and what they lack or said.
    """

    setting: Setting
    sources: int
    timed: int
    seconds: dict[Way, list[float]]
    tokens: dict[Way, int]
    prefill: dict[tuple[str, int], list[float]]
    differences: dict[Way, list[Difference]] | None
    missing: dict[str, str]

    def ms_per_token(self, way: Way) -> float:
        """The median round's, prefill included."""
        return 1e3 * statistics.median(self.seconds[way]) / self.tokens[way]

    def ratio(self, way: Way, ours: str) -> float:
        """How many times as long a way takes as one of ours."""
        return self.ms_per_token(way) / self.ms_per_token((OURS, ours))

    def to_json(self) -> dict[str, Any]:
        """All of it, with every round."""
        own = [way for program, way in self.seconds if program == OURS]
        return {
            "target": self.setting.target,
            "draft": self.setting.draft,
            "gamma": self.setting.gamma,
            "max_length": self.setting.max_length,
            "sources": self.sources,
            "timed": self.timed,
            "ways": [
                {
                    "program": way[0],
                    "way": way[1],
                    "seconds": self.seconds[way],
                    "tokens": self.tokens[way],
                    "ms_per_token": self.ms_per_token(way),
                    "over": {name: self.ratio(way, name) for name in own},
                    "differences": self.differences
                    and [dataclasses.asdict(one) for one in self.differences[way]],
                }
                for way in self.seconds
            ],
            "prefill": [
                {"program": name, "source_tokens": tokens, "seconds": seconds}
                for (name, tokens), seconds in self.prefill.items()
            ],
            "missing": self.missing,
        }


def shipped(limit: int | None, gamma: int, folder: pathlib.Path) -> tuple[Setting, list[list[int]]]:
    """The shipped pair on its test texts, exported into a folder."""
    checkpoint = checkpoints.open("debian_target")
    assert checkpoint.vocabulary is not None
    vocabulary = open_vocabulary(checkpoint.vocabulary, checkpoint.extra_ids)
    # A synopsis after each pair of translations, of which there are twice as many.
    translations, synopses = (load_prompts(task, limit) for task in TASKS)
    taken = zip_longest(translations[::2], translations[1::2], synopses)
    prompts = [prompt for group in taken for prompt in group if prompt is not None]
    sources = [vocabulary.encode(prompt.source).tolist() for prompt in prompts]
    exported = folder / "debian_target"
    huggingface.write(exported, checkpoint, "float32")
    return Setting("debian_target", "debian_draft", False, str(exported), 128, gamma), sources


def require(size: str) -> None:
    """Raises ValueError unless this machine holds a model of a size once for each program.

    CTranslate2 has it in two formats, and each export is read whole by who converts it.
    """
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(named(size))))
    needed = 4 * parameters * (len(PROGRAMS) + 2)
    name, there = plan.device_bytes()
    if needed > there:
        raise ValueError(
            f"Comparing {size} needs {needed / 2**30:.0f} GiB, but {name} has "
            f"{there / 2**30:.0f}: take a smaller model (--models)."
        )


def random(
    size: str, limit: int | None, length: int, folder: pathlib.Path
) -> tuple[Setting, list[list[int]]]:
    """Random weights of a size of `models.SIZES` on made-up sources, exported into a folder."""
    config = named(size, dtype="float32")
    exported = folder / size
    huggingface.write(exported, in_memory(size, config, random_params(config)), "float32")
    rng = np.random.default_rng(0)
    sources = rng.integers(2, config.vocab_size, (limit or 4, 63))
    rows = [[*row, EOS_ID] for row in sources.tolist()]
    return Setting(size, None, True, str(exported), length, 0), rows


def compare(
    setting: Setting,
    sources: Sequence[list[int]],
    programs: Sequence[str],
    rounds: int,
    timed: int,
    told: OnProgress,
) -> Comparison:
    """Decodes all sources in every way, and the first of them over and over, way after way.

    Programs that lack something, or cannot load the pair, are left out and named.

    Raises:
        RuntimeError: a program failed later on.
    """
    missing = {name: lacks for name in programs if (lacks := PROGRAMS[name].missing())}
    present = [name for name in programs if name not in missing]
    running: dict[str, Process] = {}
    try:
        for number, name in enumerate(present):
            told(f"loading {name}", 0.2 * number / len(present))
            try:
                running[name] = Process(name, setting)
            except RuntimeError as error:
                if name == OURS:
                    raise
                missing[name] = str(error).strip().splitlines()[-1]
        return _compare(setting, sources, running, rounds, timed, told, missing)
    finally:
        for process in running.values():
            process.close()


def _compare(
    setting: Setting,
    sources: Sequence[list[int]],
    running: Mapping[str, Process],
    rounds: int,
    timed: int,
    told: OnProgress,
    missing: dict[str, str],
) -> Comparison:
    ways = [(name, way) for name, process in running.items() for way in process.ways]
    outputs: dict[Way, list[list[int]]] = {}
    for number, (name, way) in enumerate(ways):  # Compiled, and warm, before anything is timed.
        told(f"{name}, {way}", 0.2 + 0.2 * number / len(ways))
        outputs[name, way] = [running[name].decode(way, source)[0] for source in sources]
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        # Each one follows another each time.
        for place in np.random.default_rng(turn).permutation(len(ways)):
            name, way = ways[place]
            took = [running[name].decode(way, source)[1] for source in sources[:timed]]
            seconds[name, way].append(sum(took))
            told(f"round {turn + 1}: {name}, {way}", 0.4 + 0.4 * (turn + 1) / rounds)
    made = np.random.default_rng(0).integers(2, 1000, max(PREFILLS)).tolist()
    prefill: dict[tuple[str, int], list[float]] = {}
    for place, tokens in enumerate(PREFILLS):
        told(f"prefill of {tokens}", 0.8 + 0.2 * place / len(PREFILLS))
        for turn in range(rounds + 1):
            for name in np.random.default_rng(turn).permutation(list(running)).tolist():
                took = running[name].prefill(made[:tokens])
                if turn:  # The first compiles.
                    prefill.setdefault((name, tokens), []).append(took)
    plain = [found for (name, _), found in outputs.items() if name == MEASURE]
    return Comparison(
        setting,
        len(sources),
        min(timed, len(sources)),
        seconds,
        {way: sum(map(len, found[:timed])) for way, found in outputs.items()},
        prefill,
        {
            way: _differences(running[MEASURE], sources, plain[0], found)
            for way, found in outputs.items()
        }
        if plain
        else None,
        missing,
    )


def _differences(
    theirs: Process,
    sources: Sequence[list[int]],
    expected: Sequence[list[int]],
    found: Sequence[list[int]],
) -> list[Difference]:
    differences = []
    for number, (source, one, other) in enumerate(zip(sources, expected, found, strict=True)):
        if one == other:
            continue
        both = list(zip(one, other, strict=False))
        place = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
        margin = None
        if place < len(both):
            margin = theirs.margin(source, one[:place], *both[place])
        differences.append(Difference(number, place, margin))
    return differences


def show(found: Comparison, console: Console) -> None:
    """Prints the ways of decoding, and the prefill."""
    setting, own = found.setting, [way for program, way in found.seconds if program == OURS]
    pair = f" with {setting.draft}, γ = {setting.gamma}" * bool(setting.draft)
    shown = Table(
        title=f"{setting.target}{pair}: {found.timed} sources, float32", box=None, pad_edge=False
    )
    shown.add_column("program and way", no_wrap=True)
    for head in ("ms/token", *(f"{way}\n= 1" for way in own), "same"):
        shown.add_column(head, justify="right", no_wrap=True)
    for way in found.seconds:
        same = "–"
        if found.differences is not None:
            ties = sum(one.near_tie for one in found.differences[way])
            same = f"{found.sources - len(found.differences[way])}/{found.sources}"
            same += f", {ties} ties" * bool(ties)
        shown.add_row(
            ", ".join(way),
            f"{found.ms_per_token(way):.3f}",
            *(f"{found.ratio(way, name):.3g}" for name in own),
            same,
        )
    console.print(shown)
    prefill = Table(title="Prefill, ms by tokens of the source", box=None, pad_edge=False)
    prefill.add_column("program")
    for tokens in PREFILLS:
        prefill.add_column(str(tokens), justify="right")
    for name in dict.fromkeys(name for name, _ in found.prefill):
        times = (1e3 * statistics.median(found.prefill[name, tokens]) for tokens in PREFILLS)
        prefill.add_row(name, *(f"{ms:.1f}" for ms in times))
    console.print(prefill)
    if setting.random:
        console.print("Random weights magnify rounding: their tokens are no measure.")
    console.print(
        "same: as transformers, token by token. Our draft's kernels are int8. Prefill is encoder "
        "and cross-attention's projections; ctranslate2 adds a step of decoding, t5x leaves the "
        "projections to its steps.",
        highlight=False,
    )
    for name, lacks in found.missing.items():
        console.print(
            f"{name} was left out ({lacks}); {PROGRAMS[name].remedy}.",
            highlight=False,
            markup=False,
        )


def write(found: Comparison, path: pathlib.Path) -> None:
    """Writes all of it, with machine, commit and versions."""
    contents = {
        "commit": environment.commit(),
        "device": environment.device(),
        "versions": {name: _version(name) for name in ("jax", "torch", *PROGRAMS)},
    }
    path.write_text(json.dumps(contents | found.to_json(), indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str | None:
    """Of an installed program; a checkout has none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
