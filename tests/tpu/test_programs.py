"""What the TPU's compiler makes of the programs: T5 v1.1 XXL cut to a few layers, on a v4 chip.

Its estimates are deterministic, so bounds are near what was found (libtpu 0.0.52, JAX 0.10.2).
`make test-tpu` runs this file, with libtpu on Python's path.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from rich.console import Console

from speculative import cli
from speculative.backends import Projection, Weight, Xla, compiler_options, options
from speculative.backends import tpu as backend
from speculative.decoding import loop, programs, queue
from speculative.gin_files import CONFIGS
from speculative.measurement import alpha, chips
from speculative.measurement.schedule import Cost
from speculative.models import SIZES, abstract_params
from speculative.reporting import compiled as reporting
from speculative.rows.config import RowConfig
from speculative.studies import compiled, compiled_training
from speculative.studies.compiled import Compiler, Estimate
from speculative.studies.compiled_training import TrainingEstimate

pytest.importorskip("libtpu")

ROW = RowConfig(
    task="cut", prefix="", target="t5_1_1_xxl", draft="t5_1_1_small", temperature=0.0, gamma=7,
    simulated_alpha=0.75, source_length=128,
)  # fmt: skip


def cut(config: RowConfig) -> list[Any]:
    """Both models with two layers a stack."""
    two = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    return [SIZES[name].replace(**two) for name in (config.target, config.draft)]


@pytest.fixture(autouse=True)
def cut_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs with a planted fault are no other test's, and none is read from a cache of files."""
    chips.prepare()
    monkeypatch.setattr(compiled.weights, "sizes", cut)
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    forget()


def forget() -> None:
    """No program that was traced is used again."""
    traced: list[Any] = [
        queue.run,
        loop.decode,
        loop.one_step,
        loop.begin,
        alpha.reading,
        alpha.acceptances,
    ]
    for one in traced:
        one.clear_cache()


def estimate(topology: str = "v4-8", **changes: Any) -> Estimate:
    return Compiler(topology).estimate("cut", dataclasses.replace(ROW, **changes))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pair_is_at_the_floor_of_its_memory(temperature: float) -> None:
    found = estimate(temperature=temperature)
    assert found.fits
    assert found.weight_copies == 0
    assert found.weight_copies_elsewhere == 0
    # Two layers of XXL and its logits; what is not weights weighs more than among 24 layers.
    step, floor = found.ms_target_step, found.ms_target_step_floor
    assert step is not None and floor is not None
    assert 0.99 <= step / floor <= 1.25
    assert found.verify_cost is not None and found.verify_cost <= 1.08
    assert found.ms_streamed_step is not None and found.ms_step is not None
    assert found.ms_streamed_step / found.ms_step <= 1.08
    assert found.ms_draft_step is not None and found.ms_draft_step <= 0.125
    assert found.hbm_bytes - found.hbm_weights <= 2**28
    # One of these parts alone is not the whole.
    assert found.ms_step == pytest.approx(7 * found.ms_draft_step + (found.ms_verify or 0))


def program(name: str) -> compiled.Compiled:
    """One of the cut row's programs, traced anew."""
    forget()
    compiler = Compiler("v4-8")
    return compiler._program(compiler._setting(ROW, 7), name, "cut")


def test_kernels_are_copied_where_projections_are_merged_with_their_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert program(compiled.STEP).copies == ([], [])
    # As programs of models that are not large: reading ahead prevents it too.
    monkeypatch.setattr(programs, "LARGE", 2**40)
    assert program(compiled.STEP).copies == ([], [])
    monkeypatch.setattr(backend.Tpu, "product", Xla.product)
    assert sum(map(len, program(compiled.STEP).copies)) > 0


def test_a_single_row_costs_more_than_a_tile_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = program(compiled.LOOP).step
    monkeypatch.setattr(backend.Tpu, "width", Xla.width)
    alone = program(compiled.LOOP).step
    assert filled is not None and alone is not None
    assert alone.seconds > 1.5 * filled.seconds


