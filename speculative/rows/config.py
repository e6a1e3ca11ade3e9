"""The settings of a table's row, from its own gin file or from an entry in the table's."""

import contextlib
import dataclasses
import fnmatch
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import gin

from speculative import checks, gin_files, paper, tasks, theory
from speculative.checkpoints.checkpoint import DTYPES
from speculative.decoding import Decoding, Rule, rules
from speculative.measurement import quality
from speculative.sampling import Sampling
from speculative.tasks import Task
from speculative.tree import Growth
from speculative.types import EOS_ID, QUANTIZE, Fields

RANDOM = "random"  # Replaces the folder of checkpoints: true sizes, random weights.

LARGEST = dict.fromkeys(("num_examples", "alpha_tokens"), 10**9)
LARGEST |= dict.fromkeys(("max_length", "source_length"), checks.MAX_TOKENS)
LARGEST |= {"gamma": checks.MAX_GAMMA, "tree": checks.MAX_NODES, "batch_size": checks.MAX_BATCH}
LARGEST |= {"rounds": checks.MAX_SAMPLES, "seed": 2**32 - 1}  # Above T = 0 rounds are samples.
"""The largest values of `RowConfig`'s whole numbers; the smallest is 1, or 0 for seed and tree."""


@gin.register(module="settings")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowConfig:
    """The settings that determine a row's numbers; values out of range raise ValueError."""

    task: str  # A name that `tasks.task` knows, or any name if the row gives its `prefix`.
    target: str  # A model's name, which `weights` resolves.
    draft: str  # A model's name, or one that `drafts.named` knows.
    temperature: float  # 0 is argmax.
    top_k: int = 0  # The number of likeliest tokens kept; 0 is all.
    top_p: float = 1.0  # The probability mass kept, in (0, 1].
    min_p: float = 0.0  # The least probability kept, as a share of the greatest.
    verification: str = "token"  # The verification rule, a name in `decoding.rules.RULES`.
    lenience: float = 1.0  # l in (0, 1] of appendix A.5; below 1 outputs are not the target's own.
    # Guesses per step, or the depth of their tree; None is for commands that pick a number.
    gamma: int | None = None
    tree: int = 0  # Guesses in each step's tree; 0 is a chain.
    dtype: str | None = None  # The type of weights and products; None as in `loading.resolve`.
    # The format of target and draft kernels, one of `types.QUANTIZE`; None as in `loading.resolve`.
    quantize: str | None = None
    quantize_draft: str | None = None
    # Devices that share the target, as in "model:4", and the draft. A mesh of None is one device; a
    # draft_mesh of None puts a whole draft on each device.
    mesh: str | None = None
    draft_mesh: str | None = None
    max_length: int = 128  # Tokens at which an output is cut.
    num_examples: int | None = None  # Examples measured; None is all there are.
    alpha_tokens: int = 10_000  # Tokens of the target's text on which alpha is measured (4.2).
    # Texts decoded together where only the outputs count; texts are timed one by one.
    batch_size: int = 16
    # How often each example is decoded each way: above temperature 0, another sample each time.
    rounds: int = 3
    seed: int = 0  # The seed of all random numbers.
    paper_draft: str | None = None  # The draft of the paper's row to compare with, if any.
    # Accept each guess with this probability, whatever the models say, to time models with random
    # weights. None decodes normally.
    simulated_alpha: float | None = None
    # The tokens to which longer texts are cut, and the length of random sources; None is whole
    # texts, or 64.
    source_length: int | None = None
    # The folder to search for models, as `task/name` or `name`; "random" gives models of
    # `models.SIZES` random weights; None takes names as they are.
    checkpoints: str | None = None
    vocabulary: str | None = None  # SentencePiece model for checkpoints that come without one.
    data_file: str | None = None  # The texts, as `tasks.Task.data`; None is the task's own.
    # Replacements for the fields of `tasks.Task`; None keeps the task's own.
    columns: str | None = None
    prefix: str | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        for name, high in LARGEST.items():
            value = getattr(self, name)
            if value is not None or name not in ("gamma", "num_examples", "source_length"):
                checks.whole(f"RowConfig.{name}", value, int(name not in ("seed", "tree")), high)
        checks.fields(self)
        for name, value, known in (
            ("metric", self.texts.metric, quality.METRICS),
            ("dtype", self.dtype, DTYPES),
            ("quantize", self.quantize, QUANTIZE),
            ("quantize_draft", self.quantize_draft, QUANTIZE),
        ):
            if value not in (None, *known):
                words = ", ".join(known)
                raise ValueError(f"RowConfig.{name} must be one of {words}, not {value!r}.")
        if self.draft_mesh not in (None, self.mesh):
            raise ValueError(
                f"RowConfig.draft_mesh must be None, or {self.mesh!r} as RowConfig.mesh is, not "
                f"{self.draft_mesh!r}."
            )
        try:
            if self.mesh is not None:
                checks.mesh("mesh", self.mesh)
            if self.tree:
                self.rule.require_trees(self.sampling)
                _ = Growth(self.tree, self.gamma) if self.gamma else None
            _ = self.sampling, self.rule  # Both check their values.
        except checks.SettingError as error:
            raise ValueError(f"RowConfig.{error}") from None
        if self.simulated_alpha is not None and self.gamma is None:
            raise ValueError(
                "Simulated acceptance says nothing about the best gamma; set RowConfig.gamma."
            )

    @property
    def random_length(self) -> int:
        """The number of tokens of random sources."""
        return self.source_length or 64

    @property
    def texts(self) -> Task:
        """The task, with the fields that the row overrides."""
        own = {"data": self.data_file, "columns": self.columns}
        own |= {"prefix": self.prefix, "metric": self.metric}
        overrides = {name: value for name, value in own.items() if value is not None}
        new = self.prefix is not None and self.task not in tasks.TASKS
        return dataclasses.replace(Task(self.task) if new else tasks.task(self.task), **overrides)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def shards(self) -> tuple[int, int]:
        """The numbers of parts in which devices hold the target and the draft."""
        return checks.shards(self.mesh, self.draft_mesh)

    @property
    def samples(self) -> int:
        """The number of outputs per example, each way."""
        return 1 if self.sampling.greedy else self.rounds

    @property
    def rule(self) -> Rule:
        """The rule that verifies guesses."""
        return rules.select(self.verification, self.lenience, self.simulated_alpha)

    def decoding(
        self, vocab_size: int, gamma: int, eos_ids: tuple[int, ...] = (EOS_ID,)
    ) -> Decoding:
        """The settings of a generation with this gamma; 0 is autoregressive."""
        rule, tree = (self.rule, self.tree) if gamma else (self.rule.alone, 0)
        # No token ends a text of random words.
        ends = eos_ids if self.simulated_alpha is None else ()
        shares = None
        if tree and self.simulated_alpha is not None:  # Random weights cannot rank guesses.
            shares = theory.shares_by_rank(self.simulated_alpha, self.sampling.greedy)
        settings = vocab_size, self.sampling, gamma, self.max_length, ends, rule
        return Decoding(*settings, tree=tree, shares=shares)

    def gin(self) -> str:
        """The effective configuration as the text of a gin file."""
        fields = dataclasses.asdict(self)
        return "".join(f"RowConfig.{name} = {value!r}\n" for name, value in fields.items())


