"""Distilling a draft from a target, on text that the target writes."""

import dataclasses
import pathlib
import time
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax import Array

from speculative import checkpoints, checks
from speculative.backends import for_decoding
from speculative.checkpoints import native
from speculative.checkpoints.checkpoint import MadeFor
from speculative.decoding import Decoding
from speculative.decoding.rules import EXACT, Token
from speculative.drafts.base import Draft
from speculative.drafts.hidden import model_draft
from speculative.models import Config, FlaxModel, model_of
from speculative.models.config import packed
from speculative.models.layers import shifted
from speculative.sampling import Sampling
from speculative.training import outputs
from speculative.training.counting import most_frequent
from speculative.training.examples import load
from speculative.training.loop import Metrics, TrainConfig, deadline_after, fit, minutes
from speculative.training.train import Files, initial, teacher_forced, vocabulary_of
from speculative.types import Logits, PyTree
from speculative.vocabulary import Vocabulary

GUESS_WEIGHT = 0.8

# The temperature of each kind of text; a draft in use reads prefixes of both kinds.
WRITTEN = {"greedy": 0.0, "sampled": 1.0}

# Of its own text a draft writes so many tokens a step, whatever the target holds of them; then the
# target adds one.
OWN_GAMMA, OWN_RULE = 7, Token(lenience=1e-30)


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The distance of the draft's distribution q from the target's p, token by token.

    Attributes:
        draft: the model to train.
        target: the model to imitate, whose parameters are frozen.
        kl_weight: weight of KL(p || q), in nats.
        variation_weight: weight of the total variation distance 1 - sum min(p, q). It equals
            1 - alpha, the rate of rejection (Leviathan et al., Theorem 3.5), but where p and q
            hardly overlap its gradient vanishes; there the KL divergence helps.
        guesses: guesses of a step that a draft which reads the target's decoder is trained to make,
            each after those before it (`FlaxModel.unroll`). Guess k counts as `GUESS_WEIGHT`^k, for
            it matters only where all before it are accepted.
    """

    draft: FlaxModel
    target: FlaxModel
    kl_weight: float = 1.0
    variation_weight: float = 1.0
    guesses: int = 3

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: Mapping[str, Array], dropout_key: Array | None
    ) -> tuple[Array, Metrics]:
        """See `loop.Objective`; the metrics are `loss`, `alpha` and `agreement`.

        The last two are acceptance at temperature 1 (sum min(p, q)) and 0 (equal argmax), of a
        step's first guess; `alpha_2`, `agreement_2` and so on those of the others.
        """
        weights = batch["decoder_loss_weights"]
        encoded = self.target.encode(
            frozen, batch["encoder_input_tokens"], batch["encoder_segment_ids"]
        )
        layers = self.draft.config.target_layers
        target, hidden = teacher_forced(self.target, frozen, batch, None, encoded, layers)
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(target))
        if layers:
            segments = batch["encoder_segment_ids"], batch["decoder_segment_ids"]
            of_target = jnp.concatenate([hidden[name] for name in layers], axis=-1)
            given = batch["decoder_input_tokens"], segments, encoded, of_target, self.guesses
            drafts = self.draft.unroll(params, *given)
        else:
            shared = encoded if self.draft.config.source_dim else None
            drafts = [teacher_forced(self.draft, params, batch, dropout_key, shared)[0]]
        loss, metrics = jnp.zeros(()), dict[str, Array]()
        for k, draft in enumerate(drafts):
            distance, alpha, agreement = self._compared(log_p, draft, weights)
            loss += GUESS_WEIGHT**k * distance
            # Metrics are divided by all tokens, of which each guess has fewer: a text's first
            # position has no second one.
            share = batch["decoder_loss_weights"].sum() / jnp.maximum(weights.sum(), 1)
            guess = f"_{k + 1}" if k else ""
            metrics |= {f"alpha{guess}": share * alpha, f"agreement{guess}": share * agreement}
            weights = weights * (shifted(weights, batch["decoder_segment_ids"]) > 0)
        return loss, {"loss": loss} | metrics

    def _compared(self, log_p: Array, draft: Logits, weights: Array) -> tuple[Array, Array, Array]:
        """The distance of a draft's logits, and both kinds of acceptance, summed over tokens."""
        likeliest, guessed = log_p.argmax(-1), draft.argmax(-1)
        if (tokens := self.draft.draft_vocabulary) is not None:
            # Of other tokens q is 0 whatever is learned: their part of the divergence is left out.
            log_p, guessed = log_p[..., tokens], jnp.asarray(tokens)[guessed]
        log_q = jax.nn.log_softmax(draft)
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        divergence = jnp.sum(weights * jnp.sum(p * (log_p - log_q), axis=-1))
        alpha = jnp.sum(weights * jnp.sum(jnp.minimum(p, q), axis=-1))
        agreement = jnp.sum(weights * (likeliest == guessed))
        distance = self.kl_weight * divergence + self.variation_weight * (jnp.sum(weights) - alpha)
        return distance, alpha, agreement


