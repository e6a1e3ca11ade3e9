"""Draws the pictures of README.md and docs/: a trace, the table, trees, the package's imports.

    python scripts/pictures.py          (writes docs/pictures/*.svg)

The trace decodes one sentence with the bundled pair; the next two come from docs/records, the last
from the source.
"""

import ast
import io
import json
import pathlib
from collections import defaultdict

import matplotlib
from matplotlib.figure import Figure
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import speculative
from speculative.reporting import traces
from speculative.tasks.prompts import load_prompts

ROOT = pathlib.Path(__file__).parents[1]
PICTURES, RECORDS = ROOT / "docs" / "pictures", ROOT / "docs" / "records"
GAMMA = 7
matplotlib.rcParams["svg.fonttype"] = "none"  # Text stays text, which takes less space.
matplotlib.rcParams["svg.hashsalt"] = "pictures"  # Without it, ids would change each time.
BLUE, ORANGE, GREY = "#1f5a96", "#d9772b", "#9aa5b1"


def trace() -> None:
    """The steps of speculative decoding, next to the tokens of autoregressive decoding."""
    pair, text = speculative.load(), load_prompts("debian_ende", 1)[0].source
    (request,) = pair.requests([text], speculative.Settings(gamma=GAMMA))
    found = traces.trace(pair, text, request)
    pieces = found.pieces
    one_by_one = Text("")
    for number, piece in enumerate([pieces[0].strip(), *pieces[1:]]):
        one_by_one.append(piece, "bold blue" if number % 2 else "bold cyan")
    steps = traces.render(found.lines, GAMMA, True)
    width = 104
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text(text, "dim"))
    console.print(traces.legend(True))
    halves = [
        Panel(steps, title=f"speculative: {len(pieces)} tokens in {len(found.lines)} target calls",
              width=width * 6 // 10),
        Panel(one_by_one, title=f"autoregressive: {len(pieces)} target calls",
              width=width * 4 // 10 - 1),
    ]  # fmt: skip
    console.print(Columns(halves))
    console.save_svg(str(PICTURES / "trace.svg"), title="speculative generate --trace")


def table() -> None:
    """The measured speed-ups of the bundled pair, with their intervals and Theorem 3.8."""
    lines = (RECORDS / "demo" / "records.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        low, high = row["speedup"] - row["speedup_low"], row["speedup_high"] - row["speedup"]
        first = place == 0
        axes.barh(place + 0.2, row["speedup"], 0.38, xerr=[[low], [high]], capsize=3, color=BLUE,
                  label="measured, with its 95% interval" if first else None)  # fmt: skip
        axes.barh(place - 0.2, row["speedup_expected"], 0.38, color=GREY,
                  label="Theorem 3.8, from α, c and γ" if first else None)  # fmt: skip
    names = [f"{row['task']}\nT = {row['temperature']:g}, γ = {row['gamma']}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("speed-up over autoregressive decoding (times)")
    axes.set_title(f"The bundled pair on {rows[0]['device']}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURES / "speedup.svg", metadata={"Date": None})


def trees() -> None:
    """Tokens per target call by the number of guesses that a call verifies."""
    rows = json.loads((RECORDS / "one_text" / "one_text.json").read_text())["rows"]
    series: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for row in rows:
        kept = row["task"] == "debian_ende" and "+" not in row["draft"] and row["batch_size"] == 1
        if kept and row["gamma"] == 7 and row["temperature"] in (0, 1) and row["tree"]:
            series[row["draft"], row["temperature"]][row["tree"]] = row["tokens_per_call"]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    kinds = {
        "debian_draft_hidden": ("reads hidden states", BLUE),
        "debian_draft": ("Transformer", ORANGE),
    }
    for (draft, temperature), found in sorted(series.items(), reverse=True):
        kind, color = kinds[draft]
        axes.plot(list(found), list(found.values()), marker="o", color=color,
                  linestyle="--" if temperature else "-",
                  label=f"draft: {kind}, T = {temperature:g}")  # fmt: skip
    axes.set_xscale("log", base=2)
    sizes = sorted({size for found in series.values() for size in found})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("guesses in the tree that one target call verifies (depth 7)")
    axes.set_ylabel("tokens per target call")
    axes.set_ylim(bottom=1)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURES / "trees.svg", metadata={"Date": None})


def imports() -> dict[str, set[str]]:
    """Which parts of the package import which others: modules and folders right below it."""
    package = ROOT / "speculative"

    def part(path: pathlib.Path) -> str:
        return path.relative_to(package).parts[0].removesuffix(".py")

    names = {part(path) for path in package.rglob("*.py")} - {"__init__", "__main__"}
    found: dict[str, set[str]] = {name: set() for name in sorted(names)}
    for path in package.rglob("*.py"):
        if part(path) not in names:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = []
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                if parts[0] == "speculative":
                    targets = parts[1:2] or [alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [
                    x.name.split(".")[1] for x in node.names if x.name.startswith("speculative.")
                ]
            found[part(path)] |= {name for name in targets if name in names} - {part(path)}
    return found


def floors(uses: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each part: one above the highest part that it imports.

    Raises:
        ValueError: parts import one another in a circle.
    """
    found: dict[str, int] = {}
    while len(found) < len(uses):
        ready = [name for name in uses if name not in found and uses[name] <= found.keys()]
        if not ready:
            circle = ", ".join(sorted(uses.keys() - found.keys()))
            raise ValueError(f"These parts import one another in a circle: {circle}.")
        found |= {name: 1 + max((found[one] for one in uses[name]), default=-1) for name in ready}
    return found


def house() -> None:
    """The package's parts by floor: each imports only parts below it."""
    uses = imports()
    height = floors(uses)
    rows: dict[int, list[str]] = defaultdict(list)
    for name in sorted(uses):
        rows[height[name]].append(name)
    width, step = 1000, 52
    places = {
        name: (width * (place + 0.5) / len(row), step * (len(rows) - level - 0.5))
        for level, row in rows.items()
        for place, name in enumerate(row)
    }
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {step * len(rows)}">',
             '<rect width="100%" height="100%" fill="white"/>', f'<g stroke="{GREY}">']  # fmt: skip
    reached: dict[str, set[str]] = {}
    for name in sorted(uses, key=height.__getitem__):
        reached[name] = uses[name].union(*(reached[one] for one in uses[name]))
    for name, below in uses.items():
        # Imports that a longer path implies would hide the others.
        for one in sorted(x for x in below if not any(x in reached[other] for other in below)):
            (x, y), (to_x, to_y) = places[name], places[one]
            drawn.append(f'<path d="M{x:.0f} {y:.0f}L{to_x:.0f} {to_y:.0f}"/>')
    drawn.append(f'</g><g fill="white" stroke="{BLUE}">')
    for name, (x, y) in places.items():
        half = 4 * len(name) + 6
        drawn.append(
            f'<rect x="{x - half:.0f}" y="{y - 12:.0f}" width="{2 * half}" height="24" rx="5"/>'
        )
    drawn.append('</g><g font-family="sans-serif" font-size="14" text-anchor="middle">')
    drawn += [f'<text x="{x:.0f}" y="{y + 5:.0f}">{name}</text>' for name, (x, y) in places.items()]
    (PICTURES / "imports.svg").write_text("\n".join([*drawn, "</g></svg>"]) + "\n")


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for draw in (trace, table, trees, house):
        draw()
    for picture in sorted(PICTURES.glob("*.svg")):
        print(f"Written: {picture.relative_to(ROOT)}, {picture.stat().st_size / 1024:.0f} KiB.")


if __name__ == "__main__":
    main()
