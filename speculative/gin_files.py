"""Reads gin files as data: includes are found from any folder, and imports are not executed."""

import io
import os
import pathlib
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import gin
from gin import config, config_parser

from speculative import disk, removed

CONFIGS = pathlib.Path(__file__).parent / "configs"  # In an installed package.
if not CONFIGS.is_dir():
    CONFIGS = CONFIGS.parents[1] / "configs"  # In a checkout.
MOST_FILES = 100  # Limit on includes; files that include others twice double at each level.
DYNAMIC = "__gin__.dynamic_registration"  # Training files import this; it has no effect here.


def find(file: str | pathlib.Path) -> pathlib.Path:
    """The path of a file in the working directory, or else in the checkout or installed package.

    The latter two hold `configs/...`. A file that does not exist keeps its name.
    """
    shipped = CONFIGS.parent / file
    return shipped if not os.path.isfile(file) and shipped.is_file() else pathlib.Path(file)


def listed(folder: str, pattern: str) -> list[pathlib.Path]:
    """The files of a folder that match a pattern, by name, each as `find` gives it."""
    places = pathlib.Path(folder), CONFIGS.parent / folder
    names = {path.name for place in places for path in place.glob(pattern)}
    return [find(f"{folder}/{name}") for name in sorted(names)]


def read(
    file: str | pathlib.Path | None,
    bindings: Sequence[str] = (),
    modules: Collection[str] = (),
    values: Mapping[str, Any] | None = None,
) -> None:
    """Applies a gin file, if there is one, `values` by names, and bindings like `Row.gamma = 3`.

    Included files are found as by `find`. No import is executed: a file may import `modules`,
    whose configurables are registered, and refer to these; without modules it may only hold values.
    ValueError names the faulty line.
    """
    delegate = _Delegate(modules)
    parsed = [] if file is None else [*_bindings(pathlib.Path(file), disk.text(file), delegate)]
    for name, value in (values or {}).items():
        selector, _, parameter = name.rpartition(".")
        parsed.append((name, True, "", selector, parameter, value))
    for binding in bindings:
        parsed += _bindings(None, binding, delegate)
    for at, own, scope, selector, name, value in parsed:
        macro = f"{scope}/{selector}".strip("/")
        if (scope and not modules) if name else (own and macro not in delegate.macros):
            full = f"{'TrainConfig' if modules else 'RowConfig'}.{name or selector}"
            raise ValueError(f"{at} binds nothing; name its configurable, as in {full}.")
        key = (scope, selector, name) if name else (macro, "gin.macro", "value")
        try:
            gin.bind_parameter(key, value)
        except (KeyError, ValueError) as error:
            gone = removed.said(f"{selector.rpartition('.')[2]}.{name}")
            raise ValueError(f"{at}: {gone or error}") from error
    gin.finalize()


class _Delegate(config.ParserDelegate):
    """Resolves references in values: macros, whose names it notes, and configurables if allowed."""

    def __init__(self, modules: Collection[str]) -> None:
        super().__init__()
        self.modules, self.macros, self.files = modules, set[str](), 0

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> Any:
        if not self.modules:
            raise ValueError(f"@{scoped_selector} would run code; give a value.")
        return super().configurable_reference(scoped_selector, evaluate)

    def macro(self, name: str) -> Any:
        self.macros.add(name)
        return super().macro(name)


def _bindings(
    file: pathlib.Path | None, text: str, delegate: _Delegate, above: Sequence[pathlib.Path] = ()
) -> Iterator[tuple[str, bool, str, str, str, Any]]:
    """Yields each binding of a file, or of a text without one, and of its included files.

    Each is a place, whether it is in the file itself, a scope, selector, parameter and value.
    """
    for statement in _statements(file, text, delegate):
        line = statement.location
        at = f"line {line.line_num} of {file}" if file else "the binding"
        at += f" ({line.line_content.strip()[:80]})"
        if isinstance(statement, config_parser.BindingStatement):
            yield at, not above, *statement[:4]
        elif isinstance(statement, config_parser.ImportStatement):
            known = ", ".join(sorted(delegate.modules)) or "nothing: a row takes values only"
            module = statement.module
            if not delegate.modules or module not in (*delegate.modules, DYNAMIC):
                raise ValueError(f"{at} imports {module}; it may import {known}.")
        elif isinstance(statement, config_parser.IncludeStatement):
            path = find(statement.filename).resolve()
            if not path.is_file():
                raise ValueError(f"{at} includes {statement.filename}, which does not exist.")
            within = (*above, file.resolve()) if file else above
            if path in within:
                raise ValueError(f"{at} includes a file within itself; leave that out.")
            delegate.files += 1
            if delegate.files > MOST_FILES:
                raise ValueError(f"{at} is more than {MOST_FILES} files in all; include fewer.")
            yield from _bindings(path, disk.text(path), delegate, within)


def _statements(file: pathlib.Path | None, text: str, delegate: _Delegate) -> list[Any]:
    """Parses a text as gin; ValueError names the line that cannot be parsed."""
    line = None
    try:
        return list(config_parser.ConfigParser(io.StringIO(text, newline=None), delegate))
    except SyntaxError as error:
        fault, line = error.msg, error.lineno
        if "Failed to parse token" in fault:  # The text before it names an object of the parser.
            fault = f"{fault.rpartition('token ')[2][:80]} is no value; put a text in quotes."
    except tokenize.TokenError as error:
        fault, (line, _) = f"a bracket or a quote is not closed ({error.args[0]})", error.args[1]
    except RecursionError:
        fault = "brackets are nested too deeply"
    except (KeyError, TypeError, ValueError) as error:
        fault, _, place = str(error).partition("\n  In bindings string line ")
        line = place.partition("\n")[0]
    raise ValueError(f"line {line} of " * bool(file and line) + f"{file or text.strip()}: {fault}")
