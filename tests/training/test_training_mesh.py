"""Training on meshes of devices made of this CPU: what one device computes, to rounding.

`make test-mesh` runs all meshes of eight devices; four do in the suite.
"""

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import checkpoints
from speculative.checkpoints import native
from speculative.measurement import chips
from speculative.models import (
    T5,
    Config,
    DecoderOnlyConfig,
    T5Config,
    model_of,
    named,
    sharding,
)
from speculative.training import cost, data, loop, saved
from speculative.training.train import CrossEntropy, initial, mesh_for
from speculative.training.written import Scorer
from speculative.vocabulary import Numbers
from tests import saved as saved_lib
from tests.training import tiny

pytestmark = pytest.mark.long

ALL = "SPECULATIVE_TEST_MESH" in os.environ
MESHES = ("data:8", "data:4,model:2", "data:2,model:4") if ALL else ("data:4", "data:2,model:2")
# Adafactor factors what has 128 numbers along both axes, such as feed-forward kernels here.
SIZES = T5Config(24, 128, 8, 16, 256, 1, 2, dropout_rate=0.1)
CONFIG = dataclasses.replace(
    tiny.CONFIG, steps=30, log_every=1, evaluate_every=30, checkpoint_every=10, batch_size=16,
    microbatches=2,
)  # fmt: skip


def fit(
    folder: pathlib.Path, mesh: str | None, sizes: T5Config = SIZES, **changes: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    """The loss of each step, and the parameters after the last one."""
    config = dataclasses.replace(CONFIG, **changes)
    on = mesh_for(mesh, config)
    model = dataclasses.replace(T5(sizes), backend=sharding.InTraining(remat=config.remat, on=on))
    train = data.Mixture([(tiny.examples(2000, 0), 1.0)], 16, tiny.SOURCE, tiny.TARGET)
    held_out = {"held": tiny.mixture(40, 1).once()}
    start = functools.partial(initial, model, 0, None, on)
    given = CrossEntropy(model), start, config, train, held_out, folder
    trained = loop.fit(*given, on=on)
    losses = [line["loss"] for line in loop.Log(folder).lines()]
    return np.array(losses), jax.tree.map(np.asarray, trained.params)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, dict[str, Any]]:
    return fit(tmp_path_factory.mktemp("alone"), None)


def same(found: tuple[np.ndarray, Any], wanted: tuple[np.ndarray, Any]) -> None:
    """Losses to 1e-5; each parameter, as a vector, to 1e-4 of its length."""
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5, rtol=0)
    assert len(found[0]) == CONFIG.steps

    def near(one: np.ndarray, other: np.ndarray) -> None:
        assert np.linalg.norm(one - other) < 1e-4 * np.linalg.norm(other)

    jax.tree.map(near, found[1], wanted[1])


