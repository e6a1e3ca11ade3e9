"""Measures all that docs/results.md shows, on this machine, and writes its tables from the records.

    make results        (python -m benchmarks.results)

It takes less than two hours on two cores; leave the machine idle meanwhile. Finished parts are kept
under results/<commit>/: rerun to resume. At the end the records are copied to docs/records and the
page's tables are made from them; `--tables` only does that last step. Other programs are compared
if they are installed, and a chat model if its folder is given.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import pages
from benchmarks.compare_peers import MEASURE, MODELS, OURS, PROGRAMS, Difference
from benchmarks.sampled_texts import ALONE
from scripts import pictures
from speculative.rows import environment

ROOT = pathlib.Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "results.md", ROOT / "docs" / "records"
TASKS = "debian_ende", "debian_synopsis", "debian_lm"
METRICS = {"bleu": "BLEU", "rougeL": "ROUGE-L"}
Record = dict[str, Any]


class Part(NamedTuple):
    """A command and the files of its output folder that are kept, in a folder of docs/records."""

    command: tuple[str, ...]
    kept: tuple[str, ...]
    folder: str


CLI, EACH = "speculative.cli", "records.jsonl"
SHIPPED = "--checkpoints=demo", "--limit=24"
PARTS = {
    "demo": Part((CLI, "demo"), (EACH, "report.md"), "demo"),
    "drafts": Part((CLI, "table", "3", *SHIPPED), (EACH,), "table3"),
    "rules": Part((CLI, "table", "3", *SHIPPED, "--verification=token,block"), (EACH,), "rules"),
    "lenience": Part((CLI, "table", "5", *SHIPPED), (EACH,), "table5"),
    "sampled": Part(("benchmarks.sampled_texts",), ("sampled.json",), "sampled"),
    "trees": Part(("benchmarks.one_text", "--rows=debian_draft"), ("one_text.json",), "one_text"),
    "peers": Part(("benchmarks.compare_peers",), (), "peers"),
}
"""All measurements, by name; the part `peers` writes one file per model."""


def interval(record: Record, name: str, digits: int = 2) -> str:
    """A field with the two that bound it."""
    bounds = [f"{record[f'{name}_{side}']:.{digits}f}" for side in ("low", "high")]
    return f"{record[name]:.{digits}f} ({'–'.join(bounds)})"


def lines(folder: str) -> list[Record]:
    """The records of a folder of docs/records."""
    return [json.loads(line) for line in (RECORDS / folder / EACH).read_text().splitlines()]


def whole(folder: str, file: str) -> Record:
    """A record that is one file."""
    return json.loads((RECORDS / folder / file).read_text())


def measured_on(*records: Record) -> str:
    """The machines, versions and commits of records, a line above their table."""
    names = {
        "": [one["device"] for one in records],
        "JAX ": [one.get("jax_version") or one["versions"]["jax"] for one in records],
        "commit ": [f"`{one['commit']}`" for one in records],
    }
    days = sorted({one["started_at"][:10] for one in records if "started_at" in one})
    parts = [name + ", ".join(dict.fromkeys(values)) for name, values in names.items()]
    return "; ".join(parts + days[:1]) + ".\n\n"


def shipped_pair() -> str:
    """Tables 2 and 4."""
    found = lines("demo")
    rows = [
        [
            f"`{one['task']}`", f"{one['temperature']:g}", str(one["gamma"]),
            f"{one['alpha']:.2f}", f"{one['c']:.2f}", f"{one['verify_cost']:.2f}",
            f"{one['tokens_per_call']:.2f}", f"{one['speedup_expected']:.2f}",
            f"{one['speedup_predicted']:.2f}", interval(one, "speedup"),
            "–" if "outputs_identical" not in one
            else f"{one['outputs_identical']} of {one['num_examples']}",
        ]
        for one in found
    ]  # fmt: skip
    heads = ["task", "T", "γ", "α", "c", "v", "tokens per call", "expected (Theorem 3.8)",
             "predicted", "measured", "equal outputs"]  # fmt: skip
    return measured_on(*found) + pages.markdown(heads, rows)


def _drafts(cell: Callable[[Record], str], temperatures: Sequence[int] = (0, 1)) -> str:
    """A row per draft of Table 3, named by the last word of the experiment, a column per task."""
    found = lines("table3")
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for one in found:
        kind = one["experiment"].removesuffix(f"_t{one['temperature']:g}").rpartition("_")[2]
        row = cells.setdefault(KINDS.get(kind, f"`{kind}`"), {})
        row[one["task"], int(one["temperature"])] = cell(one)
    columns = [(task, t) for task in TASKS for t in temperatures]
    heads = ["draft", *(f"`{task}` T = {t}" for task, t in columns)]
    rows = [[kind, *(row[column] for column in columns)] for kind, row in cells.items()]
    order = [f"`{name}`" for name in ("unigram", "bigram", "trigram", "copy", "suffix")]
    rows.sort(key=lambda row: [*order, *KINDS.values()].index(row[0]))
    return measured_on(*found) + pages.markdown(heads, rows)


KINDS = {
    "small": "small Transformer",
    "hidden": "hidden-state draft",
    "mixed": "hidden-state draft + `copy`",
}


def drafts() -> str:
    """Table 3."""
    fields = "alpha", "tokens_per_call", "speedup"
    return _drafts(lambda one: " / ".join(f"{one[name]:.2f}" for name in fields))


def weights() -> str:
    """The memory that drafts take."""
    return _drafts(lambda one: f"{one['draft_bytes'] / 1e6:.1f}", (0,)).replace(" T = 0", ", MB")


def positions() -> str:
    """Guesses accepted by their position in a step."""

    def cell(one: Record) -> str:
        pairs = zip(one["accepted_by_position"], one["tested_by_position"], strict=True)
        return " ".join(f"{100 * accepted / tested:.0f}" for accepted, tested in pairs if tested)

    return _drafts(cell)


def rules() -> str:
    """Block verification beside token verification."""
    found = {one["experiment"]: one for one in lines("rules")}
    rows = []
    for name, block in found.items():
        if block["verification"] != "block":
            continue
        token = found[name.removesuffix("_block")]
        rows.append([
            f"`{block['task']}`", f"`{block['draft']}`", str(block["gamma"]),
            interval(block, "gain_over_token", 3), f"{token['tokens_per_call']:.2f}",
            f"{block['tokens_per_call']:.2f}", interval(token, "speedup"),
            interval(block, "speedup"),
        ])  # fmt: skip
    heads = ["task", "draft", "γ", "gain", "tokens per call, `token`", "`block`",
             "speed-up, `token`", "`block`"]  # fmt: skip
    rows.sort(key=lambda row: TASKS.index(row[0].strip("`")))
    return measured_on(*found.values()) + pages.markdown(heads, rows, 2)


def lenience() -> str:
    """Table 5."""
    found = lines("table5")
    rows = [
        [
            f"{one['temperature']:g}", f"{one['lenience']:g}", interval(one, "alpha"),
            interval(one, "alpha_accepted"), f"{one['speedup']:.2f}",
            f"{one['paper_alpha']:.2f}", f"{one['paper_speedup']:.1f}",
        ]
        for one in found
    ]  # fmt: skip
    heads = ["T", "l", "α, formula", "α, accepted", "measured", "α in the paper",
             "speed-up in the paper"]  # fmt: skip
    return measured_on(*found) + pages.markdown(heads, rows, 0)


def sampled() -> str:
    """Scores and audits of sampled texts."""
    found = whole("sampled", "sampled.json")
    rows = []
    for one in found["rows"]:
        audited, score, above = one["audit"], "–", "–"
        if "score" in one:
            middle, low, high = one["above_alone"]
            score = f"{METRICS[one['metric']]} {one['score']:.1f}"
            above = "–" if one["way"] == ALONE else f"{middle:+.2f} ({low:.2f} to {high:.2f})"
        task = next(task for task in TASKS if task in one["row"])
        draft = f", `{one['draft']}`" if "draft" in one else ""
        least = min(test["p_value"] for test in audited["tests"])
        rows.append([
            f"`{task}`{draft}", one["way"], f"{audited['texts']:,}",
            f"{one['tokens_per_call']:.2f}", score, above, f"{least:.2f}",
            "passed" if audited["passed"] else "**failed**",
        ])  # fmt: skip
    heads = ["task, draft", "way", "texts", "tokens per call", "score", "above the target's",
             "least p", "audit"]  # fmt: skip
    return measured_on(found) + pages.markdown(heads, rows, 2)


def trees() -> str:
    """Tokens per target call with chains and trees, and the number of texts that differ."""
    found = whole("one_text", "one_text.json")
    cells: dict[tuple[str, str, float], dict[str, float]] = {}
    for one in found["rows"]:
        if one["gamma"] != 7 or one["batch_size"] != 1:
            continue
        row = cells.setdefault((one["task"], one["draft"], one["temperature"]), {})
        row |= one["tokens_per_call_of_chains"]
        row[str(one["tree"])] = one["tokens_per_call"]
    rows = []
    for (task, draft, temperature), row in cells.items():
        columns = [f"{row[name]:.2f}" for name in ("token", "block", "0", "7", "15", "63")]
        gain = f"{row['63'] / row['block']:.2f}"
        rows.append([f"`{task}`", f"`{draft}`", f"{temperature:g}", *columns, gain])
    heads = ["task", "draft", "T", "chain, `token`", "`block`", "`coupled`", "tree of 7", "15",
             "63", "63 over `block`"]  # fmt: skip
    texts, ways = sum(one["texts"] for one in found["rows"]), len(found["rows"])
    others = sum(len(one["others"]) for one in found["rows"])
    note = f"""\
