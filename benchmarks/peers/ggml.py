"""llama.cpp through llama-cpp-python, with the target's file in float32 and quantized.

Its Python package only generates with decoder-only models: it has no loop that reads an encoder's
output.
"""
# pyright: reportMissingImports=false

import itertools
import json
import pathlib
from typing import Any

import llama_cpp
from llama_cpp import llama_speculative

from benchmarks.peers.system import Setting, thread_counts
from benchmarks.verdicts.llama_cpp_ import GIVEN, Draft, converted

QUIET = llama_cpp.llama_log_callback(lambda *_: None)
KINDS = {
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


class LlamaCpp:
    """See `system.Program`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        folder = pathlib.Path(setting.exported)
        ends = json.loads((folder / "config.json").read_text()).get("eos_token_id")
        self._ends = set(ends) if isinstance(ends, list) else {ends}
        llama_cpp.llama_log_set(QUIET, None)
        files = {"F32": converted(folder)}
        for kind, number in KINDS.items():
            settings = llama_cpp.llama_model_quantize_default_params()
            settings.ftype, files[kind] = number, f"{folder}.{kind}.gguf"
            arguments = files["F32"].encode(), files[kind].encode(), settings
            if llama_cpp.llama_model_quantize(*arguments):
                raise RuntimeError(f"{folder.name} could not be quantized to {kind}")
        drafts: dict[str, Any] = {"prompt lookup": self._lookup}
        drafts |= {"draft": self._draft} if setting.exported_draft else {}
        self._models = {}
        for name, threads in thread_counts().items():
            options = GIVEN | {"n_ctx": 4096, "n_threads": threads, "n_threads_batch": threads}
            for kind, file in files.items():
                self._models[f"{kind}, {name}"] = llama_cpp.Llama(file, **options)
            for way, made in drafts.items():
                self._models[f"F32, {way}, {name}"] = llama_cpp.Llama(
                    files["F32"], draft_model=made(threads), **options
                )
        self.ways = tuple(self._models)

    def _lookup(self, _: int) -> llama_speculative.LlamaDraftModel:
        return llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=self._setting.gamma)

    def _draft(self, threads: int) -> llama_speculative.LlamaDraftModel:
        options = {"n_threads": threads, "n_threads_batch": threads}
        draft = pathlib.Path(self._setting.exported_draft or "")
        return Draft(draft, self._setting.gamma, **options)

    def decode(self, way: str, source: list[int]) -> list[int]:
        model = self._models[way]
        model.reset()  # Otherwise it would keep the prefix shared with the last prompt.
        tokens = []
        for token in itertools.islice(model.generate(source, temp=0.0), self._setting.max_length):
            tokens.append(token)
            if token in self._ends:
                break
        return tokens

    def prefill(self, source: list[int]) -> None:
        model = self._models[f"F32, {list(thread_counts())[-1]}"]
        model.reset()
        model.eval(source)
