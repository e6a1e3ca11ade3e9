"""Training a model on text."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array

from speculative import checkpoints, checks, disk
from speculative.checkpoints.checkpoint import by_name, narrowed, vacant
from speculative.models import Config, FlaxModel, model_of
from speculative.models.reads import unpacked
from speculative.training import begun
from speculative.training.data import Batch, Examples, Mixture, load_all
from speculative.training.loop import Metrics, TrainConfig, deadline_after, fit, last_step
from speculative.types import Logits, PyTree
from speculative.vocabulary import Vocabulary, from_elsewhere

Z_LOSS = 1e-4  # Weight of the squared logarithm of the softmax's normaliser; logits drift less.


def teacher_forced(
    model: FlaxModel,
    params: PyTree,
    batch: Mapping[str, Array],
    dropout_key: Array | None,
    encoded: Array | None = None,
    layers: tuple[str, ...] = (),
) -> tuple[Logits, dict[str, Array]]:
    """Teacher-forced logits [B, L, V] and hidden states of a packed batch; see `FlaxModel`."""
    tokens = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    segments = batch["encoder_segment_ids"], batch["decoder_segment_ids"]
    given = *tokens, segments, dropout_key, encoded, layers
    return model.forward_with_hidden(params, *given)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Negative log likelihood of the model to train, in nats."""

    model: FlaxModel

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: Mapping[str, Array], dropout_key: Array | None
    ) -> tuple[Array, Metrics]:
        """See `loop.Objective`; the metrics are `loss`, without z-loss, and argmax `accuracy`."""
        logits, _ = teacher_forced(self.model, params, batch, dropout_key)
        targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        loss = jnp.sum(weights * (normaliser - chosen))
        right = jnp.sum(weights * (logits.argmax(-1) == targets))
        penalty = Z_LOSS * jnp.sum(weights * jnp.square(normaliser))
        return loss + penalty, {"loss": loss, "accuracy": right}


def initial(model: FlaxModel, seed: int, init_from: disk.Path | None) -> PyTree:
    """A run's first parameters: random, or a checkpoint's, with layers on top that it lacks.

    An added layer has output kernels of zero, so that the residual connection passes its input on
    and the deeper model first computes the same function (Chen et al., arXiv 1511.05641). What
    reads a target's hidden states, where the checkpoint reads none, has small ones. Raises
    ValueError if the checkpoint cannot be opened, or has other sizes or more layers.
    """
    if init_from is None:
        return model.init(jax.random.key(seed))
    checkpoint, wanted = checkpoints.open(init_from), model.config
    if guessed := wanted.reads.draft_vocabulary:
        checkpoint = narrowed(checkpoint, unpacked(guessed))
    sizes = checkpoint.config
    free = {name: getattr(wanted, name) for name in ("dropout_rate", "dtype", *wanted.depths)}
    if not sizes.reads.target_layers:
        free["reads"] = dataclasses.replace(
            wanted.reads, draft_vocabulary=sizes.reads.draft_vocabulary
        )
    if (
        type(sizes) is not type(wanted)
        or sizes.replace(**free) != wanted
        or any(getattr(sizes, depth) > free[depth] for depth in wanted.depths)
    ):
        raise ValueError(f"{init_from} holds {sizes}, but the run is of {wanted}.")
    params = by_name(checkpoint.numpy())

    def identity(name: str, value: Array) -> Array:
        parts = name.split("/")
        if "dense" in parts:  # It adds little to an embedding; from 0 Adafactor's steps are tiny.
            return 0.1 * np.std(params["token_embedder/embedding"]) * value
        return jnp.zeros_like(value) if {"out", "wo"} & {*parts} else value

    @jax.jit  # Of the other parameters, nothing is made or compiled.
    def added(key: Array) -> dict[str, Array]:
        made = by_name(model.init(key)).items()
        return {name: identity(name, value) for name, value in made if name not in params}

    return traverse_util.unflatten_dict(params | added(jax.random.key(seed)), sep="/")


