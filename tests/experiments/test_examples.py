"""What a row keeps on disk, and what it refuses to mix."""

import dataclasses
import pathlib

import pytest

from speculative.experiments.examples import Examples
from speculative.measurement.exactness import Difference
from tests.experiments import made

ONE = dataclasses.replace(
    made.example(Difference(1, 7, None, 0.5), number=2), source="translate: ä", lengths=(3, 4)
)
OTHER = dataclasses.replace(ONE, number=0, difference=None, betas=[])


def test_examples_come_back_in_the_order_of_the_task(tmp_path: pathlib.Path) -> None:
    kept = Examples(tmp_path / "row", "a = 1\n")
    kept.add(ONE)
    kept.add(OTHER)
    again = Examples(tmp_path / "row", "a = 1\n")
    assert list(again) == list(kept) == [OTHER, ONE]
    assert 0 in again
    assert 1 not in again


def test_another_configuration_is_refused(tmp_path: pathlib.Path) -> None:
    Examples(tmp_path / "row", "a = 1\nb = 2\n").add(ONE)
    with pytest.raises(
        ValueError, match=r"row holds .*another configuration \(b = 2\).*output_dir"
    ):
        Examples(tmp_path / "row", "a = 1\nb = 3\n")


def test_a_torn_line_is_forgotten_and_a_damaged_one_named(tmp_path: pathlib.Path) -> None:
    Examples(tmp_path, "a\n").add(ONE)
    path = tmp_path / "examples.jsonl"
    with path.open("a") as file:
        file.write(OTHER.to_json()[:40])
    assert list(Examples(tmp_path, "a\n")) == [ONE]
    with path.open("a") as file:
        file.write('{"number": 1}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*examples.jsonl is no measured example"):
        Examples(tmp_path, "a\n")


def test_without_a_folder_they_are_kept_in_memory() -> None:
    kept = Examples()
    kept.add(ONE)
    assert list(kept) == [ONE]
