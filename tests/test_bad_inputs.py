"""Wrong command lines and calls: one sentence that names what is wrong, before a tensor is read.

A case is a command line, or a call's arguments, and what its error must say. All run in one
process. In command lines TMP is a folder that holds nothing but `INPUTS`.
"""

import functools
import math
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from speculative import cli, loading
from speculative.checkpoints import Checkpoint
from speculative.pair import Pair
from speculative.vocabulary import SentencePiece
from tests.saved import VOCABULARY

TEXT = "A small editor for plain text."
TABLE = pathlib.Path(__file__).parent.parent / "configs" / "runs" / "table2.gin"
ROW = f"{TABLE}:debian_ende_t0"
PUBLIC = str(TABLE.with_suffix("") / "ende_small_t0.gin")
LONE = "caf\udce9"  # What Python makes of a byte that is not UTF-8.

INPUTS = {"empty.txt": b"", "latin.txt": b"caf\xe9\n", "text.txt": b"An editor.\n"}
INPUTS |= {"few.jsonl": b'{"prompt": "An editor.", "tokens": [5, 9, 1]}\n' * 7}
COMMANDS = {
    "demo": ["demo", "--output_dir", "TMP/out"],
    "generate": ["generate", TEXT],
    "run": ["run", "--gin_file", ROW, "--output_dir", "TMP/out"],
    "table": ["table", "2", "--checkpoints", "demo", "--output_dir", "TMP/out"],
    "tune": ["tune"],
    "verify": ["verify"],
    "bench": ["bench", "--output_dir", "TMP/out"],
    "audit": ["audit", "--samples", "TMP/few.jsonl"],
    "report": ["report", "TMP/none"],
    "convert": ["convert", "debian_draft", "TMP/made", "--to", "native"],
    "inspect": ["inspect", "debian_draft"],
    "compile": ["compile", "--target=t5_1_1_base", "--draft=t5_1_1_small"],
    "distil": ["distil", "TMP/text.txt", "--output", "TMP/out"],
}
OF_PAIRS = ("demo", "generate", "bench", "audit")
OF_ROWS = ("run", "table", "tune", "verify")

Case = tuple[list[str], list[str]]


def command(name: str, *more: str) -> list[str]:
    return [*COMMANDS[name], *more]


def of_parsers() -> Iterator[Case]:
    """What every command says of options that it does not have, or of values without one."""
    for name in COMMANDS:
        own_help = f"see speculative {name} --help"
        for more in (["--no_such"], ["--no_such", "3"], ["--no_such=3"], ["-n", "3"]):
            yield command(name, *more), [f"no option {more[0].partition('=')[0]}", own_help]
        if name not in ("report", "distil"):  # They take any number of folders or files.
            yield command(name, "superfluous"), ["too many: superfluous", own_help]
    yield ["generate", "--no_such", "3", "--file", "TMP/text.txt"], ["no option --no_such"]
    yield ["generate", "--file", "TMP/text.txt", "-no_such"], ["no option -no_such"]
    yield [], ["command", "see speculative --help"]
    yield ["--no_such"], ["command", "see speculative --help"]
    yield ["--no_such", *COMMANDS["tune"]], ["--no_such", "see speculative --help"]
    for given in ("decode", "Generate", "", "gen"):
        yield [given], [repr(given), "demo", "generate"]
    for name, missing in (("table", "table"), ("report", "PATH"), ("inspect", "path")):
        yield [name], [missing]
    yield ["convert", "debian_draft", "TMP/made"], ["--to"]
    yield ["convert", "debian_draft", "--to", "native"], ["destination"]


