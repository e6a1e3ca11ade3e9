"""Prints TPU compiler estimates of rows."""

from collections.abc import Callable, Sequence

from rich.console import Console

from speculative.measurement.chips import GIB
from speculative.reporting.tables import CONSOLE, ROW, Column, field, show_parts
from speculative.studies.compiled import ALPHAS, Estimate
from speculative.studies.compiled_training import TrainingEstimate


def _ratio(name: str, over: str) -> Callable[[Estimate], str]:
    """The cell of a time and its ratio to another time."""

    def cell(one: Estimate) -> str:
        value, other = getattr(one, name), getattr(one, over)
        return "–" if value is None else f"{value:.2f} ({value / other:.2f})"

    return cell


def _assumed(alpha: str) -> Callable[[Estimate], str]:
    """The cell of the speed-up at an alpha and its gamma."""

    def cell(one: Estimate) -> str:
        gamma, speedup = one.speedups_by_alpha.get(alpha, (0, 0.0))
        return f"{speedup:.2f} ({gamma})" if gamma else "–"

    return cell


MEMORY = (
    ROW,
    Column("needs", lambda one: f"{one.hbm_bytes_per_chip / GIB:.1f} GiB", "memory per chip"),
    Column(
        "beside weights",
        lambda one: f"{(one.hbm_bytes_per_chip - one.hbm_weights) / GIB:.2f} GiB",
        "the part that the most demanding program adds: caches, activations, code",
    ),
    Column("may use", lambda one: f"{one.hbm_limit / GIB:.1f} GiB", "the chip's memory"),
    Column("fits", lambda one: "yes" if one.fits else "NO"),
    Column(
        "copies", field("weight_copies"), "copies of kernels in decoding loops and streamed steps"
    ),
    Column("elsewhere", field("weight_copies_elsewhere"), "copies of kernels elsewhere, each once"),
    Column("compiled", field("seconds_to_compile", ".0f"), "seconds for all programs"),
)
MESH = (
    ROW,
    Column("collectives", field("collectives"), "exchanges between chips in a step with guesses"),
    Column(
        "take",
        field("ms_collectives", ".2f"),
        "ms of these exchanges, by hops and links; kernels are copied meanwhile",
    ),
    Column(
        "KiB", lambda one: f"{one.collective_bytes / 2**10:,.0f}", "size of the exchanged arrays"
    ),
    Column("gathers", field("weight_gathers"), "gathers of weights in decoding loops"),
    Column(
        "over one chip",
        _ratio("ms_target_step_one_chip", "ms_target_step"),
        "ms of an autoregressive step on one chip, if the target fits (over that on the mesh)",
    ),
    Column(
        "guess, shared",
        _ratio("ms_draft_step_shared", "ms_draft_step"),
        "ms of a guess if chips share the draft (over that if each chip holds all of it; below 1, "
        "give --draft_mesh)",
    ),
)
STEPS = (
    ROW,
    Column("γ", field("gamma"), "guesses per step, or the depth of a tree"),
    Column("tree", field("tree"), "guesses in a tree; 0 is a chain"),
    Column(
        "step",
        _ratio("ms_target_step", "ms_target_step_floor"),
        "ms of an autoregressive step in its loop (over that of reading weights and caches)",
    ),
    Column(
        "verify",
        _ratio("ms_verify", "ms_target_step"),
        "ms of a pass over all guesses and of verification (v, over an autoregressive step)",
    ),
    Column(
        "guess",
        _ratio("ms_draft_step", "ms_draft_step_floor"),
        "ms of a guess of the draft, or a tree's level (over reading its weights and caches)",
    ),
    Column("c", field("c", ".4f"), "time of a guess over that of an autoregressive step"),
    Column(
        "streamed", _ratio("ms_streamed_step", "ms_step"), "ms of a streamed step (over the loop's)"
    ),
    Column("prefill", field("ms_prefill", ".1f"), "ms of reading the source, by both models"),
)
SPEED = (
    ROW,
    Column("α", field("alpha", ".2f"), "assumed: the paper's, or the one requested"),
    Column(
        "predicted",
        field("speedup_predicted", ".2f"),
        "speed-up from these costs, at γ; for trees, with the bundled pair's acceptance by rank",
    ),
    Column(
        "best",
        lambda x: f"{x.best_speedup_predicted:.2f} ({x.best_gamma})" if x.best_gamma else "–",
        "speed-up at the best γ, in parentheses",
    ),
    Column("ms per token", field("ms_per_token_predicted", ".2f"), "predicted, at γ"),
    Column("paper", field("paper_speedup", ".1f"), "measured by the paper"),
)

