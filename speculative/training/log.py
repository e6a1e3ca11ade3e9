"""What a training run says: means, JSON lines, a progress bar."""

import json
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def means(window: Sequence[dict[str, Array]]) -> dict[str, float]:
    """Means over target tokens; `tokens`, source and target, stays a sum."""
    window = jax.device_get(window)
    sums = {key: float(np.sum([m[key] for m in window], dtype=np.float64)) for key in window[0]}
    weight = max(sums.pop("weight"), 1.0)
    return {key: value if key == "tokens" else value / weight for key, value in sums.items()}


def brief(line: dict[str, float]) -> str:
    """A log line for the terminal."""
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in line.items()
    )


def progress_bar() -> Progress:
    """Steps done, and when the rest will be."""
    return Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    )


class Log:
    """JSON lines, flushed one by one; lines beyond the checkpoint resumed from are dropped."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        kept = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:  # A kill may tear the last line.
                break
        path.write_text("".join(kept))
        self._path = path

    def write(self, line: dict[str, float]) -> None:
        """Appends a line."""
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
