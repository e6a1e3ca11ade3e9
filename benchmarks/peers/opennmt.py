"""CTranslate2, OpenNMT's engine, with the target converted from its export to float32 and int8."""

import json
import pathlib
from typing import Any

import ctranslate2  # pyright: ignore[reportMissingImports]
from ctranslate2.converters import (  # pyright: ignore[reportMissingImports]
    TransformersConverter,
)

from benchmarks.peers.huggingface import quieten
from benchmarks.peers.system import Setting, thread_counts


class _Numbers:
    """A vocabulary whose pieces are their numbers, so that tokens stay unchanged."""

    pad_token, eos_token, unk_token = "0", "1", "2"

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self._size)}

    def convert_ids_to_tokens(self, number: int) -> str:
        return str(number)


class _Converter(TransformersConverter):
    def load_tokenizer(self, *_: Any, **__: Any) -> _Numbers:
        return _Numbers(self.vocab_size)

    vocab_size = 0


class OpenNMT:
    """See `system.System`."""

    def __init__(self, setting: Setting) -> None:
        """Converts and loads the target."""
        quieten()
        folder = pathlib.Path(setting.exported)
        converter = _Converter(str(folder))
        converter.vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._setting = setting
        self._translators = {}
        for dtype in ("float32", "int8"):
            made = str(folder.with_name(f"{folder.name}-{dtype}"))
            converter.convert(made, quantization=dtype, force=True)
            for name, threads in thread_counts().items():
                self._translators[f"{dtype}, {name}"] = ctranslate2.Translator(
                    made, compute_type=dtype, inter_threads=1, intra_threads=threads
                )
        self.ways = tuple(self._translators)

    def decode(self, way: str, source: list[int]) -> list[int]:
        """See `system.System`."""
        most = self._setting.max_length
        return self._translate(way, source, most, 1 if self._setting.ends else most)

    def prefill(self, source: list[int]) -> None:
        """The prefill and one step of decoding, because CTranslate2 has no prefill alone."""
        self._translate(f"float32, {list(thread_counts())[-1]}", source, 1, 1)

    def _translate(self, way: str, source: list[int], most: int, least: int) -> list[int]:
        found = self._translators[way].translate_batch(
            [[str(token) for token in source]],
            beam_size=1,
            max_input_length=0,
            max_decoding_length=most,
            min_decoding_length=least,
            return_end_token=True,
        )
        return [int(token) for token in found[0].hypotheses[0]]
