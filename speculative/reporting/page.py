"""Results as one HTML page, which needs no script, no network and no other file.

Pages are also well-formed XML, and the same records give the same bytes.
"""

import io
import itertools
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib
from absl import logging
from matplotlib.figure import Figure

from speculative import disk
from speculative.reporting import plots, tables, traces
from speculative.reporting.tables import Column
from speculative.rows import kept, records
from speculative.rows.config import read_row
from speculative.rows.run import merged

CAPTIONS = {
    "figure_2": "Figure 2: tokens per target pass over the acceptance rate α. Lines show "
    "Eq. 1, markers measurements.",
    "figure_4": "Figure 4: the speed-up (Theorem 3.8) and the growth of operations (Theorem "
    "3.11) over α, for a free draft. Markers are measured speed-ups, which include real c and v.",
    "acceptance": "Acceptance by position in a step, and by place in the text. Dashed: αⁱ, the "
    "share if all guesses had the same rate.",
}
"""Captions of the figures, the paper's first."""

SAMPLES = 3  # Outputs shown per row.
RACES, RACE_SECONDS = 2, 8.0  # Races per page, and how long autoregressive decoding takes in one.


class _Line(NamedTuple):
    """A line of a table: the name of its group, its own name, and the object its cells show."""

    group: str
    name: str
    of: Any


class _Row(NamedTuple):
    """A row's record and examples, with the names that the page gives it and its group."""

    group: str
    name: str
    title: str  # Unique among all rows.
    record: records.Record
    examples: list[kept.Example]

    @property
    def line(self) -> _Line:
        """The table line of its record."""
        return _Line(self.group, self.name, self.record)


def write(folders: Sequence[pathlib.Path], output: pathlib.Path) -> None:
    """Writes a page about all rows of some folders.

    Each holds `records.jsonl`, or those of workers, and, if there are any, `rows/*/examples.jsonl`.

    Raises:
        ValueError: there is no such folder, it has no records, or a file in it is damaged.
    """
    of_folders = [(folder, _rows(folder, len(folders) > 1)) for folder in folders]
    rows = [row for _, of_folder in of_folders for row in of_folder]
    sections = {
        "Race": [part for folder, found in of_folders for part in _races(folder, found)],
        **_tables(rows),
        "Figures": _figures(rows),
        "Samples": _samples(rows),
        "Environment": _environment(rows),
    }
    body = []
    for name, parts in sections.items():
        if parts:
            body += ["<section>", f"<h2>{name}</h2>", *parts, "</section>"]
    page = disk.text(pathlib.Path(__file__).with_name("page.html"))
    disk.write(output, page.replace("{body}", "\n".join(body)))


