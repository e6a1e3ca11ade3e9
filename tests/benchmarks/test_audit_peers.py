"""The audit of programs' samples, with stand-ins: one that samples exactly, one that does not."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import audit_peers, compare_peers
from benchmarks.peers.ours import Ours
from benchmarks.peers.system import Program, Setting
from speculative.sampling import Sampling


class Made:
    """Draws samples in this process, or repeats the greedy output."""

    def __init__(self, name: str, setting: Setting) -> None:
        self._ours = Ours(setting)
        self.sampled = ("token", "greedy") if name == "speculative" else ()

    def sample(
        self, way: str, source: list[int], sampling: Sampling, count: int, seed: int
    ) -> list[dict[str, Any]]:
        if way == "greedy":
            return [{"tokens": self._ours.decode("autoregressive", source)}] * count
        return self._ours.sample(way, source, sampling, count, seed)

    def close(self) -> None:
        pass


def test_each_way_has_its_samples_and_its_verdict(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {"speculative": Program("", (), ""), "other": Program("", ("no_such",), "find it")}
    for module in (audit_peers, compare_peers):
        monkeypatch.setattr(module, "PROGRAMS", programs)
    monkeypatch.setattr(audit_peers, "Process", Made)
    given = ["--limit=1", "--samples=12", "--max_length=32"]
    audit_peers.main([*given, "--output_dir", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "other was left out (no_such); find it." in said
    found = json.loads((tmp_path / "audits.json").read_text())
    audits = found["audits"]
    assert list(audits) == ["speculative, token", "speculative, greedy"]
    assert [one["passed"] for one in audits.values()] == [True, False]
    assert audits["speculative, token"]["impossible_count"] == 0
    assert (found["settings"]["temperature"], audits["speculative, token"]["prompts"]) == (1.0, 2)
    lines = (tmp_path / "speculative_token.jsonl").read_text().splitlines()
    assert len(lines) == 24
    assert set(json.loads(lines[0])) == {"prompt_tokens", "tokens"}
