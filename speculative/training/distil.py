"""Distilling a draft from a target, on text that the target itself writes."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from speculative.checkpoints import native
from speculative.decoding import Decoding
from speculative.models import Config, FlaxModel, for_decoding, model_of
from speculative.sampling import Sampling
from speculative.training import outputs
from speculative.training.examples import load
from speculative.training.loop import Metrics, TrainConfig, fit
from speculative.training.train import Files, initial, teacher_forced
from speculative.types import EOS_ID, PyTree
from speculative.vocabulary import open_vocabulary

WRITTEN = {"greedy": 0.0, "sampled": 1.0}
"""How the target writes, and at which temperature: a draft meets both prefixes in use."""


@dataclasses.dataclass(frozen=True)
class Distillation:
    """How far the draft's distribution q is from the target's p, token by token.

    Attributes:
        draft: the model to train.
        target: the model to imitate; its parameters are the frozen ones.
        kl_weight: of KL(p || q), in nats.
        variation_weight: of the total variation 1 - sum min(p, q). That is 1 - alpha, the very
            rate of rejection (Leviathan et al., Theorem 3.5), but its gradient vanishes where
            p and q hardly overlap, hence the KL beside it.
    """

    draft: FlaxModel
    target: FlaxModel
    kl_weight: float = 1.0
    variation_weight: float = 1.0

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: Mapping[str, Array], dropout_key: Array | None
    ) -> tuple[Array, Metrics]:
        """Sums over target tokens.

        Metrics: `loss`, `alpha` (sum min(p, q): acceptance at temperature 1) and `agreement`
        (equal argmax: acceptance at temperature 0).
        """
        weights = batch["decoder_loss_weights"]
        encoded = self.target.encode(
            frozen, batch["encoder_input_tokens"], batch["encoder_segment_ids"]
        )
        target = teacher_forced(self.target, frozen, batch, None, encoded)
        shared = encoded if self.draft.config.source_dim else None
        draft = teacher_forced(self.draft, params, batch, dropout_key, shared)
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(target))
        log_q = jax.nn.log_softmax(draft)
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        divergence = jnp.sum(weights * jnp.sum(p * (log_p - log_q), axis=-1))
        alpha = jnp.sum(weights * jnp.sum(jnp.minimum(p, q), axis=-1))
        agreement = jnp.sum(weights * (log_p.argmax(-1) == log_q.argmax(-1)))
        loss = self.kl_weight * divergence + self.variation_weight * (jnp.sum(weights) - alpha)
        return loss, {"loss": loss, "alpha": alpha, "agreement": agreement}


def write_texts(
    target: FlaxModel,
    params: PyTree,
    names: list[str],
    data_dir: pathlib.Path,
    text_dir: pathlib.Path,
    max_length: int,
    batch_size: int,
    deadline: float | None = None,
    eos_id: int = EOS_ID,
) -> bool:
    """Writes `<name>_greedy.npz` and `<name>_sampled.npz` for the inputs of every file.

    Files already there are kept.

    Returns:
        Whether all are written (False: stopped at the deadline).
    """
    for name in names:
        examples = load(data_dir / f"{name}.npz")
        if target.continues:
            examples = outputs.prompts(examples)
        for kind, temperature in WRITTEN.items():
            path = text_dir / f"{name}_{kind}.npz"
            if path.exists():
                continue
            if deadline is not None and time.monotonic() > deadline:
                return False
            sampling = Sampling(temperature)
            decoding = Decoding(target.vocab_size, sampling, 0, max_length, eos_id)
            began = time.monotonic()
            written = outputs.write(target, params, examples, decoding, batch_size=batch_size)
            (outputs.joined(written) if target.continues else written).save(path)
            print(f"{path}: {len(examples)} outputs, {time.monotonic() - began:.0f} s", flush=True)
    return True


def distil(
    model: Config,
    config: TrainConfig,
    files: Files,
    target_dir: str | pathlib.Path,
    data_dir: str | pathlib.Path,
    work_dir: str | pathlib.Path,
    out_dir: str | pathlib.Path,
    vocabulary: str | pathlib.Path,
    init_from: str | pathlib.Path | None = None,
    max_minutes: float | None = None,
    references: Mapping[str, float] | None = None,
    kl_weight: float = 1.0,
    variation_weight: float = 1.0,
    max_length: int = 128,
    generation_batch: int = 1024,
) -> bool:
    """Lets the target write, trains a draft on that, saves it; goes on where it stopped.

    Args:
        model: the draft's sizes.
        config: how long and how fast.
        files: whose inputs the target writes for; their own targets are not used.
        target_dir: the target, a native checkpoint.
        data_dir: where the files are.
        work_dir: where written text, training checkpoints and log go.
        out_dir: the folder of the draft to come.
        vocabulary: stored with the draft.
        init_from: a checkpoint of the draft's sizes to start from; None starts at random.
        max_minutes: save and stop after so many minutes; None is no limit.
        references: files whose own targets are learnt from too, each with its passes an epoch:
            the target's distribution after another's words, which costs no writing.
        kl_weight: see `Distillation`.
        variation_weight: see `Distillation`.
        max_length: tokens that the target writes at most.
        generation_batch: examples written at a time.

    Returns:
        Whether the draft is finished and saved.

    Raises:
        ValueError: target and draft differ in their vocabulary's size, or a file is missing.
    """
    if pathlib.Path(out_dir).exists():
        return True
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    target_config, target_params = native.load(target_dir)
    if type(target_config) is not type(model):
        raise ValueError(
            f"The draft's sizes are a {type(model).__name__}, those of the target in {target_dir} "
            f"a {type(target_config).__name__}; they must be of one kind."
        )
    if target_config.vocab_size != model.vocab_size:
        raise ValueError(
            f"The draft has a vocabulary of {model.vocab_size}, its target in {target_dir} one "
            f"of {target_config.vocab_size}; they must be equal."
        )
    if model.source_dim not in (0, target_config.emb_dim):
        raise ValueError(
            f"The draft's source_dim is {model.source_dim}, but the target's encoder in "
            f"{target_dir} has {target_config.emb_dim} features; they must be equal, or "
            "source_dim 0 and the encoder the draft's own."
        )
    target, draft = model_of(target_config.replace(dtype=model.dtype)), model_of(model)
    target_params = jax.tree.map(jnp.asarray, target_params)
    data_dir, text_dir = pathlib.Path(data_dir), pathlib.Path(work_dir) / "texts"
    names = [*files.train, *files.held_out]
    sizes = (max_length, generation_batch)
    eos_id = open_vocabulary(vocabulary).eos_id
    if not write_texts(target, target_params, names, data_dir, text_dir, *sizes, deadline, eos_id):
        return False
    others = {str((data_dir / name).absolute()): w for name, w in (references or {}).items()}
    written = Files(
        {f"{name}_{kind}": w for name, w in files.train.items() for kind in WRITTEN} | others,
        [f"{name}_{kind}" for name in files.held_out for kind in WRITTEN],
    )
    params, finished = fit(
        Distillation(draft, target, kl_weight, variation_weight),
        initial(draft, config.seed, init_from),
        config,
        written.mixture(text_dir, config),
        written.held_out_batches(text_dir, config),
        work_dir,
        frozen=for_decoding(target_params),
        deadline=deadline,
    )
    if finished:
        native.save(out_dir, model.replace(dtype="float32"), params, vocabulary, "int8")
    return finished
