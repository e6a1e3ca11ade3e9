"""Records what a run began with in its work folder: it resumes with the same or not at all."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from speculative import disk, fingerprints
from speculative.models import Config
from speculative.training.data import Examples
from speculative.types import Fields

FILE = "settings.json"
RATE = "TrainConfig.learning_rate"
ELSEWHERE = {"target_dir", "data_dir", "work_dir", "out_dir", "max_minutes", "mesh"}
"""Parameters that are recorded by their contents, or that do not affect the result."""


def settings(recipe: str, parameters: Mapping[str, Any]) -> Fields:
    """The settings that decide a run of "train" or "distil", by their names in gin files."""
    decisive = dict[str, Any]()
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value):
            kind = type(value).__name__
            fields = value.to_json() if isinstance(value, Config) else vars(value)
            decisive |= {f"{kind}.{field}": setting for field, setting in fields.items()}
        elif name not in ELSEWHERE:
            decisive[f"{recipe}.{name}"] = value
    return decisive


def of_examples(examples: Mapping[str, Examples]) -> str:
    """The fingerprint of tokenised files."""
    whole = hashlib.sha256()
    for part in examples.values():
        for array in vars(part).values():
            whole.update(array.tobytes())
    return whole.hexdigest()


def is_begun(work_dir: pathlib.Path) -> bool:
    """Whether a run has recorded its settings there."""
    return (work_dir / FILE).is_file()


def require_same(work_dir: pathlib.Path, decisive: Fields, made_with: Mapping[str, str]) -> None:
    """Records the settings of a run, and the fingerprints of the files that it uses.

    Raises ValueError if the folder holds a run with others. Anything that an earlier version did
    not record is assumed to be the same, with a warning if that is a model or a text.
    """
    now = json.loads(json.dumps(decisive, default=str))  # As a file holds it: tuples are lists.
    file = work_dir / FILE
    with disk.owned(work_dir):
        before = disk.read_json(file) if file.is_file() else {}
        noted = before.pop("fingerprints", None)
        earlier = {"texts": before.pop("texts")} if "texts" in before else {}
        for name in before:
            if name not in now:
                raise ValueError(
                    f"{work_dir} holds a run that an earlier version began, and {name} no "
                    "longer exists; choose another --work_dir."
                )
            if before[name] != now[name]:
                raise ValueError(
                    f"{work_dir} holds a run whose {name} is {before[name]!r}, not "
                    f"{now[name]!r}; use the same, or choose another --work_dir."
                )
        if other := fingerprints.changed(earlier if noted is None else noted, made_with):
            raise ValueError(
                f"{work_dir} holds a run whose {other} changed since it began, under the same "
                "name; use the same, or choose another --work_dir."
            )
        if noted is None and (before or (work_dir / "checkpoints").exists()):
            logging.warning(fingerprints.UNKNOWN, work_dir)
        disk.write(file, json.dumps(now | {"fingerprints": made_with}, indent=1) + "\n")


def allow_another_rate(work_dir: pathlib.Path) -> None:
    """Lets a run that overflowed resume with a lower learning rate."""
    if (file := work_dir / FILE).is_file():
        noted = disk.read_json(file)
        noted.pop(RATE, None)
        disk.write(file, json.dumps(noted, indent=1) + "\n")