@dataclasses.dataclass(frozen=True)
class Writing:
    """The texts of a distillation: where they are, how long they may be, and until when to write.

    Attributes:
        data_dir: folder of the tokenised inputs, `<name>.npz`.
        text_dir: folder of the texts, `<name>_greedy.npz` and `<name>_sampled.npz`, and of the
            draft's own, `<name>_greedy_own.npz` and `<name>_sampled_own.npz`.
        max_length: tokens of an output.
        vocabulary: the target's, whose tokens begin and end an output.
        batch_size: outputs written at a time.
        deadline: the `time.monotonic()` after which nothing more is begun.
    """

    data_dir: pathlib.Path
    text_dir: pathlib.Path
    max_length: int
    vocabulary: Vocabulary
    batch_size: int
    deadline: float

    def ensure(
        self,
        names: Iterable[str],
        target: FlaxModel,
        params: PyTree,
        draft: tuple[Draft, PyTree] | None = None,
    ) -> bool:
        """Writes what is missing of the target's texts, or of a draft's; False at the deadline.

        A draft writes with its parameters, by `OWN_RULE`.
        """
        by = "_own" if draft else ""
        rule, gamma = (OWN_RULE, OWN_GAMMA) if draft else (EXACT, 0)
        for name in names:
            examples = load(self.data_dir / f"{name}.npz")
            if target.decoder_only:
                examples = outputs.prompts(examples, self.vocabulary.start_id)
            for kind, temperature in WRITTEN.items():
                path = self.text_dir / f"{name}_{kind}{by}.npz"
                if path.exists():
                    continue
                if time.monotonic() > self.deadline:
                    return False
                began, sampling = time.monotonic(), Sampling(temperature)
                ends = self.max_length, self.vocabulary.eos_id
                decoding = Decoding(target.vocab_size, sampling, gamma, *ends, rule)
                written = outputs.write(
                    target, params, examples, decoding, 0, self.batch_size, *(draft or ())
                )
                (outputs.whole_texts(written) if target.decoder_only else written).save(path)
                took = time.monotonic() - began
                print(f"{path}: {len(examples)} outputs, {took:.0f} s", flush=True)
        return True


