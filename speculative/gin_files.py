"""Reads gin files as data: includes are found wherever a command is run, imports are not run."""

import io
import os
import pathlib
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import gin
from gin import config, config_parser

from speculative import disk, removed

CONFIGS = pathlib.Path(__file__).parent / "configs"  # Of an installed package.
if not CONFIGS.is_dir():
    CONFIGS = CONFIGS.parents[1] / "configs"  # Of a checkout.
MOST_FILES = 100  # That are included; files that include others twice double at each level.
DYNAMIC = "__gin__.dynamic_registration"  # A file of training says so; it changes nothing here.


def find(file: str | pathlib.Path) -> pathlib.Path:
    """A file as the working directory has it, or else the checkout or the installed package.

    Those two hold what is named `configs/...`. What is nowhere keeps its name.
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
    whose configurables are registered, and refer to these; without modules it holds values alone.
    ValueError names the line of what is wrong.
    """
    delegate = _Delegate(modules)
    found = [] if file is None else [*_bindings(pathlib.Path(file), disk.text(file), delegate)]
    for name, value in (values or {}).items():
        selector, _, parameter = name.rpartition(".")
        found.append((name, True, "", selector, parameter, value))
    for binding in bindings:
        found += _bindings(None, binding, delegate)
    for at, own, scope, selector, name, value in found:
        macro = f"{scope}/{selector}".strip("/")
        if (scope and not modules) if name else (own and macro not in delegate.macros):
            full = f"{'TrainConfig' if modules else 'RowConfig'}.{name or selector}"
            raise ValueError(f"{at} binds nothing; say of what it is, as in {full}.")
        key = (scope, selector, name) if name else (macro, "gin.macro", "value")
        try:
            gin.bind_parameter(key, value)
        except (KeyError, ValueError) as error:
            gone = removed.said(f"{selector.rpartition('.')[2]}.{name}")
            raise ValueError(f"{at}: {gone or error}") from error
    gin.finalize()


class _Delegate(config.ParserDelegate):
    """Makes what values refer to: macros, whose names it notes, and configurables if allowed."""

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
    """Each binding of a file, or of a text alone, and of what it includes.

    They are places, whether in the file itself, scopes, selectors, parameters and values.
    """
    for statement in _statements(file, text, delegate):
        line = statement.location
        at = f"line {line.line_num} of {file}" if file else "the binding"
        at += f" ({line.line_content.strip()[:80]})"
        if isinstance(statement, config_parser.BindingStatement):
            yield at, not above, *statement[:4]
        elif isinstance(statement, config_parser.ImportStatement):
            known = ", ".join(sorted(delegate.modules)) or "nothing, for a row takes values alone"
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
    """What gin makes of a text; ValueError names the line of which it makes nothing."""
    line = None
    try:
        return list(config_parser.ConfigParser(io.StringIO(text, newline=None), delegate))
    except SyntaxError as error:
        said, line = error.msg, error.lineno
        if "Failed to parse token" in said:  # What goes before names an object of Python's parser.
            said = f"{said.rpartition('token ')[2][:80]} is no value; put a text in quotes."
    except tokenize.TokenError as error:
        said, (line, _) = f"a bracket or a quote is not closed ({error.args[0]})", error.args[1]
    except RecursionError:
        said = "brackets are nested too deeply"
    except (KeyError, TypeError, ValueError) as error:
        said, _, place = str(error).partition("\n  In bindings string line ")
        line = place.partition("\n")[0]
    raise ValueError(f"line {line} of " * bool(file and line) + f"{file or text.strip()}: {said}")
