"""The row that a command works on, from a gin file or from the command line."""

import argparse
import contextlib
import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from speculative.commands import AUTO, add_options, chosen, option

if TYPE_CHECKING:
    from speculative.decoding import Decoding
    from speculative.rows.config import RowConfig

DEMO = "demo"  # In place of a folder of checkpoints: the bundled pair.
PAPER = "paper"  # In place of an acceptance rate: that of the row in the paper.
SHIPPED_ROW = "configs/runs/table2.gin:debian_ende_t0"
TASKS = {"debian_target": "debian_ende", "debian_lm": "debian_lm"}  # Tasks of the bundled targets.
OWN = "own"  # The task of the user's own texts.

MODELS = ("--vocabulary", "--dtype", "--quantize", "--quantize_draft", "--mesh", "--draft_mesh")
TEXTS = ("--task", "--prefix", "--metric", "--columns")
SAMPLING = ("--temperature", "--top_k", "--top_p", "--min_p")
DECODING = ("--gamma", *SAMPLING, "--verification", "--tree", "--lenience")
LENGTHS = ("--source_length", "--max_length")
OPTIONS = ("--target", "--draft", *MODELS, *TEXTS, *DECODING, *LENGTHS, "--seed")
FREE = {"tpu": (63, 31), "gpu": (15, 15)}
"""How many guesses take little more time to verify than a few: with a target as stored, in int8.

See docs/tpu.md, int8.md and performance.md.
"""

FIELDS = {option.removeprefix("--"): option.removeprefix("--") for option in OPTIONS}
FIELDS |= {"limit": "num_examples", "weights": "checkpoints", "batch_size": "batch_size"}
"""Options by name, and the fields of `RowConfig` that they set."""


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Adds the options that change all rows of a table: their models and texts."""
    _add_models(parser)
    add_options(parser, "--data_file", *MODELS, "--module", "--limit")
    add_options(parser, "--source_length", "--seed", "--gin")


def add_row(parser: argparse.ArgumentParser) -> None:
    """Adds the options of one row: a gin file's, or a target, a draft and texts."""
    option(
        parser,
        "--gin_file FILE[:ROW]",
        "a row, and its name if the file has several, instead of a row of your own (without "
        "this, --target, --draft, --task or --data_file: the bundled pair's first row)",
    )
    add_options(parser, "--target", "--draft", *MODELS, target=None)
    _add_models(parser)
    add_options(parser, "--data_file", *TEXTS, "--module", "--limit", *DECODING)
    add_options(parser, *LENGTHS, "--seed", "--gin", max_length=None)


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_mutually_exclusive_group()
    option(models, "--checkpoints DIR", "folder of a row's checkpoints under their names, or demo")
    add_options(models, "--weights")
    option(
        parser,
        "--simulated_alpha A",
        "accept guesses with probability A; paper takes each row's rate from the paper. Outputs "
        "are wrong, only times are real",
        _probability,
    )


def _probability(text: str) -> float | str:
    """A number, or the word `PAPER`."""
    try:
        return text if text == PAPER else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or {PAPER}, not {text!r}") from None


def row(options: argparse.Namespace) -> tuple[str, "RowConfig"]:
    """The row of a command, and its name in records.

    Options override its file, and `--gin` overrides options.
    """
    from speculative.rows.config import experiment

    import_module(options)
    named = ("target", "draft", "task", "data_file")
    own = options.gin_file is None and any(getattr(options, name) is not None for name in named)
    if own:
        config = changed(options, None)
        models = [pathlib.PurePath(name).name for name in (config.target, config.draft)]
        name = f"{'-'.join(models)}-t{config.temperature:g}"
        return f"{config.task.replace('/', '_')}/{name}", config
    address = options.gin_file or SHIPPED_ROW
    return experiment(address), changed(options, address)


def changed(options: argparse.Namespace, address: str | None) -> "RowConfig":
    """The row at an address, or one from the command line only, as changed by the options."""
    from speculative import tasks
    from speculative.rows.config import paper_numbers, read_row

    fields = {} if address else _own(options)
    fields |= {FIELDS[name]: value for name, value in chosen(options, FIELDS).items()}
    if auto := fields.get("tree") == AUTO:
        del fields["tree"]
    if options.checkpoints not in (None, DEMO):
        fields["checkpoints"] = options.checkpoints
    config = read_row(address, options.gin, fields)
    more: dict[str, Any] = {}  # Fields that depend on the row.
    if auto:
        more["tree"] = _tree_of_row(options, config)
    for file in options.data_file or ():
        task, _, of_task = file.partition("=")
        if task not in tasks.TASKS:
            more["data_file"] = file
        elif task == config.task:
            more["data_file"] = of_task
    if options.simulated_alpha is not None:
        more["simulated_alpha"] = options.simulated_alpha
    if options.simulated_alpha == PAPER:
        more["simulated_alpha"] = paper_numbers(dataclasses.replace(config, checkpoints=None))[0]
        if more["simulated_alpha"] is None:
            raise ValueError(
                f"The paper has no alpha for {config.task} with {config.draft}; give a number "
                "(--simulated_alpha=A)."
            )
    return read_row(address, options.gin, fields | more) if more else config


