"""Audits other programs: draws their samples, tests them against the target, keeps the verdicts.

    python -m benchmarks.verdicts --output=docs/records/verdicts/verdicts.jsonl \
        --programs speculative=.venv/bin/python transformers=.venv-transformers/bin/python

An adapter in this folder drives each program with the interpreter of an environment that has it: it
reads Hugging Face folders and writes samples, which are audited here with the same draft, or with
`copy` where guesses repeat earlier tokens. Each way of sampling runs on each target with each
setting and, if it passes, once more with a planted fault, a temperature of 0.9 T, which the audit
must find. A verdict is a line of JSON. Existing verdicts are kept; `--only` repeats some. `--table`
writes the tables of docs/verdicts.md.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks import pages
from benchmarks.verdicts import FALSE_ALARM
from speculative import checkpoints, disk, loading
from speculative.decoding import Decoding
from speculative.pair import Pair
from speculative.rows import environment
from speculative.sampling import Sampling
from speculative.studies import audit
from speculative.studies.power import powers
from speculative.studies.samples import read
from speculative.tasks.prompts import load_prompts

ROOT = pathlib.Path(__file__).parents[2]
NOISY = "noisy copy"  # The draft that is the target with noise.
PLANTED = 0.9  # Factor of the temperature in runs with a planted fault.
SETTINGS: dict[str, dict[str, float]] = {
    "T = 1": {},
    "T = 0.7": {"temperature": 0.7},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20": {"top_k": 20},
    "min-p 0.1": {"min_p": 0.1},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, its prompts and the number of samples drawn for each of them."""

    target: str  # A bundled model, or the name of a folder from the command line.
    draft: str  # A name like `target`, or `NOISY`.
    kind: str  # "decoder" or "encoder-decoder".
    task: str  # Its first texts are the prompts.
    prompts: int
    samples: int
    settings: tuple[str, ...]
    ways: tuple[str, ...] = ()  # Empty for all ways except the special ones below.
    max_length: int = 16

    def audited_with(self, way: str) -> str:
        """The draft whose agreement with a way's samples the audit tests."""
        if way in COPYING:
            return "copy"
        # A draft with another tokenizer has no q for the target's tokens.
        return "uniform" if way == OTHER_TOKENIZER else self.draft


COPYING = "copy", "n-gram", "prompt lookup"  # Ways whose guesses repeat earlier tokens.
# Not for every target: a draft with another tokenizer, and layers of the target that guess.
OTHER_TOKENIZER, EARLY_EXIT = "universal assisted", "early exit"
CASES = (
    Case("debian_lm", "debian_lm_draft", "decoder", "debian_lm", 16, 16, tuple(SETTINGS)),
    Case("debian_target", NOISY, "encoder-decoder", "debian_ende", 16, 16, ("T = 1", "top-p 0.9")),
    Case("smollm2", NOISY, "decoder", "questions", 8, 16, ("T = 1", "top-p 0.9")),
    Case("smollm2", NOISY, "decoder", "questions", 8, 16, ("T = 1",), (EARLY_EXIT,)),
    Case(
        "smollm2", "debian_lm_draft", "decoder", "questions", 8, 64, ("T = 1",), (OTHER_TOKENIZER,)
    ),
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case with its models in folders and its prompts, as tokens, in a file."""

    case: Case
    target: pathlib.Path
    draft: pathlib.Path
    prompts: pathlib.Path
    pairs: dict[str, Pair]  # The target with each draft of `Case.audited_with`.


def noisy(folder: pathlib.Path, new: pathlib.Path) -> None:
    """Writes a copy of a folder whose matrices are multiplied by noise: a draft that often errs."""
    rng = np.random.default_rng(0)
    new.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (new / file.name).write_bytes(file.read_bytes())
            continue
        tensors = {
            name: (x * (1 + rng.normal(0, 0.15, x.shape))).astype(x.dtype) if x.ndim == 2 else x
            for name, x in load_file(file).items()
        }
        save_file(tensors, new / file.name, metadata={"format": "pt"})


def prepared(case: Case, folders: dict[str, str], scratch: pathlib.Path) -> Prepared:
    """Writes a case's folders and prompts."""

    def folder(name: str) -> pathlib.Path:
        if name in folders:
            return pathlib.Path(folders[name])
        made = scratch / name
        if not made.exists():
            checkpoints.convert(name, made, "huggingface")
        return made

    target = folder(case.target)
    draft = scratch / f"{case.target}_noisy" if case.draft == NOISY else folder(case.draft)
    if not draft.exists():
        noisy(target, draft)
    names = {"copy", *map(case.audited_with, case.ways or ["plain"])}
    places = {name: str(draft) if name == case.draft else name for name in names}
    pairs = {name: loading.load(str(target), place) for name, place in places.items()}
    pair = pairs["copy"]
    texts: list[Any] = []
    for one in load_prompts(case.task):
        if one.messages and len(one.messages) == 1:
            texts.append(pair.rendered(one.messages))
        elif not one.messages:
            texts.append(one.source)
    encode = pair.vocabulary.prompt if pair.target.decoder_only else pair.vocabulary.encode
    lines = [json.dumps({"prompt_tokens": encode(text).tolist()}) for text in texts[: case.prompts]]
    file = scratch / f"{case.target}_prompts.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines))
    return Prepared(case, target, draft, file, pairs)


def listed(program: str, python: str) -> dict[str, Any]:
    """A program's version and its ways of sampling, from its adapter."""
    return json.loads(_run(python, program, "--list").splitlines()[-1])


def _run(python: str, program: str, *options: str) -> str:
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, "-m", f"benchmarks.verdicts.{program}_", *options],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | own,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise RuntimeError(f"{program}'s adapter ended with code {done.returncode}: {last}")
    return done.stdout


