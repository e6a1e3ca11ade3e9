"""CTranslate2, OpenNMT's engine, with the target converted from its export to float32 and int8."""
# pyright: reportMissingImports=false

import ctranslate2

from benchmarks.peers.huggingface import quieten
from benchmarks.peers.system import Setting, thread_counts
from benchmarks.verdicts.adapter import end_tokens
from benchmarks.verdicts.ctranslate2_ import convert


class OpenNMT:
    """See `system.Program`."""

    def __init__(self, setting: Setting) -> None:
        quieten()
        self._setting, self._engines = setting, {}
        engine = ctranslate2.Generator if setting.decoder_only else ctranslate2.Translator
        self._end = [str(end) for end in end_tokens(setting.exported)]
        for kind in ("float32", "int8"):
            converted = f"{setting.exported}-{kind}"
            convert(setting.exported, converted, kind)
            for name, threads in thread_counts().items():
                self._engines[f"{kind}, {name}"] = engine(
                    converted, compute_type=kind, inter_threads=1, intra_threads=threads
                )
        self.ways = tuple(self._engines)

    def decode(self, way: str, source: list[int]) -> list[int]:
        most = self._setting.max_length
        return self._generate(way, source, most, most if self._setting.random else 1)

    def prefill(self, source: list[int]) -> None:
        """Runs the prefill and one decoding step, which CTranslate2 cannot separate."""
        self._generate(f"float32, {list(thread_counts())[-1]}", source, 1, 1)

    def _generate(self, way: str, source: list[int], most: int, least: int) -> list[int]:
        fed, greedy = [[str(token) for token in source]], {"beam_size": 1, "end_token": self._end}
        if self._setting.decoder_only:
            results = self._engines[way].generate_batch(
                fed, max_length=most, min_length=least, include_prompt_in_result=False,
                return_end_token=True, **greedy,
            )  # fmt: skip
            texts = results[0].sequences
        else:
            results = self._engines[way].translate_batch(
                fed, max_decoding_length=most, min_decoding_length=least, max_input_length=0,
                return_end_token=True, **greedy,
            )  # fmt: skip
            texts = results[0].hypotheses
        return [int(token) for token in texts[0]]
