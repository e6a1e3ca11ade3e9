"""Draws texts from OpenVINO GenAI: `ContinuousBatchingPipeline`, on token ids.

Run it with an interpreter that has openvino-genai, and optimum-intel for what is not converted; it
needs nothing else of this repository. The program takes a draft only with a tokenizer that equals
the target's, so all folders are given one of the same make: its words are the tokens' numbers.
"""
# pyright: reportMissingImports=false

import argparse
import importlib.metadata
import json
import os
import pathlib
from typing import Any

import numpy as np

from benchmarks.verdicts.adapter import command_line

SAME = {"kinds": ["decoder"], "settings": ["top_k", "top_p", "min_p", "repetition_penalty"]}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False} | SAME,
    "draft model": {"speculative": True, "draft": True} | SAME,
    # The draft stops by itself when it is unsure of a guess.
    "draft model, own gamma": {"speculative": True, "draft": True} | SAME,
    "prompt lookup": {"speculative": True} | SAME,
}
CONFIDENCE, NGRAM = 0.4, 3  # As in the program's documentation and samples.
BATCH = 16  # Requests that are decoded together; each has random numbers of its own.
# Keys and values are kept in eight bits otherwise.
DEVICE: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
DEVICE |= {"INFERENCE_NUM_THREADS": 1}


def converted(folder: pathlib.Path) -> str:
    """The program's form of a folder, in float32, which is made if it is not there."""
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
    # Neither its tokenizer nor settings of sampling that it may come with.
    for extra in (*part.glob("*token*"), part / "generation_config.json"):
        extra.unlink(missing_ok=True)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
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
    found: dict[str, Any] = {"do_sample": True, "max_new_tokens": given.max_length}
    found |= {name: getattr(given, name) for name in ("temperature", *SAME["settings"])}
    if not given.top_k:
        del found["top_k"]  # All tokens, which 0 is not.
    ends = json.loads((given.target / "config.json").read_text()).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    found |= {"eos_token_id": ends[0], "stop_token_ids": set(ends)}
    if given.way == "draft model, own gamma":
        return found | {"assistant_confidence_threshold": CONFIDENCE}
    if given.way == "prompt lookup":
        found |= {"max_ngram_size": NGRAM}
    return found if given.way == "plain" else found | {"num_assistant_tokens": given.gamma}


def main() -> None:
    """Runs the command line."""
    given = command_line(__doc__, pathlib.Path).parse_args()
    if given.list:
        version = importlib.metadata.version("openvino-genai")
        print(json.dumps({"program": "openvino_genai", "version": version, "ways": WAYS}))
        return
    folder, device = converted(given.target), dict(DEVICE)
    draft = converted(given.draft) if WAYS[given.way].get("draft") else None
    import openvino
    import openvino_genai

    if draft:
        device["draft_model"] = openvino_genai.draft_model(draft, "CPU")
    elif given.way == "prompt lookup":
        device["prompt_lookup"] = True
    plan = openvino_genai.SchedulerConfig()
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, plan, "CPU", device)
    settings = settings_of(given)
    with open(given.output, "w") as output:
        for number, line in enumerate(given.prompts.read_text().splitlines()):
            prompt = json.loads(line)["prompt_tokens"]
            fed = openvino.Tensor(np.array([prompt], np.int64))
            seeds = np.random.SeedSequence([given.seed, number]).generate_state(given.samples)
            for some in np.array_split(seeds, -(-len(seeds) // BATCH)):
                asked = [openvino_genai.GenerationConfig(**settings, rng_seed=int(s)) for s in some]
                for found in pipeline.generate([fed] * len(asked), asked):
                    text = found.m_generation_ids[0][: given.max_length]
                    print(json.dumps({"prompt_tokens": prompt, "tokens": text}), file=output)


if __name__ == "__main__":
    main()
