"""Checks of settings: a value of another type or range is a ValueError of one sentence."""

import contextlib
import dataclasses
import operator
import re
import typing
from collections.abc import Callable
from types import NoneType
from typing import Any

MAX_BATCH = 1024  # Texts that are decoded together.
MAX_GAMMA = 64  # Guesses of a step that commands and rows take; more never pay.
MAX_NODES = 255  # Guesses of a tree.
MAX_SAMPLES = 2047  # Of one text: their numbers are told apart by multiples of 2^20.
MAX_TOKENS = 10**5  # The longest source and output.


class SettingError(ValueError):
    """A setting of another type or range; the sentence begins with the setting's name."""


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number from `low` to `high`, which may be NumPy's; no bool and no 2.0."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)
        if not isinstance(value, bool) and low <= number and (high is None or number <= high):
            return number
    span = f"from {low}" + f" to {high}" * (high is not None)
    raise SettingError(f"{name} must be a whole number {span}, not {value!r}.")


def real(name: str, value: Any, must: str, fits: Callable[[float], bool]) -> float:
    """A number that fits, which may be NumPy's; `must` says in words what fits."""
    if not isinstance(value, bool | str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if fits(number := float(value)):
                return number
    raise SettingError(f"{name} must {must}, not {value!r}.")


def mesh(name: str, value: Any) -> dict[str, int]:
    """The sizes of a mesh's axes, data and model, of a text like ``data:2,model:4``."""
    found = re.fullmatch(r"(?:data:(\d{1,6}),)?model:(\d{1,6})|data:(\d{1,6})", str(value))
    sizes = [int(size or 1) for size in found.groups()] if found else [0]
    if 0 in sizes:
        said = "must be model:N, data:N or data:N,model:M with numbers of devices"
        raise SettingError(f"{name} {said}, not {value!r}.")
    return {"data": sizes[0] * sizes[2], "model": sizes[1]}


def devices(value: str | None) -> int:
    """The devices of a mesh; without one, a single one."""
    sizes = mesh("mesh", value) if value else {}
    return sizes.get("data", 1) * sizes.get("model", 1)


def shards(target: str | None, draft: str | None) -> tuple[int, int]:
    """In how many parts devices hold a target and a draft of such meshes."""
    parts = mesh("mesh", target)["model"] if target else 1
    return parts, parts if draft else 1


def instance(name: str, value: Any, *kinds: type) -> None:
    """Whether a value is of one of some types."""
    if not isinstance(value, kinds):
        words = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ValueError(f"{name} must be of type {words}, not {value!r}.")


def text(name: str, value: Any) -> str:
    """A text that UTF-8 can hold: bytes that are not UTF-8 reach Python as lone surrogates."""
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

    A whole number will do for a float, no truth value for a number, and no number is infinite.
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


# What JAX may be set to, the value that is needed, and why.
_JAX = (
    ("jax_enable_x64", False, "models are computed in 32 bits here"),
    ("jax_numpy_dtype_promotion", "standard", "numbers of several types are mixed here"),
    ("jax_numpy_rank_promotion", "allow", "arrays of several ranks are mixed here"),
)


def jax_settings() -> None:
    """Raises ValueError if JAX is set to what would break programs, often with a traceback."""
    import jax

    for name, needed, why in _JAX:
        value = getattr(jax.config, name)
        value = getattr(value, "value", value)  # Of an enumeration.
        if value not in (needed, "warn"):
            raise ValueError(
                f"JAX is set to {name} = {value!r} (the variable {name.upper()}, or "
                f"jax.config.update), but {why}; set it to {needed!r}."
            )


def no_device(error: RuntimeError) -> str | None:
    """What to do about JAX's error of a platform that is not here; None of other errors."""
    found = re.match("Unable to initialize backend '(.*?)'", str(error))
    return found and (
        f"There is no device of the platform {found[1]!r} here, which JAX_PLATFORMS asks for; "
        "leave it unset to take what there is, or run this on such a machine."
    )
