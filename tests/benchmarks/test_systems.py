"""The installed programs on the shipped pair, live: `make test-peers` runs these."""

import pathlib

import pytest

from benchmarks import compare_peers as compare

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ctranslate2")


def test_all_decode_the_same_tokens_in_float32(tmp_path: pathlib.Path) -> None:
    setting, sources = compare.shipped(3, 5, tmp_path)
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
    setting, sources = compare.random("t5_1_1_small", 1, 6, tmp_path)
    programs = ["speculative", "transformers", "ctranslate2"]
    found = compare.compare(setting, sources, programs, 1, 2, lambda what, share: None)
    assert set(found.tokens.values()) == {6}
    assert found.differences is not None
    assert not found.differences["speculative", "autoregressive"]
