"""Imports point one way: a part of the package uses only parts above it in the README's list."""

import ast
import pathlib
import re

import speculative

PACKAGE = pathlib.Path(speculative.__file__).parent
README = PACKAGE.parent / "README.md"


def floors() -> list[str]:
    """The parts of the package, in the README's order: "types", "vocabulary", ..."""
    rows = re.findall(r"^\| (.*?) \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    return [part for row in rows for part in re.findall(r"`speculative/(\w+)(?:\.py|/)`", row)]


def imported(file: pathlib.Path) -> set[str]:
    """The parts that a module imports, also within functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "speculative":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= set(re.findall(r"^speculative\.(\w+)", node.module))
        elif isinstance(node, ast.Import):
            found |= {
                part
                for name in node.names
                for part in re.findall(r"^speculative\.(\w+)", name.name)
            }
    return found


def test_no_import_runs_up() -> None:
    order = floors()
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(order) == parts - {"__init__", "__pycache__"}
    up = []
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in order:
            below = set(order[: order.index(part) + 1])
            up += [f"{file} imports {name}" for name in imported(file) & set(order) - below]
    assert not up
