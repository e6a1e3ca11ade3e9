"""The command line: what it prints is what the library decodes, and wrong input is one line."""

import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import speculative
from speculative import checkpoints, cli
from speculative.checkpoints import native
from speculative.commands.generate import as_it_grows
from speculative.decoding.loop import Step
from speculative.models.reads import Reads, unpacked
from speculative.vocabulary import Bytes, SentencePiece, Vocabulary
from tests import saved
from tests.saved import VOCABULARY

ROOT = pathlib.Path(speculative.__file__).parent.parent
TEXT = "A small editor for plain text."


@pytest.fixture(scope="module")
def pair(pair_options: list[str]) -> list[str]:
    return pair_options


def generate(pair: list[str], *options: str) -> int:
    return cli.main(["generate", *pair, "--max_length", "12", "--gamma", "2", *options])


def expected(pair: list[str], text: str, **settings: Any) -> speculative.Result:
    loaded = speculative.load(pair[1], pair[3])
    return loaded.generate(text, max_length=12, gamma=2, **settings)


def give_input(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_text_is_what_one_dispatch_decodes(pair: list[str], capsys) -> None:
    assert generate(pair, TEXT, "--temperature", "1", "--seed", "7") == 0
    assert capsys.readouterr().out == expected(pair, TEXT, temperature=1.0, seed=7).text + "\n"
    assert generate(pair, TEXT, "--lenience", "0.1", "--verification", "token") == 0
    assert capsys.readouterr().out == expected(pair, TEXT, lenience=0.1).text + "\n"


def test_a_line_of_json_for_each_line_of_a_file(
    pair: list[str], tmp_path: pathlib.Path, capsys
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{TEXT}\n{TEXT}\n", encoding="utf-8")
    assert generate(pair, "--file", str(file), "--json", "--temperature", "1") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for example, line in enumerate(lines):
        result = expected(pair, TEXT, temperature=1.0, example=example)
        seconds = line.pop("seconds")
        assert 0 < seconds < 600
        names = (
            "text", "tokens", "target_calls", "accepted", "tokens_per_call", "draft_tokens",
            "tested_by_position", "accepted_by_position", "accepted_lengths",
        )  # fmt: skip
        counted = {key: getattr(result, key) for key in names}
        ended = "stop" if result.tokens[-1] == 1 else "length"
        more = {"prompt": TEXT, "finish_reason": ended}
        told = {"target": pair[1], "draft": pair[3], "gamma": 2, "temperature": 1.0, "top_k": 0}
        told |= {
            "top_p": 1.0,
            "min_p": 0.0,
            "verification": "token",
            "lenience": 1.0,
            "max_length": 12,
        }
        told |= {"seed": 0, "dtype": "float32", "stop": []}
        assert line == counted | more | told
        assert list(line) == [*counted, *more, *told]
    # The same prompt twice has random numbers of its own each time.
    assert len(lines) == 2
    assert lines[0]["tokens"] != lines[1]["tokens"]


def test_prompts_from_standard_input_with_a_tasks_prefix(
    pair: list[str], capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_input(monkeypatch, f"{TEXT}\nÜbergröße\n".encode())
    assert generate(pair, "--task", "debian_ende", "--temperature", "1") == 0
    texts = [
        expected(pair, f"translate English to German: {text}", temperature=1.0, example=i).text
        for i, text in enumerate((TEXT, "Übergröße"))
    ]
    assert capsys.readouterr().out == "".join(text + "\n" for text in texts)


def test_lines_end_where_editors_end_them_and_blank_ones_are_left_out(
    pair: list[str], tmp_path: pathlib.Path, capsys
) -> None:
    odd = "A small\u2028editor\u2029for\x85plain\x0ctext."
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"\ufeff{odd}\r\n\n{TEXT}\n \n".encode())
    assert generate(pair, "--file", str(file), "--json") == 0
    out, err = capsys.readouterr()
    found = [json.loads(line)["tokens"] for line in out.splitlines()]
    assert found == [expected(pair, text).tokens for text in (odd, TEXT)]
    assert err == f"Blank lines of {file} left out: 2.\n"


def test_a_prompt_that_cannot_be_read_is_named_by_its_line(
    pair: list[str], tmp_path: pathlib.Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, long = tmp_path / "prompts.txt", f"{TEXT}\n\n{'word ' * 100_000}\n"
    file.write_text(long)
    give_input(monkeypatch, long.encode())
    for options, place in (["--file", str(file)], file), ([], "standard input"):
        assert generate(pair, *options) == 2
        out, err = capsys.readouterr()
        assert out == "" and f"error: Line 3 of {place}: The prompt has 100,001 tokens" in err
    assert generate(pair, "word " * 100_000) == 2
    assert capsys.readouterr().err.startswith("error: The prompt has 100,001 tokens")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_a_locale_that_lacks_characters(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """JSON is UTF-8; of texts what the locale lacks is replaced, and nothing fails."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding=encoding))
    assert cli.main(["table", "1"]) == 0
    shown = file.getvalue().decode(encoding)
    assert "operations: growth" in shown and ("γ: guesses" in shown) == (encoding == "utf-8")
    file.truncate(file.seek(0))
    assert generate(pair, "α → β", "--json") == 0
    assert json.loads(file.getvalue().decode())["prompt"] == "α → β"


def test_a_long_prompt_is_cut_when_asked(pair: list[str], capsys) -> None:
    assert generate(pair, "word " * 600, "--source_length=512", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected(pair, "word " * 511).text


def test_converted_checkpoints_decode_the_same(
    pair: list[str], tmp_path: pathlib.Path, capsys
) -> None:
    """Through T5X's format, which has no room for a vocabulary, and Hugging Face's."""
    t5x, hub = str(tmp_path / "checkpoint_0"), str(tmp_path / "hub")
    assert cli.main(["convert", pair[1], t5x, "--to", "t5x"]) == 0
    assert "checkpoint_0 (t5x, 0.3 M parameters)" in capsys.readouterr().out
    assert cli.main(["convert", pair[3], hub, "--to", "huggingface"]) == 0
    capsys.readouterr()
    arguments = ["--target", t5x, "--draft", hub]
    assert generate(arguments, TEXT, "--vocabulary", str(VOCABULARY)) == 0
    assert capsys.readouterr().out == expected(pair, TEXT).text + "\n"
    fails(capsys, ["generate", *arguments, TEXT], "without a vocabulary", "--vocabulary")
    fails(capsys, ["convert", hub, t5x, "--to", "native"], "exists already")


def test_a_draft_of_frequent_tokens(pair: list[str], tmp_path: pathlib.Path, capsys) -> None:
    """It changes no text at temperature 0, and guesses none but the tokens of the texts given."""
    texts, narrow = tmp_path / "texts.txt", str(tmp_path / "narrow")
    texts.write_text("a package of tools\na package of programs\n")
    asked = ["convert", pair[3], narrow, "--to", "native", "--keep"]
    assert cli.main([*asked, "5", "--texts", str(texts)]) == 0
    capsys.readouterr()
    kept = checkpoints.open(narrow).config.reads.draft_vocabulary
    seen = SentencePiece(VOCABULARY).encode("a package of tools programs").tolist()
    assert len(unpacked(kept)) == 5 and set(unpacked(kept).tolist()) <= set(seen)
    assert generate([*pair[:2], "--draft", narrow], TEXT) == 0
    assert capsys.readouterr().out == expected(pair, TEXT).text + "\n"
    fails(capsys, [*asked, "5"], "--keep and --texts belong together")


def test_inspect_tells_what_there_is(pair: list[str], capsys) -> None:
    assert cli.main(["inspect", "debian_target"]) == 0
    shown = capsys.readouterr().out
    for fact in ("native", "v1.1 (gated GELU, untied", "384 features", "int8", "8,192 pieces"):
        assert fact in shown
    fails(capsys, ["inspect", "nowhere"], "no checkpoint 'nowhere'")


def steps_of(tokens: list[int]) -> list[Step]:
    """A token a step."""
    one, yes = jnp.ones(1, jnp.int32), jnp.ones(1, bool)
    more = jnp.zeros((1, 0)), one, ~yes, yes, 0 * one, 0 * one, jnp.zeros((1, 0, 2), int)
    return [Step(jnp.array([[token]]), one, *more) for token in tokens]


@pytest.mark.parametrize(
    "vocabulary", [SentencePiece(VOCABULARY), Bytes()], ids=["pieces", "bytes"]
)
def test_streaming_never_shows_half_a_character(vocabulary: Vocabulary) -> None:
    text = "Größe: 日本 €"
    tokens = vocabulary.encode(text).tolist()
    parts = list(as_it_grows(vocabulary, steps_of(tokens)))
    assert len(tokens) > len(text) // 2
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert "".join(parts) == text


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["abc"], "xab"),
        (["abx", "bab"], "xa"),
        (["cx"], "xababc"),
        (["cc", "x"], ""),
    ],
)
def test_streaming_never_shows_what_may_begin_a_stop_string(stop: list[str], shown: str) -> None:
    text, vocabulary = "xababc", Bytes()
    parts = list(as_it_grows(vocabulary, steps_of(vocabulary.encode(text).tolist()), stop))
    assert "".join(parts) == shown
    for at in range(len(parts)):  # What is kept back could not have been shown.
        said, read = "".join(parts[: at + 1]), text[: at + 1]
        kept = read[len(said) :] if len(said) < len(shown) else ""
        assert not kept or any(end.startswith(kept) for end in stop)


def test_streaming_shows_bytes_that_stay_broken() -> None:
    vocabulary = SentencePiece(VOCABULARY)
    first_byte = vocabulary.pieces.index("<0xE2>")
    parts = list(as_it_grows(vocabulary, steps_of([first_byte])))
    assert parts == ["", "\N{REPLACEMENT CHARACTER}"]


def fails(capsys, arguments: list[str], *fragments: str) -> None:
    """One sentence, exit code 2, nothing else."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


def unlink(file: pathlib.Path) -> None:
    file.unlink()


def truncate(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def alter(file: pathlib.Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))


@pytest.mark.parametrize("command", ["generate", "demo"])
@pytest.mark.parametrize(
    ("name", "damage", "fragment"),
    [
        ("model.safetensors", unlink, "missing"),
        ("model.safetensors", truncate, "cut off"),
        ("model.safetensors", alter, "checksum"),
        ("debian.model", alter, "checksum"),
        ("config.json", unlink, "neither a native nor a Hugging Face config.json"),
        ("config.json", truncate, "not JSON"),
    ],
)
def test_damaged_assets_are_named(
    pair: list[str],
    tmp_path: pathlib.Path,
    capsys,
    command: str,
    name: str,
    damage: Callable[[pathlib.Path], None],
    fragment: str,
) -> None:
    shutil.copytree(pair[3], tmp_path / "draft")
    damage(tmp_path / "draft" / name)
    options = {"generate": [TEXT], "demo": ["--output_dir", str(tmp_path / "results")]}[command]
    arguments = [command, *options, *pair[:2], "--draft", str(tmp_path / "draft")]
    fails(capsys, arguments, str(tmp_path / "draft"), name, fragment)
    assert not (tmp_path / "results").exists()


def test_vocabularies_of_one_size_with_another_piece(
    pair: list[str], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = VOCABULARY.read_bytes()
    assert raw.count("▁editor".encode()) > 0
    other = tmp_path / "other.model"
    other.write_bytes(raw.replace("▁editor".encode(), "▁editxr".encode()))
    params = saved.random(saved.DRAFT, 1)
    native.save(tmp_path / "draft", saved.DRAFT, params, other)
    arguments = ["generate", TEXT, *pair[:2], "--draft", str(tmp_path / "draft")]
    assert cli.main([*arguments, "--max_length", "8"]) == 0
    assert "guesses the 8,190 of the target's 8,192 tokens that both have" in caplog.text


def test_a_draft_that_reads_an_encoder_of_another_size(
    pair: list[str], tmp_path: pathlib.Path, capsys
) -> None:
    config = saved.DRAFT.replace(num_encoder_layers=0, reads=Reads(24))
    saved.save(tmp_path / "draft", config, 1)
    arguments = ["generate", TEXT, *pair[:2], "--draft", str(tmp_path / "draft")]
    fails(capsys, arguments, "reads an encoder of 24 features", "has 16", "made for")


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_logits_that_are_not_finite(
    pair: list[str], tmp_path: pathlib.Path, capsys, output: list[str]
) -> None:
    saved.save(tmp_path / "target", saved.TARGET, 0, logits_scale=1e38)
    arguments = ["--target", str(tmp_path / "target"), *pair[2:], TEXT, *output]
    fails(capsys, ["generate", *arguments], "logits", "not finite")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--json"], "guesses tokens that do not exist, or from logits that are not finite"),
        (["--temperature=1", "--verification=block"], "gives a q with NaN or infinity"),
        (["--temperature=1", "--samples=2"], "gives a q with NaN or infinity"),
    ],
    ids=["greedy", "streamed", "samples"],
)
def test_a_draft_whose_logits_are_not_finite(
    pair: list[str], tmp_path: pathlib.Path, capsys, settings: list[str], said: str
) -> None:
    saved.save(tmp_path / "draft", saved.DRAFT, 1, logits_scale=1e38)
    draft = str(tmp_path / "draft")
    given = ["generate", *pair[:2], "--draft", draft, "--max_length=12", TEXT, *settings]
    fails(capsys, given, f"The draft {draft} {said}", "Take another draft")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version(option: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([option])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for word in cli.COMMANDS if option == "--help" else [speculative.__version__]:
        assert word in out


def test_a_platform_that_is_not_here(tmp_path: pathlib.Path) -> None:
    commands = [["generate", TEXT], ["run", "--limit=1"]]
    code = f"from speculative import cli; print(*map(cli.main, {commands}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "tpu", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2 2\n"
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands)
    for line in lines:
        assert line.startswith("error: There is no device of the platform 'tpu' here")


RUN = """
import signal, sys
from speculative import cli, commands
# A shell starts what runs in the background with interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
def work(options):
    {body}
cli.COMMANDS["demo"] = commands.Command("", lambda parser: None, work)
sys.exit(cli.main(["demo"]))
"""


def start(body: str, stdout: int) -> subprocess.Popen:
    """The command line in a process of its own, with a command that does `body`."""
    code = RUN.format(body=body)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_an_interrupt_is_one_line_and_130() -> None:
    # `signal.pause` would not end by an interrupt that comes just before it.
    busy = "print('ready', flush=True)\n    while True: pass"
    with start(busy, subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "interrupted\n"
        assert process.wait() == 130


# At each import a child is left behind, which is interrupted there and then.
INTERRUPTED_WITHIN = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
modules = sys.argv[1:]
def interrupt(event, arguments):
    if event == "import" and arguments[0] in modules:
        assert threading.current_thread() is threading.main_thread()
        modules.remove(arguments[0])
        if child := os.fork():
            print(arguments[0], os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            if not modules:
                os._exit(0)
        else:
            signal.raise_signal(signal.SIGINT)
sys.addaudithook(interrupt)
from speculative.cli import main
sys.exit(main(["generate", "An editor."]))
"""


def test_an_interrupt_of_an_import_is_one_line_and_130() -> None:
    """As a module is first imported, wherever that is; the first of them by the command itself."""
    modules = "speculative.loading numpy jax jaxlib flax tensorstore sentencepiece".split()
    forks = ["-W", "ignore:os.fork() was called:RuntimeWarning"]  # JAX has no thread here yet.
    command = [sys.executable, *forks, "-c", INTERRUPTED_WITHIN, *modules]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert sorted(ended.stdout.splitlines()) == sorted(f"{module} 130" for module in modules)
    assert (ended.returncode, ended.stderr) == (0, "interrupted\n" * len(modules))


def test_help_needs_no_jax() -> None:
    """Nor does anything else before a command runs, so that an interrupt finds `main` at work."""
    code = "import sys; from speculative import cli; cli._parser(); print('jax' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ended.stdout, ended.stderr) == ("False\n", "")


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start("print('x' * 100_000)", writer) as process:
        os.close(writer)
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait() == 141
