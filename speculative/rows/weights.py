"""Finds and loads the models of a row: from a folder, the package, or random numbers."""

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
    """Resolves each model of several rows once, and loads the models row by row.

    A target that consecutive rows share is loaded once, and only one target is in memory at a time.
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
        resolved = self._resolve(target, draft, *how)
        resolved.require_trees(config.tree)
        return resolved

    def __call__(self, config: RowConfig) -> Pair:
        """The models of a row, loaded."""
        resolved = self.resolve(config)
        if self._target and self._target[0] != resolved.target:
            self._target = None
        pair = resolved.load(self._target[1] if self._target else None)
        self._target = resolved.target, pair.params.target
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
                f"The row uses {name}; say where its checkpoint is (--checkpoints=DIR), or time it "
                "with random weights (--weights=random --simulated_alpha=A)."
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
    """The sizes of a row's target and, if it is a model, its draft.

    They come from the checkpoints, or from `models.SIZES` if weights are random or no folder of
    checkpoints is named.
    """
    random, free = config.checkpoints == RANDOM, config.checkpoints is None
    configs = []
    for name in (config.target, named.parts(config.draft)[0]):
        if random and name == DISTILLED and configs:
            configs.append((usual(configs[0][0]), "bfloat16"))
        elif name in SIZES and (random or free and not checkpoints.known(name)):
            configs.append((SIZES[name], "bfloat16"))
        elif name:
            checkpoint = checkpoints.open(find(config, name))
            configs.append((checkpoint.config, checkpoint.dtype))
    held = config.quantize or "none", config.quantize_draft or usual_quantize()
    return [
        size.replace(dtype=config.dtype or usual_dtype(stored), quantize=quantize)
        for (size, stored), quantize in zip(configs, held, strict=False)
    ]