def distil(
    model: Config,
    config: TrainConfig,
    files: Files,
    target_dir: str | pathlib.Path,
    data_dir: str | pathlib.Path,
    work_dir: str | pathlib.Path,
    out_dir: str | pathlib.Path,
    vocabulary: str | pathlib.Path | None = None,
    init_from: str | pathlib.Path | None = None,
    max_minutes: float | None = None,
    references: Mapping[str, float] | None = None,
    kl_weight: float = 1.0,
    variation_weight: float = 1.0,
    max_length: int = 128,
    generation_batch: int = 1024,
    keep: int = 0,
    own_share: float = 0.0,
) -> bool:
    """Trains a draft on text that its target writes, and saves it; a second call resumes.

    The target, a checkpoint of any format, writes outputs of at most `max_length` tokens
    for the inputs of `files` (a decoder-only target continues the beginnings of their texts) into
    `<work_dir>/texts`. A share `own_share` of the texts to learn from is the draft's own, which it
    writes as it begins (DistillSpec, arXiv 2310.08461). The draft also learns the target's
    distribution after each prefix of the targets of `references`, files that are named with their
    passes an epoch. With `keep` its logits are of so many tokens alone, the most frequent ones of
    what the target wrote for training. The weights are those of `Distillation`; the other arguments
    and the result are as in `train.train`.

    Raises:
        ValueError: target and draft do not fit each other, or a file is missing or damaged.
    """
    if pathlib.Path(out_dir).exists():
        return True
    checks.real("distil.own_share", own_share, "lie in [0, 1]", lambda x: 0 <= x <= 1)
    deadline = deadline_after(max_minutes)
    checkpoint = checkpoints.open(target_dir)
    target, draft = model_of(checkpoint.config.replace(dtype=model.dtype)), model_of(model)
    _require_fit(target, draft, target_dir)
    pieces = vocabulary_of(model, vocabulary, target_dir)
    target_params = checkpoint.load("float32")
    text_dir = pathlib.Path(work_dir) / "texts"
    how = max_length, pieces, generation_batch, deadline
    writing = Writing(pathlib.Path(data_dir), text_dir, *how)
    if not writing.ensure((*files.train, *files.held_out), target, target_params):
        return False
    if keep:
        written = [
            load(text_dir / f"{name}_{kind}.npz") for name in files.train for kind in WRITTEN
        ]
        texts = (target for examples in written for _, target in examples)
        tokens = most_frequent(texts, keep, model.vocab_size)
        model = model.replace(draft_vocabulary=packed(tokens))
        draft = model_of(model)
    start, frozen = initial(draft, config.seed, init_from), for_decoding(target_params)
    by_draft = model_draft(draft), start
    if own_share and not writing.ensure(files.train, target, target_params, by_draft):
        return False
    # An absolute path replaces the folder of the written texts to which it is joined.
    own = pathlib.Path(data_dir).absolute()
    learned = {
        f"{name}_{kind}{author}": share * passes
        for author, share in (("", 1 - own_share), ("_own", own_share))
        for name, passes in files.train.items()
        for kind in WRITTEN
        if share
    }
    learned |= {str(own / name): weight for name, weight in (references or {}).items()}
    held_out = [f"{name}_{kind}" for name in files.held_out for kind in WRITTEN]
    batches = Files(learned, held_out).read(text_dir, config, pieces.start_id)
    objective = Distillation(draft, target, kl_weight, variation_weight)
    params, finished = fit(objective, start, config, *batches, work_dir, frozen, deadline)
    if finished:
        made_for = None
        if model.target_layers:
            made_for = MadeFor(pathlib.Path(target_dir).name, checkpoint.fingerprint())
        stored = model.replace(dtype="float32")
        before = checkpoints.open(init_from).training_minutes if init_from else None
        kept = pieces.path, "int8", pieces.extra_ids, made_for, minutes(work_dir) + (before or 0.0)
        native.save(out_dir, stored, params, *kept)
    return finished


def _require_fit(target: FlaxModel, draft: FlaxModel, where: str | pathlib.Path) -> None:
    """Raises ValueError unless a draft of these sizes can learn from the target in `where`."""
    big, small = target.config, draft.config
    if unknown := [name for name in small.target_layers if name not in target.extend_layers]:
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
    if small.source_dim not in (0, big.emb_dim):
        raise ValueError(
            f"The draft's source_dim is {small.source_dim}, but the target's encoder in "
            f"{where} has {big.emb_dim} features; they must be equal, or "
            "source_dim 0 and the encoder the draft's own."
        )