def usual_tree(
    how: "RowConfig | Decoding", draft: str, quantize: str | None, platform: str | None = None
) -> int:
    """The number of guesses in a tree that pays on a platform, by default this machine's.

    It is 0 where a chain is faster, or where the draft or the rule supports only chains.
    """
    import jax

    from speculative.drafts import named
    from speculative.tree import Growth

    in_int8 = quantize not in (None, "none")
    most = FREE.get(platform or jax.default_backend(), (0, 0))[in_int8]
    verified = how.rule.verifies_trees(how.sampling)
    if not (verified and how.gamma and most and named.grows(draft)):
        return 0
    return max(how.gamma, min(most, Growth.most(how.gamma)))


def _tree_of_row(options: argparse.Namespace, config: "RowConfig") -> int:
    """The `usual_tree` of a row, on a TPU if it is compiled for one."""
    from speculative.measurement import chips

    there = getattr(options, "topology", chips.PRESENT) == chips.PRESENT
    platform = getattr(options, "platform", None) if there else "tpu"
    return usual_tree(config, config.draft, config.quantize, platform)


def table_name(options: argparse.Namespace) -> str:
    """The name of a table's file and results: its number (2 for 4) and its family."""
    number = "2" if options.table == "4" else options.table
    return number if options.family is None else f"{number}_{options.family}"


def of_table(options: argparse.Namespace) -> dict[str, "RowConfig"]:
    """The rows of a table by their names in records, as changed by the options."""
    from speculative.rows.config import experiment, read_row
    from speculative.studies import sweep

    import_module(options)
    demo = options.checkpoints == DEMO
    listed = [
        row for row in sweep.rows(table_name(options)) if sweep.shipped(read_row(row)) == demo
    ]
    tasks = sorted({read_row(row, options.gin).task for row in listed})
    for file in options.data_file or ():
        if len(tasks) > 1 and file.partition("=")[0] not in tasks:
            raise ValueError(
                f"--data_file {file} does not name its task; put one of "
                f"{', '.join(tasks)} and = before the file."
            )
    tree, options.tree = options.tree, None  # The rules that verify it depend on the row.
    configs = {experiment(row): changed(options, row) for row in listed}
    trees = _with_trees(options, configs, tree) if tree else {}
    if rules := getattr(options, "rules", None):
        configs = _of_rules(configs, rules)
    for name in [*configs]:  # A row with trees comes after its chains.
        configs[name] = configs.pop(name)
        configs |= dict([trees.pop(name)] if name in trees else [])
    configs |= dict(trees.values())
    if not configs:
        raise ValueError(
            f"Table {options.table} has no row for these checkpoints; give a folder of "
            "checkpoints, or demo for the bundled pair (--checkpoints)."
        )
    return configs


def _of_rules(configs: dict[str, "RowConfig"], rules: list[str]) -> dict[str, "RowConfig"]:
    """Rows with other verification rules, which are appended to their names.

    Several rules are compared only above temperature 0; at 0 they do the same.
    """
    return {
        name if rule == "token" else f"{name}_{rule}": dataclasses.replace(row, verification=rule)
        for name, row in configs.items()
        for rule in (rules if len(rules) == 1 or row.temperature > 0 else ())
    }


def _with_trees(
    options: argparse.Namespace, configs: dict[str, "RowConfig"], tree: int | str
) -> dict[str, tuple[str, "RowConfig"]]:
    """Rows with trees in place of chains, and their new names, by their old names.

    Above temperature 0 only coupled verification supports trees. Rows are left out if their draft
    guesses chains, if they are lenient, or if such a tree does not fit their gamma.
    """
    from speculative.drafts import named

    with_trees: dict[str, tuple[str, RowConfig]] = {}
    for name, row in configs.items():
        rule = row.verification if row.temperature == 0 else "coupled"
        if named.grows(row.draft):
            with contextlib.suppress(ValueError):
                row = dataclasses.replace(row, verification=rule)
                nodes = _tree_of_row(options, row) if tree == AUTO else tree
                if nodes:
                    tree_row = dataclasses.replace(row, tree=nodes)
                    with_trees[name] = f"{name}_tree{nodes}", tree_row
    if not with_trees and tree != AUTO:
        raise ValueError(
            f"No row of the table can have trees of {tree} guesses: they need a model or n-grams "
            "as the draft, lenience 1, and a gamma of at most their number, deep enough to hold "
            "them; leave --tree out, or give another number."
        )
    return with_trees


def import_module(options: argparse.Namespace) -> None:
    """Imports the module that the command line names, if it names one."""
    from speculative import tasks

    if options.module is not None:
        tasks.import_module(options.module)


def _own(options: argparse.Namespace) -> dict[str, Any]:
    """The defaults of a row from the command line, which are those of `generate`."""
    from speculative.loading import default_draft

    target = options.target or "debian_target"
    fields: dict[str, Any] = {"target": target, "temperature": 0.0, "gamma": 5, "task": OWN}
    if options.draft is None:
        fields["draft"] = default_draft(target, options.weights is not None)
    if options.data_file is None and options.task is None:
        fields["task"] = TASKS.get(target, OWN)
    if fields["task"] == OWN and options.task is None:
        fields["prefix"] = ""  # The user's own texts get a prefix only on request.
    return fields
