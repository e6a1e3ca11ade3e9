"""Training a model on text."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative import checkpoints, disk
from speculative.backends import for_decoding
from speculative.checkpoints import native
from speculative.checkpoints.checkpoint import narrowed
from speculative.decoding import Decoding, Params, queue
from speculative.measurement import quality
from speculative.models import Config, FlaxModel, model_of
from speculative.models.config import unpacked
from speculative.pair import SOURCE_LENGTHS, padded
from speculative.ragged import power_of_two
from speculative.sampling import Sampling
from speculative.training import data
from speculative.training.examples import Examples, load, load_all, ragged
from speculative.training.loop import Metrics, TrainConfig, deadline_after, fit
from speculative.types import PAD_ID, Logits, PyTree
from speculative.vocabulary import Vocabulary, from_elsewhere

# Weight of the squared logarithm of the softmax's normaliser, which keeps the logits from drifting.
Z_LOSS = 1e-4


def teacher_forced(
    model: FlaxModel,
    params: PyTree,
    batch: Mapping[str, Array],
    dropout_key: Array | None,
    encoded: Array | None = None,
    layers: tuple[str, ...] = (),
) -> tuple[Logits, dict[str, Array]]:
    """Teacher-forced logits [B, L, V] and hidden states of a packed batch; see `FlaxModel`."""
    source, target = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    segments = (batch["encoder_segment_ids"], batch["decoder_segment_ids"])
    given = source, target, segments, dropout_key, encoded, layers
    return model.forward_with_hidden(params, *given)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Negative log likelihood, in nats.

    Attributes:
        model: the model to train.
    """

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


def initial(model: FlaxModel, seed: int, init_from: str | pathlib.Path | None) -> PyTree:
    """A run's first parameters: random, or a checkpoint's, with layers on top that it lacks.

    An added layer has output kernels of zero, so that the residual connection passes its input on
    and the deeper model first computes the same function (Chen et al., arXiv 1511.05641). What
    reads a target's hidden states, where the checkpoint reads none, has small ones. Raises
    ValueError if the checkpoint cannot be opened, or has other sizes or more layers.
    """
    if init_from is None:
        return model.init(jax.random.key(seed))
    checkpoint, wanted = checkpoints.open(init_from), model.config
    if wanted.draft_vocabulary and wanted.draft_vocabulary != checkpoint.config.draft_vocabulary:
        checkpoint = narrowed(checkpoint, unpacked(wanted.draft_vocabulary))
    sizes = checkpoint.config
    free = {name: getattr(wanted, name) for name in ("dropout_rate", "dtype", *wanted.depths)}
    if not sizes.target_layers:
        free |= {"target_layers": wanted.target_layers, "source_dim": wanted.source_dim}
    if (
        type(sizes) is not type(wanted)
        or sizes.replace(**free) != wanted
        or any(getattr(sizes, depth) > free[depth] for depth in wanted.depths)
    ):
        raise ValueError(f"{init_from} holds {sizes}, but the run is of {wanted}.")
    params = checkpoint.numpy()
    if sizes.replace(dtype=wanted.dtype, dropout_rate=wanted.dropout_rate) == wanted:
        return params

    def identity(path: tuple[Any, ...], leaf: Array) -> Array:
        names = {key.key for key in path}
        if "dense" in names:  # It adds little to an embedding; from 0 Adafactor's steps are tiny.
            return 0.1 * np.std(params["token_embedder"]["embedding"]) * leaf
        return jnp.zeros_like(leaf) if {"out", "wo"} & names else leaf

    @jax.jit  # Of the other parameters, nothing is made or compiled.
    def added(key: Array) -> PyTree:
        lacking = {}
        for name, stack in model.init(key).items():
            layers = {layer: stack[layer] for layer in stack.keys() - params.get(name, {}).keys()}
            lacking[name] = jax.tree_util.tree_map_with_path(identity, layers)
        return lacking

    for name, layers in added(jax.random.key(seed)).items():
        params[name] = params.get(name, {}) | layers
    return params


def vocabulary_of(
    model: Config, file: str | pathlib.Path | None, init_from: str | pathlib.Path | None
) -> Vocabulary:
    """The vocabulary of a run: that of a file, or of the checkpoint from which it starts.

    Raises ValueError if there is none, or if it has more pieces than the embedding.
    """
    if file:
        pieces = from_elsewhere(file, model.vocab_size)
    else:
        pieces = checkpoints.open(init_from).open_vocabulary() if init_from else None
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
        self, examples: Mapping[str, Examples], config: TrainConfig, start_id: int = PAD_ID
    ) -> tuple[data.Mixture, dict[str, list[data.Batch]]]:
        """Training batches, and each held-out file's examples once in batches of a microbatch.

        `examples` are those of the files, `start_id` is the vocabulary's token before a text.
        Raises ValueError if none fits a row.
        """

        def mixture(weights: Mapping[str, float], rows: int) -> data.Mixture:
            sources = [(examples[name], weight) for name, weight in weights.items()]
            lengths = config.source_length, config.target_length
            return data.Mixture(sources, rows, *lengths, start_id)

        rows = config.batch_size // config.microbatches
        held_out = {name: mixture({name: 1.0}, rows).once() for name in self.held_out}
        return mixture(self.train, config.batch_size), held_out