def large_draft(config: RowConfig) -> list[Any]:
    """Three layers of XXL and twelve of T5 v1.1 large, whose kernels the chip's memory lacks."""
    target, draft = SIZES[config.target], SIZES["t5_1_1_large"]
    fewer = target.replace(num_encoder_layers=2, num_decoder_layers=3)
    return [fewer, draft.replace(num_encoder_layers=2, num_decoder_layers=12)]


def test_a_draft_is_read_ahead_if_no_kernel_stays_on_the_chip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled.weights, "sizes", large_draft)
    ahead = program(compiled.SPECULATIVE_LOOP).step
    monkeypatch.setattr(programs, "compiler_options", lambda *_: ())
    stayed = program(compiled.SPECULATIVE_LOOP).step
    assert ahead is not None and stayed is not None
    assert ahead.named < 0.65 * stayed.named
    assert ahead.seconds < 0.75 * stayed.seconds


def test_a_batch_is_near_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compiler("v4-8", batch_size=16).estimate("cut", ROW)
    assert found.ms_target_step is not None and found.ms_target_step_floor is not None
    assert 0.99 <= found.ms_target_step / found.ms_target_step_floor <= 1.55
    assert found.ms_draft_step is not None and found.ms_streamed_step is None

    def batch(name: str) -> Cost:
        forget()
        compiler = Compiler("v4-8", batch_size=16)
        step = compiler._program(compiler._setting(ROW, 7), name, "cut").step
        assert step is not None
        return step

    # Heads of 64 by themselves fill half of a tile's lanes, and a scatter into them is slow.
    with monkeypatch.context() as patch:
        patch.setattr(backend, "LANES", 64)
        assert 1e3 * batch(compiled.LOOP).seconds > 1.5 * found.ms_target_step
    # All heads of a draft lie side by side, and a scatter into them is slow too.
    monkeypatch.setattr(backend.TpuDraft, "write", Xla.write)
    assert 1e3 * batch(compiled.SPECULATIVE_LOOP).named / 7 > 1.5 * found.ms_draft_step


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "token"), (1.0, "coupled")])
def test_a_tree_costs_little_more_than_a_chain(temperature: float, rule: str) -> None:
    """63 guesses of depth 7; two layers of XXL, of whose step logits are a large part."""
    chain = estimate(temperature=temperature)
    found = estimate(temperature=temperature, verification=rule, tree=63)
    assert found.weight_copies == 0
    assert chain.ms_draft_step is not None and found.ms_draft_step is not None
    # Two layers of small: ranking 8 nodes' successors takes as long as a level itself.
    assert found.ms_draft_step - chain.ms_draft_step <= 0.08
    assert chain.ms_verify is not None and found.ms_verify is not None
    assert found.ms_verify / chain.ms_verify <= 1.25
    # At the paper's alpha of 0.75, or 0.62 above temperature 0, with all layers: docs/tpu.md.
    assert (found.speedup_predicted or 0) > (chain.speedup_predicted or 0)


def test_trees_in_batches_need_no_loop_over_rows() -> None:
    """16 rows with trees of 15 guesses: 256 positions, of which products cost more."""
    row = dataclasses.replace(ROW, tree=15)
    alone, found = (Compiler("v4-8", rows).estimate("cut", row) for rows in (1, 16))
    assert alone.ms_verify is not None and found.ms_verify is not None
    assert found.ms_verify / alone.ms_verify <= 4
    assert alone.ms_draft_step is not None and found.ms_draft_step is not None
    assert found.ms_draft_step / alone.ms_draft_step <= 6


def test_a_compiler_without_the_option_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    device, *_ = chips.devices("v4-8")
    assert compiler_options(True, True, device) == tuple(options.READ_AHEAD.items())
    assert compiler_options(False, True, device) == ()
    (v5e,) = chips.devices("v5e-1")
    assert compiler_options(False, True, v5e) == tuple(options.WINDOWS.items())
    assert compiler_options(False, False, v5e) == ()
    monkeypatch.setattr(options, "READ_AHEAD", {"xla_tpu_of_a_later_release": "true"})
    compiler_options.cache_clear()
    assert compiler_options(True, False, device) == ()
    compiler_options.cache_clear()