def judged(
    ready: Prepared, program: str, python: str, way: str, setting: str, planted: bool, gamma: int,
    with_power: bool, file: pathlib.Path,
) -> dict[str, Any]:  # fmt: skip
    """Draws samples, audits them, and returns the fields of a verdict."""
    case, asked = ready.case, {"temperature": 1.0} | SETTINGS[setting]
    sampling = Sampling(**asked)  # pyright: ignore[reportArgumentType]
    given = asked | {"temperature": asked["temperature"] * (PLANTED if planted else 1)}
    options = {
        "way": way, "target": ready.target, "draft": ready.draft, "prompts": ready.prompts,
        "output": file, "samples": case.samples, "max_length": case.max_length, "gamma": gamma,
        "seed": 1, **given,
    }  # fmt: skip
    _run(python, program, *(f"--{name}={value}" for name, value in options.items()))
    draft = case.audited_with(way)
    pair = ready.pairs[draft]
    vocabulary = pair.vocabulary
    config = Decoding(vocabulary.size, sampling, gamma, case.max_length, vocabulary.eos_ids)
    samples = read(file, vocabulary.encode, config)
    found = audit.audit(pair, samples, sampling, FALSE_ALARM)
    fields = {
        "draft": draft, "texts": found.texts, "prompts": found.prompts, "tokens": found.tokens,
        "passed": found.passed, "impossible": len(found.impossible), "edges": found.edges,
        "p_values": {test.name: float(f"{test.p_value:.3g}") for test in found.tests},
    }  # fmt: skip
    if with_power and found.passed:
        told = powers(pair, samples, found, config)
        fields["power"] = {one.fault: float(f"{one.power:.3g}") for one in told}
    return fields


