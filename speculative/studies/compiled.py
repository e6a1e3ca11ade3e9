"""Compiles a row's programs for a TPU that need not be present: memory, copies, estimated times.

The programs are the very ones that a run dispatches. Times follow from the TPU compiler's estimates
of cycles (`measurement.schedule`); only a chip can show how long they take.
"""

import contextlib
import dataclasses
import functools
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, SingleDeviceSharding

from speculative import checks, theory
from speculative.backends import for_decoding
from speculative.decoding import Decoding, Params, loop, queue
from speculative.decoding.loop import Models
from speculative.decoding.programs import bytes_of
from speculative.drafts import model_draft, named
from speculative.measurement import alpha, chips
from speculative.measurement.chips import GIB, Chip
from speculative.measurement.hlo import HloModule
from speculative.measurement.schedule import Cost, Schedule
from speculative.models import Config, model_of, read_by_step, sharding
from speculative.models.decoder_only import AT_ONCE, READ_PROMPT
from speculative.progress import OnProgress
from speculative.rows import weights
from speculative.rows.config import RANDOM, RowConfig, gamma_of, paper_numbers
from speculative.tree import Growth
from speculative.types import PyTree

# The vocabulary sizes of T5 and Gemma 3, by the rows of embeddings that hold them.
PIECES = {32_128: 32_100, 262_208: 262_144}
ALPHAS = 0.6, 0.7, 0.8  # Assumed for rows with random weights that have no alpha.
DTYPE = "bfloat16"  # The default dtype of a row.
GAMMAS = range(1, checks.MAX_GAMMA + 1)  # The best one is chosen by predicted speed-up.
WORKERS = 2  # Programs that are compiled at once; each takes one core.

# The programs of a row. The loops decode a text in one dispatch, the steps are streamed.
PREFILL, LOOP, STEP = "prefill", "autoregressive loop", "autoregressive step"
SPECULATIVE_LOOP, SPECULATIVE_STEP = "speculative loop", "speculative step"
READING, SCORING = "reading a text", "scoring"  # Both measure alpha.


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled program."""

    hbm: int  # Bytes that it needs in addition to the weights.
    step: Cost | None  # A trip of its decoding loop, with the longest caches; None without a loop.
    once: Cost  # The whole program, with one trip of each decoding loop.
    # Instructions that copy an array of a kernel's size: in loops or streamed steps, and elsewhere.
    copies: tuple[list[str], list[str]]
    gathers: list[str]  # Instructions that gather kernels, in decoding loops.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A row's TPU compiler estimates, as `speculative compile --json` prints them.

    Times are milliseconds, with the longest caches, for steps inside the decoding loop by default.
    A floor is the time to read a step's weights, and all rows' caches, once. None marks values that
    were not compiled: those of a batch's streamed steps, or all if the models do not fit.
    """

    experiment: str
    task: str
    target: str
    draft: str
    mesh: str | None
    draft_mesh: str | None
    topology: str
    device_kind: str
    dtype: str
    quantize: str
    quantize_draft: str
    temperature: float
    gamma: int
    tree: int
    batch_size: int
    source_length: int
    max_length: int
    fits: bool
    hbm_bytes: int  # For the weights and the most demanding program, on all chips of a mesh.
    hbm_bytes_per_chip: int
    hbm_limit: int  # Per chip, like `hbm_weights`.
    hbm_weights: int
    weight_copies: int | None = None  # In decoding loops and streamed steps.
    weight_copies_elsewhere: int | None = None  # Before a loop, in prefill and in scoring.
    ms_target_step: float | None = None
    ms_target_step_floor: float | None = None
    ms_verify: float | None = None
    ms_verify_floor: float | None = None
    ms_draft_step: float | None = None
    ms_draft_step_floor: float | None = None
    ms_streamed_target_step: float | None = None
    ms_streamed_step: float | None = None
    ms_step: float | None = None  # Guesses and verification.
    # On a mesh, the exchanges of chips in a chain's or tree's step, and weight gathers in loops.
    ms_collectives: float | None = None
    collectives: int | None = None
    collective_bytes: int | None = None
    weight_gathers: int | None = None
    # If each chip has a whole draft: the time of a guess if they shared it.
    ms_draft_step_shared: float | None = None
    ms_prefill: float | None = None  # Target and draft.
    ms_scoring: float | None = None  # A whole text, for alpha.
    c: float | None = None
    verify_cost: float | None = None
    alpha: float | None = None  # Assumed for the speed-ups: the paper's, or a simulated one.
    speedup_predicted: float | None = None  # With verify_cost, at `gamma`.
    ms_per_token_predicted: float | None = None
    best_gamma: int | None = None
    best_speedup_predicted: float | None = None
    best_ms_per_token_predicted: float | None = None
    # For random weights: the best gamma and its speed-up, by assumed alpha.
    speedups_by_alpha: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    ms_target_step_one_chip: float | None = None  # The same target on one chip, if it fits.
    paper_alpha: float | None = None
    paper_speedup: float | None = None
    seconds_to_compile: float | None = None
    jax_version: str = jax.__version__
    libtpu_version: str | None = None
    fault: str | None = None  # The reason why it does not fit, and alternatives that do.


