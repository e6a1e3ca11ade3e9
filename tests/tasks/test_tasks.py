"""The names of the tasks, and what asking seqio for one says where it cannot be had."""

import subprocess
import sys

import pytest

from speculative import paper, tasks
from speculative.measurement import quality


def test_every_task_has_a_metric_and_a_row_of_the_paper() -> None:
    assert list(tasks.TASKS) == [
        "debian_ende",
        "debian_synopsis",
        "wmt_t2t_ende_v003",
        "cnn_dailymail_v002",
        "lm1b",
        "debian_lm",
    ]
    for name, task in tasks.TASKS.items():
        assert tasks.task(name) is task and task.name == name
        assert task.metric in quality.METRICS or "lm" in name and task.metric is None
        assert task.paper in {row.task for row in paper.TABLE_3}


@pytest.mark.parametrize("ask", [tasks.task, tasks.get_task])
def test_an_unknown_task_lists_the_valid_ones(ask) -> None:
    with pytest.raises(ValueError) as error:
        ask("wmt_ende")
    assert "'wmt_ende'" in str(error.value)
    assert all(name in str(error.value) for name in tasks.TASKS)


@pytest.mark.parametrize("missing", ["seqio", "tensorflow_datasets"])
def test_a_missing_package_names_the_remedy(missing: str) -> None:
    code = f"import sys; sys.modules['{missing}'] = None; from speculative import tasks\n"
    code += "try: tasks.get_task('lm1b')\nexcept ValueError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'lm1b' needs seqio" in said.stdout
    assert missing in said.stdout.partition("cannot be imported")[2]
    assert "pip install 'speculative[tasks]'" in said.stdout


@pytest.mark.parametrize("module", ["speculative.tasks", "speculative.tasks.prompts"])
def test_names_and_prompts_need_no_tensorflow(module: str) -> None:
    code = f"import sys, {module}; sys.exit('tensorflow' in sys.modules or 'seqio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
