"""`evaluate`: the score of a test set that was decoded in batches."""

import json
import pathlib
import shutil
from typing import Any

import pytest
import sacrebleu

from speculative import cli
from speculative.rows import memory
from tests import saved

SOURCES = ["A small editor for plain text.", "An archive", "A map, and more", "A tool", "b c d e"]


@pytest.fixture(scope="module")
def command(pair_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of texts whose references are what the target says of them, a word or two changed."""
    folder = tmp_path_factory.mktemp("evaluate")
    given = [*pair_options, "--max_length", "12"]
    data, file = folder / "data.tsv", folder / "said.jsonl"
    (folder / "sources.txt").write_text("\n".join(SOURCES))
    asked = [*given, "--file", str(folder / "sources.txt"), "--output", str(file)]
    assert cli.main(["generate", *asked]) == 0
    said = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    pairs = zip(SOURCES, said, strict=True)
    lines = (f"{source}\t{' '.join(text.split())} end of it\n" for source, text in pairs)
    data.write_text("".join(lines))
    given += ["--prefix", "", "--gamma", "2", "--temperature", "0"]
    return ["evaluate", *given, "--metric", "bleu", "--data_file", str(data)]


def scores(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "scores.json").read_text())


def test_the_score_does_not_depend_on_the_batch(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts: list[list[str]] = []
    for size in ("1", "4"):
        folder = tmp_path / size
        assert cli.main([*command, "--batch_size", size, "--output_dir", str(folder)]) == 0
        texts.append((folder / "texts.jsonl").read_text().splitlines())
    assert texts[0] == texts[1] and len(texts[0]) == len(SOURCES)
    one, four = scores(tmp_path / "1"), scores(tmp_path / "4")
    assert (one["batch_size"], four["batch_size"]) == (1, 4)
    assert one["score"] == four["score"] and one["low"] <= one["score"] <= one["high"]
    data = pathlib.Path(command[command.index("--data_file") + 1]).read_text().splitlines()
    references = [line.split("\t")[1] for line in data]
    said = [json.loads(line)["text"] for line in texts[0]]
    expected = sacrebleu.corpus_bleu(said, [references], tokenize="intl").score
    assert 0 < expected < 100 and one["score"] == pytest.approx(expected)
    assert f"bleu {expected:.2f} (" in capsys.readouterr().out
    assert one["tokens"] == sum(len(json.loads(line)["tokens"]) for line in texts[0])


def test_what_is_there_is_not_decoded_again(command: list[str], tmp_path: pathlib.Path) -> None:
    assert cli.main([*command, "--output_dir", str(tmp_path)]) == 0
    file, before = tmp_path / "texts.jsonl", scores(tmp_path)["score"]
    lines = file.read_text().splitlines(keepends=True)
    kept = json.loads(lines[1]) | {"text": "end of it"}
    file.write_text("".join([lines[0], json.dumps(kept) + "\n"]))
    assert cli.main([*command, "--output_dir", str(tmp_path)]) == 0
    assert json.loads(file.read_text().splitlines()[1])["text"] == "end of it"
    assert scores(tmp_path)["score"] != before


def test_texts_of_other_weights_are_not_scored(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor those of other sources; other references alone are, for nothing is kept of them."""
    target, data, out = tmp_path / "target", tmp_path / "data.tsv", tmp_path / "out"
    shutil.copytree(command[2], target)
    pairs = pathlib.Path(command[command.index("--data_file") + 1]).read_text()
    data.write_text(pairs)
    given = [*command[:2], str(target), *command[3:]]
    given += ["--data_file", str(data), "--output_dir", str(out)]
    assert cli.main(given) == 0
    first = scores(out)
    data.write_text(pairs.replace(" end of it", ""))
    assert cli.main(given) == 0
    second = scores(out)
    assert first["score"] != second["score"]
    texts = first["fingerprints"].pop("texts"), second["fingerprints"].pop("texts")
    assert texts[0] != texts[1] and first["fingerprints"] == second["fingerprints"]
    data.write_text(pairs.replace("An archive", "An old archive"))
    assert cli.main(given) == 2
    assert "its prompt is not prompt 2;" in capsys.readouterr().err
    data.write_text(pairs)
    shutil.rmtree(target)
    saved.save(target, saved.TARGET, 7)
    assert cli.main(given) == 2
    assert "its target changed since it was written" in capsys.readouterr().err
    assert scores(out)["score"] == second["score"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch_size", "0"], ["--batch_size", "'0'"]),
        (["--gin", "RowConfig.metric = None"], ["no metric", "--metric"]),
        (["--simulated_alpha", "0.5"], ["simulated alpha", "real models"]),
    ],
    ids=str,
)
def test_what_cannot_be_scored(
    command: list[str],
    tmp_path: pathlib.Path,
    options: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*command, *options, "--output_dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words) and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_text_without_a_reference_is_named(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.tsv"
    data.write_text("a\tb\nc\t\n")
    assert cli.main([*command, "--data_file", str(data), "--output_dir", str(tmp_path)]) == 2
    assert f"Line 2 of {data} has no reference" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["evaluate", "generate"])
def test_a_batch_that_memory_does_not_hold_is_refused_before_loading(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: ("this machine", 2**29))
    monkeypatch.setattr("speculative.loading.Resolved.load", lambda self: pytest.fail("loaded"))
    given = ["a"] if kind == "generate" else []
    assert cli.main([kind, *given, "--batch_size=1024"]) == 2
    said = capsys.readouterr().err
    assert "1024 rows of debian_target with debian_draft_hidden do not fit the memory" in said
    assert "the largest batch that does has" in said


def test_what_int8_costs(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, held = tmp_path / "plain", tmp_path / "held"
    assert cli.main([*command, "--output_dir", str(plain)]) == 0
    in_int8 = [*command, "--quantize=int8", "--compare", "--output_dir", str(held)]
    assert cli.main(in_int8) == 0
    said = capsys.readouterr().out
    one, other = scores(plain), scores(held)
    assert other["quantize"] == "int8" and "quantize" not in one
    assert other["unquantized"] == one["score"]
    assert other["difference"] == pytest.approx(other["score"] - one["score"])
    assert other["difference_low"] <= other["difference"] <= other["difference_high"]
    assert 0 < other["divergence"] < 0.1 and 0.5 < other["same_choices"] <= 1
    assert f"Without int8: bleu {one['score']:.2f}; with it {other['difference']:+.2f}" in said
    texts = (held / "texts_unquantized.jsonl").read_text()
    assert texts == (plain / "texts.jsonl").read_text()
    # What is there already is neither decoded again nor taken for the other.
    before = (held / "texts.jsonl").read_text()
    assert cli.main(in_int8) == 0
    assert (held / "texts.jsonl").read_text() == before != texts


def test_a_comparison_needs_int8(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--compare", "--output_dir", str(tmp_path)]) == 2
    assert "--compare is for a target in int8; add --quantize=int8" in capsys.readouterr().err
