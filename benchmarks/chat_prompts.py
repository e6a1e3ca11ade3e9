"""Samples users' messages from a chat model itself: prompts to distil on.

    python -m benchmarks.chat_prompts --target=FOLDER --output=chats.jsonl --count=3000

The target continues, at temperature 1, the beginning of a user's turn, as rendered by its template,
and possibly a few words of a task: half of the prompts have none, the others request an edit of
code, a summary or a translation. Each line is an object with `messages`, as `distil` reads them.
"""

import argparse
import json
from typing import Any

from speculative import load
from speculative.progress import bar
from speculative.vocabulary import Rendered

BEGINNINGS = (
    *[""] * 12,
    "Summarize this text in two sentences, in its own words:\n\n",
    "Give the main points of this text:\n\n",
    "What does this text say, in one sentence?\n\n",
    "Summarize:\n\nThis package",
    "Add a docstring to this Python function:\n\n```python\ndef",
    "Explain this Python function, and show it with comments:\n\n```python\ndef",
    "Rewrite this Python function with type hints:\n\n```python\ndef",
    "Find the bug in this code, and show it again:\n\n```python\nclass",
    "Translate to German:\n\n",
    "Translate to French:\n\nThe",
    "Translate this sentence to Spanish:\n\nThis program",
    "Correct the grammar of this text:\n\n",
)
HERE = "HERE"  # Marks a message's place in a rendered chat.


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--max_length", type=int, default=192)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--quantize", default="int8-activations")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pair = load(options.target, "copy", quantize=options.quantize)
    turn, _, behind = pair.rendered([{"role": "user", "content": HERE}]).partition(HERE)
    end = behind.split("\n")[0] or "\n"  # Ends a turn.
    how: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "gamma": 0, "seed": options.seed}
    how |= {"max_length": options.max_length, "stop": (end,), "show_special": True}
    begun = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(options.count)]
    written = 0
    with open(options.output, "w", encoding="utf-8") as file, bar("prompts") as on_progress:
        for first in range(0, options.count, 8 * options.batch_size):
            on_progress("sampling", first / options.count)
            some = begun[first : first + 8 * options.batch_size]
            texts: list[str] = [Rendered(turn + words) for words in some]
            results = pair.generate(texts, example=first, batch_size=options.batch_size, **how)
            for words, one in zip(some, results, strict=True):
                message = (words + one.text).strip()
                if one.finish_reason == "stop" and len(message) > len(words) + 10:
                    line = {"messages": [{"role": "user", "content": message}]}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    written += 1
            file.flush()
    print(f"Written: {options.output}, {written:,} prompts.")


if __name__ == "__main__":
    main()
