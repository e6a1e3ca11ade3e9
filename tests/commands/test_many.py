"""`generate` in batches, several samples of a prompt, and a file of results that is resumed."""

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import speculative
from speculative import cli, loading
from speculative.commands import many
from speculative.pair import Pair
from tests import saved

PROMPTS = ["A small editor for plain text.", "Übergröße", "", "An archive", "A map, and more"]
SETTINGS = ["--max_length", "12", "--gamma", "2", "--temperature", "1", "--seed", "5"]


@pytest.fixture(scope="module")
def command(pair_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("many") / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return ["generate", *pair_options, "--file", str(file), *SETTINGS]


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def samples(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The file of two samples of each prompt."""
    file = tmp_path_factory.mktemp("samples") / "made.jsonl"
    given = ["--batch_size", "4", "--samples", "2", "--output", str(file)]
    assert cli.main([*command, *given]) == 0
    return file


def test_batches_and_samples_are_the_texts_of_one_by_one_in_their_order(
    command: list[str], samples: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--json"]) == 0
    alone = lines(capsys.readouterr().out)
    assert cli.main([*command, "--json", "--batch_size", "2"]) == 0
    together = lines(capsys.readouterr().out)
    assert [line.pop("number") for line in together] == [0, 1, 2, 3]
    for line in together:
        assert line.pop("sample") == 0
    for line in alone:
        assert line.pop("seconds") > 0
    assert together == alone
    assert cli.main([*command, "--batch_size", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [line["text"] for line in alone]
    found = lines(samples.read_text())
    places = [(line["number"], line["sample"]) for line in found]
    assert places == [(i, k) for i in range(4) for k in range(2)]
    assert [line["tokens"] for line in found[::2]] == [line["tokens"] for line in alone]
    assert len({tuple(line["tokens"]) for line in found}) == 8


@pytest.mark.parametrize("cut", [0, 3, -20], ids=["nothing", "lines", "within a line"])
def test_a_file_is_gone_on_with(
    command: list[str], samples: pathlib.Path, tmp_path: pathlib.Path, cut: int
) -> None:
    """Also one whose samples were fewer; the file is what an uninterrupted run writes."""
    whole, file = samples.read_text(), tmp_path / "part.jsonl"
    kept = whole[:cut] if cut < 0 else "".join(whole.splitlines(keepends=True)[1::2][:cut])
    file.write_text(kept)
    given = ["--batch_size", "2", "--samples", "2", "--output", str(file)]
    assert cli.main([*command, *given]) == 0
    assert file.read_text() == whole


def test_what_is_done_outlives_an_interruption(
    command: list[str],
    samples: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, serve = tmp_path / "part.jsonl", Pair.serve

    def interrupted(self: Pair, requests: Any, *, batch_size: int) -> Iterator[Any]:
        for number, found in enumerate(serve(self, requests, batch_size=batch_size)):
            if number == 3:
                raise KeyboardInterrupt
            yield found

    given = [*command, "--batch_size", "2", "--samples", "2", "--output", str(file)]
    with monkeypatch.context() as patched:
        patched.setattr(Pair, "serve", interrupted)
        assert cli.main(given) == cli.INTERRUPTED
    said = f"interrupted; 3 of 8 texts are in {file}; rerun to resume"
    assert said in capsys.readouterr().err
    assert len(file.read_text().splitlines()) == 3
    assert cli.main(given) == 0
    assert file.read_text() == samples.read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--temperature", "0.5"], "Line 1 of FILE is no result: its temperature is 1.0, not 0.5;"),
        (["--gamma", "3"], "its gamma is 2, not 3;"),
        (["--prefix", "say: "], "its prompt is not prompt 1;"),
        (["--stop", "x"], "its stop is [], not ['x'];"),
        (["--logprobs"], "it has no logprobs;"),
        (["--quantize=int8"], "it has no quantize;"),
    ],
)
def test_results_of_other_settings_are_left_alone(
    command: list[str],
    samples: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    said: str,
) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(samples.read_text())
    assert cli.main([*command, *change, "--samples", "2", "--output", str(file)]) == 2
    err = capsys.readouterr().err
    assert said.replace("FILE", str(file)) in err
    assert "; write elsewhere, or delete that file." in err
    assert file.read_text() == samples.read_text()


def test_results_of_a_target_in_int8_are_not_gone_on_with_in_floating_point(
    command: list[str],
    samples: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "int8.jsonl"
    made = [line | {"quantize": "int8"} for line in lines(samples.read_text())]
    file.write_text("".join(json.dumps(line) + "\n" for line in made))
    assert cli.main([*command, "--samples", "2", "--output", str(file)]) == 2
    assert "it was written with another --quantize; write elsewhere" in capsys.readouterr().err


def test_results_of_other_weights_are_left_alone(
    command: list[str],
    samples: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They came to lie in the same folder; those that kept no fingerprints are gone on with."""
    target, file = tmp_path / "target", tmp_path / "out.jsonl"
    shutil.copytree(command[2], target)
    given = [*command[:2], str(target), *command[3:], "--samples", "2", "--output", str(file)]
    made = [line | {"target": str(target)} for line in lines(samples.read_text())]
    file.write_text("".join(json.dumps(line) + "\n" for line in made[:3]))
    assert cli.main(given) == 0  # A copy is the same.
    assert [line["tokens"] for line in lines(file.read_text())] == [x["tokens"] for x in made]
    whole = file.read_text()
    shutil.rmtree(target)
    saved.save(target, saved.TARGET, 7)
    with monkeypatch.context() as patched:
        patched.setattr(loading.Resolved, "load", lambda self: pytest.fail("loaded"))
        assert cli.main(given) == 2
    said = f"Line 1 of {file} is no result: its target changed since it was written, under the "
    *_, error = capsys.readouterr().err.splitlines()
    assert error == f"error: {said}same name; write elsewhere, or delete that file."
    assert file.read_text() == whole and not caplog.messages
    for line in made:
        del line["fingerprints"]
    file.write_text("".join(json.dumps(line) + "\n" for line in made))
    assert cli.main(given) == 0
    assert f"{file} was written before results kept fingerprints" in caplog.messages[0]


def test_results_come_in_order_as_soon_as_they_can() -> None:
    arrived: list[int] = []

    def served() -> Iterator[Any]:
        for place in (1, 0, 2):
            arrived.append(place)
            yield place, str(place)

    ordered = many.in_order(served())
    assert next(ordered) == "0" and len(arrived) == 2
    assert list(ordered) == ["1", "2"]


ASKED: list[dict[str, Any]] = [
    {"prompt": PROMPTS[0], "temperature": 0.0},
    {"prompt": PROMPTS[0], "seed": 9, "top_k": 3},
    {"prompt": PROMPTS[3], "max_length": 4},
    {"prompt": PROMPTS[4], "temperature": 0.7, "top_p": 0.9, "stop": ["e", "no such"]},
]


@pytest.mark.long
def test_a_line_of_json_has_settings_of_its_own(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each text is what `Pair.generate` gives by them, one by one and in batches."""
    file = tmp_path / "asked.jsonl"
    file.write_text("\n\n".join(map(json.dumps, ASKED)))
    target, draft = command[2], command[4]
    pair = speculative.load(target, draft)
    given = ["generate", "--target", target, "--draft", draft, "--file", str(file), *SETTINGS]
    for more in ([], ["--batch_size", "4"]):
        assert cli.main([*given, "--json", *more]) == 0
        found = lines(capsys.readouterr().out)
        assert len(found) == len(ASKED)
        for number, (line, asked) in enumerate(zip(found, ASKED, strict=True)):
            own = {"temperature": 1.0, "seed": 5, "max_length": 12, "example": number} | asked
            result = pair.generate(own.pop("prompt"), gamma=2, **own)
            assert (line["text"], line["tokens"]) == (result.text, result.tokens)
            assert asked.items() <= line.items()
    output = tmp_path / "out.jsonl"
    for _ in range(2):  # The second time there is nothing left to do.
        assert cli.main([*given, "--output", str(output)]) == 0
        assert [line["tokens"] for line in lines(output.read_text())] == [
            line["tokens"] for line in found
        ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "it is not a JSON object with a prompt, a text."),
        ('{"prompt": 3}', "it must have either a prompt, a text, or messages, those of a chat."),
        (
            '{"prompt": "a", "beams": 3}',
            "it has 'beams'; known are prompt, messages, temperature, top_k",
        ),
        ('{"prompt": "a", "temperature": -1}', "temperature must be 0"),
        ('{"prompt": "a", "seed": 1.5}', "seed must be"),
        ('{"prompt": "a", "max_length": 500000}', "max_length must be"),
        ('{"prompt": "a", "stop": [""]}', "A stop string must have 1 to 256 characters, not 0."),
    ],
)
def test_a_line_of_json_that_is_no_prompt(
    command: list[str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    line: str,
    said: str,
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    assert cli.main(["generate", *command[1:5], "--file", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"Line 3 of {file} is no prompt: " in err and said in err
