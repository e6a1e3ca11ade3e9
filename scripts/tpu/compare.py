"""Shows the compiler's predictions of a table's times next to the measured times.

    python scripts/tpu/compare.py results/table2

The folder holds `predicted.jsonl`, the output of `speculative compile --json` for the chip, and
`records.jsonl`, the measurements of `speculative table` there.
"""

import json
import pathlib
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
NAMES = ("experiment", "task", "target", "draft", "temperature", "gamma")  # These identify a row.
QUANTITIES = {  # Names in a prediction and in a record, by column header.
    "target step, ms": ("ms_target_step", "ms_target_step"),
    "verify, ms": ("ms_verify", "ms_verify"),
    "draft step, ms": ("ms_draft_step", "ms_draft_step"),
    "c": ("c", "c"),
    "v": ("verify_cost", "verify_cost"),
    "speed-up": ("speedup_predicted", "speedup"),
}


def main() -> int:
    if len(sys.argv) != 2:
        print("error: give one folder of results, such as results/table2.", file=sys.stderr)
        return 2
    folder = pathlib.Path(sys.argv[1])
    try:
        shown = compared(read(folder / "predicted.jsonl"), read(folder / "records.jsonl"))
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}; measure the table.", file=sys.stderr)
        return 2
    Console(width=120, highlight=False, markup=False, emoji=False).print(shown)
    return 0


def read(path: pathlib.Path) -> list[Row]:
    """The JSON objects of a file, one per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compared(predicted: list[Row], measured: list[Row]) -> Table:
    """A line for each record; a dash marks a value that was not predicted or not measured."""
    table = Table("task", "draft", "T", "γ", title="predicted by the compiler / measured")
    for head in QUANTITIES:
        table.add_column(head, justify="right")
    for record in measured:
        prediction = next((row for row in predicted if same(row, record)), {})
        cells = [
            f"{number(prediction.get(of_prediction))} / {number(record.get(of_record))}"
            for of_prediction, of_record in QUANTITIES.values()
        ]
        row = (record["task"], record["draft"], f"{record['temperature']:g}", record["gamma"])
        table.add_row(*map(str, row), *cells)
    return table


def same(prediction: Row, record: Row) -> bool:
    """Whether a prediction is for a record's row; it may omit names that times do not depend on."""
    return all(prediction[name] == record[name] for name in NAMES if name in prediction)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
