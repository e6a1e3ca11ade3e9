"""Other programs beside this one, on the same weights and sources, one after the other.

    pip install -e '.[peers]'
    python scripts/compare_peers.py --output_dir=results/peers

Hugging Face transformers and CTranslate2 come with that extra; T5X is compared where a checkout
of it is on PYTHONPATH. What is not there is named and left out. Takes half an hour on two cores,
and 8 GB of memory and of disk; nothing else should run meanwhile, and no file should change.
"""

import argparse
import pathlib
import sys
import tempfile

from rich.console import Console

from speculative.commands import MAX_GAMMA, MAX_LENGTH, whole
from speculative.experiments import progress
from speculative.models import SIZES, T5Config
from speculative.peers import compare
from speculative.peers.system import PROGRAMS

PAIR = "debian"
SIZES_OF_T5 = [name for name, config in SIZES.items() if isinstance(config, T5Config)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare other programs with this one.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="results/peers", metavar="DIR", help="(%(default)s)")
    add(
        "--models",
        nargs="+",
        default=[PAIR, "t5_1_1_base"],
        choices=[PAIR, *SIZES_OF_T5],
        metavar="MODEL",
        help=f"the shipped pair ({PAIR}), or random weights of {', '.join(SIZES_OF_T5)} "
        "(%(default)s)",
    )
    add("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), help="(all)")
    many = whole(1, 10**4)
    add("--rounds", type=many, default=5, help="each way is timed so often (5)")
    add("--limit", type=many, help="sources of each task, or made up (all, or 4)")
    add("--timed", type=many, default=18, help="of them are decoded in each round (18)")
    add("--length", type=whole(1, MAX_LENGTH), default=64, help="of random weights' outputs (64)")
    add("--gamma", type=whole(1, MAX_GAMMA), default=5, help="guesses a step (5)")
    options = parser.parse_args()
    try:
        for model in options.models:
            if model != PAIR:
                compare.require(model)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    """Compares, prints and writes."""
    options = _options()
    output = pathlib.Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder, progress.alone(model) as told:
            place = pathlib.Path(folder)
            if model == PAIR:
                setting, sources = compare.shipped(options.limit, options.gamma, place)
            else:
                setting, sources = compare.random(model, options.limit, options.length, place)
            found = compare.compare(
                setting, sources, options.programs, options.rounds, options.timed, told
            )
        # Written after each model: nothing that was measured is lost.
        compare.write(found, output / f"{model}.json")
        compare.show(found, Console())
        print(f"Written: {output / model}.json.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
