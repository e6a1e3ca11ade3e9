"""Samples of any program, read from a file of JSON lines for an audit (docs/audit.md)."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculative import checks
from speculative.decoding import Decoding
from speculative.types import Fields

Encode = Callable[[str], NDArray[np.int_]]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text that a program made."""

    number: int  # From 1; in a file, the number of the line.
    source: tuple[int, ...]  # The tokens of the source or prompt.
    tokens: list[int]  # Including the end of sequence, unless the text was cut.
    logprobs: list[float] | None = None  # Natural logarithms, as the program computed them.


def read(path: pathlib.Path, encode: Encode, config: Decoding) -> list[Sample]:
    """Reads samples from a file of JSON lines with `prompt` or `prompt_tokens`, and `tokens`.

    If a line has settings of sampling, they must be those of the audit, in `config`.

    Raises:
        ValueError: a line is no sample (the message has its number), or there are none.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}; give one of samples, one JSON object per line.")
    samples = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                samples.append(_sample(number, json.loads(line), encode, config))
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                raise ValueError(f"Line {number} of {path} is no sample: {error}") from error
    if not samples:
        raise ValueError(f"{path} holds no samples; give one per line, as generate --json does.")
    return samples


def _sample(number: int, fields: Any, encode: Encode, config: Decoding) -> Sample:
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object.")
    if "prompt_tokens" in fields:
        source = _whole_numbers(fields, "prompt_tokens", config.vocab_size)
    elif isinstance(fields.get("prompt"), str):
        source = encode(fields["prompt"]).tolist()
    else:
        raise ValueError("it has neither a prompt, a text, nor prompt_tokens.")
    if len(source) > checks.MAX_TOKENS:
        raise ValueError(f"its prompt has {len(source)} tokens, the limit is {checks.MAX_TOKENS}.")
    for name, audited in dataclasses.asdict(config.sampling).items():
        if fields.get(name, audited) != audited:
            raise ValueError(
                f"its {name} is {fields[name]!r}, but the audit's is {audited} (--{name})."
            )
    tokens, most = _whole_numbers(fields, "tokens", config.vocab_size), config.max_length
    if not 1 <= len(tokens) <= most:
        raise ValueError(f"it has {len(tokens)} tokens; there must be 1 to {most} (--max_length).")
    ends = [at for at, token in enumerate(tokens, 1) if token in config.eos_ids]
    if ends and ends[0] < len(tokens):
        end = tokens[ends[0] - 1]
        raise ValueError(f"{len(tokens) - ends[0]} tokens follow the end of sequence, {end}.")
    if not ends and len(tokens) < most:
        raise ValueError(
            f"it stops after {len(tokens)} tokens without the end of sequence, "
            f"{' or '.join(map(str, config.eos_ids))}, although {most} were allowed (--max_length)."
        )
    logprobs = fields.get("logprobs")
    if logprobs is not None:
        fits = isinstance(logprobs, list) and len(logprobs) == len(tokens)
        # Values that are not finite can be read, and are reported as unexplained.
        if not fits or any(type(x) not in (int, float) or 1e-6 < x < math.inf for x in logprobs):
            raise ValueError("logprobs must be a number of at most 0 for each token.")
        logprobs = [float(x) for x in logprobs]
    return Sample(number, tuple(source), tokens, logprobs)


def _whole_numbers(fields: Fields, name: str, vocab_size: int) -> list[int]:
    tokens = fields.get(name)
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError(f"{name} must be a list of whole numbers.")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"{name} has {wrong[0]}; the target's tokens are 0 to {vocab_size - 1}.")
    return tokens
