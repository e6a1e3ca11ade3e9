"""Draws texts with ONNX Runtime GenAI, alone and in its speculative ways.

Its own model builder, which supports Llama and the like but neither GPT-2 nor T5, converts the
folders. Run it with an interpreter that has onnxruntime-genai, transformers, torch and onnx-ir; it
needs nothing else of this repository.
"""
# pyright: reportMissingImports=false

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import onnxruntime_genai

from benchmarks.verdicts.adapter import command_line

FIXED: dict[str, Any] = {"kinds": ["decoder"], "settings": ["top_k", "top_p"]}
WAYS: dict[str, dict[str, Any]] = {
    "plain": FIXED,
    "draft model": FIXED,
    # It adapts the number of guesses to the time that they take.
    "draft model, own gamma": FIXED,
    # Guesses repeat the tokens that followed an earlier occurrence of the last token.
    "n-gram": FIXED,
}


def convert(folder: str, converted: pathlib.Path) -> dict[str, Any]:
    """Writes a folder's model as float32 ONNX, and returns the configuration that goes with it."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    paths = ["-i", folder, "-o", str(converted), "-c", str(converted.with_name("cache"))]
    done = subprocess.run([*builder, *paths], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    config = json.loads((converted / "genai_config.json").read_text())
    threads = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    config["model"]["decoder"]["session_options"] |= threads
    return config


def load(given: argparse.Namespace, folder: pathlib.Path) -> onnxruntime_genai.Model:
    """The converted target, with the converted draft as its `model.draft` if the way has one."""
    config = convert(given.target, folder / "target")
    if given.way.startswith("draft"):
        draft = convert(given.draft, folder / "draft")["model"]["decoder"]
        config["model"]["draft"] = draft | {"filename": "../draft/model.onnx"}
    (folder / "target" / "genai_config.json").write_text(json.dumps(config))
    return onnxruntime_genai.Model(str(folder / "target"))


def main() -> None:
    """Runs the command line."""
    parser = command_line(__doc__)
    arguments = parser.parse_args()
    if arguments.list:
        version = onnxruntime_genai.__version__
        print(json.dumps({"version": version, "ways": WAYS}))
        return
    if arguments.min_p != 0:
        parser.error("ONNX Runtime GenAI has no min_p.")
    guesses = {"max_draft_tokens": arguments.gamma}
    if arguments.way == "n-gram":
        guesses |= {"ngram_size": 2}
    if arguments.way.endswith("own gamma"):
        guesses = {"min_adaptive_k": 2}
    settings = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}
    settings["repetition_penalty"] = 1.0
    # A batch has at most 32 texts, and guesses serve one text at a time.
    rows = 32 if arguments.way == "plain" else 1
    batches = [min(rows, arguments.samples - i) for i in range(0, arguments.samples, rows)]
    seeds = np.random.default_rng(arguments.seed)
    with tempfile.TemporaryDirectory() as folder, open(arguments.output, "w") as output:
        model = load(arguments, pathlib.Path(folder))
        written = json.loads((pathlib.Path(folder) / "target/genai_config.json").read_text())
        ends = written["model"]["eos_token_id"]
        ends = ends if isinstance(ends, list) else [ends]
        for line in pathlib.Path(arguments.prompts).read_text().splitlines():
            prompt = json.loads(line)["prompt_tokens"]
            params = onnxruntime_genai.GeneratorParams(model)
            if arguments.way != "plain":
                params.set_speculative_options(**guesses)
            params.set_search_options(do_sample=True, min_length=0, **settings)
            params.set_search_options(max_length=len(prompt) + arguments.max_length)
            for rows in batches:
                seed = int(seeds.integers(2**31))
                params.set_search_options(random_seed=seed, batch_size=rows)
                generator = onnxruntime_genai.Generator(model, params)
                generator.append_tokens(np.array([prompt] * rows, np.int32))
                while not generator.is_done():
                    generator.generate_next_token()
                for row in range(rows):
                    text = generator.get_sequence(row)[len(prompt) :].tolist()
                    if arguments.way != "plain":
                        text.append(ends[0])  # With guesses, the program leaves it out.
                    text = text[: arguments.max_length]
                    stop = next((i + 1 for i, token in enumerate(text) if token in ends), None)
                    print(json.dumps({"prompt_tokens": prompt, "tokens": text[:stop]}), file=output)


if __name__ == "__main__":
    main()
