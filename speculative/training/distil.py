"""Distilling a draft from a target, on text that the target writes."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative import checkpoints, checks, disk
from speculative.checkpoints.checkpoint import MadeFor
from speculative.decoding import Decoding
from speculative.loading import Weights
from speculative.models import Config, FlaxModel, model_of, sharding
from speculative.models.positions import shifted
from speculative.models.reads import packed
from speculative.sampling import Sampling
from speculative.training import begun, saved
from speculative.training.counting import most_frequent
from speculative.training.data import Examples, load_all, prompts, whole_texts
from speculative.training.loop import (
    CHECKPOINTS,
    Log,
    Metrics,
    TrainConfig,
    deadline_after,
    fit,
    in_training,
)
from speculative.training.train import (
    Files,
    initial,
    mesh_for,
    teacher_forced,
    vocabulary_of,
)
from speculative.training.written import answered
from speculative.types import Fields, Logits, PyTree

GUESSES, GUESS_WEIGHT = 3, 0.8
WRITTEN = {"greedy": 0.0, "sampled": 1.0}  # Temperatures; a draft in use reads texts of both kinds.


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The distance of the draft's distribution q from the target's p, token by token.

    It is KL(p || q), in nats, plus the total variation distance 1 - sum min(p, q). That equals
    1 - alpha, the rate of rejection (Leviathan et al., Theorem 3.5), but where p and q hardly
    overlap its gradient vanishes; there the KL divergence helps.

    A draft which reads the target's decoder makes `GUESSES` guesses per step, each following the
    earlier ones (`FlaxModel.unroll`). Guess k has the weight `GUESS_WEIGHT`^k, because it matters
    only if all before it are accepted.
    """

    draft: FlaxModel  # To train.
    target: FlaxModel  # To imitate; its parameters are frozen.
    vocab_size: int  # Number V of pieces; the models' other tokens are never chosen.

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: Mapping[str, Array], dropout_key: Array | None
    ) -> tuple[Array, Metrics]:
        """See `loop.Objective`; the metrics are `loss`, `alpha` and `agreement`.

        The last two are acceptance of a step's first guess at temperature 1 (sum min(p, q)) and 0
        (equal argmax); `alpha_2`, `agreement_2` and so on are those of later guesses.
        """
        segments = of_source, of_text = batch["encoder_segment_ids"], batch["decoder_segment_ids"]
        encoded = self.target.encode(frozen, batch["encoder_input_tokens"], of_source)
        layers = self.draft.config.reads.target_layers
        target, hidden = teacher_forced(self.target, frozen, batch, None, encoded, layers)
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(target[..., : self.vocab_size]))
        if layers:
            of_target = jnp.concatenate([hidden[name] for name in layers], axis=-1)
            inputs = batch["decoder_input_tokens"], segments, encoded, of_target, GUESSES
            drafts = self.draft.unroll(params, *inputs)
        else:
            shared = encoded if self.draft.config.reads.source_dim else None
            drafts = [teacher_forced(self.draft, params, batch, dropout_key, shared)[0]]
        loss, metrics = jnp.zeros(()), dict[str, Array]()
        weights = batch["decoder_loss_weights"]
        for k, draft in enumerate(drafts):
            distance, alpha, agreement = self._compared(log_p, draft, weights)
            loss += GUESS_WEIGHT**k * distance
            # Metrics are divided by all tokens, but later guesses have fewer: a text's first
            # position has no second guess.
            share = batch["decoder_loss_weights"].sum() / jnp.maximum(weights.sum(), 1)
            guess = f"_{k + 1}" if k else ""
            metrics |= {f"alpha{guess}": share * alpha, f"agreement{guess}": share * agreement}
            weights = weights * (shifted(weights, of_text) > 0)
        return loss, {"loss": loss} | metrics

    def _compared(self, log_p: Array, draft: Logits, weights: Array) -> tuple[Array, Array, Array]:
        """The distance of a draft's logits, and both kinds of acceptance, summed over tokens."""
        if (tokens := self.draft.draft_vocabulary) is None:
            draft = draft[..., : self.vocab_size]
        likeliest, guessed = log_p.argmax(-1), draft.argmax(-1)
        if tokens is not None:
            # For other tokens q is always 0: their part of the divergence is left out.
            log_p, guessed = log_p[..., tokens], jnp.asarray(tokens)[guessed]
        log_q = jax.nn.log_softmax(draft)
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        divergence = jnp.sum(weights * jnp.sum(p * (log_p - log_q), axis=-1))
        alpha = jnp.sum(weights * jnp.sum(jnp.minimum(p, q), axis=-1))
        agreement = jnp.sum(weights * (likeliest == guessed))
        return divergence + jnp.sum(weights) - alpha, alpha, agreement