ASSUMED = (
    ROW,
    Column("verify", _ratio("ms_verify", "ms_target_step"), "as above"),
    Column("c", field("c", ".4f"), "as above"),
    *(
        Column(
            f"α = {alpha}", _assumed(str(alpha)), "speed-up from these costs at the best γ, in ()"
        )
        for alpha in ALPHAS
    ),
)

TRAINING = (
    Column("mesh", field("mesh")),
    Column("needs", lambda one: f"{one.hbm_bytes_per_chip / GIB:.1f} GiB", "memory per chip"),
    Column("fits", lambda one: "yes" if one.fits else "NO"),
    Column("step", field("ms_step", ",.0f"), "estimated ms"),
    Column(
        "of peak",
        lambda one: "–" if one.share_of_peak is None else f"{one.share_of_peak:.0%}",
        "operations that a step needs, over the chips' published peak in bfloat16",
    ),
    Column(
        "exchanging",
        field("ms_collectives", ",.0f"),
        "ms of exchanges between chips in a step; some overlap with products",
    ),
    Column("hours", field("hours", ",.1f"), "time of all steps"),
    Column("chip-hours", field("chip_hours", ",.0f")),
)

HEAVY = 0.05  # The least ratio of a guess's time to a step's for which `show` gives advice.


def show(found: Sequence[Estimate], console: Console = CONSOLE) -> None:
    """Prints rows as tables."""
    first = found[0]
    held = "" if first.quantize == "none" else f", {first.quantize}"
    on = (
        f"one chip of {first.topology}" if first.mesh is None else f"{first.topology}, {first.mesh}"
    )
    console.print(
        f"Estimated by the TPU's compiler (libtpu {first.libtpu_version}, JAX "
        f"{first.jax_version}) for {on}, a {first.device_kind}, "
        f"{first.dtype}{held}, batch size {first.batch_size}:"
    )
    assumed = any(one.alpha is not None for one in found)
    parts = MEMORY, *[MESH] * (first.collectives is not None), STEPS, *[SPEED] * assumed
    parts = *parts, *[ASSUMED] * any(one.speedups_by_alpha for one in found)
    show_parts([(columns, found) for columns in parts], console)
    for one in found:
        if (advice := _advice(one)) is not None:
            console.print(advice, soft_wrap=True)


def show_training(found: Sequence[TrainingEstimate], console: Console = CONSOLE) -> None:
    """Prints a training run on several meshes as a table."""
    first = found[0]
    console.print(
        f"Estimated by the TPU's compiler (libtpu {first.libtpu_version}, JAX "
        f"{first.jax_version}) for {first.chips} chips of {first.device_kind} ({first.topology}), "
        f"{first.peak_flops_per_chip / 1e12:.0f} TFLOP/s each: {first.config}, "
        f"{first.parameters / 1e9:.2f} billion parameters, {first.steps:,} steps of "
        f"{first.batch_size} rows of {first.source_length} + {first.target_length} tokens, "
        f"{first.dtype}, remat {first.remat!r}:",
        highlight=False,
    )
    show_parts([(TRAINING, found)], console)


def _advice(one: Estimate) -> str | None:
    """Advice for a row on a mesh in which a guess takes a large share of a step."""
    if one.mesh is None or one.c is None or one.ms_draft_step is None or one.c < HEAVY:
        return None
    text = f"{one.experiment}: on {one.mesh} a guess takes {one.c:.0%} of a step. "
    shared = one.ms_draft_step_shared
    if shared is not None and shared < one.ms_draft_step:
        return f"{text}Shared by the chips, it takes {shared:.2f} ms (--draft_mesh={one.mesh})."
    best = f" (γ = {one.best_gamma} is the best of these)" if one.best_gamma else ""
    return (
        f"{text}Fewer guesses{best}, a shallower tree or a draft of fewer layers would suit better."
    )
