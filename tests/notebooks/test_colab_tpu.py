"""The notebook for Colab, run on CPU: the shipped pair, and with it the part that is for a TPU."""

import argparse
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from speculative import cli
from speculative.commands import rows

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "colab_tpu.ipynb"
# Less of everything, so that it is quick.
LESS = {
    "NUM_TEXTS = 6": "NUM_TEXTS = 1",
    "GAMMAS = (1, 3, 5, 7)": "GAMMAS = (5,)",
    "temperature=0.0)": "temperature=0.0, max_length=32, rounds=1)",
    "pair.generate(text, gamma=0)": "pair.generate(text, gamma=0, max_length=32)",
    "pair.generate(text, gamma=5)": "pair.generate(text, gamma=5, max_length=32)",
    "speculative.Settings(gamma=5)": "speculative.Settings(gamma=5, max_length=32)",
}
ESTIMATE = {
    "target": "t5_3b",
    "ms_target_step": 7.5,
    "ms_verify": 8.25,
    "ms_draft_step": 0.375,
    "c": 0.05,
    "verify_cost": 1.1,
    "fits": True,
}
# A number that a cell prints, as the tables have it.
NUMBER = r"\d+\.\d+"


class Runner:
    """The notebook, and a kernel whose working folder is `folder`."""

    def __init__(self, folder: pathlib.Path) -> None:
        text = NOTEBOOK.read_text(encoding="utf-8")
        for whole, less in LESS.items():
            assert text.count(whole) == 1
            text = text.replace(whole, less)
        self.cells: list[NotebookNode] = nbformat.reads(text, as_version=4).cells
        self.book = nbformat.v4.new_notebook(cells=[])
        self.folder = folder
        where = {"metadata": {"path": str(folder)}}
        # What a cell prints is one output, however long it takes; the limits end a hang.
        limits = {"timeout": 250, "startup_timeout": 250, "coalesce_streams": True}
        self.client = NotebookClient(self.book, resources=where, **limits)

    def run(self, code: str | NotebookNode) -> NotebookNode:
        """Runs a copy of a cell, or a line, and returns it with its outputs."""
        source = code if isinstance(code, str) else code.source
        self.book.cells.append(nbformat.v4.new_code_cell(source))
        try:
            self.client.execute_cell(self.book.cells[-1], len(self.book.cells) - 1)
        except CellExecutionError:
            pass  # It is among the outputs.
        return self.book.cells[-1]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    # Names of sockets may be no longer than about 100 characters, which pytest's folders exceed.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = pathlib.Path(name)
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(variable, name)
        runner = Runner(folder)
        # Sockets in the folder: another worker's kernel may take a free port just then.
        manager = runner.client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{folder}/kernel"
        with runner.client.setup_kernel():
            yield runner


def said(cell: NotebookNode) -> str:
    """What a cell printed, or the text of what it displayed, without colours."""
    data: Any = cell.outputs
    texts = [output.get("text") or output.data["text/plain"] for output in data]
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(texts))


def shown(cell: NotebookNode, kind: str) -> str:
    """What a cell displays of a media type."""
    return "".join(output.data[kind] for output in cell.outputs if kind in output.get("data", {}))


def require_clean(*cells: NotebookNode) -> None:
    """No error, no warning, no long line."""
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", output.traceback
            assert output.get("name") != "stderr", output.text
        assert not re.search("Traceback|Warning", str(cell.outputs))
        assert max(map(len, [*said(cell).splitlines(), ""])) <= 120, cell.source


def test_it_is_stored_without_outputs_for_colab() -> None:
    book = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.accelerator == "TPU"
    assert book.metadata.colab.name == NOTEBOOK.name
    codes = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in codes)