def test_it_is_near_the_floor_of_a_v5e() -> None:
    found = estimate("v5e-1")
    assert found.fits
    assert found.weight_copies == 0
    assert found.ms_target_step is not None and found.ms_target_step_floor is not None
    assert 0.99 <= found.ms_target_step / found.ms_target_step_floor <= 1.6


@pytest.mark.parametrize("topology", ["v5p-8", "v6e-1"])
def test_it_compiles_for_other_chips(topology: str) -> None:
    # Two layers of both stacks of both models, embeddings and logits, in bfloat16.
    weights = programs.bytes_of([abstract_params(size) for size in cut(ROW)]) / 2
    compiler = Compiler(topology)
    setting = compiler._setting(ROW, 7)
    loop = compiler._program(setting, compiled.SPECULATIVE_LOOP, "the row")
    need = programs.bytes_of(setting.params) + loop.hbm
    assert weights < need < weights + 2**28


def test_the_parts_of_a_long_prompt_are_read_before_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part takes more time than a step, which does not depend on them."""
    sizes = [SIZES["gemma3_270m"].replace(num_layers=2, windows=(512, 0))] * 2
    monkeypatch.setattr(compiled.weights, "sizes", lambda config: sizes)
    names = {"target": "gemma3_270m", "draft": "gemma3_270m", "gamma": 2}
    int8 = {"quantize": "int8", "quantize_draft": "int8"}
    short, long = (estimate("v5e-1", **names, **int8, source_length=size) for size in (512, 2048))
    assert short.ms_target_step and long.ms_target_step and short.ms_prefill and long.ms_prefill
    assert 0.75 < long.ms_target_step / short.ms_target_step < 1.25
    assert long.ms_prefill > 3 * short.ms_prefill
    assert long.c is not None and 0.75 < long.c < 1.5  # The draft is as large as the target.


def test_a_v1_0_target_is_at_its_floor() -> None:
    """Tied logits, and a feed-forward layer without gate."""
    found = estimate(target="t5_11b", draft="t5_small")
    assert found.weight_copies == 0
    assert found.ms_target_step is not None and found.ms_target_step_floor is not None
    assert 0.99 <= found.ms_target_step / found.ms_target_step_floor <= 1.5
    assert found.verify_cost is not None and found.verify_cost <= 1.1


@pytest.mark.parametrize("quantize", ["int8", "int8-activations"])
def test_a_target_in_int8_is_read_as_int8(quantize: str) -> None:
    whole, found = estimate(), estimate(quantize=quantize)
    assert (found.weight_copies, found.weight_copies_elsewhere) == (0, 0)
    # The embedding stays in bfloat16; with two layers it is a tenth of all.
    assert found.hbm_weights < 0.65 * whole.hbm_weights
    step, floor = found.ms_target_step, found.ms_target_step_floor
    assert step is not None and floor is not None and whole.ms_target_step is not None
    assert 0.99 <= step / floor <= 1.45
    assert step < 0.72 * whole.ms_target_step
    assert found.verify_cost is not None and found.verify_cost <= 1.08


def test_kernels_of_int8_that_are_widened_in_memory_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be read twice as bfloat16, beside once as int8."""

    def widened(self: Xla, x: Any, projection: Projection, *given: Any, **named: Any) -> Any:
        values, scales = projection.weight
        wide = jax.lax.optimization_barrier(values.astype(x.dtype))
        weight = Weight(wide, None if scales is None else scales.astype(x.dtype))
        return Xla.product(self, x, projection._replace(weight=weight), *given, **named)

    monkeypatch.setattr(backend.Tpu, "product", widened)
    forget()
    found = estimate(quantize="int8")
    assert (found.weight_copies or 0) > 0


