"""Makes golden files for tests from small versions of transformers' current models.

    PYTHONPATH=. python scripts/make_decoder_golden.py [NAME ...]

This needs torch and transformers (the extra `peers`). It writes `tests/data/decoders/NAME.npz`: the
`config.json`, texts, some of their logits, and greedy continuations of prompts. Weights are
`tests.by_name.weights`. Encoder-decoders go to `encoder_decoders`, with sources instead of prompts.
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from tests.by_name import weights

FOLDER = pathlib.Path(__file__).parents[1] / "tests" / "data" / "decoders"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
# Every feature of a model type is on, and shows within the texts' few positions.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA_3},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama_linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", "rope_theta": 1000.0, "sliding_window": 7},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 7,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "sliding_window": 9,
        "query_pre_attn_scalar": 6,
        "rope_theta": 1e4,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True},
}
STACK = {
    **SIZES,
    "model_type": "t5_gemma_module",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
    "rope_theta": 1000.0,
}
WIDER = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 6}
MERGED = {
    **{key: value for key, value in STACK.items() if key not in ("model_type", "rope_theta")},
    "sliding_window": 6,  # Even: an encoder then sees one position further ahead than back.
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 4.0,
    "attn_logit_softcapping": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
KINDS = ["sliding_attention", "full_attention"] * 2
TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5gemma": {
        "model_type": "t5gemma",
        "encoder": {**STACK, **WIDER, "num_key_value_heads": 3, "sliding_window": 5},
        "decoder": {**STACK, "sliding_window": 5},
        "vocab_size": 64,
        "tie_word_embeddings": True,
    },
    "t5gemma2": {
        "model_type": "t5gemma2",
        "encoder": {
            "text_config": {**MERGED, "num_hidden_layers": 4, "layer_types": KINDS[:4]},
            "vision_config": {"model_type": "siglip_vision_model", **TINY},
            "mm_tokens_per_image": 4,
        },
        "decoder": {**MERGED, "num_hidden_layers": 3, "layer_types": KINDS[:3]},
        "vocab_size": 64,
        "tie_word_embeddings": True,
    },
}
POSITIONS, EVERY, GREEDY = 40, 5, 40  # Logits of every fifth position are kept.


def model(settings: dict[str, Any]) -> transformers.PreTrainedModel:
    """A model with the settings of a `config.json` and the weights of `by_name`."""
    config = transformers.AutoConfig.for_model(**SIZES | settings)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.tensor(weights(name, tuple(parameter.shape))))
    return made


def continued(
    made: transformers.PreTrainedModel, prompts: list[np.ndarray]
) -> tuple[np.ndarray, float]:
    """Greedy tokens after each prompt, and the smallest lead of a greatest logit over the next."""
    greedy, gap = [], np.inf
    for prompt in prompts:
        tokens = torch.tensor(prompt)[None]
        for _ in range(GREEDY):
            last = made(tokens).logits[:, -1]
            first, second = last.topk(2).values[0].tolist()
            gap = min(gap, first - second)
            tokens = torch.cat([tokens, last.argmax(-1)[None]], dim=1)
        greedy.append(tokens[0, len(prompt) :].numpy())
    return np.stack(greedy), gap


def about(made: transformers.PreTrainedModel, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Sources, texts, their logits, and greedy tokens; and the smallest lead, see `continued`."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(3, 64, (3, 14))
    inputs[1, 9:] = inputs[2, 4:] = 0
    texts = np.concatenate([np.full((3, 1), 2), rng.integers(3, 64, (3, 20))], axis=1)
    source = torch.tensor(inputs)
    seen = {"input_ids": source, "attention_mask": (source != 0).long()}

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(tokens)
        return made(**seen, decoder_input_ids=tokens, decoder_attention_mask=mask).logits

    tokens, gap = torch.full((3, 1), 2), np.inf
    for _ in range(GREEDY):
        last = logits(tokens)[:, -1]
        first, second = last.topk(2).values.T
        gap = min(gap, float((first - second).min()))
        tokens = torch.cat([tokens, last.argmax(-1)[:, None]], dim=1)
    small = {"inputs": np.where(inputs == 0, -1, inputs), "texts": texts}
    small["greedy"] = tokens[:, 1:].numpy()
    arrays = {key: value.astype(np.int8) for key, value in small.items()}
    return arrays | {"logits": logits(torch.tensor(texts)).numpy()[:, ::EVERY]}, gap


@torch.no_grad()
def write_encoder_decoder(name: str) -> None:
    settings = ENCODER_DECODERS[name]
    config = transformers.AutoConfig.for_model(**settings)
    kind = transformers.AutoModelForSeq2SeqLM
    made = kind.from_config(config, attn_implementation="eager").eval()
    for key, parameter in made.named_parameters():
        stored = key.replace("text_model.", "")  # The name in files.
        parameter.copy_(torch.tensor(weights(stored, tuple(parameter.shape))))
    tried = (about(made, seed) for seed in range(4, 40))
    arrays = next(arrays for arrays, gap in tried if gap > 1e-3)
    file = FOLDER.with_name("encoder_decoders") / f"{name}.npz"
    np.savez_compressed(file, config=np.array(json.dumps(settings)), **arrays)  # pyright: ignore
    print(f"Written: {file}.")


@torch.no_grad()
def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    FOLDER.with_name("encoder_decoders").mkdir(exist_ok=True)
    for name in sys.argv[1:] or ENCODER_DECODERS:
        if name in ENCODER_DECODERS:
            write_encoder_decoder(name)
    for name in sys.argv[1:] or MODELS:
        if name in ENCODER_DECODERS:
            continue
        made, size = model(MODELS[name]), SIZES["vocab_size"]
        for seed in range(4, 40):  # Take the first whose greedy tokens rounding cannot change.
            rng = np.random.default_rng(seed)
            texts = rng.integers(0, size, (2, POSITIONS))
            prompts = [rng.integers(0, size, length) for length in (14, 1, 6)]
            greedy, gap = continued(made, prompts)
            if gap > 1e-3:
                break
        else:
            raise ValueError(f"{name} has near ties in the texts of every seed.")
        inputs = np.full((3, 14), -1)
        for row, prompt in zip(inputs, prompts, strict=True):
            row[: len(prompt)] = prompt
        small = {"inputs": inputs, "texts": texts, "greedy": greedy}
        logits = made(torch.tensor(texts)).logits[:, ::EVERY].numpy()
        np.savez_compressed(
            FOLDER / f"{name}.npz",
            config=np.array(json.dumps(SIZES | MODELS[name])),
            logits=logits,
            **{key: value.astype(np.int8) for key, value in small.items()},
        )
        print(f"Written: {FOLDER / name}.npz, logits up to {np.abs(logits).max():.1f}.")


if __name__ == "__main__":
    main()
