"""Training checkpoints, by orbax: written during steps; each process writes its devices' parts.

They hold parameters and the optimizer's state; `opened` reads the parameters as a checkpoint that
can be saved as a model, or converted, tensor by tensor.
"""

import contextlib
import dataclasses
import functools
import math
import shutil
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_managers as policies

from speculative import disk
from speculative.checkpoints import native
from speculative.checkpoints.checkpoint import Checkpoint, Part, Tensor, by_name
from speculative.disk import reading
from speculative.models import Config, abstract_params, sharding
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary

ITEM = "default"  # orbax's name for the state.


class Checkpoints:
    """The checkpoints of a run in a folder, or ``gs://bucket/folder``, which all processes share.

    It keeps the newest ones, and that of the best evaluation.
    """

    def __init__(self, folder: disk.Path, keep: int) -> None:
        self.folder = folder
        best = policies.BestN(get_metric_fn=_score, n=1)
        kept = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        options = ocp.CheckpointManagerOptions(preservation_policy=kept, best_fn=_score)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def newest(self) -> int | None:
        """The step of the newest one; None if there is none."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the best evaluation; None if there is no checkpoint."""
        return self._manager.best_step()

    def save(self, step: int, state: PyTree, score: float | None) -> None:
        """Starts to write a state after the previous one is done; an OSError may be about either.

        The `score` is that of an evaluation; None if the state was not evaluated.
        """
        metrics = {"score": -math.inf if score is None else score}
        args = ocp.args.StandardSave(state)

        def write() -> None:
            self._manager.wait_until_finished()
            self._require_room(state)
            self._manager.save(step, metrics=metrics, args=args, force=True)

        self._written(write)

    def finish(self) -> None:
        """Waits until everything is written; raises OSError if that is not possible."""
        self._written(self._manager.wait_until_finished)

    def remove(self, step: int) -> None:
        """Removes the checkpoint of a step."""
        self._manager.delete(step)

    def restored(self, step: int, shapes: Callable[[PyTree], PyTree], on: Mesh | None) -> PyTree:
        """The state of a step, placed on a mesh or the first device.

        `shapes` gives the state's shapes for those of the parameters. Raises ValueError if the
        checkpoint is damaged.
        """
        try:
            # The state's structure comes from the run's optimizer, not from the file.
            metadata = self._manager.item_metadata(step)
            params = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
                dict(metadata)["params"], is_leaf=lambda x: hasattr(x, "shape"),
            )  # fmt: skip
            wanted = shapes(params)
            wanted = sharding.laid_out(wanted, sharding.places(wanted, on))
            return self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except Exception as error:  # There are many kinds.
            raise ValueError(
                f"The checkpoint of step {step} in {self.folder} is damaged "
                f"({str(error).splitlines()[0]}); remove it, and the run resumes from the one "
                "before it."
            ) from error

    def _require_room(self, state: PyTree) -> None:
        """OSError if the folder's disk lacks room for this process's parts of a state.

        A write that fails midway would print hundreds of lines from orbax's threads.
        """
        if str(self.folder).startswith("gs://"):
            return
        shards = (shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
        needed = sum(shard.data.nbytes for shard in shards if shard.replica_id == 0)
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise OSError(f"it takes {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free")

    def _written(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:  # There are many kinds, some from another thread.
            newest = self._manager.latest_step()
            kept = f"that of step {newest} is whole" if newest else "there is none before it"
            raise OSError(
                f"A checkpoint cannot be written into {self.folder} "
                f"({str(error).splitlines()[0]}); {kept}. Make room, and run the same command "
                "again."
            ) from error


def _score(metrics: Any) -> float:
    return metrics["score"]


def steps(folder: disk.Path) -> list[int]:
    """The steps of the checkpoints in a folder, which need not exist; ascending."""
    with contextlib.suppress(OSError):
        return sorted(ocp.utils.checkpoint_steps(str(folder)))
    return []


def opened(folder: disk.Path, step: int, config: Config) -> Checkpoint:
    """The parameters of a step's checkpoint, which are read when they are needed."""
    where = f"{str(folder).rstrip('/')}/{step}/{ITEM}"
    base = f"{where}/" if where.startswith("gs://") else f"file://{where}/"

    def read(name: str, part: Part = ()) -> np.ndarray:
        kept = {"driver": "ocdbt", "base": base, "path": f"params.{name.replace('/', '.')}/"}
        spec = {"driver": "zarr", "kvstore": kept}
        with reading(where):
            array = tensorstore.open(spec, read=True, open=True).result()
            return np.asarray(array[part or ...].read().result())

    tensors = {
        name: Tensor(leaf.shape, "float32", functools.partial(read, name))
        for name, leaf in by_name(abstract_params(config)).items()
    }
    return Checkpoint(where, "native", config, tensors)


def export(
    folder: disk.Path,
    checkpoints: disk.Path,
    step: int,
    config: Config,
    pieces: Vocabulary,
    storage: native.Storage,
    **more: Any,
) -> None:
    """Saves the parameters of a step as a model, with its vocabulary; see `native.write`.

    They are read from the checkpoint tensor by tensor, regardless of devices. `more` has further
    fields of `Checkpoint`.
    """
    fields = {"vocabulary": pieces.path, "extra_ids": pieces.extra_ids, "special": pieces.special}
    made = dataclasses.replace(opened(checkpoints, step, config), **fields, **more)
    native.write(folder, made, storage)
