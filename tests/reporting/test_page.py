"""The page of a results folder: the records' own numbers, in a form that any browser shows."""

import collections
import dataclasses
import errno
import html
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from speculative import cli, disk
from speculative.measurement.exactness import Difference
from speculative.reporting import page, plots
from speculative.rows.kept import Example, KeptExamples
from speculative.rows.records import Record
from speculative.studies import sweep
from tests.rows import made

GREEDY = made.record(
    experiment="table2/ende_small_t0",
    gin="RowConfig.seed = 5\n",
    num_examples=7,
    outputs_identical=5,
    near_ties=1,
)
SIMULATED = made.record(
    experiment="table2/ende_base_t1",
    gin="RowConfig.seed = 6\n",
    temperature=1.0,
    gamma=7,
    # Eq. 1 at α = 0.2 gives 1.25 tokens a pass: no draft is so fast.
    simulated_alpha=0.2,
    alpha=0.2,
    alpha_low=0.2,
    alpha_high=0.2,
    alpha_accepted=0.19,
    c=0.017,
    verify_cost=1.21,
    tokens_per_call=1.23,
    speedup=1.98,
    speedup_low=1.88,
    speedup_high=2.08,
    speedup_expected=1.11,
    speedup_predicted=1.02,
    outputs_identical=None,
    near_ties=None,
    metric=None,
    quality_autoregressive=None,
    quality_speculative=None,
    paper_alpha=None,
    paper_speedup=None,
    seed=6,
    device="an accelerator",
)
DIFFERENCES = [None, Difference(2, 7, 9, 1e-5, 1e-4), Difference(0, 7, 9, 0.25), None]
EXAMPLES = [
    dataclasses.replace(
        made.example(difference, number),
        source=f"source {number}",
        reference=f"reference {number}",
        autoregressive=f"plain {number}",
        speculative=f"guessed {number}",
        lengths=(10 + number, 20 + number),
    )
    for number, difference in enumerate(DIFFERENCES)
]
HOSTILE = """<script>alert("1 & 2")</script>'</dd></pre><b>"""


def folder(
    path: pathlib.Path, rows: list[Record], examples: list[list[Example]] | None = None
) -> pathlib.Path:
    for number, record in enumerate(rows):
        disk.append(path / "records.jsonl", dataclasses.asdict(record))
        # A row keeps more than its record's configuration: the machine it ran on.
        kept = KeptExamples(path / "rows" / record.experiment, record.gin + "device = 'x'\n")
        for example in examples[number] if examples else []:
            kept.add(example)
    return path


def written(*folders: pathlib.Path) -> str:
    output = folders[0] / "report.html"
    page.write(folders, output)
    return output.read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def coarse() -> Iterator[None]:
    """Lines of theory through a tenth of their points, which takes a second less a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "ALPHAS", plots.ALPHAS[::10])
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of both rows and their examples."""
    path = folder(tmp_path_factory.mktemp("both"), [GREEDY, SIMULATED], [EXAMPLES, EXAMPLES])
    return written(path)


@pytest.fixture(scope="module")
def root(text: str) -> ElementTree.Element:
    """The page, read by a parser that accepts no stray or open element."""
    return ElementTree.fromstring(text)


