"""Draws texts from llama.cpp through llama-cpp-python: `Llama.generate`, on token ids.

Run it with an interpreter that has llama-cpp-python, gguf and safetensors; it needs nothing else of
this repository. The program filters (top-k, top-p, min-p) before it divides by the temperature.
"""
# pyright: reportMissingImports=false

import itertools
import json
import pathlib
from typing import Any

import gguf
import llama_cpp
import numpy as np
from llama_cpp import llama_speculative
from safetensors.numpy import load_file

from benchmarks.verdicts.adapter import command_line, end_tokens, read_config

# The Python package has no model as a draft, but a class to derive one from.
WAYS = dict.fromkeys(("plain", "prompt lookup", "draft"), {"kinds": ["decoder"]})
# A prompt and its text have room for 1,024 tokens; keys and values are not in half precision.
GIVEN = {"n_ctx": 1024, "n_batch": 1024, "n_gpu_layers": 0, "n_threads": 1, "n_threads_batch": 1}
GIVEN |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "verbose": False}
FIELDS = {  # A file's names for fields of its model, and the folder's.
    "gpt2": """context_length=n_positions embedding_length=n_embd block_count=n_layer
        attention.head_count=n_head feed_forward_length=n_inner
        attention.layer_norm_epsilon=layer_norm_epsilon""",
    "llama": """context_length=max_position_embeddings embedding_length=hidden_size
        block_count=num_hidden_layers attention.head_count=num_attention_heads
        attention.head_count_kv=num_key_value_heads feed_forward_length=intermediate_size
        attention.layer_norm_rms_epsilon=rms_norm_eps rope.freq_base=rope_theta""",
}


def converted(folder: pathlib.Path) -> str:
    """The float32 file of a GPT-2 or Llama folder, made if missing, without a vocabulary."""
    to = folder.with_name(folder.name + ".gguf")
    if to.exists():
        return str(to)
    config = read_config(folder)
    config |= config.get("rope_parameters") or {}
    kind = config["model_type"]
    if kind not in FIELDS:
        raise SystemExit(f"{folder}: its model_type is {kind!r}, not one of {', '.join(FIELDS)}")
    part = to.with_name(f"{to.name}.part")
    writer = gguf.GGUFWriter(part, kind)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for key, _, name in (field.partition("=") for field in FIELDS[kind].split()):
        add = writer.add_float32 if key.endswith(("epsilon", "base")) else writer.add_uint32
        add(f"{kind}.{key}", config[name])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], 1000)
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            # GPT-2 stores these transposed.
            value = value.T
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            # The two parts of a rotary pair are neighbours in the file, but half a head apart here.
            heads = config["num_key_value_heads" if "k_proj" in name else "num_attention_heads"]
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        value = np.ascontiguousarray(value, np.float32)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), value)
    for part_of in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part_of}_to_file")()
    writer.close()
    part.rename(to)
    return str(to)


class Draft(llama_speculative.LlamaDraftModel):
    """Guesses the tokens that another model finds most likely, one after the other."""

    def __init__(self, folder: pathlib.Path, gamma: int, **settings: Any) -> None:
        self._model = llama_cpp.Llama(converted(folder), **GIVEN | settings)
        self._gamma = gamma

    def __call__(self, input_ids: np.ndarray, /, **_: Any) -> np.ndarray:
        """The guesses that follow tokens."""
        guesses = self._model.generate(input_ids.tolist(), temp=0.0)
        return np.array(list(itertools.islice(guesses, self._gamma)), np.intc)


def main() -> None:
    """Runs the command line."""
    arguments = command_line(__doc__, pathlib.Path).parse_args()
    if arguments.list:
        print(json.dumps({"version": llama_cpp.__version__, "ways": WAYS}))
        return
    draft = Draft(arguments.draft, arguments.gamma) if arguments.way == "draft" else None
    if arguments.way == "prompt lookup":
        draft = llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=arguments.gamma)
    model = llama_cpp.Llama(converted(arguments.target), draft_model=draft, **GIVEN)
    ends = end_tokens(arguments.target)
    settings = {name: getattr(arguments, name) for name in ("top_k", "top_p", "min_p")}
    settings |= {"temp": arguments.temperature, "repeat_penalty": 1.0}
    with open(arguments.output, "w") as output:
        for number, line in enumerate(arguments.prompts.read_text().splitlines()):
            prompt = json.loads(line)["prompt_tokens"]
            for seed in np.random.SeedSequence([arguments.seed, number]).generate_state(
                arguments.samples
            ):
                model.set_seed(int(seed))
                text = list(
                    itertools.islice(model.generate(prompt, **settings), arguments.max_length)
                )
                stop = next((i + 1 for i, token in enumerate(text) if token in ends), None)
                print(json.dumps({"prompt_tokens": prompt, "tokens": text[:stop]}), file=output)


if __name__ == "__main__":
    main()
