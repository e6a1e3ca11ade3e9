"""Times Hugging Face transformers with random weights, as `speculative bench` times ours.

    python -m benchmarks.time_transformers --target=t5_1_1_xxl --draft=t5_1_1_small --output=a.json
    python -m benchmarks.time_transformers --target=smollm2_135m --draft=none --output=b.json

Random models never agree: an assisted step accepts no guess, and costs as much as any other.
"""
# pyright: reportMissingImports=false

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, T5ForConditionalGeneration

from benchmarks.peers.huggingface import quieten
from benchmarks.verdicts.transformers_ import fix_guesses
from speculative.models import SIZES, named, names_of


def made(size: str) -> Any:
    """A model of a named size, T5 or decoder-only, with random weights."""
    config = named(size)
    settings = names_of(config).settings(config, "")
    kind = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if not config.encoder_layers:
        return AutoModelForCausalLM.from_config(kind).eval()
    kind.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(kind).eval()
    # With logits tied to the initial embedding it would repeat its input.
    model.lm_head = torch.nn.Linear(kind.d_model, kind.vocab_size, bias=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    shown: dict[str, Any] = {"metavar": "SIZE", "help": "(%(default)s)"}
    add("--target", default="t5_1_1_base", choices=list(SIZES), **shown)
    add("--draft", default="t5_1_1_small", choices=[*SIZES, "none"], **shown)
    add("--dtype", default="bfloat16", help="(%(default)s)")
    add("--gamma", type=int, default=7, help="guesses per step (%(default)s)")
    add("--source_length", type=int, default=128, help="(%(default)s)")
    add("--length", type=int, default=64, help="tokens of an output (%(default)s)")
    add("--rounds", type=int, default=3, help="(%(default)s)")
    add("--output", required=True, metavar="FILE", help="JSON")
    options = parser.parse_args()
    quieten()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    target = made(options.target)
    ways: dict[str, dict[str, Any]] = {"alone": {}}
    if options.draft != "none":
        draft = made(options.draft)
        fix_guesses(draft, options.gamma)
        ways["assisted"] = {"assistant_model": draft}
    source = torch.randint(2, 32000, (1, options.source_length))
    passes: list[Any] = []
    body = target.decoder if target.config.is_encoder_decoder else target.base_model
    body.register_forward_hook(lambda *given: passes.append(given[0]))

    def run(length: int, **given: Any) -> tuple[float, int]:
        """Seconds for an output, and the target's passes."""
        passes.clear()
        began = time.perf_counter()
        given |= {"min_new_tokens": length, "max_new_tokens": length}
        # Reading the tokens waits for the device.
        target.generate(source, num_beams=1, do_sample=False, **given).tolist()
        return time.perf_counter() - began, len(passes)

    record: dict[str, Any] = vars(options) | {"torch": torch.__version__}
    for way, extra in ways.items():
        run(4, **extra)
        ms, calls = [], 0
        for _ in range(options.rounds):
            (first, one), (whole, calls) = run(1, **extra), run(options.length, **extra)
            ms.append(1e3 * (whole - first) / (calls - one))
        record[f"ms_{way}_step"] = statistics.median(ms)
        record[f"tokens_{way}_step"] = options.length / calls
    pathlib.Path(options.output).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{name}: {value}" for name, value in record.items()))


if __name__ == "__main__":
    main()
