"""What was removed or renamed, and what takes its place: the table of CHANGELOG.md.

The command line, gin files and `load` answer what is asked for by an old name with its row.
"""

REMOVED = {
    "speculative generate --gamma auto": "give a number, `--gamma N`; `speculative tune` finds the "
    "best one",
    "speculative audit --power_texts": "`--power` tells the power, by 256 texts of each fault",
    "debian_draft_smaller": "take the draft `debian_draft`, or make one with `speculative distil`",
    "debian_lm_draft_smaller": "take the draft `debian_lm_draft`, or make one with `speculative "
    "distil`",
    "scripts/distil.py": "`speculative distil --config FILE.gin`; `--target_dir` and `--out_dir` "
    "are `--target` and `--output`",
    "benchmarks.distillation": "docs/drafts.md keeps what it found",
    "distil.distil.own_share": "drafts learn from the target's text alone, which is as good",
    "distil.distil.kl_weight": "both distances weigh 1",
    "distil.distil.variation_weight": "both distances weigh 1",
    "train.train.z_loss": "it is 1e-4",
    "speculative.decoding.Adaptive": "give a number, `gamma=N`",
    "speculative.decoding.Output.counts": "nothing; they were for `Adaptive`",
    "speculative.measurement.independence": "nothing; records tell acceptance by position",
    "speculative.training.launch": "`speculative.training.recipes`, and `main` in scripts/train.py",
    "speculative.training.outputs": "`training.train.answered`, `training.examples` for prompts",
    "speculative.training.own.train": "`own.recipe`, whose result `training.distil.distil` takes",
}
"""By option (with its value where others stay), script, name of a model, gin binding or name in
Python."""


def said(name: str) -> str | None:
    """The sentence about what had this name, if anything had."""
    return f"{name} was removed: {REMOVED[name]}." if name in REMOVED else None
