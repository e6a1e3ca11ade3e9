"""Tables of pages in docs/ that are made from records: each stands between two marks."""

import pathlib
import re
from collections.abc import Callable, Mapping

SHOWN = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page with each of its tables made anew."""
    return SHOWN.sub(lambda found: f"{found[1]}{tables[found[2]]()}\n{found[3]}", page)


def fill(page: pathlib.Path, tables: Mapping[str, Callable[[], str]]) -> None:
    """Makes the tables of a page anew and says so."""
    text = page.read_text(encoding="utf-8")
    assert {name for _, name, _ in SHOWN.findall(text)} == tables.keys(), page
    page.write_text(filled(text, tables), encoding="utf-8")
    print(f"Written: {page}.")