class DoesNotFit(ValueError):
    """The models, or one of their programs, need more memory than the chip has."""

    def __init__(self, need: int, chip: Chip, what: str, shards: int = 1) -> None:
        self.need = need
        over, fitting = need - chip.hbm, chips.smallest(need)
        where = f"it fits {', '.join(fitting)}" if fitting else "it fits none of the known chips"
        if mesh := chips.smallest_mesh(chip, need * shards):
            where += f", and this one's slices from {mesh} on"
        self.over = (
            f"{what} needs {need / GIB:.1f} GiB, but a program may use {chip.hbm / GIB:.1f} GiB of "
            f"a {chip.kind}, {over / GIB:.1f} GiB less."
        )
        super().__init__(
            f"{self.over[:-1]}; {where}, or take smaller models, a narrower dtype or int8 "
            "(--quantize=int8)."
        )


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A row's models and settings, as shapes on a device, from which programs are compiled."""

    models: Models
    params: Params
    config: Decoding
    source: Any  # int32 [B, S]
    device: Any  # A described device, the first of a mesh; None is the present one.
    on: Mesh | None = None  # The chips that share the target.
    spread: bool = False  # Whether they share the draft.

    @property
    def alone(self) -> "_Setting":
        """The same without a draft, for autoregressive decoding."""
        models, params = Models(self.models.target, None), Params(self.params.target)
        return dataclasses.replace(self, models=models, params=params, config=self.config.alone)

    def placed(self, tree: PyTree) -> PyTree:
        """Places shapes on the described devices; for the present one they stay as they are.

        A sharding there would count as another program in the cache of compiled programs.
        """
        if self.on is not None:
            return sharding.at(tree, self.on, draft=self.spread)
        on = SingleDeviceSharding(self.device) if self.device else None
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), tree)

    def begun(self) -> loop.Progress:
        """The shapes of the progress of all rows, with the longest caches."""
        size = self.config.cache_lengths()[-1]
        return jax.eval_shape(
            lambda params, source: loop.start(self.models, params, source, self.config, size),
            self.params, self.source,
        )  # fmt: skip

    @property
    def _text(self) -> Any:
        """The shape of whole texts, which alpha is measured on."""
        text = jax.ShapeDtypeStruct((self.source.shape[0], self.config.max_length), jnp.int32)
        return self.placed(text)

    def _queue(self) -> Any:
        """The loop of a batch, whose rows start the next text when theirs ends."""
        rows = self.source.shape[0]
        config = Decoding.together([self.config] * rows, self.config.sampling.kinds)
        begun, draws = self.placed((self.begun(), config.draws_struct(rows)))
        arguments = self.models, self.params, begun, draws, config, np.int32(1), np.int32(1)
        return queue.run.lower(*arguments, device=self.device)

    def lowered(self, program: str) -> Any:
        """One of the row's programs, as it is dispatched."""
        models, params, source, config = self.models, self.params, self.source, self.config
        if program == PREFILL:  # A queue begins its texts one by one.
            source = self.placed(jax.ShapeDtypeStruct((1, source.shape[1]), jnp.int32))
            arguments = models, params, source, config, config.cache_lengths()[-1]
            return loop.begin.lower(*arguments, device=self.device)
        if program == SCORING:
            read = self.placed(self.lowered(READING).out_info)
            more = self._text, read, config.sampling, config.rule, config.vocab_size
            return alpha.acceptances.lower(models, params, source, *more, device=self.device)
        if program == READING:
            assert (draft := models.draft) is not None
            alone, layers = self.alone, draft.layers
            arguments = alone.models, alone.params, source, self._text, layers
            return alpha.reading.lower(*arguments, device=self.device)
        draws = self.placed(jax.eval_shape(lambda: config.draws(0, np.arange(1))))
        if program in (LOOP, SPECULATIVE_LOOP):
            if source.shape[0] > 1:
                return self._queue()
            return loop.decode.lower(models, params, source, draws, config, device=self.device)
        begun = self.placed(self.begun())
        return loop.one_step.lower(models, params, begun, draws, config, device=self.device)


