"""Resolves the names of a target and a draft, and loads both as a `Pair`."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speculative import checkpoints, checks, fingerprints, removed
from speculative.backends import for_decoding, usual_dtype, usual_quantize
from speculative.backends.cpu.kernels import cache_folder
from speculative.checkpoints import Checkpoint
from speculative.checkpoints.checkpoint import DTYPES
from speculative.decoding import Params
from speculative.drafts import (
    CopyDraft,
    MixedDraft,
    SuffixDraft,
    TransformerDraft,
    model_draft,
    named,
    translated,
)
from speculative.drafts.base import require_grows
from speculative.drafts.named import MODEL_FREE
from speculative.drafts.translated import Tables, Translated
from speculative.models import SIZES, Config, model_of, random_params, sharding
from speculative.models.distilled import DISTILLED, usual
from speculative.models.reads import unpacked
from speculative.pair import Pair, require_positions
from speculative.special_tokens import SpecialTokens
from speculative.types import QUANTIZE, PyTree
from speculative.vocabulary import Numbers, Vocabulary, from_elsewhere

# The default draft of each bundled target.
DRAFTS = {"debian_target": "debian_draft_hidden", "debian_lm": "debian_lm_draft_hidden+copy"}


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model whose tensors are not in memory yet."""

    name: str
    config: Config  # Its sizes, and the dtype in which it is loaded.
    checkpoint: Checkpoint | None = None  # Random weights have none.
    on: Mesh | None = None  # Several devices, each with a part or with the `whole` model.
    whole: bool = False

    def vocabulary(self, file: str | None) -> Vocabulary:
        """The vocabulary that comes with it, or else that of a file; random weights need neither.

        ValueError is raised if there is none, it is damaged, or it has too many pieces.
        """
        vocabulary = self.checkpoint.open_vocabulary() if self.checkpoint else None
        if vocabulary is None and file is not None:
            special = self.checkpoint.special if self.checkpoint else SpecialTokens()
            vocabulary = from_elsewhere(file, self.config.vocab_size, special)
        if vocabulary is None and self.checkpoint:
            raise ValueError(f"{self.name} comes without a vocabulary; give one (--vocabulary).")
        vocabulary = vocabulary or Numbers(self.config.vocab_size)
        vocabulary.require_room(self.config.vocab_size, self.name)
        return vocabulary

    def load(self, draft: bool = False) -> PyTree:
        """Its parameters in the layout for decoding; raises ValueError if a file is damaged."""
        config, placement = self.config, (self.on, self.whole)
        if self.checkpoint:
            params = self.checkpoint.load(config.dtype, config.quantize, *placement)
        else:
            params = random_params(config, self.on and sharding.placed(config, *placement))
        shards = None
        if self.on is not None:
            shards = 1 if self.whole else self.on.shape[sharding.MODEL]
        params = for_decoding(params, draft, quantize=config.quantize, shards=shards)
        if self.on is None:
            return params
        return jax.device_put(params, sharding.shardings(params, self.on, self.whole))


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A target and a draft that fit each other and are not loaded yet."""

    names: tuple[str, str]
    target: Weights
    draft: Weights | None  # None for a model-free draft.
    free: str  # The name of the draft, or of its part, that needs no model; may be empty.
    table: pathlib.Path | None  # The file that `free` reads, if any.
    vocabulary: Vocabulary
    mesh: str | None = None  # The devices that share the target.
    tables: Tables | None = None  # For a draft with another vocabulary.

    def require_trees(self, tree: int) -> None:
        """Raises ValueError if a tree is requested and the draft only guesses chains."""
        if tree:
            require_grows(named.grows(self.names[1]), self.names[1], tree)

    def length(self, text: str, max_length: int, source_length: int | None) -> int:
        """The number of tokens of a prompt or source, cut to `source_length`.

        Raises ValueError if a prompt and its output together, or a source or its output, need more
        positions than a model has.
        """
        cut = source_length or checks.MAX_TOKENS
        prompts = model_of(self.target.config).decoder_only
        encode = self.vocabulary.prompt if prompts else self.vocabulary.encode
        length = min(len(encode(text)), cut)
        models = [(one.name, one.config.max_positions) for one in (self.target, self.draft) if one]
        require_positions(models, length, max_length, prompts)
        return length

    @property
    def configs(self) -> list[Config]:
        """The sizes of the target and, where it is a model, of the draft."""
        return [weights.config for weights in (self.target, self.draft) if weights]

    @property
    def labels(self) -> dict[str, str]:
        """The models' labels in results: names, `dtype`, and `quantize` and `mesh` if given."""
        config = self.target.config
        labels = {"target": self.names[0], "draft": self.names[1], "dtype": config.dtype}
        labels |= {"quantize": config.quantize} if config.quantize != "none" else {}
        return labels | ({"mesh": self.mesh} if self.mesh else {})

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the target, draft and vocabulary, as far as they are files.

        Results keep them, to detect that other files have taken the same names.
        """
        opened = {"target": self.target.checkpoint, "draft": self.draft and self.draft.checkpoint}
        contents = {name: one.contents for name, one in opened.items() if one}
        if self.table:
            table = fingerprints.of_files({"table": self.table})
            contents["draft"] = fingerprints.of_value([contents.get("draft"), table])
        if self.tables:
            both = self.tables.read_as.tolist(), self.tables.logits.tolist()
            contents["draft"] = fingerprints.of_value([contents.get("draft"), *both])
        return contents | {"vocabulary": self.vocabulary.contents}

    def load(self, target: PyTree | None = None) -> Pair:
        """The pair, ready to decode; `target` holds the target's parameters if loaded already.

        Raises ValueError if a file is damaged, the draft's table is for another vocabulary, or the
        draft reads another target's hidden states.
        """
        stored, of_draft = self.target.checkpoint, self.draft and self.draft.checkpoint
        made_for = of_draft and of_draft.made_for
        if self.draft and made_for and stored and not stored.has(made_for.fingerprint):
            raise ValueError(
                f"The draft {self.draft.name} reads hidden states of the target {made_for.name}, "
                f"with which it was trained, and {self.target.name} is another; load it with that "
                "one, or train a draft for this target (speculative distil)."
            )
        enable_compilation_cache()
        model = model_of(self.target.config, self.vocabulary.start_id)
        lookup, of_lookup = None, ()
        if self.free:
            setting = self.free, model.decoder_only, self.table, self.vocabulary
            lookup, of_lookup = named.model_free(*setting)
        target = self.target.load() if target is None else target
        draft, params = lookup, of_lookup
        if self.draft:
            own, params = model_of(self.draft.config), self.draft.load(draft=True)
            draft = model_draft(own)
            if self.tables:
                draft, on = TransformerDraft(Translated(own)), self.draft.on
                everywhere = NamedSharding(on, PartitionSpec()) if on else None
                params = params, jax.device_put(self.tables, everywhere)
            if isinstance(lookup, CopyDraft | SuffixDraft):
                draft, params = MixedDraft(draft, lookup), (params, of_lookup)
        assert draft is not None
        minutes = of_draft and of_draft.training_minutes
        return Pair(model, draft, Params(target, params), self.vocabulary, self.names, minutes)


def default_draft(target: str, random: bool = False) -> str:
    """The bundled draft of a target; if there is none, ValueError explains the alternatives."""
    if target in DRAFTS:
        return DRAFTS[target]
    _weights(target, random)  # Raises first if there is no such target.
    free = ", ".join(name for name, draft in MODEL_FREE.items() if draft.table is None)
    raise ValueError(
        f"No draft is bundled for {target}; choose one (--draft): a checkpoint of its kind and "
        f"vocabulary, one that needs no training ({free}), a table that speculative count makes "
        "from text like its outputs, or a small model distilled from it (speculative distil)."
    )


def resolve(
    target: str | os.PathLike[str] = "debian_target",
    draft: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    vocabulary_file: str | os.PathLike[str] | None = None,
    random: bool = False,
    quantize: str | None = None,
    quantize_draft: str | None = None,
    mesh: str | None = None,
    draft_mesh: str | None = None,
    open_checkpoint: Callable[[str], Checkpoint] = checkpoints.open,
) -> Resolved:
    """Finds a target and a draft, opens each checkpoint once, and reads no tensor.

    Args:
        target: the name of a checkpoint of any format, see `checkpoints.open`.
        draft: a checkpoint's name too, or one of `MODEL_FREE`, or the path of a counted file, or a
            checkpoint mixed with a lookup (NAME+copy), see `named`; by default the target's bundled
            draft, see `default_draft`.
        dtype: "float32" or "bfloat16", for weights and products; by default each model's
            `backends.usual_dtype` for the dtype of its checkpoint, or for bfloat16 if its weights
            are random.
        vocabulary_file: for checkpoints that come without a vocabulary, as T5X's do, see
            `from_elsewhere`. Without one, tokens of random weights are written as numbers.
        random: whether the names are those of `models.SIZES`, loaded with random weights to measure
            times.
        quantize: "int8" holds the target's kernels, including the logits', in int8, with a scale
            for each output; outputs then have the distribution of that model. "int8-activations"
            also rounds the inputs of products. "none", the default, does neither.
        quantize_draft: the same for the draft, by default `backends.usual_quantize`.
        mesh: the devices that share the target, as in ``data:2,model:4``, see `sharding.mesh`; by
            default one device holds it.
        draft_mesh: the devices that share the draft, which must be the same; by default each of
            them holds all of it.
        open_checkpoint: opens a checkpoint; a cached function shares checkpoints among pairs.

    Raises:
        ValueError: a checkpoint, table or vocabulary is missing, damaged or not needed, a name is
            unknown, target and draft do not fit each other, or there is no device.
    """
    checks.jax_settings()
    try:
        jax.default_backend()
    except RuntimeError as error:
        raise ValueError(checks.no_device(error) or str(error)) from error
    target = _path("target", target)
    draft = None if draft is None else _path("draft", draft)
    file = None if vocabulary_file is None else _path("vocabulary", vocabulary_file)
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("quantize", quantize, QUANTIZE),
        ("quantize_draft", quantize_draft, QUANTIZE),
    ):
        if value not in (None, *known):
            raise ValueError(f"{name} must be {' or '.join(known)}, not {value!r}.")
    if not (
        random or draft is None or named.known(draft) or checkpoints.known(named.parts(draft)[0])
    ):
        name = named.parts(draft)[0]
        if name in MODEL_FREE:
            raise ValueError(f"{draft} mixes no model; give a checkpoint in place of {name}.")
        raise ValueError(
            removed.said(name)
            or f"There is no draft {name!r}: it is neither a checkpoint nor one of "
            f"{', '.join([*checkpoints.SHIPPED, *MODEL_FREE])}, nor a table (FILE.npz)."
        )
    on, whole = _mesh(mesh, draft_mesh)
    big = _weights(target, random, dtype, quantize or "none", open_checkpoint, on)
    if big.checkpoint and big.checkpoint.note:
        _say_once(big.checkpoint.note)
    big.config.reads.require_none(target)
    draft = default_draft(target, random) if draft is None else draft
    name, free = named.parts(draft)
    how = dtype, quantize_draft or usual_quantize()
    how = *how, open_checkpoint, on, whole
    small = None if free and not name else _weights(name, random, *how, big.config)
    _require_use(file, big, small)
    vocabulary = big.vocabulary(file)
    last = unpacked(small.config.reads.draft_vocabulary).max(initial=0) if small else 0
    if last >= vocabulary.size:
        raise ValueError(
            f"The draft {draft} guesses token {last}, but the vocabulary has {vocabulary.size} "
            "pieces; make its draft vocabulary again (speculative convert --keep)."
        )
    folder = pathlib.Path(big.checkpoint.location) if big.checkpoint else None
    path, both = named.table(free, folder, vocabulary) if free else None, None
    if small:
        _require_of_a_kind(big, small)
        if random:
            vocabulary.require_room(small.config.vocab_size, small.name)
        else:
            both = _tables(vocabulary, small.vocabulary(file), big, small)
    return Resolved((target, draft), big, small, free, path, vocabulary, mesh, both)


def load(
    target: str | os.PathLike[str] = "debian_target",
    draft: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    vocabulary_file: str | os.PathLike[str] | None = None,
    random: bool = False,
    quantize: str | None = None,
    quantize_draft: str | None = None,
    mesh: str | None = None,
    draft_mesh: str | None = None,
) -> Pair:
    """Loads a target and its draft, by default the bundled pair; see `resolve`."""
    how = vocabulary_file, random, quantize, quantize_draft, mesh, draft_mesh
    return resolve(target, draft, dtype, *how).load()


def vocabulary(
    target: str | os.PathLike[str], file: str | os.PathLike[str] | None = None
) -> Vocabulary:
    """A target's vocabulary, without its weights; arguments and errors are those of `resolve`."""
    model = _weights(_path("target", target), False)
    path = None if file is None else _path("vocabulary", file)
    _require_use(path, model)
    return model.vocabulary(path)


