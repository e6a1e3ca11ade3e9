"""The installed programs on the shipped pair, live: `make test-peers` runs these."""

import pathlib

import pytest

from benchmarks import compare_peers as compare
from benchmarks.peers import settings

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ctranslate2")
pytest.importorskip("llama_cpp")


def test_all_decode_the_same_tokens_in_float32(tmp_path: pathlib.Path) -> None:
    setting, sources = settings.shipped(3, 5, tmp_path)
    programs = ["speculative", "transformers", "ctranslate2"]
    found = compare.compare(setting, sources, programs, 1, 2, lambda what, share: None)
    assert not found.missing
    ways = {way.partition(",")[0] for _, way in found.seconds}
    assert ways == {"autoregressive", "speculative", "assisted", "float32", "int8"}
    assert found.differences is not None
    for (name, way), differences in found.differences.items():
        unexplained = [one for one in differences if not one.near_tie]
        assert not unexplained or way.startswith("int8"), (name, way)
        assert found.tokens[name, way] > 0


def test_random_weights_decode_to_the_given_length(tmp_path: pathlib.Path) -> None:
    setting, sources = settings.random("t5_1_1_small", 1, 6, tmp_path)
    programs = ["speculative", "transformers", "ctranslate2"]
    found = compare.compare(setting, sources, programs, 1, 2, lambda what, share: None)
    assert set(found.tokens.values()) == {6}
    assert found.differences is not None
    assert not found.differences["speculative", "autoregressive"]


def test_decoder_only_models_decode_the_same_tokens(tmp_path: pathlib.Path) -> None:
    setting, prompts = settings.language_model(3, 5, tmp_path)
    programs = ["speculative", "transformers", "ctranslate2", "llama.cpp", "t5x"]
    found = compare.compare(setting, prompts, programs, 1, 2, lambda what, share: None)
    assert not found.missing  # T5X has no such model, and is not looked for.
    ways = {way.rpartition(", ")[0] for name, way in found.seconds if name == "llama.cpp"}
    assert ways == {"F32", "Q8_0", "Q4_0", "F32, prompt lookup", "F32, draft"}
    assert found.differences is not None
    for (name, way), differences in found.differences.items():
        integers = any(kind in way for kind in ("int8", "Q8_0", "Q4_0"))
        assert integers or all(one.near_tie for one in differences), (name, way)
    assert {tokens for _, tokens in found.prefill} == {64, 512}  # It has 1,024 positions.
