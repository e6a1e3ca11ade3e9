"""Where the models of a row come from: a folder, the package, or random numbers."""

import pathlib

from speculative import checkpoints
from speculative.drafts.named import MODEL_FREE, require_no_table, table
from speculative.experiments.settings import RowConfig
from speculative.models import SIZES, Config
from speculative.pair import Pair, load, load_random

RANDOM = "random"
"""In place of a folder of checkpoints: true sizes, no checkpoint."""


class Loader:
    """Loads the models of one row after the other; a target that stays is loaded once.

    There is never more than one target in memory.
    """

    def __init__(self) -> None:
        """Nothing is loaded yet."""
        self._pair: Pair | None = None

    def __call__(self, config: RowConfig) -> Pair:
        """The models of a row.

        Raises:
            ValueError: a checkpoint is missing or damaged, or the two do not go together.
        """
        random = config.checkpoints == RANDOM
        names = (config.target, config.draft)
        target, draft = names if random else (place(config, name) for name in names)
        if self._pair is not None and self._pair.names[0] != target:
            self._pair = None
        read = load_random if random else load
        self._pair = read(target, draft, config.dtype, config.vocabulary, self._pair)
        return self._pair


def place(config: RowConfig, name: str) -> str:
    """Where a row's model is.

    Raises:
        ValueError: it is nowhere in the folder of checkpoints.
    """
    if name in (*MODEL_FREE, *checkpoints.SHIPPED):
        return name
    if config.checkpoints is None:
        if not checkpoints.known(name):
            raise ValueError(
                f"The row is of {name}; say where its checkpoint is (--checkpoints=DIR), or time "
                "it with random weights (--weights=random --simulated_alpha=A)."
            )
        return name
    remote, folder = config.checkpoints.startswith("gs://"), config.checkpoints.rstrip("/")
    places = [f"{folder}/{config.task}/{name}", f"{folder}/{name}"]
    for place in places:
        if _exists(place) if remote else pathlib.Path(place).is_dir():
            return place
    listed = [] if remote else sorted(path.name for path in pathlib.Path(folder).glob("*"))
    there = "" if remote else f"; that folder holds {', '.join(listed) or 'nothing'}"
    raise ValueError(
        f"There is no checkpoint of {name} in {folder}, neither as {config.task}/{name} nor as "
        f"{name}{there}."
    )


def _exists(place: str) -> bool:
    """Whether a bucket holds a checkpoint there."""
    try:
        checkpoints.open(place)
    except ValueError:
        return False
    return True


def require(config: RowConfig) -> None:
    """Raises ValueError unless the models of a row are where they should be, without loading."""
    if config.checkpoints == RANDOM:
        for name in (config.target, config.draft):
            if name not in (*SIZES, *MODEL_FREE):
                raise ValueError(
                    f"Random weights are for the sizes {', '.join(SIZES)}, not for {name!r}."
                )
        require_no_table(config.draft)
        return
    target = checkpoints.open(place(config, config.target))
    if config.draft in MODEL_FREE:
        table(config.draft, pathlib.Path(target.place))
    else:
        checkpoints.open(place(config, config.draft))


def sizes(config: RowConfig, name: str) -> Config:
    """The sizes of a row's model: by its name, or else its checkpoint's.

    Raises:
        ValueError: there is no such checkpoint.
    """
    found = SIZES.get(name) or checkpoints.open(place(config, name)).config
    return found.replace(dtype=config.dtype or found.dtype)
