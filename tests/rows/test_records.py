"""Records: the contract's names, what a file keeps, and what is refused."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import pytest

from speculative import disk
from speculative.rows import records
from tests.rows.made import record

CONTRACT = """
experiment task target draft temperature top_k top_p lenience gamma batch_size num_examples
num_tokens num_target_calls tokens_per_call tokens_per_call_expected alpha alpha_accepted
alpha_low alpha_high c verify_cost ms_target_step ms_verify ms_draft_step
ms_per_token_autoregressive ms_per_token_speculative speedup speedup_low speedup_high
speedup_expected speedup_predicted outputs_identical near_ties metric quality_autoregressive
quality_speculative paper_alpha paper_speedup seed commit device jax_version dtype gin started_at
""".split()
"""What readers of a record rely on, in this order; later fields may follow."""


def test_records_come_back_as_they_were_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "not" / "there" / "yet.jsonl"
    written = [
        record(alpha=1 / 3, device="8 Kerne, größer"),
        record(outputs_identical=None, near_ties=None, paper_alpha=None, gin="a = 1\nb = 'x'"),
    ]
    for one in written:
        disk.append(path, dataclasses.asdict(one))
    assert records.read(path) == written
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(line)[: len(CONTRACT)] for line in lines] == [CONTRACT] * 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("speedup", math.nan, "Record.speedup must be a finite number, not nan"),
        ("alpha_accepted", math.inf, "accepted must be a finite number or None, not inf"),
        pytest.param("ms_verify", 10**400, "must be a finite number, not 1000", id="huge"),
        ("gamma", 2.5, "gamma must be a whole number, not 2.5"),
        ("gamma", True, "gamma must be a whole number, not True"),
        ("alpha", None, "alpha must be a finite number, not None"),
        ("alpha", True, "alpha must be a finite number, not True"),
        ("task", None, "task must be a text, not None"),
        ("c", "0.1", "c must be a finite number, not '0.1'"),
    ],
)
def test_values_that_no_record_holds(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**{field: value})


def test_a_whole_number_will_do_where_digits_may_follow(tmp_path: pathlib.Path) -> None:
    """JSON does not tell 1 from 1.0, and other writers drop the digits."""
    path = tmp_path / "records.jsonl"
    line = dataclasses.asdict(record()) | {"temperature": 1, "paper_alpha": 1}
    path.write_text(json.dumps(line) + "\n")
    assert records.read(path)[0].temperature == 1


@pytest.mark.parametrize(
    ("said", "damaged"), [('"alpha"', '"alfa"'), ('"speedup": 2.71', '"speedup": NaN')]
)
def test_a_damaged_line_is_named(tmp_path: pathlib.Path, said: str, damaged: str) -> None:
    path = tmp_path / "records.jsonl"
    disk.append(path, dataclasses.asdict(record()))
    line = path.read_text()
    path.write_text(line + line.replace(said, damaged))
    with pytest.raises(ValueError, match=f"Line 2 of {path} is no record"):
        records.read(path)


def test_records_of_the_first_format_are_read() -> None:
    """A line of docs/records/table2/records.jsonl, as of November 2026."""
    file = pathlib.Path(__file__).parents[1] / "data" / "record.jsonl"
    (one,) = records.read(file)
    line = json.loads(file.read_text())
    assert list(line)[: len(CONTRACT)] == CONTRACT
    assert {name: getattr(one, name) for name in line} == line
    assert one.experiment == "table2/debian_ende_t0"
    assert ("verification" in line, one.verification) == (False, "token")


def test_a_speed_up_that_no_free_draft_could_reach_is_flagged() -> None:
    """The paper's CNN/DM row: 3.1 measured, where alpha 0.65 and gamma 5 allow 2.64."""
    assert record(speedup_low=3.0, alpha_high=0.66, gamma=5).above_ceiling
    assert not record(speedup_low=2.6, alpha_high=0.66, gamma=5).above_ceiling
