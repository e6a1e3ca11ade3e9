"""Checkpoints that are loaded in int8, of any format, and random weights like them."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from speculative import checkpoints
from speculative.backends import Weight
from speculative.checkpoints import Checkpoint, native
from speculative.checkpoints.checkpoint import by_name, narrowed
from speculative.models import SIZES, random_params
from tests import saved

CONFIGS = {
    "T5 v1.1": saved.TARGET,
    "T5 v1.0": saved.TARGET.replace(mlp_activations=("relu",), logits_via_embedding=True),
    "GPT": saved.GPT,
}


def rounded(name: str, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers and scales of each output, in float64 but for the scales."""
    axis = 1 if name.endswith("embedding") else 0
    scales = np.abs(value).max(axis=axis) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(value / np.expand_dims(scales, axis)), scales


@pytest.mark.parametrize("to", ["native", "t5x", "huggingface"])
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_and_tied_logits_are_rounded(name: str, to: str, tmp_path: pathlib.Path) -> None:
    config = CONFIGS[name]
    if name == "GPT" and to == "t5x":
        return
    drawn = saved.drawn(config, 1)
    drawn["decoder"]["layers_0"]["mlp"]["wo"]["kernel"] *= np.arange(config.emb_dim) != 2
    native.save(tmp_path / "made", config, drawn)
    checkpoints.convert(tmp_path / "made", tmp_path / "given", to)
    given = by_name(drawn)
    for dtype in ("float32", "bfloat16"):
        loaded = by_name(checkpoints.open(tmp_path / "given").load(dtype, "int8"))
        tied = {"token_embedder/embedding"} if config.logits_via_embedding else set()
        kernels = {name for name in given if name.endswith("/kernel")}
        assert {name for name, leaf in loaded.items() if isinstance(leaf, Weight)} == tied | kernels
        for name, leaf in loaded.items():
            if isinstance(leaf, Weight):
                values, scales = rounded(name, np.asarray(given[name]))
                np.testing.assert_array_equal(leaf.values, values)
                np.testing.assert_array_equal(leaf.scales, scales)
                assert (leaf.values.dtype, leaf.scales.dtype) == ("int8", "float32")
            else:
                assert leaf.dtype == dtype
                np.testing.assert_array_equal(leaf, given[name].astype(dtype))


def test_what_is_stored_in_int8_is_loaded_as_it_is(tmp_path: pathlib.Path) -> None:
    """And is what its floating-point copy is rounded to again."""
    native.save(tmp_path / "float", saved.TARGET, saved.drawn(saved.TARGET, 1))
    checkpoints.convert(tmp_path / "float", tmp_path / "int8", "native", "int8")
    checkpoints.convert(tmp_path / "int8", tmp_path / "again", "native", "float32")
    loaded = [
        by_name(checkpoints.open(tmp_path / folder).load("float32", "int8"))
        for folder in ("float", "int8", "again")
    ]
    for name in loaded[0]:
        if isinstance(loaded[0][name], Weight):
            for other in loaded[1:]:
                np.testing.assert_array_equal(loaded[0][name].values, other[name].values)
                np.testing.assert_allclose(loaded[0][name].scales, other[name].scales, rtol=1e-6)
    whole = checkpoints.open(tmp_path / "int8").load("float32")
    logits = loaded[1]["decoder/logits_dense/kernel"]
    np.testing.assert_array_equal(
        by_name(whole)["decoder/logits_dense/kernel"], logits.values * logits.scales
    )


def test_a_narrowed_draft_keeps_its_columns(tmp_path: pathlib.Path) -> None:
    native.save(tmp_path / "int8", saved.TARGET, saved.drawn(saved.TARGET, 1), storage="int8")
    whole = checkpoints.open(tmp_path / "int8")
    kept = [3, 5, 90]
    found, given = (
        by_name(one.load("float32", "int8"))["decoder/logits_dense/kernel"]
        for one in (narrowed(whole, kept), whole)
    )
    np.testing.assert_array_equal(found.values, given.values[:, np.array(kept)])
    np.testing.assert_allclose(found.scales, given.scales[np.array(kept)], rtol=1e-6)


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_numbers_that_are_none(storage: Any, wrong: float, tmp_path: pathlib.Path) -> None:
    name = "encoder/layers_0/mlp/wi_0/kernel"
    made = native.in_memory("made", saved.TARGET, saved.drawn(saved.TARGET, 1))
    native.write(tmp_path / "made", made, storage)
    opened = checkpoints.open(tmp_path / "made")
    tensors = dict(opened.tensors)
    tensor = tensors[name]
    stored = tensor.quantized and tensor.quantized()
    damaged = tensor.read()
    damaged[0, 1] = wrong
    more: dict[str, Any] = {"read": lambda part: damaged}
    if stored:
        scales = stored.scales.copy()
        scales[1] = wrong
        more["quantized"] = lambda part: Weight(stored.values, scales)
    tensors[name] = tensor._replace(**more)
    where = re.escape(f"Tensor {name} of {tmp_path / 'made'} holds values that are not finite")
    broken = Checkpoint(opened.location, "native", saved.TARGET, tensors)
    with pytest.raises(ValueError, match=where):
        broken.load("float32", "int8")


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5_1_1_small", "t5_small"])
def test_random_weights(name: str) -> None:
    config = SIZES[name].replace(num_encoder_layers=1, num_decoder_layers=1, vocab_size=640)
    whole = by_name(random_params(config))
    held = by_name(random_params(config.replace(quantize="int8")))
    assert whole.keys() == held.keys()
    for name, leaf in held.items():
        if config.replace(quantize="int8").in_int8(name):
            values, scales = leaf
            axis = 1 if name.endswith("embedding") else 0
            near = values * np.expand_dims(scales, axis)
            np.testing.assert_allclose(near, whole[name], atol=float(np.max(scales)) * 0.51)
            assert values.dtype == "int8"
        else:
            np.testing.assert_array_equal(leaf, whole[name])
    leaves = jax.tree.leaves([held[name] for name in held])
    assert sum(leaf.nbytes for leaf in leaves) < 0.5 * sum(x.nbytes for x in whole.values())


def test_formats_of_others_are_told_what_to_do(tmp_path: pathlib.Path) -> None:
    remedy = r"Fetch the checkpoint that it was made from, .* \(--quantize=int8, or"
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for place in (file, tmp_path):
        with pytest.raises(ValueError, match=rf"model\.gguf is a GGUF file.*{remedy}"):
            checkpoints.open(place)
    (tmp_path / "config.json").write_text(
        '{"model_type": "t5", "quantization_config": {"quant_method": "bitsandbytes"}}'
    )
    with pytest.raises(ValueError, match=f"were quantized by bitsandbytes, .*{remedy}"):
        checkpoints.open(tmp_path)
