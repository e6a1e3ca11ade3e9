"""Where the models of a row come from: a folder, the package, or random numbers."""

import contextlib
import functools
import pathlib
from collections.abc import Callable

from speculative import checkpoints, loading
from speculative.backends import usual_dtype, usual_quantize
from speculative.checkpoints import Checkpoint
from speculative.drafts import named
from speculative.loading import Resolved, Weights
from speculative.models import SIZES, Config
from speculative.models.distilled import DISTILLED, usual
from speculative.pair import Pair
from speculative.rows.config import RANDOM, RowConfig
from speculative.types import PyTree


class Loader:
    """Resolves the models of rows, each once, and loads them, one row after the other.

    A target that stays is loaded once, and there is never more than one target in memory.
    """

    def __init__(self) -> None:
        self._open = functools.cache(checkpoints.open)
        resolve = functools.partial(loading.resolve, open_checkpoint=self._open)
        self._resolve = functools.cache(resolve)
        self._target: tuple[Weights, PyTree] | None = None

    def resolve(self, config: RowConfig) -> Resolved:
        """The models of a row, found and checked without reading tensors; errors as in `find`."""
        random, names = config.checkpoints == RANDOM, (config.target, config.draft)
        target, draft = names if random else (find(config, name, self._open) for name in names)
        how = config.dtype, config.vocabulary, random, config.quantize, config.quantize_draft
        how = *how, config.mesh, config.draft_mesh
        found = self._resolve(target, draft, *how)
        found.require_trees(config.tree)
        return found

    def __call__(self, config: RowConfig) -> Pair:
        """The models of a row, loaded."""
        found = self.resolve(config)
        if self._target and self._target[0] != found.target:
            self._target = None
        pair = found.load(self._target[1] if self._target else None)
        self._target = found.target, pair.params.target
        return pair


def resolve(config: RowConfig) -> Resolved:
    """The models of a single row, as `Loader.resolve` finds them."""
    return Loader().resolve(config)


def find(
    config: RowConfig, name: str, open_checkpoint: Callable[[str], Checkpoint] = checkpoints.open
) -> str:
    """The path or name by which a row's model is opened; raises ValueError if there is none."""
    model, free = named.parts(name)
    if model and free:
        return f"{find(config, model, open_checkpoint)}+{free}"
    if named.known(name) or name in checkpoints.SHIPPED:
        return name
    if config.checkpoints is None:
        if name in SIZES and not checkpoints.known(name):
            raise ValueError(
                f"The row is of {name}; say where its checkpoint is (--checkpoints=DIR), or time "
                "it with random weights (--weights=random --simulated_alpha=A)."
            )
        return name
    remote, folder = config.checkpoints.startswith("gs://"), config.checkpoints.rstrip("/")
    for path in (f"{folder}/{config.task}/{name}", f"{folder}/{name}"):
        with contextlib.suppress(ValueError):
            if open_checkpoint(path) if remote else pathlib.Path(path).is_dir():
                return path
    listed = [] if remote else sorted(path.name for path in pathlib.Path(folder).glob("*"))
    held = "" if remote else f"; that folder holds {', '.join(listed) or 'nothing'}"
    raise ValueError(
        f"There is no checkpoint of {name} in {folder}, neither as {config.task}/{name} nor as "
        f"{name}{held}."
    )


def sizes(config: RowConfig) -> list[Config]:
    """The sizes of a row's target and, where it is a model, its draft.

    They are those of the checkpoints, or of `models.SIZES` where weights are random or none are
    named.
    """
    random, free = config.checkpoints == RANDOM, config.checkpoints is None
    found = []
    for name in (config.target, named.parts(config.draft)[0]):
        if random and name == DISTILLED and found:
            found.append((usual(found[0][0]), "bfloat16"))
        elif name in SIZES and (random or free and not checkpoints.known(name)):
            found.append((SIZES[name], "bfloat16"))
        elif name:
            checkpoint = checkpoints.open(find(config, name))
            found.append((checkpoint.config, checkpoint.dtype))
    held = config.quantize or "none", config.quantize_draft or usual_quantize()
    return [
        size.replace(dtype=config.dtype or usual_dtype(stored), quantize=quantize)
        for (size, stored), quantize in zip(found, held, strict=False)
    ]