@pytest.mark.parametrize("remat", ["none", "layers", "products"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_what_one_device_does(
    mesh: str, remat: str, alone: tuple[np.ndarray, Any], tmp_path: pathlib.Path
) -> None:
    """Dropout included; what the gradient computes again changes nothing."""
    if not ALL and MESHES.index(mesh) == (remat == "layers"):
        pytest.skip("half of the pairs; make test-mesh has all")
    same(fit(tmp_path, mesh, remat=remat), alone)


def test_a_run_goes_on_with_another_mesh(
    alone: tuple[np.ndarray, Any], tmp_path: pathlib.Path
) -> None:
    """From data:4 to data:2,model:2 to one device, each from the checkpoint of the one before."""
    train = data.Mixture([(tiny.examples(2000, 0), 1.0)], 16, tiny.SOURCE, tiny.TARGET)
    for mesh, deadline in (("data:4", 0.0), ("data:2,model:2", 0.0), (None, np.inf)):
        on = mesh_for(mesh, CONFIG)
        model = dataclasses.replace(T5(SIZES), backend=sharding.InTraining(on=on))
        start = functools.partial(initial, model, 0, None, on)
        # A run stops at a line of its log only.
        config = dataclasses.replace(CONFIG, log_every=10 if on else 1)
        given = CrossEntropy(model), start, config, train, {}, tmp_path
        trained = loop.fit(*given, deadline=deadline, on=on)
        assert trained.taken == (None if on else 30)
    losses = [line["loss"] for line in loop.Log(tmp_path).lines()[-10:]]
    np.testing.assert_allclose(losses, alone[0][-10:], atol=1e-5, rtol=0)


def test_devices_share_parameters_and_moments() -> None:
    """XXL on a v4-32: a sixteenth of all, and each moment as the axis of its kernel that it has."""
    on = jax.sharding.AbstractMesh((8, 2), (sharding.DATA, sharding.MODEL))
    sizes, config = named("t5_1_1_xxl"), dataclasses.replace(CONFIG, clip_norm=0.0)
    params = sharding.placed(sizes, None)
    state = jax.eval_shape(functools.partial(loop.begin, config), params)
    where = sharding.of_training(state, on)  # pyright: ignore[reportArgumentType]
    kernel = "decoder", "layers_0", "mlp", "wi_0", "kernel"

    def leaf(tree: Any) -> Any:
        return functools.reduce(lambda part, name: part[name], kernel, tree)

    moments = next(
        x
        for x in jax.tree.leaves(where.optimizer, is_leaf=lambda x: hasattr(x, "v_row"))
        if hasattr(x, "v_row")
    )
    spec = jax.sharding.PartitionSpec
    assert leaf(where.params).spec == spec("data", "model")  # [4096, 10240]
    assert leaf(moments.v_row).spec == spec("data")  # [4096]
    assert leaf(moments.v_col).spec == spec("model")  # [10240]
    size = sharding.bytes_a_device(sharding.laid_out(state.params, where.params))
    whole = sum(4 * x.size for x in jax.tree.leaves(params))
    assert whole / 16 < size < 1.04 * whole / 16


@pytest.mark.parametrize(
    ("changes", "mesh", "said"),
    [
        ({"batch_size": 6}, "data:4", "6 rows .* do not divide into; take data:2"),
        ({"microbatches": 8}, "data:4", "2 rows .*16 in 8 microbatches.* take data:2"),
        ({}, "data:64", "16 rows"),
        ({"batch_size": 64}, "data:64", "needs 64 devices, and there are"),
        ({}, "rows:4", "rows:4"),
    ],
)
def test_a_mesh_that_does_not_fit(changes: dict[str, int], mesh: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mesh_for(mesh, dataclasses.replace(CONFIG, **({"microbatches": 1} | changes)))


def test_a_model_that_does_not_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "device_bytes", lambda: ("a small chip", 2**34))
    sizes = named("t5_1_1_xxl")
    with pytest.raises(ValueError, match=r"83\.\d GiB on each of 1 devices, 67\.\d GiB more than"):
        cost.Cost(sizes, CONFIG, None).require_memory()


GPT_SIZES = DecoderOnlyConfig(512, 256, 4, 64, 1024, 3, max_positions=32)


@pytest.mark.parametrize("sizes", [T5Config(512, 256, 4, 64, 512, 2, 3), GPT_SIZES])
def test_operations_of_a_step_are_those_of_its_products(sizes: Config) -> None:
    """Three times what XLA counts in a forward pass, where products are nearly all there is."""
    config = dataclasses.replace(CONFIG, batch_size=4, source_length=64, target_length=32)
    model = model_of(sizes)
    tokens = jnp.ones((4, 64), jnp.int32), jnp.ones((4, 32), jnp.int32)
    forward = jax.jit(functools.partial(model.forward_with_hidden, segments=tokens))
    params = jax.eval_shape(model.init, jax.random.key(0))
    counted = forward.lower(params, *tokens).compile().cost_analysis()
    assert counted is not None
    assert cost.operations(sizes, config) == pytest.approx(3 * counted["flops"], rel=0.03)


def test_texts_are_scored_on_a_mesh_whose_devices_cannot_share_the_heads() -> None:
    """Six heads on four devices, of which two share a model then, and both pairs the texts."""
    sizes, examples = T5Config(24, 96, 6, 16, 128, 1, 1), {"held": tiny.examples(12, 3)}
    params = T5(sizes).init(jax.random.key(1))
    given = T5(sizes), Numbers(24), examples, {"held": "rougeL"}, 9
    on = sharding.mesh("data:4")
    placed = jax.device_put(params, sharding.of_training(params, on))
    found, wanted = Scorer(*given, on)(placed), Scorer(*given)(params)
    assert found == wanted and found["held/rougeL"] > 0


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, Any]]:
    """A run's folder, and the parameters that its last checkpoint holds."""
    folder = tmp_path_factory.mktemp("two")
    short: dict[str, Any] = {
        "steps": 4,
        "warmup_steps": 1,
        "evaluate_every": 4,
        "checkpoint_every": 4,
    }
    _, params = fit(folder, "data:1,model:2", **short)
    return folder, params


@pytest.mark.parametrize("kind", ["native", "t5x", "huggingface"])
def test_a_model_of_two_devices_in_every_format(
    kind: str, two_devices: tuple[pathlib.Path, dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    """The same logits, in float32 to the last bit of the parameters."""
    folder, params = two_devices
    kept = saved.opened(folder / loop.CHECKPOINTS, 4, SIZES.replace(dropout_rate=0.0))
    native.write(tmp_path / "model", kept, "float32")
    made = checkpoints.convert(tmp_path / "model", tmp_path / kind, kind)
    jax.tree.map(np.testing.assert_array_equal, made.numpy(), params)
    inputs = np.array([[5, 6, 7, 1]]), np.array([[0, 9, 8]])
    found, wanted = (saved_lib.forward(T5(SIZES), tree, *inputs) for tree in (made.numpy(), params))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_part_of_a_tensor_is_read_by_itself(
    two_devices: tuple[pathlib.Path, dict[str, Any]],
) -> None:
    folder, params = two_devices
    kept = saved.opened(folder / loop.CHECKPOINTS, 4, SIZES)
    wo = kept.read("encoder/layers_0/mlp/wo/kernel", (slice(3, 9), slice(0, 4)))
    whole = params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    np.testing.assert_array_equal(wo, whole[3:9, :4])


def test_the_best_checkpoint_is_kept_and_taken(tmp_path: pathlib.Path) -> None:
    """Scores that fall after the second evaluation; patience ends the run, which stays ended."""
    scores = iter([3.0, 3.0, 2.0, 2.5, 9.0])  # Of two that are equal, the later one is taken.
    config = dataclasses.replace(
        CONFIG, steps=20, log_every=2, evaluate_every=2, checkpoint_every=2, take="best",
        patience=2, keep=2,
    )  # fmt: skip
    model = T5(SIZES)
    train = data.Mixture([(tiny.examples(300, 0), 1.0)], 16, tiny.SOURCE, tiny.TARGET)
    start = functools.partial(initial, model, 0, None)
    given = CrossEntropy(model), start, config, train, {}, tmp_path
    for _ in range(2):
        trained = loop.fit(*given, score=lambda params: {"held/bleu": next(scores)})
        assert trained.taken == 4
        assert {path.name for path in (tmp_path / loop.CHECKPOINTS).iterdir()} == {"4", "6", "8"}
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [3.0, 3.0, 2.0, 2.5]
