"""The commit that records name."""

import pathlib
import subprocess

import pytest

import speculative
from speculative.rows import environment


def test_a_commit_is_marked_where_code_differs_and_not_where_results_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    code, results = tmp_path / "speculative" / "__init__.py", tmp_path / "results" / "a.jsonl"
    page = tmp_path / "docs" / "a.md"
    for file in (code, results, page):
        file.parent.mkdir()
        file.write_text("1")
    monkeypatch.setattr(speculative, "__file__", str(code))
    assert environment.commit() == speculative.__version__
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "--short", "HEAD")
    assert environment.commit() == head
    results.write_text("2")
    page.write_text("2")
    assert environment.commit() == head
    (tmp_path / "notes.txt").write_text("untracked")
    assert environment.commit() == head
    code.write_text("2")
    assert environment.commit() == f"{head}-dirty"
