"""Coordination of a run's processes: joint decisions, and work of the first one for all."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process writes the log and the model."""
    return jax.process_index() == 0


def agreed(here: bool) -> bool:
    """The first process's value, if there are several processes; all of them must call this."""
    if jax.process_count() == 1:
        return here
    return bool(multihost_utils.broadcast_one_to_all(np.array(here)))


def by_first(work: Callable[[], object]) -> None:
    """Runs `work` in the first process; the others wait, and raise an error if it does.

    If they went on, they would wait forever for its part of the next step.
    """
    error = None
    try:
        if is_first():
            work()
    except (ValueError, OSError) as caught:
        error = caught
    if not agreed(error is None):
        raise error or ValueError("The first process cannot go on; its message says why.")
