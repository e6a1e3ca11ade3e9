"""`audit` as a command, on what `generate --json` of a tiny random pair writes."""

import functools
import json
import math
import pathlib

import pytest

from speculative import cli
from speculative.studies import power
from tests import saved

LENGTH = ["--max_length", "12"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = saved.save_pair_of_few_pieces(tmp_path_factory.mktemp("pair"))
    return ["--target", str(target), "--draft", str(draft)]


@pytest.fixture
def samples(pair: list[str], tmp_path: pathlib.Path) -> pathlib.Path:
    """Texts of 40 prompts at temperature 1."""
    prompts, file = tmp_path / "prompts.txt", tmp_path / "samples.jsonl"
    prompts.write_text("A small editor.\nAn archive.\n" * 20)
    given = ["--file", str(prompts), "--temperature", "1", "--gamma", "2", "--output", str(file)]
    assert cli.main(["generate", *given, *pair, *LENGTH]) == 0
    return file


@pytest.mark.long
def test_verdicts_and_exit_codes(
    pair: list[str],
    samples: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["audit", "--samples", str(samples), *pair, *LENGTH]
    assert cli.main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["texts"], found["prompts"]) == (True, 40, 2)
    assert found["power"] == []

    assert cli.main([*given, "--temperature", "0"]) == 2
    assert "its temperature is 1.0, but the audit's is 0.0" in capsys.readouterr().err
    other = [json.loads(line) for line in samples.read_text().splitlines()]
    made = [{name: line[name] for name in ("prompt", "tokens")} for line in other]
    samples.write_text("\n".join(map(json.dumps, made)))
    # No power is told of samples that fail, and none of greedy ones.
    assert cli.main([*given, "--power", "--temperature", "0"]) == 1
    out = capsys.readouterr().out
    assert "are not the argmax" in out and out.count("\n") == 1

    infinite = [line | {"logprobs": [-math.inf] * len(line["tokens"])} for line in made]
    samples.write_text("\n".join(map(json.dumps, infinite)))
    assert cli.main(given) == 1
    assert "that of token 1 of text 1 is not finite; give those" in capsys.readouterr().out
    samples.write_text("\n".join(map(json.dumps, made)))
    assert cli.main(given) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASSED: 40 texts of 2 prompts") and out.count("\n") == 2
    assert "--power shows which faults such samples would reveal." in out

    monkeypatch.setattr(power, "powers", functools.partial(power.powers, texts=40))
    assert cli.main([*given, "--gamma", "2", "--power", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["power"]
    assert found[-1]["fault"] == "temperature 0.9"
    assert all(0 <= one["power"] <= 1 for one in found)
