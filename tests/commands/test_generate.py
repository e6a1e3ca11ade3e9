"""`generate` for people: lines are answered as they come, on a pipe and on a terminal."""

import io
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time
import types
from typing import Any

import pytest
import sentencepiece

import speculative
from speculative import cli
from speculative.commands import rows
from speculative.commands.figures import Figures
from speculative.vocabulary import SentencePiece
from tests.saved import VOCABULARY

ROOT = pathlib.Path(speculative.__file__).parent.parent
TEXT, OTHER = "A small editor for plain text.", "Übergröße"
LONG = "word " * 100_000
SETTINGS = ["--max_length", "12", "--gamma", "2"]
PATIENCE = 250  # Seconds after which a process that says nothing hangs.
RATE = r"[\d,]+ tokens in \d+\.\d\d s \([\d,]+\.\d a second\)"
FIGURES = RATE + r", \d+ target calls? \(\d\.\d\d tokens per call\)\."


@pytest.fixture(scope="module")
def pair(pair_options: list[str]) -> list[str]:
    return pair_options


@pytest.fixture(scope="module")
def answers(pair: list[str]) -> list[speculative.Result]:
    """Of the two texts, the second being the second text of its run."""
    loaded = speculative.load(pair[1], pair[3])
    return [
        loaded.generate(text, max_length=12, gamma=2, example=example)
        for example, text in enumerate((TEXT, OTHER))
    ]


def until(stream: int, ending: str) -> str:
    """What is written to a file descriptor until it matches, or its end."""
    said, end = b"", time.monotonic() + PATIENCE
    while not re.search(ending + r"\Z", said.decode(errors="replace")):
        ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"nothing more after {said!r}"
        try:
            part = os.read(stream, 1 << 16)
        except OSError:  # A terminal whose last process has ended.
            part = b""
        if not part:
            break
        said += part
    return said.decode(errors="replace")


def asleep(process: int) -> bool:
    """Whether the main thread of a process waits, as far as the system tells."""
    file = pathlib.Path(f"/proc/{process}/stat")
    return not file.exists() or file.read_text().rpartition(")")[2].split()[0] == "S"


def test_a_pipe_gets_each_answer_before_the_next_line_is_sent(
    pair: list[str], answers: list[speculative.Result]
) -> None:
    command = [sys.executable, "-m", "speculative.cli", "generate", *pair, *SETTINGS]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        for line, answer in zip((TEXT, f"\r\n{OTHER}"), answers, strict=True):
            process.stdin.write(f"{line}\r\n".encode())
            assert until(process.stdout.fileno(), "\n") == f"{answer.text}\n"
        process.stdin.write(b"\ncaf\xe9\n")
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (2, b"")
    assert err.decode() == "error: Line 5 of standard input is not UTF-8; convert it.\n"


def generate_from(
    monkeypatch: pytest.MonkeyPatch, pair: list[str], chunks: list[bytes], *options: str
) -> int:
    """The exit code where so much of standard input arrives at a time."""
    buffer = types.SimpleNamespace(read1=lambda: chunks.pop(0) if chunks else b"")
    stdin = types.SimpleNamespace(isatty=lambda: False, buffer=buffer)
    monkeypatch.setattr(sys, "stdin", stdin)
    return cli.main(["generate", *pair, *SETTINGS, "--json", *options])


def test_lines_are_put_together_from_what_arrives(
    pair: list[str], answers: list[speculative.Result], capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = f"\ufeff{TEXT}\n\r\n{OTHER}".encode()
    chunks = [raw[i : i + 1] for i in range(len(raw))]
    assert generate_from(monkeypatch, pair, chunks) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["prompt"], line["text"]) for line in lines] == [
        (text, answer.text) for text, answer in zip((TEXT, OTHER), answers, strict=True)
    ]
    assert err == "Blank lines of standard input left out: 1.\n"