def vocabulary_of(model: Config, file: disk.Path | None, init_from: disk.Path | None) -> Vocabulary:
    """That of a file, or of the checkpoint a run starts from; ValueError without one that fits."""
    brought = checkpoints.open(init_from).open_vocabulary() if init_from and not file else None
    pieces = from_elsewhere(file, model.vocab_size) if file else brought
    if pieces is None:
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
    """The tokenised files of a run, named without `.npz`."""

    train: Mapping[str, float]  # File names, each with its passes an epoch.
    held_out: Sequence[str]  # File names, which also name the held-out columns of the log.

    def read(
        self, examples: Mapping[str, Examples], config: TrainConfig, start_id: int
    ) -> tuple[Mixture, dict[str, list[Batch]]]:
        """Training batches, and each held-out file's examples once in batches of a microbatch.

        Examples that are left out are counted on standard error.
        """
        rest = config.source_length, config.target_length, start_id
        rows = config.batch_size // config.microbatches
        whole = {n: Mixture([(examples[n], 1.0)], rows, *rest) for n in self.held_out}
        sources = [(examples[name], passes) for name, passes in self.train.items()]
        train = Mixture(sources, config.batch_size, *rest)
        left_out = dict(zip(self.train, train.left_out, strict=True))
        for name, mixture in whole.items():
            left_out[name] = mixture.left_out[0]
        for name, count in left_out.items():
            if count:
                print(
                    f"{name}: {count:,} of {len(examples[name]):,} examples are left out; they "
                    f"have no target, or more than {config.source_length} source or "
                    f"{config.target_length} target tokens (TrainConfig.source_length, "
                    "target_length).",
                    file=sys.stderr,
                )
        return train, {name: mixture.once() for name, mixture in whole.items()}


def train(
    model: Config,
    config: TrainConfig,
    files: Files,
    data_dir: disk.Path,
    work_dir: disk.Path,
    out_dir: disk.Path,
    vocabulary: disk.Path | None = None,
    init_from: disk.Path | None = None,
    max_minutes: float | None = None,
    storage: checkpoints.native.Storage = "int8",
) -> bool:
    """Trains a model and saves it; a second call resumes.

    The tokenised `files` are in `data_dir`. Training checkpoints and log go into `work_dir`; the
    model goes into `out_dir` in the number format `storage`, with the file `vocabulary`, by
    default that of `init_from`. This is a checkpoint of any format to start from, of the same
    sizes or with fewer layers; None starts from random weights. After `max_minutes`, if given, the
    run saves and stops. Returns whether the model is finished and saved. Raises ValueError if a
    setting is unknown, a file is missing or damaged, the loss is not finite, or `work_dir` was
    begun with something else, see `begun.require_same`.
    """
    if storage not in (known := get_args(checkpoints.native.Storage)):
        raise ValueError(f"train.storage must be one of {', '.join(known)}, not {storage!r}.")
    checks.jax_settings()
    deadline, work_dir = deadline_after(max_minutes), pathlib.Path(work_dir)
    pieces = vocabulary_of(model, vocabulary, init_from)
    examples = load_all(data_dir, [*files.train, *files.held_out])
    if last_step(work_dir) == 0:
        vacant(out_dir)  # No run in that work folder has made it.
    made_with = {"vocabulary": pieces.contents, "texts": begun.of_examples(examples)}
    if init_from:
        made_with["init_from"] = checkpoints.open(init_from).contents
    decisive = {"model": model, "config": config, "files": files, "storage": storage}
    decisive |= {"vocabulary": vocabulary, "init_from": init_from}
    begun.require_same(work_dir, begun.settings("train", decisive), made_with)
    if last_step(work_dir) == config.steps and pathlib.Path(out_dir).exists():
        print(f"{out_dir} is finished, by the run in {work_dir}; there is nothing to do.")
        return True
    vacant(out_dir)
    made = model_of(model)
    objective, start = CrossEntropy(made), initial(made, config.seed, init_from)
    batches = files.read(examples, config, pieces.start_id)
    params, finished = fit(objective, start, config, *batches, work_dir, deadline=deadline)
    if finished:
        stored = model.replace(dtype="float32", dropout_rate=0.0)  # Decoding needs neither.
        kept = pieces.path, storage, pieces.extra_ids, pieces.special
        checkpoints.native.save(out_dir, stored, params, *kept)
    return finished
