"""How other programs name, store and describe the tensors of a family's models."""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from speculative.models.config import Config
from speculative.types import Fields

C = TypeVar("C", bound=Config)

SPIECE = "spiece.model"  # The file of a SentencePiece vocabulary.


class Stored(NamedTuple):
    """The tensors of ours that one of theirs, maybe [out, in], holds along its last axis."""

    parts: tuple[str, ...]
    transposed: bool = False


class Names(Generic[C]):
    """How transformers and T5X represent a family's models; by default, neither has any."""

    title: ClassVar[str] = ""  # The family's name in transformers.
    # The `model_type`s of a `config.json`, each with the number of sentinels that by default follow
    # the vocabulary's pieces.
    model_types: ClassVar[Mapping[str, int]] = {}
    # The prefix of tensors' names, unless the weights are of the model without its logits; and
    # names after it of tensors that no model reads, or reads elsewhere.
    prefix: ClassVar[str] = ""
    passed_over: ClassVar[re.Pattern[str]]
    of_images: ClassVar[re.Pattern[str]] = re.compile("(?!)")  # Those that only images need.
    # Tensors that are copies of another, unless both are stored and differ; and those of them that
    # are filled in if missing.
    tied: ClassVar[Mapping[str, str]] = {}
    filled: ClassVar[tuple[str, ...]] = ()
    vocabularies: ClassVar[tuple[str, ...]]  # Files that may hold its vocabulary, the best first.
    # Settings that a `config.json` must have, with our fields; and (`required`) those of which only
    # certain values are supported, the default first.
    sizes: ClassVar[Mapping[str, str]]
    aliases: ClassVar[Mapping[str, str]]  # Other names of settings in transformers.
    required: ClassVar[Mapping[str, tuple[Any, ...]]]
    # transformers' names of the supported feed-forward activations, and ours.
    activations: ClassVar[Mapping[str, str]] = {
        "relu": "relu",
        "gelu_new": "gelu",
        "gelu_pytorch_tanh": "gelu",
        "silu": "silu",
        "swish": "silu",
    }

    def of_text(self, settings: Fields) -> tuple[Fields, str]:
        """The settings of the text model in a larger one, and the prefix of its tensors' names.

        For a text-only model, the settings are unchanged and the prefix is empty.
        """
        return settings, ""

    def configuration(self, settings: Fields, own: Callable[[str], bool], location: str) -> C:
        """The configuration in a `config.json` of transformers.

        `own` tells whether a tensor of `tied` is stored and no copy. Raises ValueError if a size is
        missing or not supported.
        """
        raise NotImplementedError

    def names(self, config: C) -> dict[str, Stored]:
        """The contents of every tensor of such a model, by transformers' name."""
        raise NotImplementedError

    def settings(self, config: C, location: str) -> dict[str, object]:
        """The `config.json` of such a model; raises ValueError if transformers has none."""
        raise ValueError(f"transformers has no model of the kind of {location}.")

    def infer(self, shapes: Mapping[str, tuple[int, ...]], location: str) -> C | None:
        """A T5X checkpoint's configuration from its tensors' shapes; None if T5X has no such model.

        Raises ValueError if the shapes are not those of such a model.
        """
        return None

    def require_t5x(self, config: C, location: str) -> None:
        """Raises ValueError unless T5X's format can hold such a model."""
        raise ValueError(
            f"T5X's format holds only T5s, not {config.description()[0]}; write {location} in "
            "another format (--to native)."
        )

    def _settings(self, settings: Fields, location: str) -> Fields:
        """Settings under their main names, checked against the supported values in `required`.

        Raises ValueError if a setting is not supported, or contradicts one of the same meaning.
        """
        named = {name: value for name, value in settings.items() if name not in self.aliases}
        for alias, name in self.aliases.items():
            if alias in settings and named.setdefault(name, settings[alias]) != settings[alias]:
                raise ValueError(
                    f"{location} has the {name} {named[name]!r} and the {alias} "
                    f"{settings[alias]!r}, which are one setting; remove one of them."
                )
        for name, supported in {**_REQUIRED, **self.required}.items():
            if named.get(name, supported[0]) not in supported:
                raise ValueError(
                    f"{location} has the {name} {named[name]!r}; supported is "
                    f"{' or '.join(str(value) for value in supported)}."
                )
        return named

    def _read_sizes(self, settings: Fields, location: str) -> dict[str, int]:
        """Our fields of `sizes`, which must be positive."""
        for name in self.sizes:
            if name not in settings:
                raise ValueError(f"{location} lacks {name!r}.")
            if not isinstance(value := settings[name], int) or value < 1:
                raise ValueError(
                    f"{location} has the {name} {value!r}; it must be a positive whole number."
                )
        return {ours: settings[name] for name, ours in self.sizes.items()}

    def _write_sizes(self, config: C) -> dict[str, Any]:
        return {name: getattr(config, ours) for name, ours in self.sizes.items()}


# Settings that change any model's results, with the values that change nothing.
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "pruned_heads": (None, {}),
}

AnyNames = Names[Any]  # The names of any family.
