"""Loading onto a mesh: every device gets its part of each tensor, and reads no more."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from speculative import checkpoints
from speculative.backends import Weight
from speculative.checkpoints import Checkpoint, native
from speculative.checkpoints.checkpoint import by_name
from speculative.models import random_params, sharding
from tests import saved

DATA = pathlib.Path(__file__).parent.parent / "data"
FOLDERS = ["t5x_v1_1", "transformers_v1_0", "transformers_v1_1", "transformers_gpt2"]
MESHES = ["model:4", "data:2,model:2", "model:3"]

pytestmark = pytest.mark.skipif(
    jax.device_count() < 4, reason="XLA was told to make fewer devices of this CPU"
)


@pytest.fixture(params=[*FOLDERS, "float32", "int8"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Checkpoint:
    if request.param in FOLDERS:
        (folder,) = [DATA / request.param, *(DATA / request.param).glob("checkpoint_*")][-1:]
        return checkpoints.open(folder)
    native.save(
        tmp_path / "own", saved.TARGET, saved.random(saved.TARGET, 3), storage=request.param
    )
    return checkpoints.open(tmp_path / "own")


def filled(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor with zeros at the ends of its axes."""
    return np.pad(value, [(0, new - old) for new, old in zip(shape, value.shape, strict=True)])


@pytest.mark.parametrize("how", [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
@pytest.mark.parametrize("mesh", MESHES)
def test_parts_are_those_of_the_whole(
    checkpoint: Checkpoint, mesh: str, how: tuple[str, str]
) -> None:
    on = sharding.mesh(mesh)
    whole, parts = by_name(checkpoint.load(*how)), by_name(checkpoint.load(*how, on))
    assert whole.keys() == parts.keys()
    for name, one in whole.items():
        spread = parts[name]
        pairs = zip(one, spread, strict=True) if isinstance(one, Weight) else [(one, spread)]
        for a, b in pairs:
            if a is None:
                assert b is None
                continue
            np.testing.assert_array_equal(np.asarray(b), filled(np.asarray(a), b.shape), name)
            assert b.dtype == a.dtype
            assert {shard.device for shard in b.addressable_shards} == {*on.devices.flat}
        values = spread.values if isinstance(spread, Weight) else spread
        spec = sharding.spec(name, values.shape, on)
        assert values.sharding.spec == spec


@pytest.mark.parametrize("how", [("float32", "none"), ("float32", "int8")])
def test_a_draft_is_whole_on_each_device(checkpoint: Checkpoint, how: tuple[str, str]) -> None:
    on = sharding.mesh("model:4")
    whole, same = checkpoint.load(*how), checkpoint.load(*how, on, True)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(same), strict=True):
        assert b.sharding.is_fully_replicated and len(b.addressable_shards) == 4
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_no_more_is_read_than_a_device_gets(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, read, kept = sharding.mesh("model:4"), Checkpoint.read, dict[str, list[int]]()

    def reads(self: Checkpoint, name: str, part: Any = ()) -> np.ndarray:
        value = read(self, name, part)
        kept.setdefault(name, []).append(value.size)
        return value

    monkeypatch.setattr(Checkpoint, "read", reads)
    parts = by_name(checkpoint.load("float32", "none", on))
    for name, leaf in parts.items():
        most = int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        assert max(kept[name]) <= most, name
        # What all devices have alike is read once.
        assert len(kept[name]) == (4 if most < leaf.size else 1)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_random_weights_are_made_in_parts(quantize: str) -> None:
    config, on = saved.TARGET.replace(quantize=quantize), sharding.mesh("model:4")
    whole = random_params(config)
    # Two heads by four devices stay whole where nothing is padded.
    spread = random_params(config, sharding.placed(config, on))
    assert sharding.spread(spread)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("mesh", ["model:4", "data:2,model:2"])
def test_nothing_is_read_twice(
    mesh: str, quantize: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.save(tmp_path / "own", saved.TARGET, saved.random(saved.TARGET, 3))
    opened, read, kept = checkpoints.open(tmp_path / "own"), Checkpoint.read, dict[str, int]()

    def reads(self: Checkpoint, name: str, part: Any = ()) -> np.ndarray:
        value = read(self, name, part)
        kept[name] = kept.get(name, 0) + value.size
        return value

    monkeypatch.setattr(Checkpoint, "read", reads)
    opened.load("float32", quantize, sharding.mesh(mesh))
    for name, tensor in opened.tensors.items():
        # Of a device whose part is padding alone a row or a column is read.
        padding = 2 * max(tensor.shape) if "2,model" not in mesh else 0
        assert np.prod(tensor.shape) <= kept[name] <= np.prod(tensor.shape) + padding, name