def answered(
    model: FlaxModel, params: PyTree, examples: Examples, decoding: Decoding, batch_size: int
) -> Examples:
    """The same inputs with the model's own outputs as targets, in the same order.

    `batch_size` examples are decoded at a time, each as alone (`decoding.queue`), with the random
    numbers of its place and seed 0. Raises ValueError if an input is too long, or if the model's
    logits are not finite.
    """
    sizes = np.diff(examples.inputs_offsets)
    if sizes.max() > SOURCE_LENGTHS[-1]:
        raise ValueError(
            f"Example {sizes.argmax()} has {sizes.max()} source tokens; at most "
            f"{SOURCE_LENGTHS[-1]} can be decoded."
        )
    used = Params(for_decoding(jax.device_put(params)), ())
    targets: list[np.ndarray] = [np.zeros(0, np.int32)] * len(examples)

    def text(i: int, width: int) -> queue.Text:
        source = np.full((1, width), model.pad_id, np.int32)
        source[0, : sizes[i]] = examples.input(i)
        return queue.Text(i, jax.device_put(source), decoding.draws(0, np.array([i])))

    # Long inputs tend to have long outputs, which had better not begin last.
    order = np.argsort(-sizes, kind="stable").tolist()
    for width, group in itertools.groupby(order, lambda i: padded(int(sizes[i]))):
        chosen = list(group)
        texts = (text(i, width) for i in chosen)
        rows = min(batch_size, power_of_two(len(chosen)))
        for i, output in queue.generate(model, None, used, texts, decoding, rows):
            if not output.finite.all():
                raise ValueError(f"Logits are not finite for example {i}.")
            targets[i] = np.array(output.tokens[0, : output.lengths[0]])  # Not the whole batch.
    return ragged([source for source, _ in examples], targets)


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
    max_length: int = 128,
    generation_batch: int = 1024,
) -> bool:
    """Trains a model, saves it, and tests the saved one; a second call resumes.

    The tokenised `files` and `tests`, each test with its metric of `quality.METRICS`, are in
    `data_dir`. Training checkpoints, log, test outputs and scores go into `work_dir`; the model
    goes into `out_dir` in the number format `storage`, with the file `vocabulary`, by default
    that of `init_from`. This is a checkpoint of any format to start from, of the same sizes or
    with fewer layers; None starts from random weights. After `max_minutes`, if given, the run
    saves and stops. Tests decode `generation_batch` examples at a time, each into at most
    `max_length` tokens.

    Returns:
        Whether the model is finished and saved.

    Raises:
        ValueError: a setting is unknown, a file is missing or damaged, or the loss is not finite.
    """
    settings = [("storage", storage, get_args(native.Storage))]
    settings += [("tests", metric, quality.METRICS) for metric in tests.values()]
    for name, value, known in settings:
        if value not in known:
            raise ValueError(f"train.{name} must be one of {', '.join(known)}, not {value!r}.")
    deadline = deadline_after(max_minutes)
    work_dir = pathlib.Path(work_dir)
    references = load_all(data_dir, tests)
    pieces = vocabulary_of(model, vocabulary, init_from)
    if not pathlib.Path(out_dir).exists():
        made = model_of(model)
        objective, start = CrossEntropy(made), initial(made, config.seed, init_from)
        examples = load_all(data_dir, [*files.train, *files.held_out])
        batches = files.read(examples, config, pieces.start_id)
        params, finished = fit(objective, start, config, *batches, work_dir, deadline=deadline)
        if not finished:
            return False
        stored = model.replace(dtype="float32", dropout_rate=0.0)  # Decoding needs neither.
        native.save(out_dir, stored, params, pieces.path, storage, pieces.extra_ids)
    saved = native.open(out_dir)
    made, params = model_of(saved.config.replace(dtype=model.dtype)), saved.numpy()
    decoding = Decoding(pieces.size, Sampling(0.0), 0, max_length, pieces.eos_id)
    scores: dict[str, dict[str, float]] = {}
    for name, metric in tests.items():
        path, expected = work_dir / f"{name}_greedy.npz", references[name]
        if not path.exists():
            answered(made, params, expected, decoding, generation_batch).save(path)
        texts = [[pieces.decode(t) for _, t in found] for found in (expected, load(path))]
        scores[name] = quality.METRICS[metric](*texts)
    disk.write(work_dir / "scores.json", json.dumps(scores, indent=2) + "\n")
    print(scores)
    return True