FIELDS = """target draft topology device_kind dtype gamma fits hbm_bytes hbm_limit hbm_weights
weight_copies ms_target_step ms_target_step_floor ms_verify ms_verify_floor ms_draft_step
ms_draft_step_floor c verify_cost speedup_predicted paper_alpha seconds_to_compile jax_version
libtpu_version""".split()


def test_the_command_prints_an_object_or_tables(capsys: pytest.CaptureFixture[str]) -> None:
    row = str(CONFIGS / "runs" / "table2" / "ende_small_t0.gin")
    assert cli.main(["compile", "--gin_file", row, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(FIELDS) <= set(found)
    assert (found["gamma"], found["paper_alpha"], found["source_length"]) == (7, 0.75, 64)
    c, v = found["c"], found["verify_cost"]
    assert found["speedup_predicted"] == pytest.approx((1 - 0.75**8) / 0.25 / (7 * c + v))
    one = Estimate(**found)
    reporting.show([one], Console(width=120))
    said = capsys.readouterr().out
    assert "Estimated by the TPU's compiler" in said
    assert "ende_small_t0" in said


def test_what_does_not_fit_says_by_how_much_and_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.weights, "sizes", lambda c: [SIZES[c.target], SIZES[c.draft]])
    found = estimate("v5e-1")
    assert not found.fits
    assert found.ms_target_step is None
    assert found.fault is not None
    assert "t5_1_1_xxl with t5_1_1_small needs 20.9 GiB" in found.fault
    assert "15.8 GiB of a TPU v5 lite, 5.1 GiB less; it fits v4-8, v5p-8, v6e-1" in found.fault


@pytest.mark.timeout(900)  # Eight programs, some of them for four chips.
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_four_chips_share_a_target(quantize: str) -> None:
    alone, found = estimate(quantize=quantize), estimate(quantize=quantize, mesh="model:4")
    assert found.fits and found.mesh == "model:4"
    assert (found.weight_copies, found.weight_copies_elsewhere, found.weight_gathers) == (0, 0, 0)
    # Three sums a layer, two for the greatest logit and its place, and where logits end.
    assert found.collectives == 3 * 2 + 3
    assert found.ms_collectives == pytest.approx(9 * 5e-3, rel=0.2)
    quarter = (alone.ms_target_step_floor or 0) / 4
    assert found.ms_target_step is not None and found.ms_target_step_floor is not None
    assert found.ms_target_step_floor == pytest.approx(quarter, rel=0.02)
    # Two layers of XXL in int8 are little beside logits and what is not products.
    most = {"none": 1.35, "int8": 1.9}[quantize]
    assert 0.99 <= found.ms_target_step / quarter
    assert found.ms_target_step <= most * quarter + (found.ms_collectives or 0)
    # The draft and the embedding are whole on each chip.
    assert found.hbm_weights <= alone.hbm_weights / 4 + 2**29
    assert found.hbm_bytes == 4 * found.hbm_bytes_per_chip
    assert found.ms_target_step_one_chip == pytest.approx(alone.ms_target_step or 0)
    # A draft as small as this is faster whole.
    assert (found.ms_draft_step_shared or 0) > (found.ms_draft_step or 0)


def test_a_mesh_larger_than_the_slice() -> None:
    with pytest.raises(ValueError, match="model:8 needs 8 devices, and there are 4"):
        estimate(mesh="model:8")


def test_slices() -> None:
    for topology, count in ("v4-16", 8), ("v5e-4", 4), ("v6e-1", 1):
        assert len(chips.devices(topology)) == count
    for topology in "v4-6", "v4-12", "v5e-3", "v7-8", "v4":
        with pytest.raises(ValueError, match=f"There is no topology '{topology}'"):
            chips.chip(topology)


TRAINING = """
from __gin__ import dynamic_registration
from speculative.models import registry
from speculative.models.t5 import config
from speculative.training import train
include "configs/training/finetune_ende.gin"
"""
SMALL = """
config.T5Config.vocab_size = 1024
config.T5Config.emb_dim = 512
config.T5Config.num_heads = 8
config.T5Config.head_dim = 64
config.T5Config.mlp_dim = 1024
config.T5Config.num_encoder_layers = 1
config.T5Config.num_decoder_layers = 1
config.T5Config.dtype = "bfloat16"
train.train.model = @config.T5Config()
"""


def test_a_training_run_is_predicted(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One layer a stack, on four chips, by the command."""
    (tmp_path / "small.gin").write_text(TRAINING + SMALL)
    options = [f"--config={tmp_path / 'small.gin'}", "--topology=v4-8", "--mesh=data:4", "--json"]
    less = {"steps": 1000, "batch_size": 16, "source_length": 128, "target_length": 64}
    options += [f"--gin=TrainConfig.{name} = {value}" for name, value in less.items()]
    assert cli.main(["compile", *options]) == 0
    one = TrainingEstimate(**json.loads(capsys.readouterr().out))
    assert (one.chips, one.steps, one.fits) == (4, 1000, True)
    assert one.ms_step is not None and one.share_of_peak is not None
    share = one.operations / (one.ms_step / 1e3 * 4 * 275e12)
    assert one.share_of_peak == pytest.approx(share)
    assert 0.01 < share < 0.6  # Narrow layers do not fill the matrix units.
    assert one.hours == pytest.approx(1000 * one.ms_step / 3.6e6)
    assert one.chip_hours == pytest.approx(4 * (one.hours or 0))
    assert 0 < one.hbm_bytes_per_chip < one.hbm_limit
    reporting.show_training([one], Console(width=160))
    said = capsys.readouterr().out
    assert "275 TFLOP/s each: small, 0.01 billion parameters, 1,000 steps" in said


def test_the_best_mesh_is_printed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all whose devices divide the rows; times are given here, the fastest does not fit."""
    times = {"data:8,model:1": 10.0, "data:4,model:2": 30.0, "data:2,model:4": 20.0}
    times["data:1,model:8"] = 25.0
    tried = list[str]()

    def estimated(name: str, model: Any, config: Any, topology: str, mesh: str, **_: Any) -> Any:
        tried.append(mesh)
        fits = mesh != "data:8,model:1"
        return TrainingEstimate(
            config=name, parameters=1, topology=topology, device_kind="", mesh=mesh, chips=8,
            dtype="", remat="", batch_size=8, microbatches=1, source_length=1, target_length=1,
            fits=fits, hbm_bytes_per_chip=1, hbm_limit=1, steps=1, operations=1.0,
            peak_flops_per_chip=1.0, ms_step=times[mesh] if fits else None,
        )  # fmt: skip

    monkeypatch.setattr(compiled_training, "estimate", estimated)
    (tmp_path / "small.gin").write_text(TRAINING + SMALL)
    options = ["compile", f"--config={tmp_path / 'small.gin'}", "--topology=v4-16", "--json"]
    assert cli.main([*options, "--gin=TrainConfig.batch_size = 8"]) == 0
    assert tried == [*times]
    assert json.loads(capsys.readouterr().out)["mesh"] == "data:2,model:4"
    assert cli.main([*options, "--gin=TrainConfig.batch_size = 3"]) == 0  # One mesh divides it.
    assert tried[len(times) :] == ["data:1,model:8"]
    assert cli.main([*options, "--gamma=3", "--target=debian_target"]) == 2
    assert "--gamma, --target: only for a row, not for a training run" in capsys.readouterr().err


def test_a_training_run_that_does_not_fit(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told by the state alone, before anything is compiled."""
    (tmp_path / "xxl.gin").write_text(TRAINING)
    options = [f"--config={tmp_path / 'xxl.gin'}", "--topology=v5e-4", "--mesh=data:1"]
    assert cli.main(["compile", *options]) == 2
    (said,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error:")]
    assert "xxl on data:1 needs 41.5 GiB" in said
    assert "Take TrainConfig.remat = 'layers', more microbatches than 1, or more chips." in said