class Compiler:
    """Compiles rows for a chip; a program that several rows share is compiled once."""

    def __init__(self, topology: str, batch_size: int = 1) -> None:
        """Describes the topology; ValueError if it is unknown or its compiler is missing."""
        self.topology, self.chip, self._rows = topology, chips.chip(topology), batch_size
        self._devices = None if topology == chips.PRESENT else chips.devices(topology)
        self._done: dict[Any, Compiled] = {}

    def estimate(
        self, experiment: str, config: RowConfig, on_progress: OnProgress = lambda what, share: None
    ) -> Estimate:
        """Compiles a row's programs; `fits` is False if they need too much memory."""
        gamma, what = gamma_of(config, experiment), f"{config.target} with {config.draft}"
        setting = self._setting(config, gamma)
        size, shards = sharding.bytes_a_device(setting.params), setting.on.size if setting.on else 1
        paper_alpha, paper_speedup = paper_numbers(config, experiment)
        own = ("task", "target", "draft", "mesh", "draft_mesh", "max_length")
        known: dict[str, Any] = {name: getattr(config, name) for name in own} | {
            "experiment": experiment,
            "source_length": config.random_length,
            "topology": self.topology,
            "device_kind": self.chip.kind,
            "dtype": config.dtype or DTYPE,
            "quantize": config.quantize or "none",
            "quantize_draft": config.quantize_draft or "none",
            "temperature": float(config.temperature),
            "gamma": gamma,
            "tree": config.tree,
            "batch_size": self._rows,
            "hbm_limit": self.chip.hbm,
            "hbm_weights": size,
            "paper_alpha": paper_alpha,
            "paper_speedup": paper_speedup,
            "libtpu_version": chips.compiler_version(),
        }
        # Simulated acceptance needs no scoring, and the acceptance of trees is counted.
        scores = config.simulated_alpha is None and not config.tree
        scoring = [READING, SCORING] if scores else []
        # Batches are not streamed.
        streamed = [SPECULATIVE_STEP, STEP] if self._rows == 1 else []
        names = [SPECULATIVE_LOOP, LOOP, *streamed, PREFILL, *scoring]
        compiled, began = dict[str, Compiled](), time.perf_counter()
        try:
            if size > self.chip.hbm:
                raise DoesNotFit(size, self.chip, what, shards)
            with ThreadPoolExecutor(WORKERS) as pool:
                programs = pool.map(lambda name: self._program(setting, name, what), names)
                for number, name in enumerate(names):
                    on_progress("compiling", number / len(names))
                    compiled[name] = next(programs)
        except DoesNotFit as error:
            known |= {"hbm_bytes": shards * error.need, "hbm_bytes_per_chip": error.need}
            return Estimate(**known, fits=False, fault=str(error))
        beside = self._beside(config, gamma, what) if setting.on else {}
        seconds = time.perf_counter() - began
        need = size + max(one.hbm for one in compiled.values())
        fault = str(DoesNotFit(need, self.chip, what, shards)) if need > self.chip.hbm else None
        inside, elsewhere = (sum(len(one.copies[i]) for one in compiled.values()) for i in (0, 1))
        alone, both = (compiled[name].step for name in (LOOP, SPECULATIVE_LOOP))
        assert alone is not None and both is not None
        begun = setting.placed(setting.begun())
        read_once = [  # Bytes.
            sharding.bytes_a_device([read_by_step(params), state.keys, state.values, state.cross])
            for params, state in zip(setting.params, (begun.target, begun.draft.model), strict=True)
        ]
        floor, draft_floor = (1e3 * size / self.chip.bandwidth for size in read_once)
        step, draft = 1e3 * alone.seconds, 1e3 * both.named / gamma
        verify = 1e3 * both.seconds - gamma * draft
        c, v = draft / step, verify / step
        rate = paper_alpha if config.simulated_alpha is None else config.simulated_alpha
        speedups = {} if rate is None else _speedups(config, rate, c, v)
        assumed = ALPHAS if rate is None and config.checkpoints == RANDOM else ()
        by_alpha = {str(one): _speedups(config, one, c, v) for one in assumed}
        bests = {one: max(gains.items(), key=lambda x: x[1]) for one, gains in by_alpha.items()}
        best = max(speedups, key=speedups.__getitem__, default=None)
        streamed_ms = [1e3 * compiled[name].once.seconds for name in streamed] or [None, None]
        on_mesh: dict[str, Any] = {
            "ms_collectives": 1e3 * both.exchanging,
            "collectives": both.collectives,
            "collective_bytes": both.exchanged,
            "weight_gathers": sum(len(one.gathers) for one in compiled.values()),
        }
        return Estimate(
            **known,
            **(on_mesh | beside if setting.on else {}),
            fits=fault is None,
            hbm_bytes=shards * need,
            hbm_bytes_per_chip=need,
            weight_copies=inside,
            weight_copies_elsewhere=elsewhere,
            ms_target_step=step,
            ms_target_step_floor=floor,
            ms_verify=verify,
            ms_verify_floor=floor,
            ms_draft_step=draft,
            ms_draft_step_floor=draft_floor,
            ms_streamed_target_step=streamed_ms[1],
            ms_streamed_step=streamed_ms[0],
            ms_step=1e3 * both.seconds,
            ms_prefill=1e3 * compiled[PREFILL].once.seconds,
            ms_scoring=sum(1e3 * compiled[name].once.seconds for name in scoring) or None,
            c=c,
            verify_cost=v,
            alpha=rate,
            speedup_predicted=speedups.get(gamma),
            ms_per_token_predicted=step / speedups[gamma] if speedups else None,
            best_gamma=best,
            best_speedup_predicted=speedups[best] if best else None,
            best_ms_per_token_predicted=step / speedups[best] if best else None,
            speedups_by_alpha=bests,
            seconds_to_compile=seconds,
            fault=fault,
        )

    def _beside(self, config: RowConfig, gamma: int, what: str) -> dict[str, Any]:
        """For a mesh, times of the target on one chip and of a shared draft, if they fit."""
        times = dict[str, Any]()
        one = dataclasses.replace(config, mesh=None, draft_mesh=None)
        shared = dataclasses.replace(config, draft_mesh=config.mesh)
        for field, row, name in (
            ("ms_target_step_one_chip", one, LOOP),
            ("ms_draft_step_shared", shared, SPECULATIVE_LOOP),
        ):
            other = self._setting(row, gamma)
            if row == config or sharding.bytes_a_device(other.params) > self.chip.hbm:
                continue
            with contextlib.suppress(DoesNotFit):
                step = self._program(other, name, what).step
                assert step is not None
                times[field] = 1e3 * (step.named / gamma if row == shared else step.seconds)
        return times

    def _setting(self, config: RowConfig, gamma: int) -> _Setting:
        name, free = named.parts(config.draft)
        if free:
            raise ValueError(
                f"The draft {config.draft} is not just a model, and this command compiles pairs of "
                f"models; give {name or 'a checkpoint'} as the draft."
            )
        on = None
        if config.mesh is not None:
            on = sharding.mesh(config.mesh, self._devices)
        spread = config.draft_mesh is not None
        held = config.quantize or "none", config.quantize_draft or "none"
        sizes = [
            size.replace(dtype=config.dtype or DTYPE, quantize=quantize)
            for size, quantize in zip(weights.sizes(config), held, strict=True)
        ]
        rows, shards = sizes[0].vocab_size, config.shards
        sizes = [sharding.padded(*one, "tpu") for one in zip(sizes, shards, strict=True)]
        target, draft = map(model_of, sizes)
        decoding = config.decoding(PIECES.get(rows, rows), gamma)
        decoding = dataclasses.replace(decoding, growing=False)
        source = jax.ShapeDtypeStruct((self._rows, config.random_length), jnp.int32)
        params = Params(*map(_laid_out, sizes, (False, True), shards))
        device = self._devices[0] if self._devices else None
        fields = Models(target, model_draft(draft)), params, decoding, source, device, on, spread
        made = _Setting(*fields)
        placed = Params(*(made.placed(each) for each in params))
        if on and not spread:
            placed = placed._replace(draft=sharding.at(params.draft, on, whole=True))
        return dataclasses.replace(made, params=placed, source=made.placed(source))

    def _program(self, setting: _Setting, name: str, what: str) -> Compiled:
        """One of a row's programs; `what` names the row in errors."""
        if name in (LOOP, STEP):
            setting = setting.alone
        key = name, setting.models, jax.tree.structure(setting.config), setting.source.shape
        key = *key, setting.on, setting.spread
        if key not in self._done:
            lowered = setting.lowered(name)
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                raise explained(error, self.chip, f"{what} ({name})") from error
            program = HloModule(compiled.as_text())
            if not any(one.cycles for one in program.instructions.values()):
                raise ValueError(
                    f"libtpu {chips.compiler_version()} gives no estimate of cycles; take another "
                    "release of it."
                )
            parts_read = {READ_PROMPT: -(-setting.source.shape[1] // AT_ONCE)}
            schedule = Schedule(program, self.chip, loop.PROPOSING, parts_read)
            loops = [schedule.cost(one.called[1]) for one in schedule.loops()]
            kernels, parts = (_kernels(setting.params, part) for part in (False, True))
            inside, elsewhere = schedule.copies(parts)
            if name in (STEP, SPECULATIVE_STEP):
                inside, elsewhere = inside + elsewhere, []
            memory = compiled.memory_analysis()
            hbm = bytes_of(lowered.args_info) - bytes_of(setting.params)
            if setting.on and hbm >= bytes_of(begun := setting.begun()):
                # Chips share the caches among the arguments.
                hbm += sharding.bytes_a_device(setting.placed(begun)) - bytes_of(begun)
            hbm += beside_arguments(memory)
            step, once = max(loops, default=None), schedule.cost(program.entry)
            gathers = schedule.gathers(kernels) if setting.on else []
            self._done[key] = Compiled(hbm, step, once, (inside, elsewhere), gathers)
        return self._done[key]


def beside_arguments(memory: Any) -> int:
    """The bytes that a program needs in addition to its arguments, by its memory analysis."""
    own = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return own + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _speedups(config: RowConfig, alpha: float, c: float, v: float) -> dict[int, float]:
    """The speed-up by gamma, if a guess, or a level of a tree, costs the same at any gamma.

    A tree is the best one of `config.tree` guesses, accepted as `theory.shares_by_rank` predicts.
    """
    coupled = config.verification == "coupled" and not config.sampling.greedy
    if not config.tree and not coupled:
        return {g: theory.speedup(alpha, g, c, v) for g in GAMMAS}
    shares, speedups = theory.shares_by_rank(alpha, config.sampling.greedy), dict[int, float]()
    for g in GAMMAS:
        if config.tree >= g:
            best = theory.best_tree(shares, config.tree, g, Growth.WIDTH)
            tokens = theory.tree_tokens(best)
        else:
            tokens = theory.expected_tokens(shares[0], g)
        speedups[g] = tokens / (g * c + v)
    return speedups


def _laid_out(size: Config, draft: bool, shards: int) -> PyTree:
    """The shapes of a model's parameters as they lie on a TPU, or on several that share them."""
    lay_out = functools.partial(for_decoding, draft=draft, shards=shards, platform="tpu")
    shapes = sharding.placed(size, None)
    return jax.eval_shape(functools.partial(lay_out, quantize=size.quantize), shapes)


def _kernels(params: Params, part: bool) -> set[tuple[str, int]]:
    """The element types, as programs name them, and the numbers of elements of all matrices.

    With `part`, the numbers are those of each chip's part of a matrix. An int8 matrix may be copied
    in a wider type, too.
    """
    leaves: list[Array] = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    names = {"bfloat16": ("bf16",), "float32": ("f32",), "int8": ("s8", "bf16", "f32")}
    # Relative positions have 32 buckets; a copy of them costs nothing.
    large = [leaf for leaf in leaves if min(leaf.shape) > 32]

    def size(leaf: Array) -> int:
        on = leaf.sharding if part else None
        return math.prod(on.shard_shape(leaf.shape)) if on else leaf.size

    return {(name, size(leaf)) for leaf in large for name in names[str(leaf.dtype)]}


def explained(error: Exception, chip: Chip, what: str) -> Exception:
    """`DoesNotFit` if a program needs too much memory, otherwise the error itself."""
    message = str(error)
    size = re.search(
        r"(?:required for HLO temporaries \(|Used )([\d.]+)([KMGT]).*?exceed", message, re.S
    )
    if "RESOURCE_EXHAUSTED" not in message or size is None:
        return error
    need = int(float(size[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[size[2]])
    return DoesNotFit(max(need, chip.hbm + 1), chip, what)
