"""Fingerprints of files and values: results identify their inputs by content, not by name."""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from speculative import disk

DIGITS = 16  # Hexadecimal digits of a fingerprint: 64 bits.
WHOLE = 2**28  # Bytes of files up to which all are read whole; beyond, large files are sampled.
EVERY, SAMPLE = 2**20, 2**12  # A sample is the first `SAMPLE` bytes of every `EVERY`.
UNKNOWN = (
    "%s was written before results kept fingerprints: whether its models and texts have changed "
    "is not known; it is resumed as if they had not."
)


def of_value(value: Any) -> str:
    """The fingerprint of a value that JSON can represent."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:DIGITS]


def sha256(path: pathlib.Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with disk.reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_files(
    files: Mapping[str, pathlib.Path],
    recorded: Mapping[pathlib.Path, str] = MappingProxyType({}),
    sha256: Callable[[pathlib.Path], str] = sha256,
) -> str:
    """The fingerprint of files under the names in `files`; their locations do not matter.

    It covers each file's SHA-256: the `recorded` one, or the one that names the file in the hub's
    cache, or else what `sha256` returns. If more than `WHOLE` bytes would be read, files
    above `EVERY` are represented by only their size and a sample of each MiB: reading 45 GB would
    take as long as loading them. Times are not included, so a copy has its original's fingerprint.
    Raises ValueError if a file cannot be read.
    """
    known, sizes = dict[str, str](), dict[str, int]()
    for name, path in files.items():
        with disk.reading(path):
            real = path.resolve(strict=True)
            if (digest := recorded.get(path)) or re.fullmatch("[0-9a-f]{64}", real.name):
                known[name] = digest or real.name
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
    """The names of fingerprints that changed, joined by "and"; empty if none did.

    A fingerprint that was not recorded before counts as unchanged.
    """
    return " and ".join(name for name in now if before.get(name, now[name]) != now[name])
