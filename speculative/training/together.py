"""What several processes of one run do together, and what the first one does for all of them."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process writes log and model."""
    return jax.process_index() == 0


def agreed(here: bool) -> bool:
    """What the first process says, where there are several; all of them must ask."""
    if jax.process_count() == 1:
        return here
    return bool(multihost_utils.broadcast_one_to_all(np.array(here)))


def by_first(work: Callable[[], object]) -> None:
    """Done by the first process; the others wait, and end with an error where it does.

    Without that they would wait for its part of the next step.
    """
    error = None
    try:
        if is_first():
            work()
    except (ValueError, OSError) as caught:
        error = caught
    if not agreed(error is None):
        raise error or ValueError("The first process cannot go on; its message says why.")
