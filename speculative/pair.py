"""A target and its draft, ready to decode text: the package's front door."""

import dataclasses
import pathlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speculative import checkpoints
from speculative.decoding import Decoding, Output, Params, autoregressive, random_draws, reference
from speculative.decoding import speculative as speculative_decoding
from speculative.decoding.reference import Trace
from speculative.decoding.speculative import Step, stream
from speculative.drafts import Draft, TransformerDraft
from speculative.drafts.named import MODEL_FREE, model_free, require_no_table
from speculative.models import Config, FlaxModel, for_decoding, model_of, named, random_params
from speculative.models.kernels import cache_folder
from speculative.sampling import Sampling
from speculative.types import PyTree
from speculative.vocabulary import Numbers, Vocabulary, from_elsewhere, open_vocabulary

SOURCE_LENGTHS = (32, 64, 128, 256, 512)
"""A source is padded to the next of these, for each is a compiled program."""

DRAFTS = {"debian_target": "debian_draft", "debian_lm": "debian_lm_draft"}
"""The draft that goes with a shipped target, where none is named."""


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

    target: FlaxModel
    draft: Draft
    params: Params
    vocabulary: Vocabulary
    names: tuple[str, str]

    def encode(self, text: str, truncate: bool = False) -> jax.Array:
        """The source or prompt [1, S] of a text, padded to one of `SOURCE_LENGTHS`.

        Raises:
            ValueError: the text is empty, and the target no language model that may begin with
                nothing; or it is longer than the limit and not to be truncated.
        """
        continues, limit = self.target.continues, SOURCE_LENGTHS[-1]
        if not continues and not text.strip():
            raise ValueError("The prompt is empty; give a text to decode.")
        tokens = self.vocabulary.prompt(text) if continues else self.vocabulary.encode(text)
        if len(tokens) > limit:
            if not truncate:
                raise ValueError(
                    f"The prompt has {len(tokens)} tokens, the limit is {limit}; shorten it or "
                    "ask for truncation."
                )
            # What is nearest to the text to come is kept of a prompt, and the end of a source.
            tokens = tokens[-limit:] if continues else np.append(tokens[: limit - 1], tokens[-1])
        size = next(length for length in SOURCE_LENGTHS if len(tokens) <= length)
        padding = (0, size - len(tokens))
        return jnp.asarray(np.pad(tokens, padding, constant_values=self.target.pad_id)[None])

    def decoding(
        self,
        gamma: int = 5,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        max_length: int = 128,
        lenience: float = 1.0,
    ) -> Decoding:
        """The settings of a generation, checked; below 1, lenience gives up exactness (A.5).

        Raises:
            ValueError: a value outside its range.
        """
        sampling = Sampling(float(temperature), top_k, float(top_p))
        return Decoding(
            self.vocabulary.size,
            sampling,
            gamma,
            max_length,
            self.vocabulary.eos_id,
            lenience=lenience,
        )

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

    def run(
        self,
        source: jax.Array,
        draws: jax.Array,
        config: Decoding,
        counts: jax.Array | None = None,
    ) -> Output:
        """One dispatch: sources [B, S] decoded speculatively, or plainly where gamma is 0.

        An adaptive gamma begins by `Output.counts` of earlier texts, if they are given.

        Raises:
            ValueError: target or draft has too few positions for it.
        """
        self._require_positions(source, config)
        if config.gamma == 0:
            return autoregressive.generate(self.target, self.params.target, source, draws, config)
        return speculative_decoding.generate(
            self.target, self.draft, self.params, source, draws, config, counts
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

    def _require_positions(self, source: jax.Array, config: Decoding) -> None:
        models = [self.target, getattr(self.draft, "model", None)]
        for name, model in zip(self.names, models, strict=True):
            most = getattr(getattr(model, "config", None), "max_positions", 0)
            if 0 < most < source.shape[1] + config.capacity:
                raise ValueError(
                    f"{name} has {most} positions, but a prompt of up to {source.shape[1]} tokens "
                    f"with max_length = {config.max_length} and gamma = {config.gamma} needs "
                    f"{source.shape[1] + config.capacity}; shorten one of them."
                )

    def _require_finite(self, result: Output | Step) -> None:
        if not np.all(result.finite):
            raise ValueError(
                f"The logits of {self.names[0]} are not finite: its weights are damaged, or its "
                "dtype is too narrow for it."
            )

    def check(
        self, text: str, seed: int = 0, example: int = 0, truncate: bool = False, **settings: Any
    ) -> Trace:
        """Decodes with the reference loop, Algorithm 1 on the host in float64, step by step.

        It is slow, and looks at everything that the draft proposes: for drafts of one's own.

        Raises:
            ValueError: a proposal breaks the draft's contract, in the step that is named, or the
                fast path gives other tokens from the same random numbers.
        """
        config = self.decoding(**settings)
        source = self.encode(text, truncate)
        draws = random_draws(seed, np.array([example]), config.capacity)
        found = reference.generate(
            self.target,
            self.draft,
            self.params,
            np.asarray(source)[0],
            np.asarray(draws)[0],
            config,
        )
        fast = self.result(self.run(source, draws, config)).tokens
        if fast != found.tokens:
            place = next(
                i for i, pair in enumerate(zip_longest(fast, found.tokens)) if len(set(pair)) > 1
            )
            raise ValueError(
                f"Token {place + 1} of the fast path is not that of the reference loop: the draft "
                "proposes otherwise when it is compiled into the loop, or rounding decided a tie."
            )
        return found

    def stream(
        self, text: str, seed: int = 0, example: int = 0, truncate: bool = False, **settings: Any
    ) -> Iterator[Step]:
        """Like `generate`, a step at a time: see `decoding.Step`."""
        config = self.decoding(**settings)
        source = self.encode(text, truncate)
        self._require_positions(source, config)
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
        draft: likewise, or one of `MODEL_FREE`; by default the shipped draft of that target.
        dtype: "float32" or "bfloat16"; by default as the checkpoints say.
        vocabulary_file: a SentencePiece model for checkpoints that come without one, as T5X's
            do; T5's 100 sentinels follow its pieces where the embedding has room for them.
        beside: a pair whose target is taken, if it is the same one, instead of loading it again.

    Raises:
        ValueError: a checkpoint is missing or damaged, the name is unknown, or the two do not
            go together.
    """
    enable_compilation_cache()
    draft = draft or DRAFTS.get(target, "debian_draft")
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
    if draft in MODEL_FREE:
        folder = pathlib.Path(checkpoints.SHIPPED.get(target, target))
        drafter, draft_params = model_free(draft, model.continues, folder, vocabulary)
    else:
        # Whatever a draft guesses is verified, so its kernels may be rounded; the target's not.
        small, draft_params, theirs = _load_model(draft, dtype, vocabulary_file, rounded=True)
        vocabulary.require_equal(theirs)
        drafter = _transformer_draft(small, model, (target, draft))
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
    model = model_of(config)
    require_no_table(draft)
    if draft in MODEL_FREE:
        drafter, draft_params = model_free(draft, model.continues, pathlib.Path(), vocabulary)
    else:
        small = named(draft, dtype=dtype)
        drafter = _transformer_draft(model_of(small), model, (target, draft))
        draft_params = for_decoding(random_params(small), rounded=True)
    return Pair(model, drafter, Params(params, draft_params), vocabulary, (target, draft))


def _transformer_draft(
    small: FlaxModel, model: FlaxModel, names: tuple[str, str]
) -> TransformerDraft:
    """A draft of a model, which must be of its target's kind."""
    target, draft = names
    if small.continues != model.continues:
        kinds = [
            "a decoder-only model" if m.continues else "an encoder-decoder" for m in (small, model)
        ]
        raise ValueError(
            f"The draft {draft} is {kinds[0]}, but its target {target} is {kinds[1]}; they must "
            "be of one kind."
        )
    read = small.config.source_dim
    if read not in (0, model.config.emb_dim):
        raise ValueError(
            f"The draft {draft} reads an encoder of {read} features, but that of {target} has "
            f"{model.config.emb_dim}; load it with the target that it was made for."
        )
    return TransformerDraft(small, reads_target=read > 0)


def _load_model(
    name: str, dtype: str | None, vocabulary_file: str | None, rounded: bool = False
) -> tuple[FlaxModel, PyTree, Vocabulary]:
    checkpoint = checkpoints.open(name)
    config = checkpoint.config.replace(dtype=dtype or checkpoint.config.dtype)
    if checkpoint.vocabulary is not None:
        vocabulary = open_vocabulary(checkpoint.vocabulary, checkpoint.extra_ids)
    elif vocabulary_file is not None:
        vocabulary = _vocabulary(name, config, vocabulary_file)
    else:
        raise ValueError(f"{name} comes without a vocabulary; give one (--vocabulary).")
    _require_room(name, config, vocabulary)
    return model_of(config), for_decoding(checkpoint.load(config.dtype), rounded), vocabulary


def _vocabulary(name: str, config: Config, file: str) -> Vocabulary:
    vocabulary = from_elsewhere(file, config.vocab_size)
    _require_room(name, config, vocabulary)
    return vocabulary


def _require_room(name: str, config: Config, vocabulary: Vocabulary) -> None:
    if vocabulary.size > config.vocab_size:
        raise ValueError(
            f"{name} has {config.vocab_size} embeddings, fewer than the {vocabulary.size} pieces "
            f"of its vocabulary {vocabulary.path}."
        )


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place for them."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
