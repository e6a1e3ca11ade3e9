"""Checks of settings: a value of the wrong type or range raises a one-sentence ValueError."""

import contextlib
import dataclasses
import operator
import re
import typing
from collections.abc import Callable
from types import NoneType
from typing import Any

MAX_BATCH = 1024  # Texts that are decoded together.
MAX_GAMMA = 64  # Guesses per step that commands and rows accept; more never pay off.
MAX_NODES = 255  # Guesses in a tree.
MAX_SAMPLES = 2047  # Samples of one text, numbered in multiples of 2^20.
MAX_TOKENS = 10**5  # The longest source and output.


class SettingError(ValueError):
    """A setting of the wrong type or range; the message begins with the setting's name."""


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns `value`, maybe NumPy's, as an int from `low` to `high`; rejects bools and 2.0."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)
        if not isinstance(value, bool) and low <= number and (high is None or number <= high):
            return number
    span = f"from {low}" + f" to {high}" * (high is not None)
    raise SettingError(f"{name} must be a whole number {span}, not {value!r}.")


def real(name: str, value: Any, must: str, fits: Callable[[float], bool]) -> float:
    """Returns `value`, maybe NumPy's, as a float that `fits`; `must` is the condition in words."""
    if not isinstance(value, bool | str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if fits(number := float(value)):
                return number
    raise SettingError(f"{name} must {must}, not {value!r}.")


def mesh(name: str, value: Any) -> dict[str, int]:
    """The sizes of a mesh's data and model axes, parsed from a text like ``data:2,model:4``."""
    match = re.fullmatch(r"(?:data:(\d{1,6}),)?model:(\d{1,6})|data:(\d{1,6})", str(value))
    sizes = [int(size or 1) for size in match.groups()] if match else [0]
    if 0 in sizes:
        must = "must be model:N, data:N or data:N,model:M with numbers of devices"
        raise SettingError(f"{name} {must}, not {value!r}.")
    return {"data": sizes[0] * sizes[2], "model": sizes[1]}


def devices(value: str | None) -> int:
    """The number of devices of a mesh; 1 without a mesh."""
    sizes = mesh("mesh", value) if value else {}
    return sizes.get("data", 1) * sizes.get("model", 1)


def shards(target: str | None, draft: str | None) -> tuple[int, int]:
    """The numbers of parts into which these meshes split the target and the draft."""
    parts = mesh("mesh", target)["model"] if target else 1
    return parts, parts if draft else 1


def instance(name: str, value: Any, *kinds: type) -> None:
    """Raises ValueError unless a value is of one of the types."""
    if not isinstance(value, kinds):
        words = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ValueError(f"{name} must be of type {words}, not {value!r}.")


def text(name: str, value: Any) -> str:
    """Returns a text that UTF-8 can encode: Python reads other bytes as lone surrogates."""
    instance(name, value, str)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text: its character {error.start + 1} is "
            f"{value[error.start]!r}; convert it first."
        ) from None
    return value


def fields(settings: Any) -> None:
    """Checks a dataclass of numbers and texts by its annotations; ValueError names a field.

    A float may be a whole number, a number may not be a truth value, and none may be infinite.
    """
    words = {int: "a whole number", float: "a finite number", str: "a text", NoneType: "None"}
    words |= {list: "whole numbers", dict: "texts by name"}
    for name, kind in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        kinds = (kind,) if typing.get_origin(kind) is list else typing.get_args(kind) or (kind,)
        kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
        if float in kinds and isinstance(value, int | float) and abs(value) < 1e300:
            fits = not isinstance(value, bool)
        else:
            fits = isinstance(value, kinds) and not isinstance(value, bool | float)
            fits &= not isinstance(value, list) or _whole_numbers(value) or _fields(value)
            fits &= not isinstance(value, dict) or all(type(x) is str for x in value.values())
        if not fits:
            known = " or ".join(words[kind] for kind in kinds)
            raise ValueError(f"{type(settings).__name__}.{name} must be {known}, not {value!r}.")


def _fields(value: list[Any]) -> bool:
    """Whether a list holds dataclasses, which have checked themselves."""
    return all(map(dataclasses.is_dataclass, value))


def _whole_numbers(value: Any) -> bool:
    """Whether a list, or lists in it, hold whole numbers only."""
    return all(map(_whole_numbers, value)) if isinstance(value, list) else type(value) is int


# Settings of JAX, the value that is needed, and the reason.
_JAX = (
    ("jax_enable_x64", False, "models are computed in 32 bits here"),
    ("jax_numpy_dtype_promotion", "standard", "numbers of several types are mixed here"),
    ("jax_numpy_rank_promotion", "allow", "arrays of several ranks are mixed here"),
)


def jax_settings() -> None:
    """Raises ValueError if a setting of JAX would break programs, often with a traceback."""
    import jax

    for name, needed, why in _JAX:
        value = getattr(jax.config, name)
        value = getattr(value, "value", value)  # Some settings are enumerations.
        if value not in (needed, "warn"):
            raise ValueError(
                f"JAX is set to {name} = {value!r} (the variable {name.upper()}, or "
                f"jax.config.update), but {why}; set it to {needed!r}."
            )


def no_device(error: RuntimeError) -> str | None:
    """Advice on JAX's error for a platform that this machine lacks; None for other errors."""
    match = re.match("Unable to initialize backend '(.*?)'", str(error))
    return match and (
        f"There is no device of the platform {match[1]!r} here, which JAX_PLATFORMS requests; "
        "leave it unset to use any device there is, or run this on a machine that has one."
    )