def _rows(folder: pathlib.Path, several: bool) -> list[_Row]:
    """The rows of a folder; with several folders, group names include the folder's."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}; give one that holds a records.jsonl.")
    rows = []
    for record in _records(folder):
        group, _, name = record.experiment.rpartition("/")
        if not group:  # The name has no group, and may be that of other rows.
            name = f"{record.task}, T\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{record.temperature:g}"
        if several:
            group = f"{folder}: {group}" if group else str(folder)
        title = f"{group}: {name}" if group else name
        examples = kept.read(folder / "rows" / record.experiment)
        rows.append(_Row(group, name, title, record, examples))
    if not rows:
        raise ValueError(
            f"{folder} holds no records; give a folder that speculative demo, run or table wrote."
        )
    return rows


def _records(folder: pathlib.Path) -> list[records.Record]:
    """The records of a folder; rows that only workers have are merged from theirs."""
    found = records.read(folder / "records.jsonl")
    done, of_rows = {record.experiment for record in found}, dict[str, list[records.Record]]()
    for record in records.of_workers(folder):
        if record.experiment not in done:
            of_rows.setdefault(record.experiment, []).append(record)
    for name, of_workers in of_rows.items():
        config = read_row(None, of_workers[0].gin.splitlines())
        found.append(merged(of_workers, config, kept.read(folder / "rows" / name)))
    return found


def _tables(rows: Sequence[_Row]) -> dict[str, list[str]]:
    """The tables of measurements, by sections of the page."""
    found = tables.parts([row.record for row in rows])
    columns = (*found.pop("Acceptance")[0], *found.pop("Speed")[0])
    drawn = {
        caption: _table(caption, columns, [row.line for row in rows if row.record in shown])
        for caption, (columns, shown) in found.items()
    }
    note = f'<p class="simulated">Rows that say so have {tables.SIMULATED}.</p>'
    speed = [note] * any(row.record.simulated for row in rows)
    speed.append(_table("Batch size 1, beside the paper", columns, [row.line for row in rows]))
    texts = ("Quality", "Exactness at temperature 0")
    outputs = [drawn.pop(name) for name in texts if name in drawn]
    if cut := tables.cut_sources([row.record for row in rows]):
        outputs.append(f"<p>{escape(cut)}</p>")
    category, *measured = tables.CATEGORIES
    by_category = [
        _table(
            f"{row.title}, by category",
            measured,
            [_Line("", category.cell(one), one) for one in row.record.categories],
        )
        for row in rows
        if row.record.categories
    ]
    return {"Speed": [*speed, *drawn.values()], "Categories": by_category, "Outputs": outputs}


def _races(folder: pathlib.Path, rows: Sequence[_Row]) -> list[str]:
    """The first texts of `traces.jsonl`, replayed in both ways at the row's costs per call."""
    by_name, parts = {row.record.experiment: row.record for row in rows}, []
    for experiment, trace in traces.read(folder)[:RACES]:
        if (record := by_name.get(experiment)) is None:
            continue
        pieces, steps = trace.pieces, trace.steps
        ms_step = record.ms_verify + record.gamma * record.ms_draft_step
        slower = 1e3 * RACE_SECONDS / (record.ms_target_step * len(pieces))
        lanes = {
            f"autoregressive: {len(pieces)} target calls": [
                _shown_at(slower * record.ms_target_step * i, "", piece)
                for i, piece in enumerate(pieces, 1)
            ],
            f"speculative: {len(steps)} target calls": [
                _shown_at(slower * ms_step * i, accepted, corrected)
                for i, (accepted, corrected) in enumerate(steps, 1)
            ],
        }
        halves = "".join(
            f"<div><h4>{head}</h4><p>{''.join(spans)}</p></div>" for head, spans in lanes.items()
        )
        speed = f"replay at {1 / slower:.2g} times the measured speed, prefill excluded"
        label = f'<input type="checkbox"/> {speed} (uncheck and check to start again)'
        parts += [
            f"<h3>{_text(experiment)}</h3><p>{_text(trace.source)}</p>",
            f'<div class="race"><label>{label}</label><div class="lanes">{halves}</div></div>',
        ]
    if parts:
        note = (
            "Each target call adds its tokens at once: accepted guesses, then the target's own "
            "token. The autoregressive side shows the same text, one token per call."
        )
        parts.insert(0, f"<p>{_text(note)}</p>")
    return parts


def _shown_at(ms: float, accepted: str, own: str) -> str:
    """A target call's text, which appears after `ms` milliseconds."""
    guesses = f"<i>{_text(accepted)}</i>" if accepted else ""
    return f'<span style="animation-delay:{ms:.0f}ms">{guesses}<b>{_text(own)}</b></span>'


def _figures(rows: Sequence[_Row]) -> list[str]:
    """Figures 2 and 4 with the points of all rows, and acceptance by position and place."""
    shown = [row.record for row in rows if not row.record.tree]  # Equation 1 describes chains.
    figures: dict[str, Callable[[], Figure]] = {}
    if shown:
        figures["figure_2"] = lambda: plots.figure_2(shown)
        figures["figure_4"] = lambda: plots.figure_4(shown)
    seen = {
        _printable(row.title): (row.record, [example.betas for example in row.examples])
        for row in rows
        if row.record.accepted_by_position and not row.record.simulated
    }
    if seen:
        figures["acceptance"] = lambda: plots.acceptance(seen)
    return ['<div class="figures">', *map(_figure, figures, figures.values()), "</div>"]