def said(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def tables(root: ElementTree.Element) -> dict[str, list[list[str]]]:
    """The cells of each table, by its caption."""
    return {
        table.findtext("caption", ""): [[said(cell) for cell in row] for row in table.iter("tr")]
        for table in root.iter("table")
    }


def section(root: ElementTree.Element, title: str) -> ElementTree.Element:
    (found,) = (part for part in root.iter("section") if part.findtext("h2") == title)
    return found


def cells(text: str) -> list[str]:
    return text.split("|")


def test_every_number_of_the_tables_is_a_records(root: ElementTree.Element) -> None:
    simulated = "ende_base_t1simulated acceptance"
    assert tables(root) == {
        "Batch size 1, beside the paper": [
            cells("row|γ|α|paper|accepted|c|v|per call|expected|predicted|measured|95%|paper"),
            ["table2"],
            cells("ende_small_t0|6|0.81|0.75|0.80|0.090|1.36|4.50|3.14|2.66|2.71|2.52–2.93|3.4"),
            cells(simulated + "|7|0.20|–|0.19|0.017|1.21|1.23|1.11|1.02|1.98 !|1.88–2.08|–"),
        ],
        "Quality": [
            cells("row|metric|autoregressive|speculative|difference|95%"),
            ["table2"],
            cells("ende_small_t0|bleu|25.4|26.3|+0.9|-1.25 to 3.05"),
        ],
        "Exactness at temperature 0": [
            cells("row|identical|near ties|unexplained"),
            ["table2"],
            cells("ende_small_t0|5 of 7|1|1"),
        ],
        "Where it was measured": [
            cells("row|num examples|device|seed"),
            ["table2"],
            cells("ende_small_t0|7|a processor, 2 cores|5"),
            cells(f"{simulated}|6|an accelerator|6"),
        ],
    }
    pairs = section(root, "Environment").find("dl")  # What is the same of all rows.
    assert pairs is not None
    assert dict(zip(map(said, pairs.iter("dt")), map(said, pairs.iter("dd")), strict=True)) == {
        "target": "the_target",
        "draft": "the_draft",
        "dtype": "float32",
        "quantize": "none",
        "jax version": "0.10.2",
        "commit": "abc1234",
        "started at": "2026-01-02T03:04:05+00:00",
    }


def test_simulated_acceptance_is_said_everywhere(root: ElementTree.Element) -> None:
    assert "simulated acceptance: only the times are real" in said(section(root, "Speed"))
    figure_2, figure_4 = map(said, section(root, "Figures").iter("figure"))
    for figure in (figure_2, figure_4):
        assert "simulated α, γ = 7" in figure
        assert "measured, γ = 6" in figure
    assert "ende_base" not in said(section(root, "Samples"))


def test_samples_stand_side_by_side_and_are_compared(root: ElementTree.Element) -> None:
    found = section(root, "Samples")
    assert [said(head) for head in found.iter("h4")] == [
        "Example 1: identical",
        "Example 2: the outputs part, a near tie",
        "Example 3: the outputs part, NOT explained by rounding",
    ]
    assert [[said(part) for part in sample.iter("dd")] for sample in found.iter("dl")] == [
        [f"{kind} {number}" for kind in ("source", "reference", "plain", "guessed")]
        for number in range(3)
    ]
    heads = [said(head) for head in found.iter("dt")]
    lengths = ["autoregressive, 10 tokens", "speculative, 20 tokens"]
    assert heads[:4] == ["source", "reference", *lengths]


def test_lenient_rows_are_not_said_to_be_exact(tmp_path: pathlib.Path) -> None:
    lenient = dataclasses.replace(GREEDY, lenience=0.5, outputs_identical=None, near_ties=None)
    text = written(folder(tmp_path, [lenient], [EXAMPLES]))
    assert "Not so where l &lt; 1" in text
    assert "identical" not in text
    assert "0.70–0.90" in text  # Alpha's interval.


def test_of_a_measured_exact_row_there_is_nothing_to_warn_of(tmp_path: pathlib.Path) -> None:
    text = written(folder(tmp_path, [GREEDY]))
    for said in ("simulated acceptance<", "only the times are real", "Not so where"):
        assert said not in text
    assert written(tmp_path) == text


def test_every_configuration_is_there(root: ElementTree.Element) -> None:
    shown = [said(details) for details in root.findall(".//details/pre")]
    assert shown == [GREEDY.gin, SIMULATED.gin]


class Reader(html.parser.HTMLParser):
    """What a browser would take for elements, and for text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: collections.Counter[str] = collections.Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_is_shown_and_not_obeyed(tmp_path: pathlib.Path) -> None:
    names = ("experiment", "target", "draft", "device", "commit", "jax_version", "dtype", "gin")
    hostile = {name: f"{HOSTILE} {name}" for name in names}
    # A slash would be a folder of its own.
    hostile["experiment"] = f"a/{HOSTILE.replace('/', '')}"
    texts = ("source", "reference", "autoregressive", "speculative")
    example = dataclasses.replace(EXAMPLES[0], **{name: f"{HOSTILE} {name}" for name in texts})
    path = folder(tmp_path, [made.record(**hostile)], [[example]])
    read = Reader(written(path))
    hostile["experiment"] = hostile["experiment"].replace("/", ": ")
    for name, value in hostile.items():
        assert value in read.text, name
    for name in texts:
        assert f"{HOSTILE} {name}" in read.text
    assert not read.tags.keys() & {"script", "b"}
    assert read.tags["pre"] == 1


@pytest.mark.parametrize("name", ["dr$$aft", "_dr$x_{1$", "翻訳", "half \udcff"])
def test_a_name_of_any_characters_is_drawn(name: str, tmp_path: pathlib.Path) -> None:
    """An undecodable byte of a path, which Python makes a half of a character, is replaced."""
    row = made.record(
        experiment=f"own/{name}", draft=name, accepted_by_position=[20, 9, 4, 2, 1, 0]
    )
    path = folder(tmp_path, [row])
    assert json.loads((path / "records.jsonl").read_bytes())["draft"] == name
    root = ElementTree.fromstring(written(path))
    drawn = ["".join(figure.itertext()) for figure in root.iter("figure")]
    assert f"own: {name.replace(chr(0xDCFF), '�')}" in drawn[-1]


def test_a_figure_that_cannot_be_drawn_loses_no_table(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no <font>")

    monkeypatch.setattr(plots, "figure_4", fail)
    root = ElementTree.fromstring(written(folder(tmp_path, [GREEDY])))
    assert "0.81" in said(section(root, "Speed"))
    figures = section(root, "Figures")
    assert len([*figures.iter("figure")]) == 1
    assert "It could not be drawn: RuntimeError('no <font>')" in said(figures)


@pytest.mark.parametrize("fails", ["speculative.reporting.tables.show_records", "page.write"])
def test_neither_page_nor_terminal_loses_the_other(
    fails: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "it is gone")

    monkeypatch.setattr(sweep, "run", lambda *_: [GREEDY])
    monkeypatch.setattr(fails.replace("page", "speculative.reporting.page"), fail)
    path = folder(tmp_path, [GREEDY])
    assert cli.main(["run", "--output_dir", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "it is gone" in err
    assert (path / "report.html").exists() == (fails != "page.write")
    assert ("ende_small_t0" in out) == (fails == "page.write")


def test_control_characters_of_a_model_are_replaced(tmp_path: pathlib.Path) -> None:
    example = dataclasses.replace(EXAMPLES[0], speculative="a\0b\x1b[1mc\td")
    root = ElementTree.fromstring(written(folder(tmp_path, [GREEDY], [[example]])))
    assert [said(part) for part in section(root, "Samples").iter("dd")][3] == "a�b�[1mc\td"


def test_nothing_else_is_needed(text: str) -> None:
    read = Reader(text)
    links = {"href", "xlink:href", "src", "srcset", "action", "data", "poster"}
    for name, value in read.attributes:
        assert not name.startswith("on")
        assert name not in links or value.startswith("#"), (name, value)
    assert not read.tags.keys() & {"script", "link", "img", "iframe", "object", "base"}
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert "@import" not in text
    # The names of formats, which no browser opens.
    assert set(re.findall(r"\w+://[^\"' ]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert len(text) < 200_000


def test_ids_are_unique_and_whole(text: str) -> None:
    attributes = Reader(text).attributes
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 50
    used = re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)
    assert used
    assert set(used) <= set(ids)


def test_rows_of_several_folders_are_told_apart(tmp_path: pathlib.Path, capsys) -> None:
    demo = made.record(experiment="demo", speedup=1.5)
    folders = [folder(tmp_path / "first", [demo]), folder(tmp_path / "second", [demo])]
    assert cli.main(["report", *map(str, folders)]) == 0
    output = folders[0] / "report.html"
    assert capsys.readouterr().out == f"Written: {output}.\n"
    found = tables(ElementTree.fromstring(output.read_text(encoding="utf-8")))
    names = [row[0].replace("\N{NO-BREAK SPACE}", " ") for row in next(iter(found.values()))[1:]]
    assert names == [str(folders[0]), row := "debian_ende, T = 0", str(folders[1]), row]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "There is no folder {}; give one that holds a records.jsonl."),
        ({}, "{} holds no records; give a folder that speculative demo, run or table wrote."),
        ({"records.jsonl": "{"}, "Line 1 of {}/records.jsonl is no record"),
        (
            {"rows/made/examples.jsonl": "{}"},
            "Line 1 of {}/rows/made/examples.jsonl is no measured example",
        ),
    ],
)
def test_what_cannot_be_shown_is_named(
    damage: dict[str, str] | None, message: str, tmp_path: pathlib.Path, capsys
) -> None:
    path = tmp_path / "results"
    if damage:
        folder(path, [made.record()])
    elif damage is not None:
        path.mkdir()
    for name, text in (damage or {}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{text}\n", encoding="utf-8")
    assert cli.main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: " + message.format(path))
    assert err.count("\n") == 1
    assert not (path / "report.html").exists()


def browser(*arguments: str) -> str:
    """What a headless browser prints, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("There is no Chromium to show the page.")
    # A container's root has no sandbox to give.
    command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    return run.stdout


WIDTHS = (320, 390, 718, 1280)
"""Of two phones, of a sheet of paper within its margins, and of a desk's screen."""

MEASURE = """
onload = () => {
  const measure = frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const boxes = [...page.querySelectorAll(".box")];
    return {
      own: root.clientWidth,
      needed: root.scrollWidth,
      end: Math.max(0, ...boxes.map(box => box.getBoundingClientRect().right)),
      wider: boxes.filter(box => box.scrollWidth > box.clientWidth).length,
      open: [...page.querySelectorAll("pre")].filter(text => text.checkVisibility()).length,
    };
  };
  const sizes = [...document.querySelectorAll("iframe")].map(measure);
  document.body.append(`SIZES${JSON.stringify(sizes)}SIZES`);
};
"""


def sizes(path: pathlib.Path, text: str) -> list[dict[str, float]]:
    """Of a page at each width: that width, what it needs, where boxes end, what is in them.

    A window has a least width, which is wider than a phone's; a frame has none.
    """
    frames = "".join(
        f'<iframe width="{width}" height="800" srcdoc="{html.escape(text)}"></iframe>'
        for width in WIDTHS
    )
    file = path / "frames.html"
    code = f"<!DOCTYPE html><body><script>{MEASURE}</script>{frames}</body>"
    file.write_text(code, encoding="utf-8")
    shown = browser(f"--user-data-dir={path / 'browser'}", "--dump-dom", file.as_uri())
    (found,) = re.findall(r"SIZES(\[.*?\])SIZES", shown)
    return json.loads(found)


@pytest.mark.parametrize("name", ["report", "report of one long word"])
def test_no_page_scrolls_sideways(name: str, text: str, tmp_path: pathlib.Path) -> None:
    if name == "report of one long word":
        word = "word" * 50
        example = dataclasses.replace(EXAMPLES[0], source=word, speculative=word)
        record = made.record(experiment=f"a/{word}", target=word, gin=word, device=word)
        text = written(folder(tmp_path, [record], [[example]]))
    for width, size in zip(WIDTHS, sizes(tmp_path, text), strict=True):
        assert size["own"] == width
        assert size["needed"] <= width
        assert size["end"] <= width
        assert size["open"] == 0
        # A phone has no room for what the boxes hold.
        assert size["wider"] >= (2 if width < 400 else 0)


def test_paper_shows_whole_tables_and_open_details(text: str, tmp_path: pathlib.Path) -> None:
    style = text.replace("@media print", "@media all")
    assert style != text
    paper = sizes(tmp_path, style)[WIDTHS.index(718)]
    assert paper["needed"] <= 718
    assert paper["wider"] == 0
    assert paper["open"] == text.count("<pre>") == 2


def test_each_section_is_printed_on_pages_of_its_own(
    text: str, root: ElementTree.Element, tmp_path: pathlib.Path
) -> None:
    source, output = tmp_path / "report.html", tmp_path / "report.pdf"
    source.write_text(text, encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'browser'}"
    browser(profile, f"--print-to-pdf={output}", source.as_uri())
    printed = output.read_bytes()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= len(root.findall(".//section")) == 5


def test_rules_are_compared_and_acceptance_is_drawn(tmp_path: pathlib.Path) -> None:
    sampled = {"temperature": 1.0, "outputs_identical": None, "near_ties": None, "gamma": 2}
    by_token = made.record(experiment="table2/t1", accepted_by_position=[14, 9], **sampled)
    by_block = made.record(
        experiment="table2/t1_block", verification="block", accepted_by_position=[15, 11],
        gain_over_token=1.081, gain_over_token_low=1.042, gain_over_token_high=1.113,
        tokens_per_call_predicted=3.97, **sampled,
    )  # fmt: skip
    examples = [made.example(number=number) for number in range(3)]
    found = written(folder(tmp_path, [by_token, by_block], [examples, examples]))
    table = found[found.index("Rules of verification") :]
    assert table.index("token") < table.index("block") < table.index("1.081")
    for shown in ("3.97", "1.04–1.11"):
        assert shown in table
    assert page.CAPTIONS["acceptance"][:40] in found
    assert written(folder(tmp_path / "token", [by_token])).count("Rules of verification") == 0
