"""`audit` as a command, on what `generate --json` of a tiny random pair writes."""

import json
import pathlib
import shutil

import pytest

from speculative import cli
from tests import saved

LENGTH = ["--max_length", "12"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = saved.save_pair_of_few_pieces(tmp_path_factory.mktemp("pair"))
    return ["--target", str(target), "--draft", str(draft)]


@pytest.fixture(scope="module")
def samples(pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Texts of 40 prompts at temperature 1."""
    folder = tmp_path_factory.mktemp("samples")
    prompts, file = folder / "prompts.txt", folder / "samples.jsonl"
    prompts.write_text("A small editor.\nAn archive.\n" * 20)
    given = ["--file", str(prompts), "--temperature", "1", "--gamma", "2", "--output", str(file)]
    assert cli.main(["generate", *given, *pair, *LENGTH]) == 0
    return file


def test_verdicts_and_exit_codes(
    pair: list[str],
    samples: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = pathlib.Path(shutil.copy(samples, tmp_path))
    given = ["audit", "--samples", str(samples), *pair, *LENGTH]
    assert cli.main([*given, "--json", "--gamma", "2", "--power_texts", "40"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["texts"], found["prompts"]) == (True, 40, 2)
    assert [one["fault"] for one in found["power"]][-1] == "temperature 0.9"
    assert all(0 <= one["power"] <= 1 for one in found["power"])

    assert cli.main([*given, "--power_texts", "0", "--temperature", "0"]) == 2
    assert "its temperature is 1.0, but the audit is of 0.0" in capsys.readouterr().err
    other = [json.loads(line) for line in samples.read_text().splitlines()]
    made = [{name: line[name] for name in ("prompt", "tokens")} for line in other]
    samples.write_text("\n".join(map(json.dumps, made)))
    assert cli.main([*given, "--power_texts", "0", "--temperature", "0"]) == 1
    assert "are not the argmax" in capsys.readouterr().out

    assert cli.main([*given, "--power_texts", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASSED: 40 texts of 2 prompts") and out.count("\n") == 1


def test_the_power_is_a_table(
    pair: list[str], samples: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["audit", "--samples", str(samples), *pair, *LENGTH, "--gamma", "2"]
    assert cli.main([*given, "--power_texts", "40"]) == 0
    said = capsys.readouterr().out
    assert "γ = 2) with a probability of at least:" in said
    for words in ("correction drawn from p", "every possible guess accepted", "texts for 0.9"):
        assert words in said
