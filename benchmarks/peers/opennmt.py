"""CTranslate2, OpenNMT's engine, with the target converted from its export to float32 and int8."""
# pyright: reportMissingImports=false

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter

from benchmarks.peers.huggingface import quieten
from benchmarks.peers.system import Setting, thread_counts


class OpenNMT:
    """See `system.Program`."""

    def __init__(self, setting: Setting) -> None:
        quieten()
        folder = pathlib.Path(setting.exported)
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        # Its tokens are their numbers, so that they stay unchanged.
        tokenizer = SimpleNamespace(
            pad_token="0",
            eos_token="1",
            unk_token="2",
            get_vocab=lambda: {str(i): i for i in range(size)},
            convert_ids_to_tokens=str,
        )
        converter = TransformersConverter(str(folder))
        converter.load_tokenizer = lambda *_, **__: tokenizer
        load_model = converter.load_model

        def corrected(*given: Any, **settings: Any) -> Any:
            """The model with its own flag in the place of the one that the converter reads.

            From version 5 transformers' T5 says that embeddings are tied even if they are not, and
            the converter then divides logits by the root of their width: greedy outputs are the
            same, samples are not.
            """
            model = load_model(*given, **settings)
            if hasattr(model.config, "scale_decoder_outputs"):
                model.config.tie_word_embeddings = model.config.scale_decoder_outputs
            return model

        self._setting = setting
        self._translators = {}
        converter.load_model = corrected
        for kind in ("float32", "int8"):
            converted = str(folder.with_name(f"{folder.name}-{kind}"))
            converter.convert(converted, quantization=kind, force=True)
            for name, threads in thread_counts().items():
                self._translators[f"{kind}, {name}"] = ctranslate2.Translator(
                    converted, compute_type=kind, inter_threads=1, intra_threads=threads
                )
        self.ways = tuple(self._translators)

    def decode(self, way: str, source: list[int]) -> list[int]:
        most = self._setting.max_length
        return self._translate(way, source, most, most if self._setting.random else 1)[0]

    def prefill(self, source: list[int]) -> None:
        """The prefill and one step of decoding, because CTranslate2 has no prefill alone."""
        self._translate(f"float32, {list(thread_counts())[-1]}", source, 1, 1)

    def _translate(
        self, way: str, source: list[int], most: int, least: int, **settings: Any
    ) -> list[list[int]]:
        found = self._translators[way].translate_batch(
            [[str(token) for token in source]],
            beam_size=1,
            max_input_length=0,
            max_decoding_length=most,
            min_decoding_length=least,
            return_end_token=True,
            **settings,
        )
        return [[int(token) for token in text] for text in found[0].hypotheses]
