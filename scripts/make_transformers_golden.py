"""Makes golden files for tests: small models of the transformers package and their outputs.

    python scripts/make_transformers_golden.py

This needs torch and transformers (the extra `peers`). It writes a folder for each version into
`tests/data`: `config.json`, `model.safetensors`, and `expected.npz` with inputs, logits and greedy
continuations. T5's inputs are padded with 0, GPT-2's with -1. ByT5's folder also has a tokenizer,
and a text with its tokens.

The file `transformers_t5_shapes.json.gz` holds the configurations of public checkpoints, as in
Google's `config.json`, and the names and shapes of the tensors of transformers' models with these
configurations (as JSON, made without weights).
"""

import gzip
import json
import pathlib
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

DATA = pathlib.Path(__file__).parents[1] / "tests" / "data"
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SMALLER = {"d_model": 12, "d_ff": 20, "num_heads": 2}
VERSIONS: dict[str, dict[str, Any]] = {
    "transformers_v1_0": {"feed_forward_proj": "relu", "tie_word_embeddings": True, **SMALLER},
    "transformers_v1_1": GATED,  # LM-adapted and Flan-T5 are the same.
    "transformers_ul2": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
    "transformers_mt5": {"model_type": "mt5", **GATED},
    "transformers_umt5": {"model_type": "umt5", **GATED, **SMALLER},
    "transformers_byt5": {
        **GATED,
        **SMALLER,
        "vocab_size": 384,
        "num_layers": 3,
        "num_decoder_layers": 1,
    },
}
SIZES = {
    "vocab_size": 96,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "decoder_start_token_id": 0,
}
TEXT = "Ein naïver Wunsch: €5 🙂"  # A text for ByT5.
GPT2 = "transformers_gpt2"
GPT2_SIZES = {"vocab_size": 96, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 64}
GREEDY = 24
EVERY = 5  # Logits of GPT-2 are kept of every fifth position.

SHAPES = "transformers_t5_shapes.json.gz"
V1_1_SMALL = {"d_model": 512, "d_ff": 1024, "num_heads": 6, "num_layers": 8, **GATED}
UL2 = {"d_model": 4096, "d_kv": 256, "d_ff": 16384, "num_heads": 16, "num_layers": 32}
BYT5_SMALL = {"d_model": 1472, "d_ff": 3584, "num_heads": 6, "num_layers": 12, **GATED}
PUBLIC: dict[str, dict[str, Any]] = {
    "t5-small": {"d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "google/t5-v1_1-small": V1_1_SMALL,
    "google/t5-small-lm-adapt": V1_1_SMALL,
    "google/flan-t5-small": V1_1_SMALL,
    "google/mt5-small": {"model_type": "mt5", "vocab_size": 250112, **V1_1_SMALL},
    "google/umt5-small": {"model_type": "umt5", "vocab_size": 256384, **V1_1_SMALL},
    "google/byt5-small": {"vocab_size": 384, **BYT5_SMALL, "num_decoder_layers": 4},
    "google/ul2": {**UL2, **VERSIONS["transformers_ul2"]},
    "google/flan-ul2": {**UL2, **VERSIONS["transformers_ul2"]},
}
USUAL = {"model_type": "t5", "vocab_size": 32128, "d_kv": 64}


def untrained(settings: dict[str, Any]) -> transformers.PreTrainedModel:
    """A model of the family and sizes in a `config.json`."""
    kind = {"mt5": "MT5", "umt5": "UMT5"}.get(settings.get("model_type", ""), "T5")
    settings = {name: value for name, value in settings.items() if name != "model_type"}
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


def make(version: str) -> transformers.PreTrainedModel:
    """A random model in which no norm has its initial value, so that a missing one shows."""
    torch.manual_seed(7)
    model = untrained(SIZES | VERSIONS[version])
    if not VERSIONS[version]["tie_word_embeddings"]:
        # Recent versions always tie a new model's logits, but keep those of a loaded one.
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(model.lm_head.weight.shape))
        model.config.tie_word_embeddings = False
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name:
                parameter.normal_(0.0, 0.7)
    return model


