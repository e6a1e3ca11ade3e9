"""What was removed or renamed, and what takes its place: the table of CHANGELOG.md.

The command line, gin files and `load` answer what is asked for by an old name with its row.
"""

REMOVED = {
    "speculative generate --gamma auto": "give a number, `--gamma N`; `speculative tune` finds the "
    "best one",
    "speculative plan": "`speculative compile` tells whether a row fits a TPU",
    "speculative figure": "`speculative report` draws Figures 2 and 4, `speculative generate "
    "--trace` shows Figure 1",
    "speculative compile --output": "`--json` prints each row as it is done",
    "speculative bench --cache_length": "`--max_length`",
    "speculative verify --output": "`--json` prints what was found",
    "speculative audit --power_texts": "`--power` tells the power, by 256 texts of each fault",
    "debian_draft_smaller": "take the draft `debian_draft`, or make one with `speculative distil`",
    "debian_lm_draft_smaller": "take the draft `debian_lm_draft`, or make one with `speculative "
    "distil`",
    "distil.own_share": "drafts learn from the target's text alone, which is as good",
    "distil.kl_weight": "both distances weigh 1",
    "distil.variation_weight": "both distances weigh 1",
    "train.z_loss": "it is 1e-4",
    "train.tests": "`speculative evaluate` scores the checkpoint",
    "train.max_length": "`speculative evaluate --max_length`",
    "train.generation_batch": "`speculative evaluate --batch_size`",
    "scripts/distil.py": "`speculative distil --config FILE.gin`; `--target_dir` and `--out_dir` "
    "are `--target` and `--output`",
    "scripts/build_debian_corpus.py --releases": "constants of the script, as are `--po_packages`; "
    "`--extra_po` is always on, and downloads are kept in OUTPUT_DIR/downloads",
    "scripts/run_docs.py --whole": "commands are always run as the page has them",
    "scripts/check_wheel.py --wheel": "it builds the wheel that it checks",
    "scripts/train_vocabulary.py": "scripts/build_debian_corpus.py makes the vocabulary too",
    "scripts/debian_corpus.py": "its functions are in scripts/build_debian_corpus.py",
    "benchmarks.audit_peers --power_texts": "`--power`, as of `speculative audit`",
    "benchmarks.audit_faults --power_texts": "nothing; it is 1,024",
    "benchmarks.distillation": "docs/drafts.md keeps what it found",
    "speculative.decoding.Adaptive": "give a number, `gamma=N`",
    "speculative.studies.step_costs": "nothing; it kept the costs for `Adaptive`",
    "speculative.decoding.Output.counts": "nothing; they were for `Adaptive`",
    "speculative.decoding.random_draws": "`Decoding.draws(seed, examples)`",
    "speculative.models.FlaxModel.forward": "the first of what `forward_with_hidden` gives",
    "speculative.checkpoints.convert(extra_ids=)": "the usual sentinels follow where there is room",
    "speculative.checkpoints.native.load": "`open(folder)`, its `config` and `numpy()`",
    "speculative.measurement.hlo.Program.root": "the last of `Program.computations[name]`",
    "speculative.measurement.independence": "nothing; records tell acceptance by position",
    "speculative.rows.run.Row": "`run_row` gives the record; the examples are in its `kept`",
    "speculative.rows.workload.source_length": "`speculative bench --source_length`",
    "speculative.studies.batches.Timed": "nothing; rates are measured and not predicted",
    "speculative.studies.batches.crossover": "read it off the speed-ups of `Batches`",
    "speculative.studies.certificate": "`speculative.studies.verify`, which gives an `Audit`",
    "speculative.studies.compiled.Compiler.memory": "the field `hbm_bytes` of `Compiler.estimate`",
    "speculative.studies.bench.Bench.compile_seconds`, `host_us`, `operation_us": "nothing",
    "speculative.progress.waiting": "`progress.bar`",
    "speculative.reporting.figures": "`speculative.reporting.plots` and `.traces`",
    "speculative.reporting.plots.figure_3": "`speculative tune` finds the best gamma",
    "speculative.reporting.plots.figure_5": "`speculative bench` tells what each call costs",
    "speculative.reporting.tables.show_memory": "`speculative.rows.memory.needs`",
    "speculative.studies.tune.operations_ratio": "`theory.operations`",
    "speculative.backends.cpu.prepacked.Transposed": "nothing; XLA takes kernels as stored",
    "speculative.studies.sweep.certify": "`sweep.verify`",
    "speculative.studies.sweep.tuning": "the same, which gives the `Tuning` alone",
    "speculative.tasks.prompts.load_prompts(data_file=)": "the field `data` of a `tasks.Task`",
    "speculative.theory.best_gamma": "`studies.tune` takes all measured costs",
    "speculative.training.launch": "`speculative.training.recipes`, and `main` in scripts/train.py",
    "speculative.training.outputs": "`training.distil.answered`, `training.examples` for prompts",
    "speculative.training.own.acceptance": "`speculative.training.distil.acceptance`",
    "speculative.training.own.train": "`own.recipe`, whose result `training.distil.distil` takes",
}
"""By option (with its value where others stay), script, name of a model, gin binding or name in
Python."""


def said(name: str) -> str | None:
    """The sentence about what had this name, if anything had."""
    return f"{name} was removed: {REMOVED[name]}." if name in REMOVED else None
