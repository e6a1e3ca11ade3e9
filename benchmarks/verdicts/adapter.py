"""What adapters share; those of other programs import nothing else from here.

With `--list` an adapter describes its program. Otherwise it draws samples of each prompt of a file,
which has one `{"prompt_tokens": [...]}` per line.
"""

import argparse
import json
import pathlib
from typing import Any

NUMBERS = {"samples": 1, "max_length": 16, "gamma": 4, "top_k": 0, "seed": 0}
REALS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
SAMPLING = "temperature", "top_k", "top_p", "min_p"


def command_line(
    description: str | None, path: type[str] | type[pathlib.Path] = str
) -> argparse.ArgumentParser:
    """Options of an adapter, whose folders and files are of the type `path`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--way")
    for name in ("target", "draft", "prompts", "output"):
        parser.add_argument(f"--{name}", type=path)
    for name, value in {**NUMBERS, **REALS}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """The configuration in a Hugging Face folder."""
    return json.loads((pathlib.Path(folder) / "config.json").read_text())


def end_tokens(folder: str | pathlib.Path) -> list[int]:
    """The tokens that end a text of a Hugging Face folder's model."""
    ends = read_config(folder)["eos_token_id"]
    return ends if isinstance(ends, list) else [ends]
