"""Draws texts with Hugging Face transformers' `generate`, alone and in its speculative ways.

Run it with an interpreter that has transformers; it needs nothing else of this repository.
"""
# pyright: reportMissingImports=false

import argparse
import json
import pathlib
from typing import Any

import torch
import transformers

from benchmarks.verdicts.adapter import SAMPLING, command_line

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "assisted": {},
    # The assistant stops by itself when it is unsure of a guess.
    "assisted, own gamma": {},
    "prompt lookup": {},
    # The draft has its own tokenizer.
    "universal assisted": {"kinds": ["decoder"]},
    # The first half of the target's layers guesses, which Llama and the like support.
    "early exit": {"kinds": ["decoder"]},
}


def load(folder: str) -> Any:
    """The model of a folder, of either kind, in float32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    two = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if two else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    if two:  # This sets a cache's number of layers, otherwise the encoder's.
        model.config.num_layers = model.config.num_decoder_layers
    return model


def ways_settings(given: argparse.Namespace, target: Any) -> dict[str, Any]:
    """The arguments of `generate` for a way, in addition to the sampling settings."""
    if given.way == "plain":
        return {}
    if given.way == "prompt lookup":
        return {"prompt_lookup_num_tokens": given.gamma}
    if given.way == "early exit":
        fix_guesses(target, given.gamma)
        return {"assistant_early_exit": max(1, target.config.num_hidden_layers // 2)}
    draft = load(given.draft)
    if given.way != "assisted, own gamma":
        fix_guesses(draft, given.gamma)
    settings = {"assistant_model": draft}
    if given.way == "universal assisted":
        tokenizer = transformers.AutoTokenizer.from_pretrained
        settings["tokenizer"] = tokenizer(given.target)
        settings["assistant_tokenizer"] = tokenizer(given.draft)
    return settings


def fix_guesses(model: Any, gamma: int) -> None:
    """Makes a model guess `gamma` tokens in every step."""
    config = model.generation_config
    config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0
    config.num_assistant_tokens_schedule = "constant"


def main() -> None:
    """Runs the command line."""
    arguments = command_line(__doc__).parse_args()
    if arguments.list:
        version = transformers.__version__
        print(json.dumps({"version": version, "ways": WAYS}))
        return
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    target = load(arguments.target)
    special = {
        f"{part}_token_id": getattr(target.generation_config, f"{part}_token_id")
        for part in ("bos", "eos", "pad", "decoder_start")
    }
    ends = special["eos_token_id"]
    ends = set(ends) if isinstance(ends, list) else {ends}
    if special["pad_token_id"] is None:
        special["pad_token_id"] = min(ends)
    # A folder may come with sampling settings; only its special tokens are kept.
    target.generation_config = transformers.GenerationConfig(**special)
    settings = {"do_sample": True, "num_beams": 1, "max_new_tokens": arguments.max_length}
    settings |= {name: getattr(arguments, name) for name in SAMPLING}
    settings |= ways_settings(arguments, target)
    rows = 256 if arguments.way == "plain" else 1  # Guesses serve one text at a time.
    batches = [min(rows, arguments.samples - i) for i in range(0, arguments.samples, rows)]
    with open(arguments.output, "w") as output:
        for line in pathlib.Path(arguments.prompts).read_text().splitlines():
            prompt = json.loads(line)["prompt_tokens"]
            skipped = 1 if target.config.is_encoder_decoder else len(prompt)
            for rows in batches:
                fed = torch.tensor([prompt] * rows)
                for row in target.generate(fed, attention_mask=torch.ones_like(fed), **settings):
                    text = row[skipped:].tolist()[: arguments.max_length]
                    stop = next((i + 1 for i, token in enumerate(text) if token in ends), None)
                    print(json.dumps({"prompt_tokens": prompt, "tokens": text[:stop]}), file=output)


if __name__ == "__main__":
    main()
