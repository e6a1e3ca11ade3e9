"""Draws texts with this package, in every way in which it samples."""

import json
from typing import Any

import jax
import numpy as np

import speculative
from benchmarks.verdicts.adapter import command_line
from speculative import grouping
from speculative.decoding import Decoding, rules
from speculative.rows import environment
from speculative.sampling import Sampling

NAMES = "autoregressive", "token", "block", "coupled", "coupled, tree of 12", "copy"
WAYS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
BATCH = 64


def main() -> None:
    arguments = command_line(__doc__).parse_args()
    if arguments.list:
        version = environment.here()["commit"]
        print(json.dumps({"version": version, "ways": WAYS}))
        return
    pair = speculative.load(
        arguments.target, "copy" if arguments.way == "copy" else arguments.draft
    )
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    name, _, tree = arguments.way.partition(", tree of ")
    rule = rules.select(name if name in ("block", "coupled") else "token")
    gamma = 0 if name == "autoregressive" else arguments.gamma
    vocabulary = pair.vocabulary
    config = Decoding(
        vocabulary.size, sampling, gamma, arguments.max_length, vocabulary.eos_ids,
        rule if gamma else rule.alone, tree=int(tree or 0),
    )  # fmt: skip
    with open(arguments.prompts) as file, open(arguments.output, "w") as lines:
        for number, line in enumerate(file):
            source = json.loads(line)["prompt_tokens"]
            width = grouping.padded(len(source))
            for first in range(0, arguments.samples, BATCH):
                count = min(BATCH, arguments.samples - first)
                rows = grouping.filled([source] * count, width, pair.target.pad_id)
                examples = number * arguments.samples + first + np.arange(count)
                output = pair.run(
                    jax.device_put(rows), config.draws(arguments.seed, examples), config
                )
                for result in pair.results(output):
                    sample = {"prompt_tokens": source, "tokens": result.tokens}
                    lines.write(json.dumps(sample) + "\n")


if __name__ == "__main__":
    main()