def expected(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """Inputs of different lengths, teacher-forced logits, and greedy tokens without an end."""
    rng, size = np.random.default_rng(3), model.config.vocab_size
    inputs = rng.integers(2, size, (3, 14))
    inputs[1, 9:] = inputs[2, 4:] = 0
    decoder_inputs = np.concatenate([np.zeros((3, 1), int), rng.integers(2, size, (3, 10))], axis=1)
    source = torch.tensor(inputs)
    seen = {"input_ids": source, "attention_mask": (source != 0).long()}
    with torch.no_grad():
        logits = model(**seen, decoder_input_ids=torch.tensor(decoder_inputs)).logits
        tokens = torch.zeros((3, 1), dtype=torch.long)
        for _ in range(GREEDY):
            best = model(**seen, decoder_input_ids=tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, best], dim=1)
    return {
        "inputs": inputs.astype(np.int32),
        "decoder_inputs": decoder_inputs.astype(np.int32),
        "logits": logits.numpy(),
        "greedy": tokens[:, 1:].numpy().astype(np.int32),
    }


def make_gpt2() -> transformers.GPT2LMHeadModel:
    """A random GPT-2 in which no norm and no bias has its initial value."""
    torch.manual_seed(8)
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2_SIZES, **ends)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.5)
    return model


def expected_gpt2(model: transformers.GPT2LMHeadModel) -> dict[str, np.ndarray]:
    """Prompts of different lengths, logits of whole texts, and greedy tokens after each prompt."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, GPT2_SIZES["vocab_size"], length) for length in (14, 1, 6)]
    inputs = np.full((3, 14), -1)
    for row, prompt in zip(inputs, prompts, strict=True):
        row[: len(prompt)] = prompt
    texts = rng.integers(0, GPT2_SIZES["vocab_size"], (3, 40))
    greedy = []
    with torch.no_grad():
        logits = model(torch.tensor(texts)).logits
        for prompt in prompts:
            tokens = torch.tensor(prompt)[None]
            for _ in range(GREEDY):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
            greedy.append(tokens[0, len(prompt) :].numpy())
    return {
        "inputs": inputs.astype(np.int32),
        "texts": texts.astype(np.int32),
        "logits": logits.numpy()[:, ::EVERY],
        "greedy": np.stack(greedy).astype(np.int32),
    }


def save(
    folder: pathlib.Path, model: transformers.PreTrainedModel, computed: dict[str, np.ndarray]
) -> None:
    """Writes a model's folder."""
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights, first = folder / "model.safetensors", DATA / "transformers_v1_1" / "model.safetensors"
    weights.chmod(0o644)
    if folder != first.parent and weights.read_bytes() == first.read_bytes():
        weights.unlink()  # mT5 and UL2 have the same weights as v1.1, which are stored once.
    np.savez_compressed(folder / "expected.npz", **computed)  # pyright: ignore[reportArgumentType]
    print(f"Written: {folder}.")


def shapes() -> dict[str, dict[str, Any]]:
    """The content of `SHAPES`, by the models' names on the hub."""
    made = {}
    for name, settings in PUBLIC.items():
        settings = USUAL | settings
        with torch.device("meta"):
            model = untrained(settings)
        sizes = {key: list(value.shape) for key, value in model.state_dict().items()}
        made[name] = {"config": settings, "tensors": sizes}
    return made


def main() -> None:
    for version in VERSIONS:
        model = make(version)
        computed = expected(model)
        if version == "transformers_byt5":
            tokenizer = transformers.ByT5Tokenizer()
            tokenizer.save_pretrained(DATA / version)
            listed = DATA / version / "tokenizer_config.json"  # Its 128 added tokens fill it.
            listed.write_text(json.dumps(json.loads(listed.read_text()), separators=(",", ":")))
            computed |= {"text": np.array(TEXT), "tokens": np.array(tokenizer(TEXT).input_ids)}
        save(DATA / version, model, computed)
    model = make_gpt2()
    save(DATA / GPT2, model, expected_gpt2(model))
    with gzip.GzipFile(DATA / SHAPES, "w", mtime=0) as file:
        file.write(json.dumps(shapes()).encode())


if __name__ == "__main__":
    main()