def _weights(
    name: str,
    random: bool,
    dtype: str | None = None,
    quantize: str = "none",
    open_checkpoint: Callable[[str], Checkpoint] = checkpoints.open,
    on: Mesh | None = None,
    whole: bool = False,
    of: Config | None = None,
) -> Weights:
    """A model by its name; for a draft, `of` holds the sizes of its target."""
    own = {DISTILLED: usual(of)} if random and of else {}
    if random and name not in SIZES | own:
        raise ValueError(f"Random weights are for the sizes {', '.join(SIZES)}, not for {name!r}.")
    checkpoint = None if random else open_checkpoint(name)
    config = checkpoint.config if checkpoint else (SIZES | own)[name]
    dtype = dtype or usual_dtype(checkpoint.dtype if checkpoint else "bfloat16")
    config = config.replace(dtype=dtype, quantize=quantize)
    if on is not None and not whole:
        config = sharding.padded(config, on.shape[sharding.MODEL])
    return Weights(name, config, checkpoint, on, whole)


def _mesh(mesh: str | None, draft_mesh: str | None) -> tuple[Mesh | None, bool]:
    """The devices that share a target, and whether each of them holds a whole draft."""
    if mesh is None and draft_mesh is not None:
        raise ValueError(f"draft_mesh is {draft_mesh!r}, but there is no mesh; give one (--mesh).")
    if mesh is None:
        return None, False
    if draft_mesh not in (None, mesh):
        raise ValueError(
            f"draft_mesh must be {mesh!r}, as mesh is, or be left out, not {draft_mesh!r}."
        )
    on = sharding.mesh(mesh)
    if jax.default_backend() == "cpu":
        _say_once("On a mesh, XLA computes products instead of this program's CPU kernels.")
    return on, draft_mesh is None


