"""The installed programs on the shipped pair, live: `make test-peers` runs these."""

import json
import pathlib

import pytest

from benchmarks import audit_peers
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


def test_samples_are_the_targets(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for what CTranslate2 makes of a T5 v1.1 that transformers 5 has read."""
    given = ["--limit=1", "--samples=16", "--output_dir", str(tmp_path)]
    audit_peers.main(given)
    found = json.loads((tmp_path / "audits.json").read_text())["audits"]
    named = {way.partition(", ")[0] for way in found}
    assert named == {"speculative", "transformers", "ctranslate2"}
    assert found.pop("ctranslate2, float32 as converted")
    assert all(one["passed"] for one in found.values()), found
