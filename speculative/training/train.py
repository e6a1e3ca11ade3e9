"""Training a model on text."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array

from speculative import checkpoints
from speculative.checkpoints import native
from speculative.decoding import Decoding
from speculative.models import Config, FlaxModel, model_of
from speculative.sampling import Sampling
from speculative.training import data, outputs
from speculative.training.examples import Examples, load
from speculative.training.loop import Metrics, TrainConfig, fit
from speculative.types import Logits, PyTree
from speculative.vocabulary import Vocabulary, from_elsewhere, open_vocabulary


def teacher_forced(
    model: FlaxModel,
    params: PyTree,
    batch: Mapping[str, Array],
    dropout_key: Array | None,
    encoded: Array | None = None,
) -> Logits:
    """Logits [B, L, V] of a packed batch, `encoded` [B, S, D] by default by the model itself."""
    return model.forward(
        params,
        batch["encoder_input_tokens"],
        batch["decoder_input_tokens"],
        (batch["encoder_segment_ids"], batch["decoder_segment_ids"]),
        dropout_key,
        encoded,
    )


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Negative log likelihood, in nats.

    Attributes:
        model: the model to train.
        z_loss: weight of the squared log normaliser, which keeps logits from drifting.
    """

    model: FlaxModel
    z_loss: float = 1e-4

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: Mapping[str, Array], dropout_key: Array | None
    ) -> tuple[Array, Metrics]:
        """Sums over target tokens; metrics are the plain loss and the argmax's accuracy."""
        del frozen
        logits = teacher_forced(self.model, params, batch, dropout_key)
        targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        loss = jnp.sum(weights * (normaliser - chosen))
        right = jnp.sum(weights * (logits.argmax(-1) == targets))
        penalty = self.z_loss * jnp.sum(weights * jnp.square(normaliser))
        return loss + penalty, {"loss": loss, "accuracy": right}


DEPTHS = ("num_encoder_layers", "num_decoder_layers", "num_layers")
"""Fields of configurations that count layers."""


def initial(model: FlaxModel, seed: int, init_from: str | pathlib.Path | None) -> PyTree:
    """A run's first parameters: random, or a checkpoint's, deepened where it is shallower.

    Raises:
        ValueError: as `checkpoints.open`, or the checkpoint has other sizes, or more layers.
    """
    fresh = jax.jit(model.init)(jax.random.key(seed))
    if init_from is None:
        return fresh
    checkpoint = checkpoints.open(init_from)
    sizes = checkpoint.config
    depths = [d for d in DEPTHS if hasattr(model.config, d)]
    alike = type(sizes) is type(model.config)
    if alike:
        deep_enough = all(getattr(sizes, d) <= getattr(model.config, d) for d in depths)
        free = ("dropout_rate", "dtype", *depths)
        same = sizes.replace(**{name: getattr(model.config, name) for name in free})
        alike = deep_enough and same == model.config
    if not alike:
        raise ValueError(f"{init_from} holds {sizes}, but the run is of {model.config}.")
    return {name: deepened(fresh[name], tree) for name, tree in checkpoint.numpy().items()}


def deepened(stack: PyTree, shallower: PyTree) -> PyTree:
    """A shallower stack's parameters, and `stack`'s own layers on top as identities.

    A residual layer whose output kernels are zero changes nothing, so the deeper model begins
    as the very function that the shallower one is (Chen et al., arXiv 1511.05641).
    """

    def identity(path: tuple[Any, ...], leaf: Array) -> Array:
        into_residual = {"out", "wo"} & {key.key for key in path}
        return jnp.zeros_like(leaf) if into_residual else leaf

    added = {name: layer for name, layer in stack.items() if name not in shallower}
    return shallower | jax.tree_util.tree_map_with_path(identity, added)


def vocabulary_of(
    model: Config, file: str | pathlib.Path | None, init_from: str | pathlib.Path | None
) -> Vocabulary:
    """The vocabulary of a run: a file's, or that of the checkpoint from which it starts.

    Raises:
        ValueError: there is none, or the model has no room for it.
    """
    start = None if file or not init_from else checkpoints.open(init_from)
    if file:
        pieces = from_elsewhere(file, model.vocab_size)
    elif start and start.vocabulary:
        pieces = open_vocabulary(start.vocabulary, start.extra_ids)
    else:
        raise ValueError(
            f"{init_from or 'A run from random weights'} brings no vocabulary; give the "
            "SentencePiece model of the token files (--vocabulary)."
        )
    if pieces.size > model.vocab_size:
        raise ValueError(
            f"{pieces.path} has {pieces.size} pieces, the model room for {model.vocab_size}; "
            f"raise {type(model).__name__}.vocab_size."
        )
    return pieces


