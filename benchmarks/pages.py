"""Tables of pages in docs/ that are made from records: each stands between two marks."""

import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

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


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table, of whose columns the first so many are words and the others numbers."""
    ruled = [":--" if i < words else "--:" for i in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ruled, *rows))
