"""This program, by its own package: every way in which it samples."""

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

WAYS: dict[str, dict[str, Any]] = {
    "autoregressive": {"speculative": False},
    "token": {"speculative": True, "draft": True},
    "block": {"speculative": True, "draft": True},
    "coupled": {"speculative": True, "draft": True},
    "coupled, tree of 12": {"speculative": True, "draft": True},
    "copy": {"speculative": True},
}
BATCH = 64


def main() -> None:
    given = command_line(__doc__).parse_args()
    if given.list:
        version = environment.here()["commit"]
        print(json.dumps({"program": "speculative", "version": version, "ways": WAYS}))
        return
    pair = speculative.load(given.target, "copy" if given.way == "copy" else given.draft)
    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.min_p)
    name, _, tree = given.way.partition(", tree of ")
    rule = rules.select(name if name in ("block", "coupled") else "token")
    gamma = 0 if name == "autoregressive" else given.gamma
    vocabulary = pair.vocabulary
    config = Decoding(
        vocabulary.size, sampling, gamma, given.max_length, vocabulary.eos_ids,
        rule if gamma else rule.alone, tree=int(tree or 0),
    )  # fmt: skip
    with open(given.prompts) as file, open(given.output, "w") as lines:
        for number, line in enumerate(file):
            source = json.loads(line)["prompt_tokens"]
            width = grouping.padded(len(source))
            for first in range(0, given.samples, BATCH):
                count = min(BATCH, given.samples - first)
                rows = grouping.filled([source] * count, width, pair.target.pad_id)
                examples = number * given.samples + first + np.arange(count)
                output = pair.run(jax.device_put(rows), config.draws(given.seed, examples), config)
                for result in pair.results(output):
                    sample = {"prompt_tokens": source, "tokens": result.tokens}
                    lines.write(json.dumps(sample) + "\n")


if __name__ == "__main__":
    main()