@pytest.mark.long
def test_it_shows_the_shipped_pair_and_on_a_tpu_a_prediction_beside_it(runner: Runner) -> None:
    """In one test: what stands in the cells serves both parts."""
    cells = {cell.id: runner.run(cell) for cell in runner.cells if cell.cell_type == "code"}
    require_clean(*cells.values())
    assert "no TPU in this runtime" in said(cells["device"])
    assert "v5e-1 TPU" in said(cells["device"])
    assert "Editor" in said(cells["decode"])
    alone, fast, *_ = re.findall(r"\[[\d, ]+\]", said(cells["equal"]))
    assert json.loads(alone) == json.loads(fast)
    assert re.search("The same tokens: +True", said(cells["equal"]))
    [per_call] = re.findall(rf"Tokens a call: +({NUMBER})", said(cells["equal"]))
    assert float(per_call) > 1
    trace = shown(cells["trace"], "text/html")
    steps = trace[trace.index(" │") :]
    # Accepted, rejected, own.
    for style in ("color: #008000", "line-through", "font-weight: bold"):
        assert style in steps
    head, row = said(cells["speed"]).strip().splitlines()
    assert head.split()[:4] == ["γ", "tokens/call", "autoregressive", "speculative"]
    assert row.split()[0] == "5" and "1 of 1" in row
    assert shown(cells["plot"], "image/png").startswith("iVBOR")  # PNG's first bytes in base64.
    last = list(cells)[list(cells).index("compile") :]
    assert [said(cells[name]) for name in last if cells[name].outputs] == [
        "This part needs a TPU, so it is left out here.\n"
    ]

    # As if this were a TPU, the command gave `ESTIMATE`, and the hub the shipped pair.
    command = runner.folder / "speculative"
    command.write_text(f"#!/bin/sh\necho $@ > asked\necho '{json.dumps(ESTIMATE)}'\n")
    command.chmod(0o755)
    runner.run("TPU, load = True, speculative.load")
    runner.run("speculative.load = lambda *names, dtype: pair")
    again = {name: runner.run(cells[name]) for name in last}
    command.write_text("#!/bin/sh\necho No compiler. >&2\nexit 2\n")
    failed = {name: runner.run(cells[name]) for name in ("compile", "beside")}
    runner.run("TPU, speculative.load = False, load")
    require_clean(*again.values(), *failed.values())
    assert said(failed["compile"]) == "There is no estimate: No compiler.\n\n"
    assert re.search(rf"^ms_verify +– +{NUMBER}$", said(failed["beside"]), re.MULTILINE)
    assert (runner.folder / "asked").read_text().split() == [
        "compile",
        "--target=t5_3b",
        "--draft=t5_small",
        "--gamma=5",
        "--topology=v5e-1",
        "--json",
    ]
    assert "fits: True" in said(again["compile"])
    assert "Editor" in said(again["load"])
    assert "line-through" in shown(again["big-trace"], "text/html")
    table = said(again["beside"])
    for name in ("ms_target_step", "ms_verify", "ms_draft_step", "c", "verify_cost"):
        assert re.search(rf"^{name} +{ESTIMATE[name]:.3f} +{NUMBER}$", table, re.MULTILINE)
    assert re.search(rf"^speed-up from c and v +{NUMBER} +{NUMBER}$", table, re.MULTILINE)
    assert re.search(rf"^speed-up of whole texts +– +{NUMBER}$", table, re.MULTILINE)
    assert shown(again["big-plot"], "image/png").startswith("iVBOR")

    # The cells on 11B give these commands, in this process those that need the chip.
    for name in ("speculative", "sacrebleu"):
        command = runner.folder / name
        command.write_text(f"#!/bin/sh\necho {name} $@ | tee -a commands\n")
        command.chmod(0o755)
    runner.run("TPU, main, ran = True, cli.main, []; cli.main = ran.append")
    runner.run("retrieve, urllib.request.urlretrieve = urllib.request.urlretrieve, print")
    convert = runner.run(cells["convert"].source.replace("ELEVEN = False", "ELEVEN = True"))
    table2 = runner.run(cells["eleven"])
    ran = runner.run("print(json.dumps(ran))")
    runner.run("TPU, cli.main, urllib.request.urlretrieve, ELEVEN = False, main, retrieve, False")
    require_clean(convert, table2)
    commands = (runner.folder / "commands").read_text().splitlines()
    bucket = "gs://t5-data/pretrained_models/t5x"
    assert commands[0].startswith(
        f"speculative convert {bucket}/t5_11B/checkpoint_1000000 v1_0/t5_11b --dtype int8 "
    )
    assert " v1_0/t5_small --dtype bfloat16 --to native --vocabulary " in commands[1]
    assert [line.split()[-1] for line in commands[2:]] == ["src", "ref"]
    for row, arguments in zip(
        ("ende_small_t0", "ende_small_t1"), json.loads(said(ran)), strict=True
    ):
        parser = argparse.ArgumentParser()
        cli.COMMANDS["run"].add_options(parser)
        options = parser.parse_args(arguments[1:])
        name, config = rows.row(options)
        assert name == f"table2_v1_0/{row}"
        assert (config.quantize, config.draft, config.checkpoints) == ("int8", "t5_small", "v1_0")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (None, "REPOSITORY is still the placeholder https://HOST/OWNER/speculative;"),
        (
            "file://localhost/nowhere",
            "pip could not install REPOSITORY = file://localhost/nowhere, as it says above;",
        ),
    ],
)
def test_a_wrong_repository_ends_in_a_sentence(
    runner: Runner, address: str | None, sentence: str
) -> None:
    [install] = [cell.source for cell in runner.cells if cell.id == "install"]
    if address:
        install = install.replace("https://HOST/OWNER/speculative", address)
    runner.run("import importlib.util; find = importlib.util.find_spec")
    runner.run("importlib.util.find_spec = lambda name, *_: None")
    error = runner.run(install).outputs[-1]
    runner.run("importlib.util.find_spec = find")
    assert error.output_type == "error"
    [text] = error.traceback
    assert text.splitlines()[0] == sentence
    assert text.endswith("field and run it again.")