def gamma_of(config: RowConfig, experiment: str) -> int:
    """The guesses per step of a row; raises ValueError if it names none."""
    if config.gamma is None:
        raise ValueError(
            f"{experiment} has no gamma; set RowConfig.gamma (speculative tune finds the best one)."
        )
    return config.gamma


def paper_numbers(config: RowConfig, experiment: str = "row") -> tuple[float | None, float | None]:
    """The paper's alpha and speed-up for the corresponding row, if there is one.

    Lenient rows, and the exact rows of Table 5, are compared with Table 5, whose speed-ups at l = 1
    differ from those of Table 2.
    """
    sampling, task = config.sampling, config.texts.paper
    random = config.checkpoints == RANDOM and config.simulated_alpha is None
    if random or config.paper_draft is None or sampling.truncated:
        return None, None
    setting = {"draft": config.paper_draft, "temperature": sampling.temperature}
    if config.lenience < 1 or experiment.startswith("table5/"):
        lenient = paper.find(paper.TABLE_5, lenience=config.lenience, **setting)
        return (lenient.alpha, lenient.speedup) if lenient and task == "ende" else (None, None)
    row = paper.find(paper.TABLE_3, task=task, **setting)
    timed = paper.find(paper.TABLES_2_AND_4, task=task, **setting)
    return row.alpha if row else None, timed.speedup if timed else None


def changed(before: str, now: str) -> list[str]:
    """The lines of an earlier effective configuration (`RowConfig.gin`) that have changed.

    A setting that is missing because the text predates it has its default.
    """
    defaults = {f"RowConfig.{f.name}": repr(f.default) for f in dataclasses.fields(RowConfig)}
    split = [[line.partition(" = ") for line in text.splitlines()] for text in (before, now)]
    old, new = (defaults | {name: value for name, _, value in lines} for lines in split)
    names = [name for name in old | new if old.get(name) != new.get(name)]
    return [f"{name} = {old[name]}" if name in old else f"no {name}" for name in names]


