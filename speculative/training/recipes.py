"""What gin files of training and distillation say."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from speculative import gin_files
from speculative.models import Config, DecoderOnlyConfig, T5Config, named
from speculative.models.reads import Reads
from speculative.training import distil, loop, train

MODELS = (T5Config, DecoderOnlyConfig, Reads, named)
KNOWN = (*MODELS, loop.TrainConfig, train.Files, train.train, distil.distil)
"""What gin files of training configure; they may import the modules of these, and no others."""
for configurable in KNOWN:
    gin.register(configurable)


def configured(
    recipe: Callable[..., bool], file: str, bindings: Sequence[str], arguments: dict[str, Any]
) -> dict[str, Any]:
    """The parameters of `train.train` or `distil.distil` by a gin file, bindings and arguments.

    The arguments come before the bindings, those before the file. Raises ValueError if the file
    names something that does not exist, or leaves out a parameter.
    """
    try:
        gin_files.read(gin_files.find(file), bindings, {known.__module__ for known in KNOWN})
        parameters = gin.get_bindings(recipe) | arguments
        inspect.signature(recipe).bind(**parameters)
        return parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    finally:
        gin.clear_config()


def settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What gin decided of the parameters of `distil.distil`, by the names of the bindings."""
    elsewhere = {"target_dir", "data_dir", "work_dir", "out_dir", "max_minutes"}
    found = dict[str, Any]()
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value):
            kind = type(value).__name__
            fields = value.to_json() if isinstance(value, Config) else vars(value)
            found |= {f"{kind}.{field}": given for field, given in fields.items()}
        elif name not in elsewhere:
            found[f"distil.{name}"] = value
    return found