def of_numbers() -> Iterator[Case]:
    """Whole numbers of a range: others, and what is none."""
    ranges = [
        *((name, "--seed", 0, 2**32 - 1) for name in ("demo", "generate", *OF_ROWS)),
        *((name, "--limit", 1, 10**6) for name in ("demo", *OF_ROWS)),
        *((name, "--max_length", 1, 10**5) for name in ("demo", "generate", "audit")),
        ("bench", "--source_length", 1, 10**5),
        ("bench", "--widths", 1, 1024),
        ("generate", "--gamma", 0, 64),
        ("verify", "--samples", 1, 10**6),
        ("generate", "--samples", 1, 2047),
        ("generate", "--batch_size", 1, 1024),
        ("bench", "--batch_sizes", 1, 1024),
    ]
    for name, option, low, high in ranges:
        for value in (str(low - 1), str(high + 1), "1.5", "two", "", "nan"):
            says = [option, f"whole number from {low} to {high}", repr(value)]
            yield command(name, option, value), says
    for option in ("--temperature", "--top_p", "--top_k", "--lenience"):
        yield command("generate", option, "hot"), [option, "'hot'"]
    yield command("generate", "--top_k", "1.5"), ["--top_k", "'1.5'"]
    for option, values in {
        "--temperature": ("-0.5", "1e-9", "nan", "inf", "1e999"),
        "--top_p": ("0", "1.01", "-1", "nan"),
        "--min_p": ("-0.1", "1.01", "nan"),
        "--top_k": ("-1",),
        "--lenience": ("0", "1.01", "nan"),
    }.items():
        for value in values:
            number = str(int(value) if option == "--top_k" else float(value))
            yield command("generate", option, value), [f"{option[2:]} must", f"not {number}."]
    for more in (["--batch_size", "2"], ["--samples", "2"], ["--output", "TMP/out.jsonl"]):
        yield command("generate", "--compare", *more), ["--compare is for one text at a time"]
    for more in (["--json"], ["--samples", "2"], ["--output", "TMP/out.jsonl"]):
        yield command("generate", "--trace", *more), ["--trace is for texts that are shown one"]
    yield command("generate", "--output", "TMP"), ["TMP", "directory"]
    yield command("generate", "--logprobs"), ["--logprobs is for lines of JSON"]
    yield command("generate", "--stop", ""), ["A stop string must have 1 to 256 characters"]
    yield command("bench", "--widths", "33"), ["between 1 and 32", "--max_length"]
    for name in OF_ROWS:
        says = ["--simulated_alpha", "a number or paper", "'some'"]
        yield command(name, "--simulated_alpha", "some"), says
        for value in ("2", "-0.1", "nan"):
            says = ["RowConfig.simulated_alpha must", str(float(value))]
            yield command(name, "--simulated_alpha", value), says
    yield command("tune", "--simulated_alpha", "0.5"), ["nothing to tune by", "real models"]
    yield command("verify", "--simulated_alpha", "0.5"), ["simulated", "real models"]
    for value in ("0", "1", "-1", "nan"):
        for name in ("verify", "audit"):
            yield command(name, "--false_alarm", value), ["--false_alarm", repr(value)]
    says = ["7 samples of 21 tokens are too few", "at least 360 tokens, some 120 such samples"]
    yield COMMANDS["audit"], says


def of_choices() -> Iterator[Case]:
    """One of a few words: others, and none."""
    for name in ("demo", "generate", "bench", "convert", *OF_ROWS):
        for value in ("float16", "", "Float32"):
            says = ["--dtype", repr(value), "float32", "bfloat16"]
            yield command(name, "--dtype", value), says
        yield command(name, "--dtype"), ["--dtype", "expected one argument"]
    for name in ("bench", "run", "tune", "verify"):
        yield command(name, "--weights", "zeros"), ["--weights", "'zeros'", "random"]
    for name in OF_ROWS:
        both = ["--checkpoints", "demo", "--weights", "random"]
        yield command(name, *both), ["--weights", "not allowed with", "--checkpoints"]
    says = ["'v9'", "v4-8, v5e-1, v5p-8, v6e-1, present"]
    yield command("compile", "--topology", "v9"), says
    there = [*COMMANDS["compile"], "--topology"]
    yield [*there, "present"], ["no TPU here", "cpu", "TPU v4 (v4-8)"]
    yield [*there, "v5e-1"], ["The TPU's compiler is not installed", "pip install libtpu"]
    yield ["table", "2", "--family=v9"], ["no family 'v9' of table 2", "v1_0", "v1_0_3b"]
    yield ["table", "3", "--family=v1_0"], ["no family 'v1_0' of table 3", "it has none"]
    yield [*COMMANDS["convert"][:-1], "onnx"], ["--to", "'onnx'", "native", "huggingface"]
    yield command("generate", "--verification", "any"), ["no verification 'any'", "are token"]
    yield command("generate", "--task", "wmt"), ["'wmt'", "debian_ende", "debian_synopsis"]
    for value in ("4.5", "6", "x", ""):
        yield ["table", value], [f"no table {value!r}", "1, 2, 3, 5"]


