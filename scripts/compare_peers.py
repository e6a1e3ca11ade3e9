"""Other programs beside this one, on the same weights and sources, one after the other.

    pip install -e '.[peers]'
    python scripts/compare_peers.py --output_dir=results/peers

Hugging Face transformers and CTranslate2 come with that extra; T5X is compared where a checkout
of it is on PYTHONPATH. What is not there is named and left out. Takes about 15 minutes on two
cores, and 6 GB of memory and of disk; nothing else should run meanwhile.
"""

import argparse
import pathlib
import sys
import tempfile

from rich.console import Console

from speculative.experiments import progress
from speculative.peers import compare
from speculative.peers.system import PROGRAMS

PAIR = "debian"


def main() -> int:
    """Compares, prints and writes."""
    parser = argparse.ArgumentParser(
        description="Compare other programs with this one.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="results/peers", metavar="DIR", help="(%(default)s)")
    add(
        "--models",
        nargs="+",
        default=[PAIR, "t5_1_1_base"],
        help=f"the shipped pair ({PAIR}), or sizes of random weights (%(default)s)",
    )
    add("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), help="(all)")
    add("--rounds", type=int, default=5, help="each way is timed so often (5)")
    add("--limit", type=int, help="sources of each task, or made up (all, or 4)")
    add("--timed", type=int, default=18, help="of them are decoded in each round (18)")
    add("--length", type=int, default=64, help="tokens of random weights' outputs (64)")
    add("--gamma", type=int, default=5, help="guesses a step (5)")
    options = parser.parse_args()
    found, output = [], pathlib.Path(options.output_dir)
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder, progress.alone(model) as told:
            place = pathlib.Path(folder)
            if model == PAIR:
                setting, sources = compare.shipped(options.limit, options.gamma, place)
            else:
                setting, sources = compare.random(model, options.limit, options.length, place)
            found.append(
                compare.compare(
                    setting, sources, options.programs, options.rounds, options.timed, told
                )
            )
        compare.show(found[-1], Console())
        # Written after each model: nothing that was measured is lost.
        compare.write(found, output)
    print(f"Written: {output / compare.FILE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