With `coupled`, {others} of {texts:,} texts differ from the target's own, over {ways} combinations
of task, draft, γ, temperature, tree and batch size.

"""
    return measured_on(found) + note + pages.markdown(heads, rows, 2)


INT8 = "int8", "Q8_0", "Q4_0"  # Words of ways that hold the target in integers.


def compared_models() -> list[Record]:
    """The records of other programs, one per model."""
    return [json.loads(file.read_text()) for file in sorted((RECORDS / "peers").glob("*.json"))]


def peers() -> str:
    """Milliseconds a token of each program and, in brackets, over ours of the same kind."""
    found = compared_models()
    cells: dict[str, dict[str, str]] = {}
    for model in found:
        best: dict[str, Record] = {}  # With the better number of threads.
        for one in model["ways"]:
            parts = [part for part in one["way"].split(", ") if "thread" not in part]
            name = f"{one['program']}, {', '.join(parts)}"
            if name not in best or one["ms_per_token"] < best[name]["ms_per_token"]:
                best[name] = one
        for name, one in best.items():
            drafted = any(word in name for word in ("assisted", "lookup", "draft"))
            ours = "speculative" if drafted else "autoregressive"
            ours += ", int8" * any(word in name for word in INT8)
            over = f" ({one['over'][ours]:.2g})" if one["program"] != OURS else ""
            cells.setdefault(name, {})[model["target"]] = f"{one['ms_per_token']:.2f}{over}"
    names = [model["target"] for model in found]
    heads = ["program, way", *(f"`{name}`" for name in names)]
    order = sorted(cells, key=lambda name: list(PROGRAMS).index(name.partition(",")[0]))
    rows = [[name, *(cells[name].get(model, "") for model in names)] for name in order]
    same = []
    for model in found:
        ways = [x for x in model["ways"] if not any(word in x["way"] for word in INT8)]
        listed = [(x["program"], x["differences"]) for x in ways if x["program"] != MEASURE]
        if model["random"] or any(differences is None for _, differences in listed):
            continue  # Random weights magnify rounding: their tokens cannot be compared.
        others = [
            program
            for program, differences in listed
            if not all(Difference(**one).near_tie for one in differences)
        ]
        except_for = f" (all but {', '.join(dict.fromkeys(others))}'s)" if others else ""
        equal = f"{len(listed) - len(others)} of {len(listed)}"
        same.append(f"{equal} for `{model['target']}`{except_for}")
    drafts = [f"`{model['draft']}` of `{model['target']}`" for model in found if "draft" in model]
    note = f"""\
