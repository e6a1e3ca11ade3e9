"""Imports point one way: a part uses only parts above it in the table of docs/architecture.md."""

import pathlib
import re

import pytest

import speculative
from scripts import pictures

PACKAGE = pathlib.Path(speculative.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def listed() -> list[str]:
    """The parts of the package, in the page's order: "types", "vocabulary", ..."""
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [part for row in rows for part in re.findall(r"`speculative/(\w+)(?:\.py|/)`", row)]


def test_no_import_runs_up() -> None:
    order, uses = listed(), pictures.imports()
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(order) == parts - {"__init__", "__pycache__"}
    assert uses.keys() <= set(order)
    up = {name: below - set(order[: order.index(name)]) for name, below in uses.items()}
    assert not any(up.values()), up
    # It sees imports: of modules, of folders, and of modules within folders.
    assert {"checks", "tree"} <= uses["decoding"] and "models" in uses["drafts"]


def test_a_circle_is_named() -> None:
    assert pictures.floors({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == {"a": 0, "b": 1, "c": 2}
    with pytest.raises(ValueError, match="circle: b, c"):
        pictures.floors({"a": set(), "b": {"a", "c"}, "c": {"b"}})
