"""What a row keeps on disk, and what it refuses to mix."""

import dataclasses
import pathlib

import pytest

from speculative.measurement.exactness import Difference
from speculative.rows.config import RowConfig, changed
from speculative.rows.kept import KeptExamples
from tests.rows import made

ONE = dataclasses.replace(
    made.example(Difference(1, 7, None, 0.5), number=2), source="translate: ä", lengths=(3, 4)
)
OTHER = dataclasses.replace(ONE, number=0, difference=None, betas=[])
ANOTHER_SAMPLE = dataclasses.replace(OTHER, sample=1)


def test_examples_come_back_in_the_order_of_the_task(tmp_path: pathlib.Path) -> None:
    kept = KeptExamples(tmp_path / "row", "a = 1\n")
    for example in (ONE, ANOTHER_SAMPLE, OTHER):
        kept.add(example)
    again = KeptExamples(tmp_path / "row", "a = 1\n")
    assert list(again) == list(kept) == [OTHER, ANOTHER_SAMPLE, ONE]
    assert [place in again for place in ((0, 0), (0, 1), (2, 0))] == [True] * 3
    assert [place in again for place in ((0, 2), (1, 0), (2, 1))] == [False] * 3


def test_a_setting_that_did_not_exist_had_its_default(tmp_path: pathlib.Path) -> None:
    """Examples and records of before `RowConfig.verification` go on, unless it is another now."""
    now = RowConfig(task="debian_ende", target="a", draft="b", temperature=0.0).gin()
    before = now.replace("RowConfig.verification = 'token'\n", "")
    assert before != now
    KeptExamples(tmp_path, before + "device = 'x'\n").add(ONE)
    assert list(KeptExamples(tmp_path, now + "device = 'x'\n")) == [ONE]
    other = now.replace("'token'", "'block'")
    with pytest.raises(ValueError, match=r"configuration \(RowConfig\.verification = 'token'\)"):
        KeptExamples(tmp_path, other + "device = 'x'\n")
    with pytest.raises(ValueError, match=r"configuration \(no jax\)"):
        KeptExamples(tmp_path, now + "device = 'x'\njax = '1'\n")
    assert changed(before, now) == changed(now, before) == []


def test_examples_of_other_weights_are_refused(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the same ones go on; what kept no fingerprints goes on too, which is said, once."""
    KeptExamples(tmp_path, "a\n", {"target": "1", "texts": "2"}).add(ONE)
    assert list(KeptExamples(tmp_path, "a\n", {"texts": "2", "target": "1"})) == [ONE]
    for now, said in (
        ({"target": "3", "texts": "2"}, "target"),
        ({"target": "3", "texts": "3"}, "target and texts"),
    ):
        with pytest.raises(ValueError, match=f"examples whose {said} changed since .*output_dir"):
            KeptExamples(tmp_path, "a\n", now)
    assert not caplog.messages
    (tmp_path / "fingerprints.json").unlink()
    KeptExamples(tmp_path, "a\n", {"target": "3"}).add(OTHER)
    assert f"{tmp_path} was written before results kept fingerprints" in caplog.messages[0]
    assert list(KeptExamples(tmp_path, "a\n", {"target": "3"})) == [OTHER, ONE]
    assert len(caplog.messages) == 1


def test_a_damaged_line_is_named(tmp_path: pathlib.Path) -> None:
    KeptExamples(tmp_path, "a\n").add(ONE)
    with (tmp_path / "examples.jsonl").open("a") as file:
        file.write('{"number": 1}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*examples.jsonl is no measured example"):
        KeptExamples(tmp_path, "a\n")


def test_an_empty_configuration_is_that_of_a_run_that_was_killed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.gin").touch()
    KeptExamples(tmp_path, "a = 1\nb = 2\n").add(ONE)
    assert (tmp_path / "config.gin").read_text() == "a = 1\nb = 2\n"
    with pytest.raises(ValueError, match=r"another configuration \(b = 2\).*output_dir"):
        KeptExamples(tmp_path, "a = 1\nb = 3\n")


def test_without_a_folder_they_are_kept_in_memory() -> None:
    kept = KeptExamples()
    kept.add(ONE)
    assert list(kept) == [ONE]