@dataclasses.dataclass(frozen=True)
class Files:
    """The tokenised files of a run, named without `.npz`.

    Attributes:
        train: file names, each with its passes an epoch.
        held_out: file names; their names also head the held-out columns of the log.
    """

    train: Mapping[str, float]
    held_out: Sequence[str]

    def mixture(self, folder: str | pathlib.Path, config: TrainConfig) -> data.Mixture:
        """The training batches."""
        return _mixture(folder, self.train, config, config.batch_size)

    def held_out_batches(
        self, folder: str | pathlib.Path, config: TrainConfig
    ) -> dict[str, list[data.Batch]]:
        """Each held-out file's examples once, as many rows at a time as are trained on."""
        rows = config.batch_size // config.microbatches
        return {name: _mixture(folder, {name: 1.0}, config, rows).once() for name in self.held_out}


def _mixture(
    folder: str | pathlib.Path, weights: Mapping[str, float], config: TrainConfig, rows: int
) -> data.Mixture:
    folder = pathlib.Path(folder)
    sources = [(load(folder / f"{name}.npz"), weight) for name, weight in weights.items()]
    return data.Mixture(sources, rows, config.source_length, config.target_length)


def train(
    model: Config,
    config: TrainConfig,
    files: Files,
    tests: Mapping[str, str],
    data_dir: str | pathlib.Path,
    work_dir: str | pathlib.Path,
    out_dir: str | pathlib.Path,
    vocabulary: str | pathlib.Path | None = None,
    init_from: str | pathlib.Path | None = None,
    max_minutes: float | None = None,
    storage: native.Storage = "int8",
    z_loss: float = 1e-4,
    max_length: int = 128,
    generation_batch: int = 1024,
) -> bool:
    """Trains a model, saves it, and tests what was saved.

    Called again, it goes on where it stopped; what is done is not done again.

    Args:
        model: the sizes.
        config: how long and how fast.
        files: which tokenised files.
        tests: files on which it is tested, each with its metric, "bleu" or "rouge".
        data_dir: where the files are.
        work_dir: where training checkpoints, log, test outputs and scores go.
        out_dir: the folder of the checkpoint to come.
        vocabulary: the SentencePiece model of the token files, stored with the checkpoint; None
            is that of `init_from`.
        init_from: a checkpoint of any format and of these sizes to start from; None starts at
            random.
        max_minutes: save and stop after so many minutes; None is no limit.
        storage: the number format of the checkpoint to come.
        z_loss: see `CrossEntropy`.
        max_length: tokens written at most in a test.
        generation_batch: examples decoded at a time.

    Returns:
        Whether the model is finished and saved.

    Raises:
        ValueError: a file is missing or unfit, or the loss stopped being finite.
    """
    if storage not in get_args(native.Storage):
        raise ValueError(
            f"train.storage must be one of {', '.join(get_args(native.Storage))}, not {storage!r}."
        )
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    data_dir, work_dir = pathlib.Path(data_dir), pathlib.Path(work_dir)
    references = {name: load(data_dir / f"{name}.npz") for name in tests}
    pieces = vocabulary_of(model, vocabulary, init_from)
    if not pathlib.Path(out_dir).exists():
        made = model_of(model)
        params, finished = fit(
            CrossEntropy(made, z_loss),
            initial(made, config.seed, init_from),
            config,
            files.mixture(data_dir, config),
            files.held_out_batches(data_dir, config),
            work_dir,
            deadline=deadline,
        )
        if not finished:
            return False
        stored = model.replace(dtype="float32", dropout_rate=0.0)  # Both are of training alone.
        native.save(out_dir, stored, params, pieces.path, storage, pieces.extra_ids)
    saved, params = native.load(out_dir)
    decoding = Decoding(pieces.size, Sampling(0.0), 0, max_length, pieces.eos_id)
    for name, examples in references.items():
        path = work_dir / f"{name}_greedy.npz"
        if not path.exists():
            made = model_of(saved.replace(dtype=model.dtype))
            outputs.write(made, params, examples, decoding, batch_size=generation_batch).save(path)
    _score(tests, references, pieces, work_dir)
    return True


def _score(
    tests: Mapping[str, str],
    references: Mapping[str, Examples],
    vocabulary: Vocabulary,
    folder: pathlib.Path,
) -> None:
    try:
        # Late, because a machine that only trains may lack the metrics' packages.
        from speculative.measurement import quality
    except ModuleNotFoundError as error:
        print(f"No scores, for {error.name} is not installed; the outputs are in {folder}.")
        return
    metrics = {"bleu": quality.bleu, "rouge": quality.rouge}
    scores = {
        name: outputs.score(
            load(folder / f"{name}_greedy.npz"), references[name], vocabulary, metrics[metric]
        )
        for name, metric in tests.items()
    }
    (folder / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    print(scores)
