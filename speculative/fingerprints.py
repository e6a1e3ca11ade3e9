"""Fingerprints of files and values: results tell by content, not by name, what they are of."""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from speculative import disk

DIGITS = 16  # Of a fingerprint, in hexadecimal: 64 bits.
WHOLE = 2**28  # Bytes of files that are read whole; of more than that, larger files are sampled.
EVERY, SAMPLE = 2**20, 2**12  # The first bytes of every so many are such a file's sample.
UNKNOWN = (
    "%s was written before results kept fingerprints: whether its models and texts are still the "
    "same is not known; it is gone on with as if they were."
)


def of_value(value: Any) -> str:
    """The fingerprint of what JSON can say."""
    said = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:DIGITS]


def sha256(path: pathlib.Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with disk.reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_files(
    files: Mapping[str, pathlib.Path],
    recorded: Mapping[pathlib.Path, str] = MappingProxyType({}),
    sha256: Callable[[pathlib.Path], str] = sha256,
) -> str:
    """The fingerprint of files by their names in the fingerprint; their places do not matter.

    It is of each file's SHA-256, which may be `recorded` or be the name of the hub's file; else
    `sha256` computes it, or has kept it. Where what is to be read is larger than `WHOLE`, files
    above `EVERY` are known by their size and samples of each MiB alone: to read 45 GB would take as
    long as to load them. Times are not part of it, so a copy has the fingerprint of its original.
    Raises ValueError if a file cannot be read.
    """
    known, sizes = dict[str, str](), dict[str, int]()
    for name, path in files.items():
        with disk.reading(path):
            real = path.resolve(strict=True)
            if (said := recorded.get(path)) or re.fullmatch("[0-9a-f]{64}", real.name):
                known[name] = said or real.name
            else:
                sizes[name] = real.stat().st_size
    sampled = sum(sizes.values()) > WHOLE
    for name, size in sizes.items():
        whole = not sampled or size <= EVERY
        known[name] = sha256(files[name]) if whole else f"sampled {_sampled(files[name], size)}"
    return of_value(known)


def _sampled(path: pathlib.Path, size: int) -> str:
    """The SHA-256, in hexadecimal, of a file's size and samples."""
    parts = hashlib.sha256(str(size).encode())
    with disk.reading(path), path.open("rb") as file:
        for start in range(0, size, EVERY):
            parts.update(os.pread(file.fileno(), SAMPLE, start))
    return parts.hexdigest()


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names of fingerprints that were others before, joined by "and"; empty if none was.

    One that was not kept before is taken to be the same.
    """
    return " and ".join(name for name in now if before.get(name, now[name]) != now[name])