def distil(
    model: Config,
    config: TrainConfig,
    files: Files,
    target_dir: disk.Path,
    data_dir: disk.Path | Mapping[str, Examples],
    work_dir: disk.Path,
    out_dir: disk.Path,
    vocabulary: disk.Path | None = None,
    init_from: disk.Path | None = None,
    max_minutes: float | None = None,
    references: Mapping[str, float] | None = None,
    max_length: int = 128,
    generation_batch: int = 1024,
    keep: int = 0,
    settings: Fields | None = None,
    mesh: str | None = None,
    quantize: str = "none",
) -> bool:
    """Trains a draft on text that its target writes, and saves it; a second call resumes.

    The target, a checkpoint of any format, writes outputs of at most `max_length` tokens for the
    inputs of `files` into `<work_dir>/texts`. If there are none, a decoder-only target continues
    the beginnings of their texts, as far as target and draft have positions. The draft also learns
    the target's distribution after each prefix of the targets of `references`, files with their
    passes per epoch. If `keep` is set, the draft has logits for only that many tokens, the most
    frequent ones in the target's outputs for training. `work_dir` records target, texts and
    `settings`, under the names that the user knows, and a second call must have the same, see
    `begun.require_same`. `data_dir` may also be the contents of its files, by name. The devices of
    a `mesh` like "data:2,model:4" share the target, and the rows of a batch. The target writes with
    its kernels as `quantize` says, but its distribution is learned without quantization. The rest
    is as in `train.train`. Raises ValueError also if target and draft do not fit each other, if a
    text has a token that is no piece, or if a reference has more tokens than there are positions.
    """
    checks.jax_settings()
    deadline = deadline_after(max_minutes)
    work_dir, references = pathlib.Path(work_dir).absolute(), references or {}
    on = mesh_for(mesh, config)
    checkpoint = checkpoints.open(target_dir)
    sizes = checkpoint.config.replace(dtype=model.dtype)
    _require_fit(model_of(sizes), model_of(model), target_dir)
    pieces = vocabulary_of(model, vocabulary, target_dir)
    target = model_of(sizes, pieces.start_id)
    names = *files.train, *files.held_out, *references
    inputs = data_dir if isinstance(data_dir, Mapping) else load_all(data_dir, names)
    positions = min(
        (most for most in (target.max_positions, model.max_positions) if most), default=0
    )
    for name, part in inputs.items():
        _require_fits(name, part, pieces.size, positions if name in references else 0)
    made_with = {
        "target": checkpoint.contents,
        "vocabulary": pieces.contents,
        "texts": begun.of_examples(inputs),
    }
    if quantize != "none":
        made_with["quantize"] = quantize
    if init_from:
        made_with["init_from"] = checkpoints.open(init_from).contents
    begun.require_same(work_dir, {"target": str(target_dir), **(settings or {})}, made_with)
    if on is not None:
        target = model_of(sharding.padded(sizes, on.shape[sharding.MODEL]), pieces.start_id)
    frozen = Weights(str(target_dir), target.config, checkpoint, on).load()
    writer = frozen
    if quantize != "none":
        writer = Weights(
            str(target_dir), target.config.replace(quantize=quantize), checkpoint, on
        ).load()
    text_dir = work_dir / "texts"
    for name in (*files.train, *files.held_out):
        examples = inputs[name]
        if target.decoder_only and not examples.inputs.size:
            examples = prompts(examples, pieces.start_id)
        for kind, temperature in WRITTEN.items():
            path, began = text_dir / f"{name}_{kind}.npz", time.monotonic()
            if path.exists():
                continue
            if began > deadline:
                return False
            ends = max_length, pieces.eos_ids
            decoding = Decoding(pieces.size, Sampling(temperature), 0, *ends)
            texts = answered(target, writer, examples, decoding, generation_batch, positions)
            (whole_texts(texts) if target.decoder_only else texts).save(path)
            print(f"{path}: {len(texts)} outputs, {time.monotonic() - began:.0f} s", flush=True)
    learned = {f"{n}_{kind}": passes for n, passes in files.train.items() for kind in WRITTEN}
    held_out = [f"{name}_{kind}" for name in files.held_out for kind in WRITTEN]
    written = load_all(text_dir, [*learned, *held_out])
    if keep:
        texts = (text for name in learned for _, text in written[name])
        guessed = packed(most_frequent(texts, keep, pieces.size))
        model = model.replace(reads=dataclasses.replace(model.reads, draft_vocabulary=guessed))
    draft = in_training(model, config.remat, on)
    all_files = Files({**learned, **references}, held_out)
    batches = all_files.read({**inputs, **written}, config, pieces.start_id)
    objective = Distillation(draft, target, pieces.size)
    start = functools.partial(initial, draft, config.seed, init_from, on)
    trained = fit(objective, start, config, *batches, work_dir, frozen, deadline, on)
    if trained.taken is not None:
        made_for = None
        if model.reads.target_layers:
            made_for = MadeFor(pathlib.Path(target_dir).name, checkpoint.fingerprint())
        before = checkpoints.open(init_from).training_minutes if init_from else None
        # Time of the steps only, without the evaluations and saves between them.
        minutes = sum(line.get("seconds", 0.0) for line in Log(work_dir).lines()) / 60
        details = {"made_for": made_for, "training_minutes": minutes + (before or 0.0)}
        stored = model.replace(dtype="float32")
        kept = work_dir / CHECKPOINTS
        saved.export(out_dir, kept, trained.taken, stored, pieces, "int8", **details)
    return trained.taken is not None


