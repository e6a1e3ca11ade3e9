"""The names of the tasks, and what asking seqio for one says where it cannot be had."""

import pathlib
import subprocess
import sys

import pytest

from speculative import paper, tasks
from speculative.measurement import quality


def test_every_task_but_questions_has_a_metric_and_a_row_of_the_paper() -> None:
    assert list(tasks.TASKS) == [
        "debian_ende",
        "debian_synopsis",
        "wmt_t2t_ende_v003",
        "cnn_dailymail_v002",
        "lm1b",
        "debian_lm",
        "questions",
    ]
    for name, task in [*tasks.TASKS.items()][:-1]:
        assert tasks.task(name) is task and task.name == name
        assert task.metric in quality.METRICS or "lm" in name and task.metric is None
        assert task.paper in {row.task for row in paper.TABLE_3}


@pytest.mark.parametrize("ask", [tasks.task, tasks.get_task])
def test_an_unknown_task_lists_the_valid_ones(ask) -> None:
    with pytest.raises(ValueError) as error:
        ask("wmt_ende")
    assert "'wmt_ende'" in str(error.value)
    assert all(name in str(error.value) for name in tasks.TASKS)


def test_a_task_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    own = tasks.Task("own", "Do: ", "bleu")
    tasks.register(own)
    tasks.register(own)
    assert tasks.task("own") is own
    with pytest.raises(ValueError, match="another task 'own' already"):
        tasks.register(tasks.Task("own"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("def", "SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_tasks.py").write_text(code)
    with pytest.raises(ValueError, match=f"'broken_tasks' cannot be imported .{said}"):
        tasks.import_module("broken_tasks")
    with pytest.raises(ValueError, match="'missing_tasks' cannot be imported .*No module"):
        tasks.import_module("missing_tasks")
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("missing", ["seqio", "tensorflow_datasets"])
def test_a_missing_package_names_the_remedy(missing: str, tmp_path: pathlib.Path) -> None:
    # A seqio that imports the other alone: the true one takes seconds to get there.
    (tmp_path / "seqio.py").write_text("import tensorflow_datasets\n")
    code = f"import sys; sys.modules['{missing}'] = None; sys.path.insert(0, '{tmp_path}')\n"
    code += "from speculative import tasks\n"
    code += "try: tasks.get_task('lm1b')\nexcept ValueError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'lm1b' needs seqio" in said.stdout
    assert missing in said.stdout.partition("cannot be imported")[2]
    assert "pip install 'speculative[tasks]'" in said.stdout


@pytest.mark.parametrize("module", ["speculative.tasks", "speculative.tasks.prompts"])
def test_names_and_prompts_need_no_tensorflow(module: str) -> None:
    code = f"import sys, {module}; sys.exit('tensorflow' in sys.modules or 'seqio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
