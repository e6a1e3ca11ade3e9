"""A target and its draft, ready to decode text: the package's front door."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speculative import checkpoints
from speculative.decoding import Decoding, Output, Params, autoregressive, random_draws
from speculative.decoding import speculative as speculative_decoding
from speculative.decoding.speculative import Step, stream
from speculative.drafts import BigramDraft, Draft, TransformerDraft, UniformDraft, bigram_params
from speculative.models import T5, T5Config, for_decoding, named, random_params
from speculative.models.kernels import cache_folder
from speculative.sampling import Sampling
from speculative.types import PyTree
from speculative.vocabulary import Numbers, Vocabulary, from_elsewhere

SOURCE_LENGTHS = (32, 64, 128, 256, 512)
"""A source is padded to the next of these, for each is a compiled program."""

MODEL_FREE = ("uniform", "bigram")
"""Drafts without a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A decoded text.

    Attributes:
        text: the output.
        tokens: its ids, the end of sequence included.
        target_calls: passes of the target.
        tested: guesses tested.
        accepted: guesses accepted.
    """

    text: str
    tokens: list[int]
    target_calls: int
    tested: int
    accepted: int

    @property
    def tokens_per_call(self) -> float:
        """What Equation 1 of the paper expects."""
        return len(self.tokens) / self.target_calls


@dataclasses.dataclass(frozen=True)
class Pair:
    """Target, draft, their parameters and the vocabulary they share.

    Attributes:
        target: the model whose distribution the outputs follow.
        draft: what guesses for it.
        params: of both, laid out for decoding.
        vocabulary: theirs.
        names: of target and draft, as they were asked for.
    """

    target: T5
    draft: Draft
    params: Params
    vocabulary: Vocabulary
    names: tuple[str, str]

    def encode(self, text: str, truncate: bool = False) -> jax.Array:
        """The source [1, S] of a text, padded to one of `SOURCE_LENGTHS`.

        Raises:
            ValueError: the text is empty, or longer than the limit and not to be truncated.
        """
        if not text.strip():
            raise ValueError("The prompt is empty; give a text to decode.")
        tokens, limit = self.vocabulary.encode(text), SOURCE_LENGTHS[-1]
        if len(tokens) > limit:
            if not truncate:
                raise ValueError(
                    f"The prompt has {len(tokens)} tokens, the limit is {limit}; shorten it or "
                    "ask for truncation."
                )
            tokens = np.append(tokens[: limit - 1], tokens[-1])
        size = next(length for length in SOURCE_LENGTHS if len(tokens) <= length)
        return jnp.asarray(np.pad(tokens, (0, size - len(tokens)))[None])

    def decoding(
        self,
        gamma: int = 5,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        max_length: int = 128,
    ) -> Decoding:
        """The settings of a generation, checked.

        Raises:
            ValueError: a value outside its range.
        """
        sampling = Sampling(float(temperature), top_k, float(top_p))
        return Decoding(self.vocabulary.size, sampling, gamma, max_length)

    def generate(
        self, text: str, seed: int = 0, example: int = 0, truncate: bool = False, **settings: Any
    ) -> Result:
        """Decodes a text; `gamma=0` decodes with the target alone.

        Args:
            text: the source, its task prefix included.
            seed: of all random numbers.
            example: number of the text in its task; each has random numbers of its own.
            truncate: cut a source that is too long, instead of an error.
            **settings: of `decoding`.
        """
        config = self.decoding(**settings)
        source = self.encode(text, truncate)
        output = self.run(source, random_draws(seed, np.array([example]), config.capacity), config)
        return self.result(output)

    def run(self, source: jax.Array, draws: jax.Array, config: Decoding) -> Output:
        """One dispatch: sources [B, S] decoded speculatively, or plainly where gamma is 0."""
        if config.gamma == 0:
            return autoregressive.generate(self.target, self.params.target, source, draws, config)
        return speculative_decoding.generate(
            self.target, self.draft, self.params, source, draws, config
        )

    def result(self, output: Output) -> Result:
        """The only row of an output as text.

        Raises:
            ValueError: the target's logits were not finite.
        """
        output = jax.device_get(output)
        self._require_finite(output)
        tokens = output.tokens[0, : output.lengths[0]].tolist()
        return Result(
            self.vocabulary.decode(tokens),
            tokens,
            int(output.target_calls[0]),
            int(output.tested[0]),
            int(output.accepted[0]),
        )

    def _require_finite(self, result: Output | Step) -> None:
        if not np.all(result.finite):
            raise ValueError(
                f"The logits of {self.names[0]} are not finite: its weights are damaged, or its "
                "dtype is too narrow for it."
            )

    def stream(
        self, text: str, seed: int = 0, example: int = 0, truncate: bool = False, **settings: Any
    ) -> Iterator[Step]:
        """Like `generate`, a step at a time: see `decoding.Step`."""
        config = self.decoding(**settings)
        source = self.encode(text, truncate)
        draws = random_draws(seed, np.array([example]), config.capacity)
        draft = self.draft if config.gamma else None

        def checked(step: Step) -> Step:
            self._require_finite(step)
            return step

        # Not a generator itself: wrong settings are told at the call, not at the first step.
        return map(checked, stream(self.target, draft, self.params, source, draws, config))


def load(
    target: str = "debian_target",
    draft: str | None = None,
    dtype: str | None = None,
    vocabulary_file: str | None = None,
    beside: Pair | None = None,
) -> Pair:
    """Loads a target and its draft; without arguments, the pair that ships with the package.

    Args:
        target: a checkpoint of any format, as `checkpoints.open` finds it.
        draft: likewise, or one of `MODEL_FREE`; by default the shipped draft.
        dtype: "float32" or "bfloat16"; by default as the checkpoints say.
        vocabulary_file: a SentencePiece model for checkpoints that come without one, as T5X's
            do; T5's 100 sentinels follow its pieces where the embedding has room for them.
        beside: a pair whose target is taken, if it is the same one, instead of loading it again.

    Raises:
        ValueError: a checkpoint is missing or damaged, the name is unknown, or the two do not
            share a vocabulary.
    """
    enable_compilation_cache()
    draft = draft or "debian_draft"
    if draft not in MODEL_FREE and not checkpoints.known(draft):
        raise ValueError(
            f"There is no draft {draft!r}: it is neither a checkpoint nor one of "
            f"{', '.join([*checkpoints.SHIPPED, *MODEL_FREE])}."
        )
    if beside and beside.names[0] == target and dtype in (None, beside.target.config.dtype):
        model, target_params = beside.target, beside.params.target
        vocabulary = beside.vocabulary
    else:
        model, target_params, vocabulary = _load_model(target, dtype, vocabulary_file)
    drafter: Draft
    draft_params: PyTree = ()
    if draft == "uniform":
        drafter = UniformDraft()
    elif draft == "bigram":
        drafter = BigramDraft()
        counts = _shipped_bigrams(vocabulary)
        draft_params = bigram_params(counts, model.vocab_size)
    else:
        # Whatever a draft guesses is verified, so its kernels may be rounded; the target's not.
        small, draft_params, theirs = _load_model(draft, dtype, vocabulary_file, rounded=True)
        vocabulary.require_equal(theirs)
        if small.config.source_dim not in (0, model.config.emb_dim):
            raise ValueError(
                f"The draft {draft} reads an encoder of {small.config.source_dim} features, but "
                f"that of {target} has {model.config.emb_dim}; load it with the target that it "
                "was made for."
            )
        drafter = TransformerDraft(small, reads_target=small.config.source_dim > 0)
    return Pair(model, drafter, Params(target_params, draft_params), vocabulary, (target, draft))


def load_random(
    target: str,
    draft: str,
    dtype: str | None = None,
    vocabulary_file: str | None = None,
    beside: Pair | None = None,
) -> Pair:
    """A pair of true sizes and random weights, for the time that it takes.

    Args:
        target: a name of `models.SIZES`.
        draft: likewise, or one of `MODEL_FREE`.
        dtype: "float32" or "bfloat16"; by default the latter on accelerators.
        vocabulary_file: as in `load`; without one, tokens are but numbers.
        beside: as in `load`.

    Raises:
        ValueError: a name is unknown, or the vocabulary is larger than the models'.
    """
    enable_compilation_cache()
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    config = named(target, dtype=dtype)
    if beside and beside.names[0] == target and dtype == beside.target.config.dtype:
        vocabulary, params = beside.vocabulary, beside.params.target
    else:
        vocabulary = Numbers(config.vocab_size)
        if vocabulary_file is not None:
            vocabulary = _vocabulary(target, config, vocabulary_file)
        params = for_decoding(random_params(config))
    drafter: Draft
    draft_params: PyTree = ()
    if draft == "uniform":
        drafter = UniformDraft()
    elif draft == "bigram":
        raise ValueError("Random weights have no bigrams to count; take another draft.")
    else:
        small = named(draft, dtype=dtype)
        drafter, draft_params = TransformerDraft(T5(small)), random_params(small)
        draft_params = for_decoding(draft_params, rounded=True)
    return Pair(T5(config), drafter, Params(params, draft_params), vocabulary, (target, draft))


def _load_model(
    name: str, dtype: str | None, vocabulary_file: str | None, rounded: bool = False
) -> tuple[T5, PyTree, Vocabulary]:
    checkpoint = checkpoints.open(name)
    config = checkpoint.config.replace(dtype=dtype or checkpoint.config.dtype)
    if checkpoint.vocabulary is not None:
        vocabulary = Vocabulary(checkpoint.vocabulary, checkpoint.extra_ids)
    elif vocabulary_file is not None:
        vocabulary = _vocabulary(name, config, vocabulary_file)
    else:
        raise ValueError(f"{name} comes without a vocabulary; give one (--vocabulary).")
    _require_room(name, config, vocabulary)
    return T5(config), for_decoding(checkpoint.load(config.dtype), rounded), vocabulary


def _vocabulary(name: str, config: T5Config, file: str) -> Vocabulary:
    vocabulary = from_elsewhere(file, config.vocab_size)
    _require_room(name, config, vocabulary)
    return vocabulary


def _require_room(name: str, config: T5Config, vocabulary: Vocabulary) -> None:
    if vocabulary.size > config.vocab_size:
        raise ValueError(
            f"{name} has {config.vocab_size} embeddings, fewer than the {vocabulary.size} pieces "
            f"of its vocabulary {vocabulary.path}."
        )


def _shipped_bigrams(vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    shipped = Vocabulary(checkpoints.ASSETS / "debian.model")
    vocabulary.require_equal(shipped)
    return dict(np.load(checkpoints.ASSETS / "bigrams.npz"))


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place for them."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
