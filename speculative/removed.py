"""What was removed or renamed, and what takes its place: the table of CHANGELOG.md.

The command line and `load` answer what is asked for by an old name with its row.
"""

REMOVED = {
    "speculative generate --gamma auto": "give a number, `--gamma N`; `speculative tune` finds the "
    "best one",
    "speculative audit --power_texts": "`--power` tells the power, by 256 texts of each fault",
    "debian_draft_smaller": "take the draft `debian_draft`, or one of `speculative distil`",
    "debian_lm_draft_smaller": "take the draft `debian_lm_draft`, or one of `speculative distil`",
    "scripts/distil.py": "`speculative distil --config FILE.gin`",
    "speculative.decoding.Adaptive": "give a number, `gamma=N`",
}
"""By option (with its value where others stay), script, name of a model, or name in Python."""


def said(name: str) -> str | None:
    """The sentence about what had this name, if anything had."""
    return f"{name} was removed: {REMOVED[name]}." if name in REMOVED else None