def acceptance(work_dir: pathlib.Path) -> dict[tuple[str, float], list[float]]:
    """Acceptance rates of guess 1, 2, ... when a run ended, by held-out file and temperature."""
    *_, last = Log(work_dir).lines()
    rates = dict[tuple[str, float], list[float]]()
    for column in sorted(last):
        text, _, metric = column.rpartition("/")
        name, _, kind = text.rpartition("_")
        if name and metric.startswith("alpha" if WRITTEN[kind] else "agreement"):
            rates.setdefault((name, WRITTEN[kind]), []).append(last[column])
    return rates


def _require_fits(name: str, examples: Examples, vocab_size: int, positions: int) -> None:
    """Raises ValueError if texts have tokens that are not pieces, or more than the positions.

    There is no limit where `positions` is 0.
    """
    for part in (examples.inputs, examples.targets):
        if (most := part.max(initial=0)) >= vocab_size:
            raise ValueError(
                f"{name} has token {most}, outside a vocabulary of {vocab_size} pieces; tokenise "
                "it with that vocabulary."
            )
    sizes = np.diff(examples.targets_offsets)
    if 0 < positions < sizes.max():
        raise ValueError(
            f"Example {sizes.argmax()} of {name} has {sizes.max()} tokens, but there are "
            f"{positions} positions; shorten it or leave it out."
        )


def _require_fit(target: FlaxModel, draft: FlaxModel, where: disk.Path) -> None:
    """Raises ValueError unless a draft of these sizes can learn from the target in `where`."""
    big, small = target.config, draft.config
    big.reads.require_none(str(where))
    if unknown := [name for name in small.reads.target_layers if name not in target.extend_layers]:
        raise ValueError(
            f"The draft's target_layers has {unknown[0]!r}; the target in {where} has "
            f"{', '.join(target.extend_layers)}."
        )
    if target.decoder_only != draft.decoder_only:
        raise ValueError(
            f"The draft's sizes are a {type(small).__name__}, those of the target in {where} "
            f"a {type(big).__name__}; they must be of one kind."
        )
    if big.vocab_size != small.vocab_size:
        raise ValueError(
            f"The draft has a vocabulary of {small.vocab_size}, its target in {where} one "
            f"of {big.vocab_size}; they must be equal."
        )
    if small.reads.source_dim not in (0, big.emb_dim):
        raise ValueError(
            f"The draft's source_dim is {small.reads.source_dim}, but the target's encoder in "
            f"{where} has {big.emb_dim} features; they must be equal, or "
            "source_dim 0 and the encoder the draft's own."
        )
