"""Plots the loss curves of a training run next to those of a distillation.

    python scripts/plot_training.py --target work/{shallow,target}/log.jsonl \
        --draft work/{draft,draft_again}/log.jsonl --output speculative/assets/training.png

Consecutive runs are plotted one after the other.
"""

import argparse
import pathlib

import matplotlib.pyplot as plt

from speculative import disk
from speculative.reporting.curves import curve, held_out


def read(paths: list[pathlib.Path]) -> list[dict[str, float]]:
    lines: list[dict[str, float]] = []
    for path in paths:
        before = lines[-1]["step"] if lines else 0
        logged = disk.entries(path, dict, "line of a log")
        lines += [line | {"step": before + line["step"]} for line in logged]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Plots training curves.")
    parser.add_argument("--target", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--draft", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    target, draft = read(arguments.target), read(arguments.draft)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    curve(left, target, "loss", "training")
    for key in held_out(target, "loss"):
        curve(left, target, key, key.removesuffix("/loss"), "o")
    left.set(title="Target", xlabel="step", ylabel="loss (nats per token)")
    curve(right, draft, "alpha", "training, T = 1")
    curve(right, draft, "agreement", "training, T = 0")
    for metric, kind in (("agreement", "greedy"), ("alpha", "sampled")):
        for key in held_out(draft, metric):
            name = key.removesuffix(f"/{metric}")
            if name.endswith(kind):
                curve(right, draft, key, f"{name}, T = {0 if kind == 'greedy' else 1}", "o")
    right.set(title="Draft", xlabel="step", ylabel="acceptance rate α on the target's text")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
