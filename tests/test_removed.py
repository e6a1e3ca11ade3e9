"""What is asked for by a name that is gone is answered by its row of the changelog's table."""

import pathlib
import re

import pytest

from speculative import cli
from speculative.removed import REMOVED, said

CHANGELOG = pathlib.Path(__file__).parent.parent / "CHANGELOG.md"


def test_the_changelog_has_the_table() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE)
    assert dict(rows) == REMOVED
    assert len(rows) == len(REMOVED)


COMMANDS = [name for name in REMOVED if name.startswith("speculative ")]
MODELS = [name for name in REMOVED if name.startswith("debian_")]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_removed_option_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = name.split()
    answered(words, name, capsys)
    if len(words) > 2:
        answered([words[0], "=".join(words[1:])], name, capsys)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("option", ["--draft", "--target"])
def test_a_removed_model_is_answered(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(["generate", "A text.", option, name], name, capsys)


def answered(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"error: {said(name)}\n"


def test_what_is_there_is_not_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--gamma", "3", "--nope"]) == 2
    assert "there is no option --nope" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in REMOVED if name.startswith("distil.")])
def test_a_removed_binding_is_answered(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--config=configs/training/draft.gin", "--data_dir=nowhere"]
    for prefix in ("", "distil.", "speculative.training.distil."):
        binding = f"--gin={prefix}{name} = 0.5"
        assert cli.main(["distil", *given, binding, f"--output={tmp_path / 'draft'}"]) == 2
        assert (said(name) or "nothing") in capsys.readouterr().err
