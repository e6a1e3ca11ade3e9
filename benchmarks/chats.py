"""How much drafts gain for chats of four kinds: talk, code, summaries, translation.

    python -m benchmarks.chats --target=FOLDER --drafts copy my_draft my_draft+copy --gamma 3 5

48 prompts, 12 a kind: each is decoded alone and with each draft in turn, and each begins with
another of these, so that a slow moment of the machine meets all alike. Prints the median of what a
token takes alone over what it takes with the draft, with its 95% interval (by bootstrap over
prompts), and tokens a target call; `--json` prints records.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speculative import load
from speculative.measurement.bootstrap import interval
from speculative.tasks.prompts import load_prompts

TALK = (
    "What should I see in Rome in two days?",
    "How do I keep basil alive on a windowsill?",
    "Explain why the seasons change, to a child of ten.",
    "Give me five ideas for a birthday present for my sister.",
    "What is the difference between weather and climate?",
    "I cannot sleep well. What helps?",
    "How does a bicycle stay upright?",
    "Suggest a simple dinner with rice and eggs.",
    "What makes a good cover letter?",
    "Tell me a short story about a lighthouse.",
    "How do vaccines work?",
    "What are the rules of chess, in short?",
)
TOTAL = """\
def total(items):
    s = 0
    for x in items:
        s = s + x.price
    return s"""
LOAD = """\
def load(path):
    f = open(path)
    data = f.read()
    f.close()
    return data"""
MEAN = """\
def mean(values):
    return sum(values) / len(values)"""
FIND = """\
def find(rows, name):
    for row in rows:
        if row['name'] == name:
            return row
    return None"""
COUNT = """\
def count(words):
    found = {}
    for word in words:
        if word in found:
            found[word] = found[word] + 1
        else:
            found[word] = 1
    return found"""
FLAT = """\
def flat(lists):
    out = []
    for one in lists:
        for x in one:
            out.append(x)
    return out"""
KINDS = "talk", "code", "summary", "translation"
CODE = TOTAL, LOAD, MEAN, FIND, COUNT, FLAT
EDITS = (
    "Add a docstring and type hints to this Python function, and show the whole function:",
    "Rewrite this Python function with clearer names, and show the whole function:",
)


def prompts() -> dict[str, list[str]]:
    """Twelve prompts of each kind."""
    texts = [one.source for one in load_prompts("debian_synopsis")][:12]
    sentences = [one.source for one in load_prompts("debian_ende")][:12]
    return {
        "talk": [*TALK],
        "code": [f"{edit}\n\n```python\n{body}\n```" for edit in EDITS for body in CODE],
        "summary": [
            "Summarize this text in two sentences, in its own words:\n\n"
            + text.removeprefix("summarize: ")
            for text in texts
        ],
        "translation": [
            "Translate to German:\n\n" + text.removeprefix("translate English to German: ")
            for text in sentences
        ],
    }


def seconds(pair: Any, text: str, **how: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = pair.generate(text, **how)
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", nargs="+", default=["copy"])
    parser.add_argument("--gamma", nargs="+", type=int, default=[3, 5], help="with each draft")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", default="block")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    usual = {"temperature": options.temperature, "max_length": options.max_length, "seed": 1}
    rule = options.verification if options.temperature else "token"
    pairs = {
        draft: load(options.target, draft, quantize=options.quantize) for draft in options.drafts
    }
    ways = [(draft, gamma) for draft in options.drafts for gamma in options.gamma]
    console, records = Console(), []
    for kind, listed in prompts().items():
        if kind not in options.kinds:
            continue
        alone, found = [], {way: [] for way in ways}
        for number, question in enumerate(listed):
            any_pair = next(iter(pairs.values()))
            text = any_pair.rendered([{"role": "user", "content": question}])
            own = {"gamma": 0, **usual, "example": number}
            taken = {}
            for _ in range(2):  # The first compiles.
                order = [None, *ways]
                order = order[number % len(order) :] + order[: number % len(order)]
                for way in order:
                    pair, how = (any_pair, own) if way is None else (
                        pairs[way[0]], own | {"gamma": way[1], "verification": rule}
                    )  # fmt: skip
                    taken[way] = seconds(pair, text, **how)
            spent, result = taken[None]
            alone.append(spent / len(result.tokens))
            for way in ways:
                spent, other = taken[way]
                if not options.temperature:
                    assert other.tokens == result.tokens, (kind, number, way)
                calls = len(other.tokens) / other.target_calls
                found[way].append((spent / len(other.tokens), calls))
        for way, values in found.items():
            ratio = np.array(alone) / np.array([value for value, _ in values])
            low, high = interval(lambda i, x=ratio: float(np.median(x[i])), len(ratio))
            records.append({
                "kind": kind, "draft": way[0], "gamma": way[1], "temperature": options.temperature,
                "ms_per_token_alone": 1e3 * float(np.mean(alone)),
                "ms_per_token": 1e3 * float(np.mean([value for value, _ in values])),
                "alone_over_draft": float(np.median(ratio)), "interval": [low, high],
                "tokens_per_call": float(np.mean([calls for _, calls in values])),
            })  # fmt: skip
            if options.json:
                print(json.dumps(records[-1]), flush=True)
    if options.json:
        return
    table = Table(
        "kind", "draft", "γ", "ms alone", "ms", "alone / draft", "tokens a call", box=None
    )
    for one in records:
        low, high = one["interval"]
        table.add_row(
            one["kind"], one["draft"], str(one["gamma"]), f"{one['ms_per_token_alone']:.2f}",
            f"{one['ms_per_token']:.2f}", f"{one['alone_over_draft']:.2f} ({low:.2f}-{high:.2f})",
            f"{one['tokens_per_call']:.2f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
