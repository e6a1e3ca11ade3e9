"""What was removed or renamed, and what takes its place: the table of CHANGELOG.md.

The command line, gin files and `load` answer what is asked for by an old name with its row.
"""

import json
import pathlib

REMOVED: dict[str, str] = json.loads(
    pathlib.Path(__file__).with_name("removed.json").read_text(encoding="utf-8")
)
"""By option (with its value where others stay), script, name of a model, gin binding or name in
Python."""


def said(name: str) -> str | None:
    """The sentence about what had this name, if anything had."""
    return f"{name} was removed: {REMOVED[name]}." if name in REMOVED else None
