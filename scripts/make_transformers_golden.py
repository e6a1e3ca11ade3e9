"""Small T5s of the transformers package, with what it computes for them: golden files for tests.

    python scripts/make_transformers_golden.py --output_dir=tests/data

Needs torch and transformers (the extra `peers`). A folder for each version: `config.json`,
`model.safetensors`, and `expected.npz` with inputs, logits and greedy continuations.
"""

import argparse
import pathlib

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

VERSIONS = {
    "transformers_v1_0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "transformers_v1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
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
GREEDY = 24


def make(version: str) -> transformers.T5ForConditionalGeneration:
    """A random model in which no norm is at its initial value, so that a missing one shows."""
    torch.manual_seed(7)
    config = transformers.T5Config(**SIZES, **VERSIONS[version])
    model = transformers.T5ForConditionalGeneration(config).eval()
    if not VERSIONS[version]["tie_word_embeddings"]:
        # Recent versions tie a new model's logits in any case, and keep those of a loaded one.
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(model.lm_head.weight.shape))
        model.config.tie_word_embeddings = False
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name:
                parameter.normal_(0.0, 0.7)
    return model


def expected(model: transformers.T5ForConditionalGeneration) -> dict[str, np.ndarray]:
    """Inputs of different lengths, teacher-forced logits, and greedy tokens without an end."""
    rng = np.random.default_rng(3)
    inputs = rng.integers(2, SIZES["vocab_size"], (3, 14))
    inputs[1, 9:] = inputs[2, 4:] = 0
    decoder_inputs = np.concatenate(
        [np.zeros((3, 1), int), rng.integers(2, SIZES["vocab_size"], (3, 10))], axis=1
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    folder = parser.parse_args().output_dir
    for version in VERSIONS:
        model = make(version)
        model.save_pretrained(folder / version, safe_serialization=True)
        (folder / version / "generation_config.json").unlink(missing_ok=True)
        (folder / version / "model.safetensors").chmod(0o644)
        np.savez_compressed(folder / version / "expected.npz", **expected(model))  # pyright: ignore[reportArgumentType]
        print(f"Written: {folder / version}.")


if __name__ == "__main__":
    main()