def _figure(name: str, draw: Callable[[], Figure]) -> str:
    """A figure and its caption; ids in it begin with its name."""
    caption = _text(CAPTIONS[name])
    try:
        drawn = _svg(name, draw())
    except Exception as error:  # A failed picture must not lose hours of measurements.
        logging.warning("%s could not be drawn: %r", name, error)
        return f"<p>{caption} It could not be drawn: {_text(repr(error))}</p>"
    drawn = f'<svg role="img" aria-label="{caption}"{drawn}'
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _svg(name: str, figure: Figure) -> str:
    """The figure's SVG after `<svg`."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Without the salt, ids would change each time. Text stays text, because the browser has fonts
    # that Matplotlib lacks.
    settings = matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"})
    with settings, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True, metadata=nothing)
    drawn = file.getvalue().partition("<svg")[2]
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", drawn)


def _samples(rows: Sequence[_Row]) -> list[str]:
    """The first outputs of rows whose acceptance is not simulated."""
    shown = [row for row in rows if row.examples and not row.record.simulated]
    if not shown:
        return []
    note = (
        f"The first {SAMPLES} of each row. At temperature 0 both outputs must be the same; "
        "above it they are two samples of one distribution."
    )
    if any(row.record.lenience < 1 for row in rows):
        note += " Not so where l < 1: those speculative outputs are not the target's own."
    parts = [f"<p>{_text(note)}</p>"]
    for row in shown:
        parts.append(f"<h3>{_text(row.title)}</h3>")
        first = [example for example in row.examples if example.sample == 0][:SAMPLES]
        parts += [_sample(example, row.record) for example in first]
    return parts


def _sample(example: kept.Example, record: records.Record) -> str:
    """An example, its texts side by side where there is room."""
    texts = {"prefix": example.prefix} if example.prefix else {}
    texts |= {
        "source": example.source.removeprefix(example.prefix),
        "reference": example.reference,
        f"autoregressive, {example.lengths[0]} tokens": example.autoregressive,
        f"speculative, {example.lengths[1]} tokens": example.speculative,
    }
    parts = [f"<div><dt>{head}</dt><dd>{_text(text)}</dd></div>" for head, text in texts.items()]
    verdict = "" if record.outputs_identical is None else ": identical"
    if verdict and example.difference:
        tie = example.difference.near_tie
        verdict = f": the outputs part, {'a near tie' if tie else 'NOT explained by rounding'}"
    head = f"<h4>Example {example.number + 1}{verdict}</h4>"
    return f'{head}\n<dl class="sample">{"".join(parts)}</dl>'


def _environment(rows: Sequence[_Row]) -> list[str]:
    """The machine, versions and settings of the rows."""
    names = ("num_examples", *tables.ENVIRONMENT)
    names = [name for name in names if any(getattr(row.record, name) is not None for row in rows)]
    columns = [Column(name.replace("_", " "), tables.field(name)) for name in names]
    values = {column: {column.cell(row.record) for row in rows} for column in columns}
    shared = {column.head: min(cells) for column, cells in values.items() if len(cells) == 1}
    parts = [_pairs(shared.items())] * bool(shared)
    if own := [column for column in columns if column.head not in shared]:
        table = _table("Where it was measured", own, [row.line for row in rows])
        # In print, numbers stay whole; names, which may be long paths, break where they must.
        parts.append(f'<div class="words">{table}</div>')
    for row in rows:
        head = f"<details><summary>Configuration of {_text(row.title)}</summary>"
        parts.append(f"{head}<pre>{_text(row.record.gin)}</pre></details>")
    return parts


def _table(caption: str, columns: Sequence[Column], rows: Sequence[_Line]) -> str:
    """A table whose rows stand under the names of their groups, and the meanings of its columns.

    It may be wider than the page, and then scrolls, also with the keyboard.
    """
    heads, caption = ["row", *(column.head for column in columns)], _text(caption)
    box = f'<div class="box" role="region" tabindex="0" aria-label="{caption}">'
    lines = [f"{box}<table><caption>{caption}</caption>", "<thead><tr>"]
    lines += [f'<th scope="col">{_text(head)}</th>' for head in heads]
    lines.append("</tr></thead><tbody>")
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        if group:
            head = f'<th scope="rowgroup" colspan="{len(heads)}"><span>{_name(group)}</span></th>'
            lines.append(f'<tr class="group">{head}</tr>')
        for row in members:
            simulated = isinstance(row.of, records.Record) and row.of.simulated
            mark = '<strong class="simulated">simulated acceptance</strong>' * simulated
            cells = (f"<td>{_text(column.cell(row.of))}</td>" for column in columns)
            lines.append(f'<tr><th scope="row">{_name(row.name)}{mark}</th>{"".join(cells)}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(lines) + _pairs((x.head, x.meaning) for x in columns if x.meaning)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Terms and their explanations, in as many columns as fit; empty without terms."""
    parts = [f"<div><dt>{_text(term)}</dt> <dd>{_text(text)}</dd></div>" for term, text in pairs]
    return '\n<dl class="pairs">{}</dl>'.format("\n".join(parts)) if parts else ""


def _name(name: str) -> str:
    """A name as HTML, which may break after a slash or an underscore."""
    return re.sub("([/_])", r"\1<wbr/>", _text(name))


def _text(text: str) -> str:
    """Text as HTML."""
    return escape(_printable(text))


def _printable(text: str) -> str:
    """Text without characters that XML forbids: control characters, which a model may emit.

    Lone surrogates, which names outside the system's encoding contain, are replaced too.
    """
    never = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]"
    return re.sub(never, "\N{REPLACEMENT CHARACTER}", text)