def of_models() -> Iterator[Case]:
    """Names of models and vocabularies that are not there, or do not go together."""
    shipped = ["debian_target", "debian_draft"]
    for name in OF_PAIRS:
        yield command(name, "--target", "nowhere"), ["no checkpoint 'nowhere'", *shipped]
        yield command(name, "--target", ""), ["no checkpoint ''", *shipped]
        yield command(name, "--target", "TMP"), ["TMP is no checkpoint", "text.txt"]
        says = ["debian_draft reads its target's encoder", "can be a draft only"]
        yield command(name, "--target", "debian_draft", "--draft", "copy"), says
        says = ["No draft is bundled for debian_lm_draft", "--draft", "uniform, copy"]
        if name != "audit":  # It takes the uniform draft.
            yield command(name, "--target", "debian_lm_draft"), says
        says = ["debian_draft is an encoder-decoder", "debian_lm is a decoder-only", "one kind"]
        yield command(name, "--target", "debian_lm", "--draft", "debian_draft"), says
        for draft in ("nowhere", "", "tetragram"):
            says = [repr(draft), *shipped, "uniform", "suffix"]
            yield command(name, "--draft", draft), says
    yield command("generate", "--target", "debian_draft"), ["can be a draft only"]
    for name in (*OF_PAIRS, *OF_ROWS):
        says = ["no use for the vocabulary /nope", "leave --vocabulary out"]
        yield command(name, "--vocabulary", "/nope"), says
    for path, says in {
        "nowhere": "no checkpoint 'nowhere'",
        "": "no checkpoint ''",
        "TMP": "TMP is no checkpoint",
        "TMP/text.txt": "no checkpoint 'TMP/text.txt'",
        "a\0b": "no checkpoint",
    }.items():
        yield ["inspect", path], [says]
        yield ["convert", path, "TMP/made", "--to", "native"], [says]
    yield ["convert", "debian_draft", "TMP", "--to", "native"], ["TMP exists already"]
    for name in ("run", "tune", "verify"):
        more = ["--gin_file", PUBLIC, "--checkpoints", "TMP/none"]
        yield command(name, *more), ["no checkpoint of t5_1_1", "TMP/none", "holds nothing"]
        more = ["--checkpoints", "TMP", "--gin", 'RowConfig.target = "other"']
        yield command(name, *more), ["no checkpoint of other in TMP", "folder holds empty.txt, few"]
    yield command("bench", "--weights", "random"), ["for the sizes", "not for 'debian_target'"]
    more = ["--weights", "random", "--target", "t5_1_1_small"]
    yield command("bench", *more), ["No draft is bundled for t5_1_1_small", "uniform, copy"]
    yield command("bench", *more, "--draft", "bigram"), ["no text to count for bigram"]


def of_files() -> Iterator[Case]:
    """Files and folders that are missing, or are not what they should be."""
    for file, says in {
        "TMP/none": "TMP/none",
        "TMP": "TMP",
        "TMP/empty.txt": "The prompt is missing: TMP/empty.txt is empty",
        "TMP/latin.txt": "TMP/latin.txt is not UTF-8",
    }.items():
        yield ["generate", "--file", file], [says]
    both = ["--file", "TMP/text.txt"]
    yield command("generate", *both), ["--file", "not allowed with"]
    for prompt in ("", " \t"):
        yield ["generate", prompt], ["The prompt is missing: the command line is empty"]
    for prompt in (LONE, f"An {LONE} editor", "\ud800"):
        says = ["The prompt on the command line is not UTF-8", "convert it"]
        yield ["generate", prompt], says
    for name in ("run", "tune", "verify"):
        more = ["--gin_file", "TMP/none.gin"]
        yield command(name, *more), ["no configuration TMP/none.gin"]
        more = ["--gin_file", f"{TABLE}:none"]
        yield command(name, *more), ["no row 'none'", "debian_ende_t0"]
        more = ["--gin_file", str(TABLE)]
        yield command(name, *more), ["is a table", "name a row", "debian_ende_t0"]
    for name in ("run", "tune", "verify"):
        for file in ("TMP/none.tsv", "TMP/none.jsonl", "TMP/none.en,TMP/none.de"):
            says = ["no file", file.partition(",")[0]]
            yield command(name, "--data_file", file), says
    yield command("table", "--data_file", "TMP/none.tsv"), ["not name its task", "debian_synopsis"]
    yield (
        ["table", "2", "--output_dir", "TMP/out"],
        ["say where its checkpoint is (--checkpoints=DIR)"],
    )
    for file, says in {
        "none": ["There is no file TMP/none"],
        "empty.txt": ["TMP/empty.txt holds no samples"],
        "latin.txt": ["Line 1 of TMP/latin.txt is no sample"],
        "text.txt": ["Line 1 of TMP/text.txt is no sample"],
    }.items():
        yield ["audit", "--samples", f"TMP/{file}"], says
    yield ["audit"], ["--samples"]
    yield command("audit", "--target", "debian_lm", "--draft", "none.npz"), ["none.npz"]
    yield command("report"), ["TMP/none"]
    yield ["report", "TMP"], ["TMP"]


