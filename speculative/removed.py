"""Removed and renamed names with their replacements: the table of CHANGELOG.md.

The command line, gin files and `load` answer requests for an old name with its row.
"""

import json
import pathlib

REMOVED: dict[str, str] = json.loads(
    pathlib.Path(__file__).with_name("removed.json").read_text(encoding="utf-8")
)
"""Replacements by old name: an option (with its value if others remain), script, model, gin binding
or name in Python."""


def said(name: str) -> str | None:
    """The sentence about a removed name; None if the name was not removed."""
    return f"{name} was removed: {REMOVED[name]}." if name in REMOVED else None
