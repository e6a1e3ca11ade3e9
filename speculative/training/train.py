"""Training a model on text."""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array
from jax.sharding import Mesh

from speculative import checkpoints, checks, disk
from speculative.checkpoints.checkpoint import by_name, narrowed, vacant
from speculative.measurement import quality
from speculative.models import Config, FlaxModel, abstract_params, model_of, sharding
from speculative.models.reads import unpacked
from speculative.training import begun, saved
from speculative.training.cost import Cost
from speculative.training.data import Batch, Examples, Mixture, load_all, ragged
from speculative.training.loop import (
    CHECKPOINTS,
    Log,
    Metrics,
    TrainConfig,
    deadline_after,
    fit,
    in_training,
)
from speculative.training.together import agreed, by_first, is_first
from speculative.training.written import Scorer
from speculative.types import Logits, PyTree
from speculative.vocabulary import Vocabulary, from_elsewhere


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
    inputs = *tokens, segments, dropout_key, encoded, layers
    return model.forward_with_hidden(params, *inputs)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Negative log likelihood of the model to train, in nats, with T5X's two additions.

    For a label smoothing E the model learns a distribution that has 1 - E at the target and shares
    the rest evenly among the other tokens; that distribution's entropy is subtracted.
    """

    model: FlaxModel
    label_smoothing: float = 0.0
    # Weight of the squared logarithm of the softmax's normaliser, so that logits drift less.
    z_loss: float = 1e-4

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
        penalty = self.z_loss * jnp.sum(weights * jnp.square(normaliser))
        if share := self.label_smoothing:
            others = logits.shape[-1] - 1
            of_others = normaliser - (logits.sum(-1) - chosen) / others
            entropy = -(1 - share) * np.log(1 - share) - share * np.log(share / others)
            smooth = (1 - share) * (normaliser - chosen) + share * of_others - entropy
            return jnp.sum(weights * smooth) + penalty, {"loss": loss, "accuracy": right}
        return loss + penalty, {"loss": loss, "accuracy": right}


def initial(
    model: FlaxModel, seed: int, init_from: disk.Path | None, on: Mesh | None = None
) -> PyTree:
    """A run's initial parameters: random, or a checkpoint's, with layers on top that it lacks.

    Devices of a mesh have a part each (`sharding.of_training`). An added layer has output kernels
    of zero, so that the residual connection passes its input on and the deeper model first computes
    the same function (Chen et al., arXiv 1511.05641). Kernels that read a target's hidden states,
    if the checkpoint reads none, are small. Raises ValueError if the checkpoint cannot be opened,
    or has other sizes or more layers.
    """
    key = jax.random.key(seed)
    if init_from is None:
        shardings = _shardings(jax.eval_shape(model.init, key), on)
        return jax.jit(model.init, out_shardings=shardings)(key)
    checkpoint = begun_from(model.config, init_from)
    params = by_name(checkpoint.load("float32", on=on, training=True))
    if by_name(abstract_params(model.config)).keys() == params.keys():
        return traverse_util.unflatten_dict(params, sep="/")
    spread = np.std(checkpoint.read("token_embedder/embedding"))

    def identity(name: str, value: Array) -> Array:
        parts = name.split("/")
        if "dense" in parts:  # It adds little to an embedding; from 0 Adafactor's steps are tiny.
            return 0.1 * spread * value
        return jnp.zeros_like(value) if {"out", "wo"} & {*parts} else value

    def added(key: Array) -> dict[str, Array]:
        made = by_name(model.init(key)).items()
        return {name: identity(name, value) for name, value in made if name not in params}

    # No other parameters are made or compiled.
    more = jax.jit(added, out_shardings=_shardings(jax.eval_shape(added, key), on))(key)
    return traverse_util.unflatten_dict(params | more, sep="/")


def begun_from(wanted: Config, init_from: disk.Path) -> checkpoints.Checkpoint:
    """The checkpoint that a run starts from; ValueError unless `wanted` can start from it."""
    checkpoint = checkpoints.open(init_from)
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
    return checkpoint


def _shardings(shapes: PyTree, on: Mesh | None) -> PyTree | None:
    return None if on is None else sharding.of_training(shapes, on)


def vocabulary_of(model: Config, file: disk.Path | None, init_from: disk.Path | None) -> Vocabulary:
    """The vocabulary of a file, or of the checkpoint to start from; ValueError if none fits."""
    brought = checkpoints.open(init_from).open_vocabulary() if init_from and not file else None
    pieces = from_elsewhere(file, model.vocab_size) if file else brought
    if pieces is None:
        raise ValueError(
            f"{init_from or 'A run from random weights'} brings no vocabulary; give the "
            "SentencePiece model of the token files (--vocabulary)."
        )
    if pieces.size > model.vocab_size:
        raise ValueError(
            f"{pieces.path} has {pieces.size} pieces, but the model has room for "
            f"{model.vocab_size}; raise {type(model).__name__}.vocab_size."
        )
    return pieces


@dataclasses.dataclass(frozen=True)
class Files:
    """The tokenised files of a run, named without `.npz`."""

    train: Mapping[str, float]  # File names, each with its passes per epoch.
    held_out: Sequence[str]  # File names, which also name the held-out columns of the log.
    # The metric of held-out files whose inputs are decoded too: "bleu", "rougeL" or "rougeLsum".
    scored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scored_texts: int = 256  # Texts of each of those files, spread over it.

    def __post_init__(self) -> None:
        for name, metric in self.scored.items():
            if name not in self.held_out:
                known = ", ".join(self.held_out)
                raise ValueError(
                    f"Files.scored has {name!r}, none of the held-out files ({known})."
                )
            if metric not in quality.METRICS:
                known = ", ".join(quality.METRICS)
                raise ValueError(f"Files.scored has the metric {metric!r}; known are {known}.")
        checks.whole("Files.scored_texts", self.scored_texts, 1)

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

    def to_score(self, examples: Mapping[str, Examples]) -> dict[str, Examples]:
        """The examples that are decoded, by file."""
        by_file = dict[str, Examples]()
        for name in self.scored:
            every = max(1, len(examples[name]) // self.scored_texts)
            chosen = list(itertools.islice(examples[name], 0, None, every))[: self.scored_texts]
            by_file[name] = ragged(*zip(*chosen, strict=True))
        return by_file


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
    label_smoothing: float = 0.0,
    z_loss: float = 1e-4,
    mesh: str | None = None,
    checkpoint_dir: disk.Path | None = None,
    on_evaluation: Callable[[pathlib.Path], object] = lambda folder: None,
) -> bool:
    """Trains a model and saves it; a second call resumes.

    The tokenised `files` are in `data_dir`. Training checkpoints and log go into `work_dir`, the
    checkpoints into `checkpoint_dir` where one is given, a folder or ``gs://bucket/folder``; the
    model goes into `out_dir` in the number format `storage`, with the file `vocabulary`, by default
    that of `init_from`, a checkpoint in any format to start from, of the same sizes or with fewer
    layers; None starts from random weights. After `max_minutes`, if given, the run saves and
    stops. `label_smoothing` and `z_loss` are those of `CrossEntropy`. The devices of a `mesh` like
    "data:8", from all processes if there are several, share the work; a run may resume on another
    mesh. After every evaluation `on_evaluation` is called with `work_dir`. Returns whether the
    model is finished and saved.

    Raises ValueError if a setting is unknown, a file is missing or damaged, a mesh does not fit the
    batch or the devices, the loss is not finite, or `work_dir` was begun with something else, see
    `begun.require_same`; OSError if there is no room for a checkpoint.
    """
    if storage not in (known := get_args(checkpoints.native.Storage)):
        raise ValueError(f"train.storage must be one of {', '.join(known)}, not {storage!r}.")
    must = "be at least 0 and below 1"
    checks.real("train.label_smoothing", label_smoothing, must, lambda x: 0 <= x < 1)
    checks.real("train.z_loss", z_loss, "be at least 0 and finite", lambda x: 0 <= x < math.inf)
    checks.jax_settings()
    deadline, work_dir = deadline_after(max_minutes), pathlib.Path(work_dir).absolute()
    on = mesh_for(mesh, config)
    kept = _checkpoint_folder(checkpoint_dir, work_dir)
    if files.scored and model_of(model).decoder_only:
        raise ValueError(
            "Files.scored is for models that read sources; a decoder-only one continues texts."
        )
    pieces = vocabulary_of(model, vocabulary, init_from)
    examples = load_all(data_dir, [*files.train, *files.held_out])
    cost, log = Cost(model, config, on), Log(work_dir)
    cost.require_memory()
    made_with = {"vocabulary": pieces.contents, "texts": begun.of_examples(examples)}
    if init_from:
        begun_from(model, init_from)
        made_with["init_from"] = checkpoints.open(init_from).contents
    decisive = {"model": model, "config": config, "files": files, "storage": storage}
    decisive |= {"vocabulary": vocabulary, "init_from": init_from, "checkpoint_dir": checkpoint_dir}
    decisive |= {"label_smoothing": label_smoothing, "z_loss": z_loss}

    def require_own_folders() -> None:
        if not begun.is_begun(work_dir) and checkpoint_dir and (there := saved.steps(kept)):
            raise ValueError(
                f"{checkpoint_dir} holds checkpoints (of step {there[-1]}) of a run that "
                f"{work_dir} does not know; use that run's --work_dir, or choose another "
                "--checkpoint_dir."
            )
        if not log.lines():
            vacant(out_dir)  # No run in that work folder has made it.
        begun.require_same(work_dir, begun.settings("train", decisive), made_with)
        if not log.ended(config):
            vacant(out_dir)

    by_first(require_own_folders)
    if agreed(log.ended(config) and pathlib.Path(out_dir).exists()):
        print(f"{out_dir} is finished, by the run in {work_dir}; there is nothing to do.")
        return True
    if is_first():
        print(cost.expected(), flush=True)
    decoder = model_of(model, pieces.start_id)
    made = in_training(model, config.remat, on, pieces.start_id)
    objective = CrossEntropy(made, label_smoothing, z_loss)
    start = functools.partial(initial, made, config.seed, init_from, on)
    batches = files.read(examples, config, pieces.start_id)
    chosen = files.to_score(examples)
    scorer = Scorer(decoder, pieces, chosen, files.scored, config.target_length, on)
    trained = fit(
        *(objective, start, config, *batches, work_dir),
        deadline=deadline,
        on=on,
        score=scorer if chosen else None,
        measured=cost.measured,
        checkpoint_dir=kept,
        on_evaluation=on_evaluation,
    )
    taken = trained.taken
    if taken is not None:
        stored = model.replace(dtype="float32", dropout_rate=0.0)  # Decoding needs neither.
        by_first(lambda: saved.export(out_dir, kept, taken, stored, pieces, storage))
        if is_first():
            print(f"{out_dir} has the checkpoint of step {taken}.")
    return taken is not None


def mesh_for(text: str | None, config: TrainConfig) -> Mesh | None:
    """The devices that share a run's work, if there are several; ValueError if they cannot."""
    if text is None and jax.process_count() == 1:
        return None
    text = text or f"{sharding.DATA}:{jax.device_count()}"
    config.require_mesh(text)
    on = sharding.mesh(text)
    return on if on.size > 1 else None


def _checkpoint_folder(checkpoint_dir: disk.Path | None, work_dir: pathlib.Path) -> disk.Path:
    """Where a run's checkpoints go; ValueError if several processes would not share it."""
    if checkpoint_dir is None:
        if jax.process_count() > 1:
            raise ValueError(
                "Several processes need a folder for checkpoints that all of them see, such as "
                "gs://BUCKET/FOLDER; name it (--checkpoint_dir)."
            )
        return work_dir / CHECKPOINTS
    remote = str(checkpoint_dir).startswith("gs://")
    return checkpoint_dir if remote else pathlib.Path(checkpoint_dir).absolute()