@functools.cache
def _say_once(note: str) -> None:
    logging.warning("%s", note)


def _path(what: str, value: Any) -> str:
    checks.instance(f"The name of a {what}", value, str, os.PathLike)
    return os.fspath(value)


def _require_use(file: str | None, *models: Weights | None) -> None:
    opened = [model.checkpoint for model in models if model and model.checkpoint]
    if file is not None and opened and all(one.vocabulary for one in opened):
        names = " and ".join(one.location for one in opened)
        raise ValueError(
            f"There is no use for the vocabulary {file}, because there is one with {names} "
            "already; leave --vocabulary out."
        )


def _tables(
    vocabulary: Vocabulary, of_draft: Vocabulary, target: Weights, draft: Weights
) -> Tables | None:
    """The translation tables of a draft with another vocabulary; None if it is the same."""
    try:
        vocabulary.require_equal(of_draft)
        return None
    except ValueError:
        if draft.config.reads.source_dim:  # It was made for a target with its own vocabulary.
            raise
    kept = draft.config.reads.draft_vocabulary
    logits = unpacked(kept) if kept else None
    count = draft.config.logits if kept else min(of_draft.size, draft.config.vocab_size)
    tables, shared = translated.tables(vocabulary, of_draft, logits, count)
    _say_once(
        f"{draft.name} has another vocabulary than {target.name}: it guesses the {shared:,} of the "
        f"target's {vocabulary.size:,} tokens that both have."
    )
    return tables


def _require_of_a_kind(target: Weights, draft: Weights) -> None:
    kinds = [
        "a decoder-only model" if model_of(weights.config).decoder_only else "an encoder-decoder"
        for weights in (draft, target)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"The draft {draft.name} is {kinds[0]}, but its target {target.name} is {kinds[1]}; "
            "they must be of one kind."
        )
    read = draft.config.reads.source_dim
    if read not in (0, target.config.emb_dim):
        raise ValueError(
            f"The draft {draft.name} reads an encoder of {read} features, but that of "
            f"{target.name} has {target.config.emb_dim}; load it with the target that it was made "
            "for."
        )


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs in our folder, unless the user has set another."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
