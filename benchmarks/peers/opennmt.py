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
from speculative.sampling import Sampling
from speculative.types import EOS_ID

AS_CONVERTED = "float32 as converted"


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
        named = {"float32": "float32", "int8": "int8", AS_CONVERTED: "float32"}
        for kind, dtype in named.items():
            converter.load_model = load_model if kind == AS_CONVERTED else corrected
            converted = str(folder.with_name(f"{folder.name}-{kind}"))
            converter.convert(converted, quantization=dtype, force=True)
            for name, threads in thread_counts().items():
                self._translators[f"{kind}, {name}"] = ctranslate2.Translator(
                    converted, compute_type=dtype, inter_threads=1, intra_threads=threads
                )
        self.ways = tuple(way for way in self._translators if not way.startswith(AS_CONVERTED))
        self.sampled = tuple(named)

    def decode(self, way: str, source: list[int]) -> list[int]:
        most = self._setting.max_length
        return self._translate(way, source, most, most if self._setting.random else 1)[0]

    def sample(
        self, way: str, source: list[int], sampling: Sampling, count: int, seed: int
    ) -> list[dict[str, Any]]:
        ctranslate2.set_random_seed(seed)
        settings = {
            "sampling_temperature": sampling.temperature,
            "sampling_topk": sampling.top_k,
            "sampling_topp": sampling.top_p,
            "num_hypotheses": count,
        }
        most = self._setting.max_length
        way = f"{way}, 1 thread"
        texts = self._translate(way, source, most, 0, **settings)
        if sampling != Sampling():  # It scores texts at temperature 1, with all tokens.
            return [{"tokens": text} for text in texts]
        scores = self._translators[way].score_batch(
            [[str(token) for token in source]] * count,
            [[str(token) for token in text if token != EOS_ID] for text in texts],
            max_input_length=0,
        )
        # A score follows for the end of sequence; a text that was cut has none.
        return [
            {"tokens": text, "logprobs": score.log_probs[: len(text)]}
            for text, score in zip(texts, scores, strict=True)
        ]

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
