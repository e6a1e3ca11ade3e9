"""Draws texts from OpenVINO GenAI: `ContinuousBatchingPipeline`, on token ids.

Run it with an interpreter that has openvino-genai, and optimum-intel for folders not converted yet;
it needs nothing else of this repository. The program only takes a draft whose tokenizer equals the
target's, so all folders get the same kind of tokenizer, whose words are the tokens' numbers.
"""
# pyright: reportMissingImports=false

import argparse
import importlib.metadata
import json
import os
import pathlib
from typing import Any

import numpy as np

from benchmarks.verdicts.adapter import SAMPLING, command_line, end_tokens, read_config

# With its own gamma, the draft stops by itself when it is unsure of a guess.
NAMES = "plain", "draft model", "draft model, own gamma", "prompt lookup"
WAYS: dict[str, dict[str, Any]] = dict.fromkeys(NAMES, {"kinds": ["decoder"]})
CONFIDENCE, NGRAM = 0.4, 3  # As in the program's documentation and samples.
BATCH = 16  # Requests that are decoded together; each has its own random numbers.
# Keys and values are kept in eight bits otherwise.
DEVICE: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
DEVICE |= {"INFERENCE_NUM_THREADS": 1}


def converted(folder: pathlib.Path) -> str:
    """A folder in the program's own format, in float32, which is made if missing."""
    to = folder.with_name(folder.name + ".openvino")
    if to.exists():
        return str(to)
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    part = to.with_name(f"{to.name}.{os.getpid()}")
    task = "text-generation-with-past"
    main_export(str(folder), part, task=task, ov_config=OVConfig(dtype="fp32"))
    # Removes its tokenizer and any sampling settings that came with it.
    for extra in (*part.glob("*token*"), part / "generation_config.json"):
        extra.unlink(missing_ok=True)
    size = read_config(folder)["vocab_size"]
    words = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")
    encoder, decoder = convert_tokenizer(fast, with_detokenizer=True)
    save_model(encoder, part / "openvino_tokenizer.xml")
    save_model(decoder, part / "openvino_detokenizer.xml")
    part.rename(to)
    return str(to)


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """The settings of a request, all but its seed."""
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": given.max_length}
    settings |= {name: getattr(given, name) for name in SAMPLING}
    if not given.top_k:
        del settings["top_k"]  # Here 0 does not mean all tokens.
    ends = end_tokens(given.target)
    settings |= {"eos_token_id": ends[0], "stop_token_ids": set(ends)}
    if given.way == "draft model, own gamma":
        return settings | {"assistant_confidence_threshold": CONFIDENCE}
    if given.way == "prompt lookup":
        settings |= {"max_ngram_size": NGRAM}
    if given.way == "plain":
        return settings
    return settings | {"num_assistant_tokens": given.gamma}


def main() -> None:
    """Runs the command line."""
    arguments = command_line(__doc__, pathlib.Path).parse_args()
    if arguments.list:
        version = importlib.metadata.version("openvino-genai")
        print(json.dumps({"version": version, "ways": WAYS}))
        return
    folder, device = converted(arguments.target), dict(DEVICE)
    draft = converted(arguments.draft) if arguments.way.startswith("draft") else None
    import openvino
    import openvino_genai

    if draft:
        device["draft_model"] = openvino_genai.draft_model(draft, "CPU")
    elif arguments.way == "prompt lookup":
        device["prompt_lookup"] = True
    plan = openvino_genai.SchedulerConfig()
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, plan, "CPU", device)
    settings = settings_of(arguments)
    with open(arguments.output, "w") as output:
        for number, line in enumerate(arguments.prompts.read_text().splitlines()):
            prompt = json.loads(line)["prompt_tokens"]
            fed = openvino.Tensor(np.array([prompt], np.int64))
            seeds = np.random.SeedSequence([arguments.seed, number]).generate_state(
                arguments.samples
            )
            for some in np.array_split(seeds, -(-len(seeds) // BATCH)):
                requests = [
                    openvino_genai.GenerationConfig(**settings, rng_seed=int(s)) for s in some
                ]
                for result in pipeline.generate([fed] * len(requests), requests):
                    text = result.m_generation_ids[0][: arguments.max_length]
                    print(json.dumps({"prompt_tokens": prompt, "tokens": text}), file=output)


if __name__ == "__main__":
    main()
