"""How parameters and states lie on a mesh, by their names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from speculative import checks
from speculative.backends import for_decoding
from speculative.checkpoints.checkpoint import by_name
from speculative.models import (
    FAMILIES,
    SIZES,
    Config,
    LlamaConfig,
    abstract_params,
    model_of,
    sharding,
)
from speculative.models.interface import Chunk
from speculative.models.sharding import MODEL
from speculative.models.t5gemma2 import T5Gemma2Config
from tests import saved


def on(data: int, model: int) -> Any:
    return AbstractMesh((data, model), ("data", MODEL))


@pytest.mark.parametrize("size", ["t5_1_1_xxl", "t5_11b", "lamda_137b", "gpt2_xl"])
def test_every_kernel_is_shared_by_all_devices(size: str) -> None:
    config = sharding.padded(SIZES[size], 4)
    found = by_name(abstract_params(config))
    for name, leaf in found.items():
        spec = sharding.spec(name, leaf.shape, on(1, 4))
        parts = name.split("/")
        outputs = {"out", "wo"} & {*parts} and parts[-1] == "bias"
        if {*parts} & {"token_embedder", "position_embedder", "scale"} or outputs:
            assert MODEL not in spec, name
        elif not ("norm" in name and parts[-1] == "bias"):
            assert MODEL in spec, name
    kernels = {name: leaf for name, leaf in found.items() if name.endswith("kernel")}
    # Rows of what attention and feed-forward layers give back, columns of all others.
    for name, leaf in kernels.items():
        axis = 0 if name.split("/")[-2] in ("out", "wo") else 1
        assert sharding.spec(name, leaf.shape, on(1, 4))[axis] == MODEL


def test_a_tied_logits_kernel_and_its_scales() -> None:
    assert sharding.spec("prepacked/logits/values", (16, 64), on(1, 4)) == PartitionSpec(
        None, MODEL
    )
    assert sharding.spec("prepacked/logits/scales", (64,), on(1, 4)) == PartitionSpec(MODEL)
    # Scales are those of outputs, which devices do not share where they share the inputs.
    name = "prepacked/decoder/layers_0/mlp/wo/kernel"
    assert sharding.spec(f"{name}/values", (64, 16), on(1, 4)) == PartitionSpec(MODEL, None)
    assert sharding.spec(f"{name}/scales", (16,), on(1, 4)) == PartitionSpec(None)


def test_states_and_rows() -> None:
    model = model_of(saved.TARGET)
    inputs = jax.ShapeDtypeStruct((4, 8), np.int32)
    begun = jax.eval_shape(
        lambda params, given: model.start(params, given, 16).state,
        abstract_params(saved.TARGET), inputs,
    )  # fmt: skip
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(begun)
    }
    for name, leaf in found.items():
        spec = sharding.spec(name, leaf.shape, on(2, 2))
        if name.split("/")[0] in ("keys", "values", "cross"):
            assert spec[:2] == ("data", MODEL), name
        else:
            assert spec == PartitionSpec(), name
    assert {name.split("/")[0] for name in found} >= {"keys", "values", "cross", "lengths"}


def test_what_devices_cannot_share_stays_whole() -> None:
    # Three rows of a batch by two, five heads by four.
    assert sharding.spec("keys/0", (3, 5, 16, 8), on(2, 4)) == PartitionSpec(None, None, None, None)
    assert sharding.spec("unknown/kernel", (8, 8), on(1, 2)) == PartitionSpec()


@pytest.mark.parametrize("config", [saved.TARGET, saved.GPT, SIZES["t5_1_1_small"]])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_padding_is_the_least_that_devices_can_share(config: Config, shards: int) -> None:
    found = sharding.padded(config, shards)
    for field in ("num_heads", "mlp_dim", "vocab_size"):
        before, after = getattr(config, field), getattr(found, field)
        assert after % shards == 0
        assert before <= after < before + shards
    same = {"num_heads": config.num_heads, "mlp_dim": config.mlp_dim}
    assert found.replace(**same, vocab_size=config.vocab_size) == config


def test_heads_that_share_keys_stay_with_them() -> None:
    one = LlamaConfig(64, 18, 9, 8, 24, 1, num_kv_heads=3)
    found = sharding.padded(one, 2)
    assert (found.num_heads, found.num_kv_heads) == (12, 4)


def test_heads_that_a_tpu_keeps_side_by_side_stay_together() -> None:
    small = SIZES["t5_1_1_small"]  # Six heads of 64, of which two fill a register.
    assert sharding.padded(small, 4, "tpu").num_heads == 8
    assert sharding.padded(small, 2, "tpu").num_heads == 8
    assert sharding.padded(small, 2, "cpu").num_heads == 6


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("model:4", (1, 4)), ("data:2,model:4", (2, 4)), ("data:8", (8, 1)), ("model:1", (1, 1))],
)
def test_meshes(text: str, sizes: tuple[int, int]) -> None:
    assert tuple(checks.mesh("mesh", text).values()) == sizes


@pytest.mark.parametrize(
    "text",
    ["", "4", "model", "model:0", "model:-1", "model:2,data:2", "heads:2", "model:2.0", None],
)
def test_texts_that_are_no_mesh(text: str | None) -> None:
    with pytest.raises(ValueError, match="^mesh must be model:N, data:N or data:N,model:M"):
        checks.mesh("mesh", text)


def test_a_mesh_of_more_devices_than_there_are() -> None:
    count = len(jax.devices())
    with pytest.raises(ValueError, match=rf"needs {count + 1} devices, and there are {count};"):
        sharding.mesh(f"model:{count + 1}")


def test_names_cover_the_layouts_of_all_platforms() -> None:
    """No kernel of a target is whole on every chip, however it is laid out."""
    for family in FAMILIES.values():
        size = next(iter(family.sizes.values()))
        for quantize in ("none", "int8"):
            config = sharding.padded(size, 2).replace(quantize=quantize)
            for platform in ("tpu", "cpu", "gpu"):
                shapes = sharding.placed(config, None)
                given = {"platform": platform, "shards": 2, "quantize": quantize}
                laid_out = jax.eval_shape(lambda x, g=given: for_decoding(x, **g), shapes)
                for path, leaf in jax.tree_util.tree_leaves_with_path(laid_out):
                    name = jax.tree_util.keystr(path, simple=True, separator="/")
                    if leaf.ndim == 2 and "embedder" not in name:
                        assert MODEL in sharding.spec(name, leaf.shape, on(1, 2)), name


GROUPED = LlamaConfig(8192, 16, 4, 8, 24, 2, num_kv_heads=4, qkv_biases=True)
MERGED = T5Gemma2Config(8192, 16, 4, 8, 24, 1, 2, num_kv_heads=4, windows=(3, 0))


@pytest.mark.long
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("config", [saved.TARGET, saved.GPT, GROUPED, MERGED])
def test_kernels_that_chips_share_side_by_side_compute_the_same(
    config: Config, shards: int
) -> None:
    """`TpuShared` on this CPU, beside XLA's products of the same numbers."""
    config = config.replace(num_heads=8 if config.num_kv_heads else 4)
    params = jax.tree.map(jnp.asarray, saved.drawn(config, 3, 0.3))
    model, found = model_of(config), list[np.ndarray]()
    inputs = jnp.asarray(np.random.default_rng(0).integers(2, 1000, (1, 7)), jnp.int32)
    for platform, parts in ("gpu", None), ("tpu", shards):
        laid_out = for_decoding(params, False, platform, "int8", parts)
        state = model.start(laid_out, inputs, 32).state
        chunk = Chunk(jnp.asarray([[3, 5, 9, 11]], jnp.int32))
        found.append(np.asarray(model.extend(laid_out, state, chunk).logits))
    assert found[0].std() > 0.1
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