Drafts: {", ".join(drafts)}.

Ways in float32 whose outputs are those of transformers, near ties excused: {", ".join(same)}. Each
number of threads counts as a way.

"""
    return measured_on(*found) + note + pages.markdown(heads, rows)


def prefill() -> str:
    """Milliseconds of a prefill by program, model and tokens of the source or prompt."""
    found = compared_models()
    columns = [
        (model["target"], tokens)
        for model in found
        for tokens in dict.fromkeys(one["source_tokens"] for one in model["prefill"])
    ]
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for model in found:
        for one in model["prefill"]:
            ms = f"{1e3 * statistics.median(one['seconds']):.0f}"
            cells.setdefault(one["program"], {})[model["target"], one["source_tokens"]] = ms
    heads = ["program", *(f"`{pathlib.Path(name).name}` {tokens:,}" for name, tokens in columns)]
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()]
    return measured_on(*found) + pages.markdown(heads, rows)


TABLES: dict[str, Callable[[], str]] = {
    "shipped_pair": shipped_pair, "sampled": sampled, "drafts": drafts, "weights": weights,
    "positions": positions, "rules": rules, "trees": trees, "lenience": lenience, "peers": peers,
    "prefill": prefill,
}  # fmt: skip


def of_sampled_guesses(records: Sequence[Record]) -> list[Record]:
    """Where rules are compared, the rows of drafts whose guesses they verify differently.

    Single guesses and certain ones are verified alike by both rules.
    """
    alike = {
        one["experiment"].removesuffix("_block")
        for one in records
        if (one.get("gain_over_token") or 2) < 1 + 1e-6
    }
    return [one for one in records if one["experiment"].removesuffix("_block") not in alike]


UNKEPT = "gin", "fingerprints"  # Of use where a run is resumed.


def short(record: Record) -> str:
    """A record as a line for the repository: five digits, no empty fields, no `UNKEPT` ones."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rounded(x) for name, x in value.items()}
        if isinstance(value, list):
            return [rounded(x) for x in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    kept = {
        name: x for name, x in record.items() if x not in (None, "", [], {}) and name not in UNKEPT
    }
    return json.dumps(rounded(kept), ensure_ascii=False, separators=(",", ":")) + "\n"


def measure(parts: Sequence[str], folder: pathlib.Path, chat: Sequence[str]) -> None:
    """Runs the commands of parts that are not done, and copies their records."""
    for name in parts:
        output = folder / name
        command = [sys.executable, "-m", *PARTS[name].command, f"--output_dir={output}"]
        steps = {name: command}
        if name == "peers":  # One model at a time, so that a stopped run keeps those it has.
            steps = {model: [*command, f"--models={model}"] for model in MODELS}
            if chat:
                # A token takes twenty times as long as the bundled models', so there are fewer.
                few = "--rounds=3", "--timed=4"
                steps[chat[0]] = [*command, f"--models={chat[0]}", f"--draft={chat[1]}", *few]
        for step, command in steps.items():
            done = output / f"done_{pathlib.Path(step).name}"
            if not done.exists():
                began = time.time()
                print(f"{name}: {' '.join(command[1:])}", flush=True)
                try:
                    code = subprocess.run(command, cwd=ROOT).returncode
                except KeyboardInterrupt:
                    raise SystemExit(f"{name} was stopped; run it again to resume.") from None
                if code:
                    raise SystemExit(f"{name} ended with code {code}; run it again to resume.")
                done.write_text(f"{time.time() - began:.0f} s\n")
            print(f"{name}: done in {done.read_text().strip()}", flush=True)
    for name in parts:
        part = PARTS[name]
        if not part.kept:  # Files of models that were not measured again would mix machines.
            shutil.rmtree(RECORDS / part.folder, ignore_errors=True)
        files = part.kept or [file.name for file in (folder / name).glob("*.json")]
        for file in files:
            to = RECORDS / part.folder / file
            to.parent.mkdir(parents=True, exist_ok=True)
            text = (folder / name / file).read_text()
            if file.endswith(".json"):
                text = short(json.loads(text))
            elif file.endswith(".jsonl"):
                records = [json.loads(line) for line in text.splitlines()]
                text = "".join(map(short, of_sampled_guesses(records)))
            to.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts (all)")
    add("--chat_model", nargs=2, default=[], metavar=("FOLDER", "DRAFT"), help="for other programs")
    add("--tables", action="store_true", help="measure nothing, write the tables")
    options = parser.parse_args(arguments)
    if not options.tables:
        folder = ROOT / "results" / environment.commit()
        measure(options.only, folder, options.chat_model)
    pages.fill(PAGE, TABLES)
    pictures.table()
    pictures.trees()


if __name__ == "__main__":
    main()