@gin.register(module="settings")
@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one gin file: each row's own parameters of `RowConfig`, by row name.

    `shared` holds, by a pattern like "*_t0", the parameters of all rows whose names match. A later
    pattern overrides an earlier one, and a row's own parameters override all.
    """

    rows: Mapping[str, Fields] = dataclasses.field(default_factory=dict)
    shared: Mapping[str, Fields] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for row, parameters in (*self.rows.items(), *self.shared.items()):
            if pathlib.PurePath(str(row)).name != row or not isinstance(parameters, Mapping):
                raise ValueError(
                    f"Table has {row!r}: {parameters!r}, but needs a name without slashes and "
                    'its parameters, as in {"a_t0": {"gamma": 3}}.'
                )
        for pattern in self.shared:
            if not fnmatch.filter(self.rows, pattern):
                raise ValueError(f"Table.shared has {pattern!r}, which matches no row's name.")


def experiment(address: str | pathlib.Path) -> str:
    """A row's name in records: its table, and the name of the row or of its file there."""
    file, row = _split(address)
    folder = os.path.basename(os.path.dirname(os.path.abspath(file)))
    return f"{file.stem}/{row}" if row else f"{folder}/{file.stem}".removeprefix("/")


def addresses(file: pathlib.Path) -> list[str]:
    """The addresses of a gin file's rows, in order, for `read_row`, whose errors it shares."""
    with _parsed(file) as table:
        return [f"{file}:{row}" for row in table.rows] or [str(file)]


def read_row(
    address: str | pathlib.Path | None,
    bindings: Sequence[str] = (),
    fields: Fields | None = None,
) -> RowConfig:
    """The row that a gin file describes, changed first by fields, then by bindings.

    A binding is a text like `RowConfig.gamma = 3`. The address is the file, followed for a table of
    several rows by a colon and the row's name; None is for a row without a file. ValueError names
    the address if the file or row does not exist, if a parameter is unknown, or if a value is
    missing or out of range.
    """
    if address is not None:
        file, row = _split(address)
        with _parsed(address, bindings) as table:
            rows = ", ".join(table.rows)
            if row is None and rows:
                raise ValueError(f"it is a table; name a row of it, {file}:ROW: {rows}.")
            if row is not None and row not in table.rows:
                raise ValueError(f"the file has no row {row!r}; its rows are {rows or 'none'}.")
            if row is not None:
                shared = [x for at, x in table.shared.items() if fnmatch.fnmatchcase(row, at)]
                parts = *shared, table.rows[row], fields or {}
                fields = {name: value for part in parts for name, value in part.items()}
    with _parsed(address, bindings, fields):
        known, bound = dataclasses.fields(RowConfig), gin.get_bindings(RowConfig)
        required = [field.name for field in known if field.default is dataclasses.MISSING]
        lacking = [f"RowConfig.{name}" for name in required if name not in bound]
        if not lacking:
            return gin.get_configurable(RowConfig)()
    raise ValueError(
        f"{address or 'The command line'} gives no value for {lacking[0]}; add a line "
        f"{lacking[0]} = ..., or give it with --gin."
    )


def _split(address: str | pathlib.Path) -> tuple[pathlib.Path, str | None]:
    """The file of a row, and its name there, if it has one."""
    file, _, row = str(address).rpartition(".gin:")
    return (pathlib.Path(f"{file}.gin"), row) if file else (pathlib.Path(address), None)


@contextlib.contextmanager
def _parsed(
    address: str | pathlib.Path | None,
    bindings: Sequence[str] = (),
    fields: Fields | None = None,
) -> Iterator[Table]:
    """Binds a row's file, bindings and fields; errors there or in the block name the address."""
    file = None if address is None else gin_files.find(_split(address)[0])
    if file and not file.is_file():
        table = gin_files.CONFIGS / "runs" / f"{file.parent.name}.gin"
        fault = f"There is no configuration {file}"
        if table.is_file() and f'"{file.stem}"' in table.read_text(encoding="utf-8"):
            fault += f"; this row is a line of its table now: --gin_file={table}:{file.stem}"
        elif others := sorted(other.name for other in file.parent.glob("*.gin")):
            fault += f"; there are {', '.join(others)}"
        raise ValueError(f"{fault}.")
    gin.clear_config()
    try:
        values = {f"RowConfig.{name}": value for name, value in (fields or {}).items()}
        gin_files.read(file, bindings, values=values)
        yield gin.get_configurable(Table)()
    except (TypeError, AttributeError, ValueError) as error:
        fault = re.split("In call to configurable|in config string", str(error))[0]
        if "'RowConfig' doesn't have a parameter" in fault:  # Gin does not list the parameters.
            names = ", ".join(field.name for field in dataclasses.fields(RowConfig))
            fault += f" (It has {names}.)"
        where = f"{address or 'The command line'} is no configuration of a row"
        raise ValueError(f"{where}: {' '.join(fault.split())}") from error
    finally:
        gin.clear_config()