def test_what_arrives_together_is_checked_together(
    pair: list[str], answers: list[speculative.Result], capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [f"{TEXT}\n".encode(), f"{OTHER}\n{LONG}\n".encode()]
    assert generate_from(monkeypatch, pair, chunks) == 2
    out, err = capsys.readouterr()
    assert [json.loads(line)["text"] for line in out.splitlines()] == [answers[0].text]
    said = r"error: Line 3 of standard input: The prompt has 100,001 tokens, .*\n"
    assert re.fullmatch(said, err)


# Twice, with the terminal as its own, from which Ctrl-C comes.
ON_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from speculative import cli
from speculative.commands import rows
for _ in range(2):
    print(cli.main(["generate", *sys.argv[1:]]), flush=True)
"""


def test_a_terminal_is_answered_line_by_line(
    pair: list[str], answers: list[speculative.Result]
) -> None:
    """And ends by Ctrl-D, or by Ctrl-C."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, *pair, *SETTINGS]
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        said = until(ours, "> ")
        assert "Each line is a prompt" in said and said.endswith("\r\n> ")
        os.write(ours, f"{TEXT}\n".encode())
        said = until(ours, "\n> ")
        assert re.fullmatch(rf"{re.escape(TEXT)}\r\n.*\r\n{FIGURES}\r\n> ", said), said
        assert answers[0].text in said
        for wrong, complaint in {
            b"caf\xe9\n": "error: Line 2 of standard input is not UTF-8; convert it.",
        }.items():
            os.write(ours, wrong)
            assert f"\r\n{complaint}" in until(ours, "\n> ")
        os.write(ours, b" \n")
        assert until(ours, "\n> ") == " \r\n> "
        os.write(ours, f"{OTHER}\n".encode())
        assert f"\r\n{answers[1].text}\r\n" in until(ours, "\n> ")
        os.write(ours, b"\x04")
        # The next run may write at once: until it waits for a line too.
        assert re.match(rf"\r\n2 texts: {FIGURES}\r\n0\r\n", until(ours, "\n> "))
        os.write(ours, f"{TEXT}\n".encode())
        assert answers[0].text in until(ours, "\n> ")
        while not asleep(process.pid):  # Python keeps a signal that comes just before a read.
            pass
        os.write(ours, b"\x03")
        assert until(ours, "130\r\n") == "^C\r\ninterrupted\r\n130\r\n"
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_comparison_with_the_target_alone(pair: list[str], capsys) -> None:
    assert cli.main(["generate", *pair, *SETTINGS, TEXT, "--compare"]) == 0
    err = capsys.readouterr().err
    alone = rf"Without a draft: {RATE}, so with it \d+\.\d\d times as fast\."
    same = r"The tokens are the same both ways\."
    assert re.fullmatch(rf"{FIGURES}\n{alone}\n{same}\n", err), err
    assert err.count("12 tokens") == 2


def test_a_trace_spells_the_output(pair: list[str], answers: list[Any], capsys) -> None:
    """The target's own tokens and accepted guesses are the output; what was rejected is not."""
    assert cli.main(["generate", TEXT, *pair, *SETTINGS, "--trace"]) == 0
    _, prompt, legend, *steps = capsys.readouterr().out.splitlines()
    assert (prompt, "rejected guess" in legend) == (TEXT, True)
    assert all(re.match(rf" *{i}  [0-2]/2 │", step) for i, step in enumerate(steps, 1))
    spelled = "".join(step.partition("│")[2] for step in steps)
    spelled = re.sub(r"\[-.*?-\]", "", spelled).replace("{+", "").replace("+}", "")
    pieces = SentencePiece(VOCABULARY).pieces
    expected = "".join(pieces[token] for token in answers[0].tokens).replace("▁", " ")
    assert spelled.split() == expected.split()


def test_a_comparison_in_json(pair: list[str], capsys) -> None:
    sampled = ["--compare", "--json", "--temperature", "1", "--seed", "3"]
    assert cli.main(["generate", *pair, *SETTINGS, OTHER, *sampled]) == 0
    out, err = capsys.readouterr()
    line = json.loads(out)
    loaded = speculative.load(pair[1], pair[3])
    alone = loaded.generate(OTHER, max_length=12, gamma=0, temperature=1.0, seed=3)
    assert list(line)[-3:] == ["seconds", "tokens_autoregressive", "seconds_autoregressive"]
    assert line["tokens_autoregressive"] == alone.tokens
    assert OTHER in out  # Not spelled in escapes.
    assert err == ""


@pytest.mark.parametrize("free, tree", [({"cpu": (15, 7)}, 15), ({}, 0)])
def test_the_usual_tree(
    free: dict[str, tuple[int, int]],
    tree: int,
    pair: list[str],
    answers: list[Any],
    capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "FREE", free)
    options = [*pair, *SETTINGS, "--json", "--tree=auto", TEXT]
    assert not cli.main(["generate", *options])
    line = json.loads(capsys.readouterr().out)
    assert line.get("tree", 0) == tree
    assert line["tokens"] == answers[0].tokens


def test_figures_are_sums() -> None:
    one = Figures(1, 20, 8, 0.5, tokens_alone=10, seconds_alone=0.5, greedy=1, equal=1)
    two = Figures(1, 1180, 1, 0.5, tokens_alone=1190, seconds_alone=1.0, greedy=1, near_ties=1)
    assert str(one).splitlines() == [
        "20 tokens in 0.50 s (40.0 a second), 8 target calls (2.50 tokens per call).",
        "Without a draft: 10 tokens in 0.50 s (20.0 a second), so with it 2.00 times as fast.",
        "The tokens are the same both ways.",
    ]
    assert str(one + two).splitlines() == [
        "2 texts: 1,200 tokens in 1.00 s (1,200.0 a second), 9 target calls "
        "(133.33 tokens per call).",
        "Without a draft: 1,200 tokens in 1.50 s (800.0 a second), so with it 1.50 times as fast.",
        "The tokens are the same both ways for 1 of 2 texts; 1 differ by a tie that rounding "
        "decides.",
    ]
    assert str(Figures(1, 3, 1, 0.1, greedy=1)).endswith("\nThe tokens differ.")


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("An editor.", 0),
        ("Größe", 0),
        ("ﬁne ①", 0),  # Normalised to "fine 1".
        ("你好 世界，hello", 0.4),
        ("مرحبا", 1),
        ("naïve", 0.2),
        ("", 0),
        (" ", 0),
    ],
)
def test_what_a_vocabulary_cannot_spell(text: str, share: float) -> None:
    assert SentencePiece(VOCABULARY).spelled_out(text) == pytest.approx(share)


