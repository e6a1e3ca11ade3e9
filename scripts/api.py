"""Writes docs/api.md from the code: every public name, its signature and its description.

    python scripts/api.py

It covers `speculative` and the modules that README.md and docs/ import from. A test checks that it
is up to date.
"""

import ast
import importlib.util
import inspect
import pathlib
import re
import textwrap
from typing import Any

from speculative.settings import Settings

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = "# Public names\n\nThis page is made from the code by `python scripts/api.py`.\n"
QUOTED = re.compile(r"(: |-> |\[)'([^']+)'")  # A type that is quoted because it is defined later.
HIDDEN = re.compile("_|tree_(un)?flatten")
SENTENCE = re.compile(r"(?<!e\.g)(?<=[.:])\s(?=[A-Z`])")  # Splits sentences.


def modules() -> list[str]:
    """The modules on the page."""
    listed = {"speculative", "speculative.pair"}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = page.read_text(encoding="utf-8")
        for module, names in re.findall(r"^from (speculative\S*) import (.+)$", text, re.M):
            package = hasattr(importlib.import_module(module), "__path__")
            for name in names.split(", "):
                within = package and importlib.util.find_spec(f"{module}.{name}")
                listed.add(within.name if within else module)
    return sorted(listed)


def node_of(thing: Any) -> Any:
    """The syntax tree of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def arguments(node: Any) -> str:
    """The arguments of a function or of a class's constructor, as written in the source."""
    if isinstance(node, ast.ClassDef):
        if begin := [own for own in node.body if getattr(own, "name", "") == "__init__"]:
            return arguments(begin[0])
        fields = [ast.unparse(own) for own in node.body if isinstance(own, ast.AnnAssign)]
        return ", ".join(field for field in fields if not re.match("_|.*ClassVar", field))
    parameters = re.sub("^(self|cls)(, |$)", "", ast.unparse(node.args))
    if any(ast.unparse(one) == "by_name" for one in node.decorator_list):
        parameters = parameters.replace("settings: Settings", f"*, {arguments(node_of(Settings))}")
    return parameters


def entry(node: Any) -> str:
    """A line: the signature (a property's name only) and the docstring's first sentence."""
    marks = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
    shown = f"{node.name}({arguments(node)})"
    if isinstance(node, ast.ClassDef):
        shown = f"class {shown}" + "".join(f", of {ast.unparse(base)}" for base in node.bases)
    elif node.returns:
        shown += f" -> {ast.unparse(node.returns)}"
    shown = node.name if marks & {"property", "cached_property"} else shown
    text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    shown = QUOTED.sub(r"\1\2", shown)
    return f"- `{shown}`: {SENTENCE.split(text)[0]}\n"


def page() -> str:
    """The whole page, on which each name appears once."""
    text, seen = HEAD, set[Any]()
    for name in modules():
        module, lines = importlib.import_module(name), ""
        for public in getattr(module, "__all__", sorted(vars(module))):
            thing = inspect.unwrap(getattr(module, public))
            here = hasattr(module, "__all__") or getattr(thing, "__module__", "") == name
            if here and isinstance(thing, type | type(page)) and thing not in seen:
                seen.add(thing)
                if not HIDDEN.match(public):
                    lines += entry(node := node_of(thing))
                    for own in node.body if isinstance(thing, type) else ():
                        if isinstance(own, ast.FunctionDef) and not HIDDEN.match(own.name):
                            overload = "overload" in map(ast.unparse, own.decorator_list)
                            lines += "" if overload else f"  {entry(own)}"
        if lines:
            text += f"\n## `{name}`\n\n{(module.__doc__ or '').splitlines()[0]}\n\n{lines}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