def of_distil() -> Iterator[Case]:
    """Texts of one's own or a gin file, and not what belongs to the other."""
    yield COMMANDS["distil"], ["There are 1 texts to learn from; give at least 40"]
    yield command("distil", "--dim", "100"), ["--dim must be a multiple of 64"]
    yield command("distil", "--steps", "3"), ["a whole number from 25"]
    yield command("distil", "--output", "TMP"), ["TMP exists already; remove it or choose"]
    says = ["There are no texts; give a FILE of them, or a gin file (--config)"]
    yield ["distil", "--output", "TMP/out"], says
    says = ["--gin, --init_from: allowed only with a gin file"]
    yield command("distil", "--init_from", "b", "--gin", "c"), says
    of_gin = ["distil", "--output", "TMP/out", "--config", "a.gin"]
    yield of_gin, ["give their folder (--data_dir)"]
    says = ["b, --prefix, --steps, --max_length: not allowed with --config; set it in the gin file"]
    yield [*of_gin, "b", "--steps", "50", "--max_length", "8", "--prefix", ""], says


def of_rows() -> Iterator[Case]:
    """Bindings of a row: values of another type or out of range, and what binds nothing."""
    whole = "True", "1.5", "'3'", "[3]", "0", "-1", str(10**12)
    texts = "3", "True", "['a']", "{}"
    wrong = {
        "gamma": whole,
        "max_length": (*whole, "None"),
        "source_length": whole,
        "rounds": (*whole, "None"),
        "alpha_tokens": (*whole, "None"),
        "num_examples": whole,
        "seed": ("True", "1.5", "'3'", "-1", str(2**32), "None"),
        "temperature": ("True", "'x'", "None", "-1.0", "1e-09", "1" + "0" * 400),
        "top_k": ("True", "1.5", "'x'", "None", "-1"),
        "top_p": ("True", "'x'", "None", "0.0", "1.01"),
        "min_p": ("True", "'x'", "None", "-0.1", "1.01"),
        "batch_size": ("True", "1.5", "'x'", "None", "0", "1025"),
        "lenience": ("True", "'x'", "None", "0.0", "1.01"),
        "simulated_alpha": ("True", "'x'", "1.5", "-0.1"),
        "task": (*texts, "None", "'wmt'"),
        "target": (*texts, "None"),
        "draft": (*texts, "None"),
        "dtype": (*texts, "'int8'", "''"),
        "verification": (*texts, "None", "'any'"),
        "vocabulary": texts,
        "data_file": texts,
        "checkpoints": texts,
    }
    for name, values in wrong.items():
        for value in values:
            yield command("run", "--gin", f"RowConfig.{name} = {value}"), [ROW, name, value]
    yield command("run", "--gin", "RowConfig.gamma = None"), ["table2/debian_ende_t0 has no gamma"]
    for binding, says in {
        "gamma = 3": "as in RowConfig.gamma",
        "RowConfig.gama = 3": "RowConfig.gama",
        "Row.gamma = 3": "Row.gamma",
        "RowConfig.target = unigram": "put a text in quotes",
        "RowConfig.gamma =": "RowConfig.gamma =",
        "RowConfig.gamma = [3": "not closed",
        "RowConfig.gamma = @RowConfig": "would run code",
        "RowConfig.gamma = %none": "none",
        "import os": "imports os",
        "include 'none.gin'": "none.gin, which does not exist",
        "3": "3",
    }.items():
        for name in ("run", "table", "tune", "verify"):
            yield command(name, "--gin", binding), [says]