def test_a_vocabulary_without_bytes(tmp_path: pathlib.Path) -> None:
    """Whose pieces are its characters; a row of unknown ones is a single token."""
    model = io.BytesIO()
    settings: dict[str, Any] = {"vocab_size": 8, "model_type": "char", "minloglevel": 2}
    settings |= {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["abcd"]), model_writer=model, **settings
    )
    (tmp_path / "letters.model").write_bytes(model.getvalue())
    letters = SentencePiece(tmp_path / "letters.model")
    assert len(letters.encode("ab 你好世界 cd")) < 10
    assert letters.spelled_out("ab 你好世界 cd") == 0.5
    assert letters.spelled_out("ab cd") == 0


def test_another_script_is_warned_of(pair: list[str], tmp_path: pathlib.Path, capsys) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{OTHER}\n\n你好 hello, world\n", encoding="utf-8")
    assert cli.main(["generate", *pair, *SETTINGS, "--file", str(file), "--json"]) == 0
    warning, blank = capsys.readouterr().err.splitlines()
    assert blank.startswith("Blank lines")
    assert warning.startswith("15% of the characters of prompt 2 are unknown pieces or single")
    assert warning.endswith("noise.") and "debian.model" in warning


@pytest.mark.parametrize("raw", [None, b"", b"\n \r\n"], ids=["closed", "empty", "blank"])
def test_an_empty_standard_input(
    raw: bytes | None, pair: list[str], capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = None if raw is None else io.TextIOWrapper(io.BytesIO(raw))
    monkeypatch.setattr(sys, "stdin", given)
    assert cli.main(["generate", *pair]) == 2
    assert "standard input is empty" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def interruptible():
    """A command sets its own handler of Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
