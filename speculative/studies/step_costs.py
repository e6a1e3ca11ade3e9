"""What a step costs with each number of guesses: measured once for a pair and a machine, and kept.

`speculative tune` and `speculative generate --gamma auto` write the files, which lie in the cache
folder; a file that is missing or damaged is measured anew.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from speculative import disk
from speculative.backends.cpu.kernels import cache_folder
from speculative.decoding import Adaptive
from speculative.measurement.timing import TURNS, CostMeter, Costs
from speculative.pair import Pair
from speculative.rows import environment
from speculative.sampling import Sampling

GAMMAS = (1, 3, 5, 7)  # Numbers of guesses that `--gamma auto` chooses from.
LENGTH = 64  # Positions of the source and of the caches with which costs are measured.


def adaptive(pair: Pair, sampling: Sampling, on_measure: Callable[[], None]) -> Adaptive:
    """The rule that picks gamma by a pair's costs, which are measured where none are kept.

    `on_measure` is called before costs are measured, which takes some seconds.
    """
    try:
        steps = json.loads(_file(pair, sampling)[0].read_text(encoding="utf-8"))["ms_step"]
        return Adaptive(GAMMAS, tuple(float(steps[str(gamma)]) for gamma in GAMMAS))
    except (OSError, ValueError, KeyError, TypeError):
        on_measure()
    meter = CostMeter(pair, sampling, GAMMAS, LENGTH, LENGTH)
    for _ in range(TURNS):
        meter.turn()
    return Adaptive(GAMMAS, tuple(keep(pair, sampling, meter.costs()).values()))


def keep(pair: Pair, sampling: Sampling, costs: Costs) -> dict[str, float]:
    """Writes the milliseconds of a step by gamma, if all of `GAMMAS` were timed; gives them."""
    if not set(GAMMAS) <= set(costs.ms_verify):
        return {}
    file, identity = _file(pair, sampling)
    steps = {str(gamma): costs.ms_verify[gamma] + costs.ms_proposal[gamma] for gamma in GAMMAS}
    try:
        disk.write(file, json.dumps(identity | {"ms_step": steps}, indent=1) + "\n")
    except OSError as error:
        logging.warning("The costs could not be kept in %s (%s).", file, error)
    return steps


def _file(pair: Pair, sampling: Sampling) -> tuple[pathlib.Path, dict[str, Any]]:
    """The file of a pair's costs, and what they depend on: sizes and settings, not weights."""
    target, draft = (
        str(pathlib.Path(name).resolve()) if pathlib.Path(name).is_dir() else name
        for name in pair.names
    )
    identity = {
        "target": target,
        "draft": draft,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(pair.params)),
        "dtype": pair.target.config.dtype,
        "device": environment.device(),
        "jax_version": jax.__version__,
        "sampling": [sampling.greedy, sampling.top_k > 0, sampling.top_p < 1, sampling.min_p > 0],
    }
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return cache_folder() / "costs" / f"{digest[:16]}.json", identity