CASES = [
    case
    for cases in (of_parsers, of_numbers, of_choices, of_models, of_files, of_distil, of_rows)
    for case in cases()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wrong")
    for name, content in INPUTS.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_parser() -> Iterator[None]:
    """It is built once, not for each of hundreds of cases: that would take half of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_parser", functools.cache(cli._parser))
        yield


@pytest.mark.parametrize(("arguments", "says"), CASES, ids=[" ".join(c[0])[:90] for c in CASES])
def test_a_wrong_command_line_is_one_sentence(
    arguments: list[str],
    says: list[str],
    folder: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor first"))
    monkeypatch.setattr(loading, "random_params", lambda *_: pytest.fail("made weights first"))
    code = cli.main([given.replace("TMP", str(folder)) for given in arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [words for words in says if words.replace("TMP", str(folder)) not in err] == [], err
    assert sorted(path.name for path in folder.rglob("*")) == sorted(INPUTS)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Settings and texts are checked by a pair that has nothing to decode with."""
    both: Any = types.SimpleNamespace(decoder_only=False, pad_id=0, max_positions=0)
    nothing: Any = None
    return Pair(both, both, nothing, SentencePiece(VOCABULARY), ("a target", "a draft"))


SETTINGS = {
    "gamma": (-1, 1.5, 2.0, "3", None, True, np.float64(2), [3]),
    "max_length": (0, -3, 4.0, "12", None, True),
    "temperature": (-1, 1e-9, math.nan, math.inf, "x", "1", None, True, [1.0], 10**400),
    "top_k": (-1, 1.5, "x", None, True),
    "top_p": (0, 1.01, -1, math.nan, "0.5", None, True),
    "min_p": (-0.1, 1.01, math.nan, "0.5", None, True),
    "lenience": (0, 1.01, math.nan, "x", None, True),
    "verification": ("any", "", 3, None, []),
    "processors": (3, None, "x"),
    "seed": (-1, 2**32, 1.5, "x", None, True),
    "example": (-1, 2**31, 1.5, 1.0, "x", None, True),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values]
)
def test_a_wrong_setting_is_one_sentence(pair: Pair, name: str, value: Any) -> None:
    with pytest.raises(ValueError) as raised:
        pair.generate(TEXT, **{name: value})
    said = str(raised.value)
    assert name in said
    assert repr(value) in said or str(float(value)) in said
    assert said.endswith(".") and "\n" not in said


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (3, "type str, not 3"),
        (None, "type str, not None"),
        (b"an editor", "type str, not b'an editor'"),
        ([TEXT, None], "type str, not None"),
        ({"a": "b"}, "type str, not {'a': 'b'}"),
        ([], "no text to decode"),
        ("", "is empty"),
        ([TEXT, " \n"], "is empty"),
        (LONE, r"not UTF-8 text: its character 4 is '\\udce9'"),
        ([TEXT, "\ud800"], r"not UTF-8 text: its character 1 is '\\ud800'"),
        ("word " * 100_000, "100,001 tokens, the limit is 100,000; .*source_length="),
    ],
)
def test_a_wrong_text_is_one_sentence(pair: Pair, texts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pair.generate(texts)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"target": 3}, "name of a target must be of type str or PathLike, not 3"),
        ({"target": None}, "name of a target must be of type str or PathLike, not None"),
        ({"target": pathlib.Path("nowhere")}, "no checkpoint 'nowhere'"),
        ({"draft": 3}, "name of a draft must be of type str or PathLike, not 3"),
        ({"draft": pathlib.Path("nowhere")}, "no draft 'nowhere'"),
        ({"dtype": "int8"}, "float32 or bfloat16, not 'int8'"),
        ({"dtype": 3}, "float32 or bfloat16, not 3"),
        ({"vocabulary_file": 3}, "name of a vocabulary must be of type str or PathLike, not 3"),
        ({"vocabulary_file": pathlib.Path("/nope")}, "no use for the vocabulary /nope"),
        ({"target": "nowhere", "random": True}, "for the sizes .*, not for 'nowhere'"),
    ],
)
def test_a_wrong_model_is_one_sentence(
    names: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor first"))
    with pytest.raises(ValueError, match=said):
        loading.load(**names)