def asked_for(case: Case, ways: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """A program's ways on a case, with each setting it supports, and with the planted fault."""
    usual = ["top_k", "top_p", "min_p"]
    for way, about in ways.items():
        if case.kind not in about.get("kinds", [case.kind]):
            continue
        if way not in case.ways if case.ways else way in (OTHER_TOKENIZER, EARLY_EXIT):
            continue
        for setting in case.settings:
            needs = set(SETTINGS[setting]) - {"temperature"}
            if needs <= set(about.get("settings", usual)):
                yield way, setting, False
        yield way, case.settings[0], True


def fails(verdicts: Sequence[dict[str, Any]], one: dict[str, Any]) -> bool:
    """Whether a verdict's way fails without a fault: its failure with one then means nothing."""
    names = "target", "program", "version", "way", "setting"
    same = {name: one[name] for name in names} | {"planted": False}
    return not all(x.get("passed") for x in verdicts if same.items() <= x.items())


def table(verdicts: Sequence[dict[str, Any]]) -> str:
    """All verdicts in Markdown, one line per way and target."""
    columns = [*SETTINGS, "planted fault"]
    lines = [
        f"| target | program | way | texts | {' | '.join(columns)} |",
        f"| :-- | :-- | :-- | --: | {' | '.join([':--'] * len(columns))} |",
    ]
    rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for one in verdicts:
        key = one["target"], f"{one['program']} {one['version']}", one["way"]
        column = columns[-1] if one["planted"] else one["setting"]
        rows.setdefault(key, {})[column] = one

    def cell(column: str, one: dict[str, Any] | None) -> str:
        if one is None or (one["planted"] and fails(verdicts, one)):
            return ""
        if "error" in one:
            return "could not be run"
        if column == columns[-1]:
            return "missed" if one["passed"] else "found"
        least = min(one["p_values"].values(), default=0.0)
        said = f"p = {least:.2g}" if least else "p < 1e-300"
        said = f"{one['impossible']} impossible" if one["impossible"] else said
        return f"passed, {said}" if one["passed"] else f"**failed**, {said}"

    for key, found in sorted(rows.items()):
        texts = max(one.get("texts", 0) for one in found.values())
        cells = [cell(column, found.get(column)) for column in columns]
        lines.append(f"| {' | '.join(f'`{key[0]}`' if i == 0 else x for i, x in enumerate(key))}"
                     f" | {texts:,} | {' | '.join(cells)} |")  # fmt: skip
    return "\n".join(lines)


def power_table(verdicts: Sequence[dict[str, Any]]) -> str:
    """The probability with which an audit finds a fault in these texts, in Markdown."""
    shown = [one for one in verdicts if "power" in one]
    faults = list(dict.fromkeys(fault for one in shown for fault in one["power"]))
    rows = []
    for one in shown:
        found = (one["power"].get(fault) for fault in faults)
        cells = ["" if power is None else f"{power:.2f}" for power in found]
        name = f"`{one['target']}`, {one['draft']}, {one['setting']}, {one['texts']:,}"
        rows.append([name, *cells])
    return pages.markdown(["target, draft, setting, texts", *faults], rows)


def _named(texts: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output", default="results/verdicts.jsonl", type=pathlib.Path)
    add("--programs", nargs="+", default=[f"speculative={sys.executable}"], metavar="NAME=PYTHON")
    add("--folders", nargs="+", default=[], metavar="NAME=FOLDER", help="such as smollm2=...")
    add("--targets", nargs="+", default=[case.target for case in CASES])
    add("--only", nargs="+", default=None, metavar="WAY", help="repeat the verdicts of these")
    add("--gamma", type=int, default=4)
    add("--power", action="store_true", help="also simulate the power of the audits")
    add("--table", action="store_true", help="only write the table of docs/verdicts.md")
    options = parser.parse_args(arguments)
    kept = []
    if options.output.is_file():
        kept = [json.loads(line) for line in options.output.read_text().splitlines()]
    if options.table:
        if not kept:
            parser.error(f"--output: there are no verdicts in {options.output}.")
        pages.fill(ROOT / "docs" / "verdicts.md", {
            "verdicts": lambda: table(kept), "power": lambda: power_table(kept),
        })  # fmt: skip
        return
    folders, programs = _named(options.folders), _named(options.programs)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = pathlib.Path(temporary)
        for case in CASES:
            known = case.target in checkpoints.SHIPPED or case.target in folders
            if case.target not in options.targets or not known:
                continue
            ready = prepared(case, folders, scratch)
            for program, python in programs.items():
                about = listed(program, python)
                for way, setting, planted in asked_for(case, about["ways"]):
                    name = {"target": case.target, "program": program, "version": about["version"]}
                    name |= {"way": way, "setting": setting, "planted": planted}
                    same = [x for x in kept if name.items() <= x.items()]
                    if way not in options.only if options.only else same:
                        continue
                    if planted and fails(kept, name):
                        continue
                    draft = case.audited_with(way)
                    alike = {"target": case.target, "setting": setting, "draft": draft}
                    powered = any("power" in x for x in kept if alike.items() <= x.items())
                    with_power = options.power and not planted and not powered
                    given = ready, program, python, way, setting, planted, options.gamma
                    try:
                        found = judged(*given, with_power, scratch / "samples.jsonl")
                    except RuntimeError as error:
                        found = {"error": str(error)}
                    found |= environment.here()
                    today = datetime.date.today().isoformat()
                    kept = [x for x in kept if x not in same] + [name | {"date": today} | found]
                    lines = [json.dumps(x, separators=(",", ":")) for x in kept]
                    disk.write(options.output, "".join(f"{line}\n" for line in lines))
                    print(kept[-1], flush=True)
    print(f"Written: {options.output}, {len(kept)} verdicts.")


if __name__ == "__main__":
    main()
