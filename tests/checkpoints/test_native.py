"""Our own checkpoints: what is saved is what is loaded, and damage is named."""

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

from speculative import checkpoints
from speculative.checkpoints import native
from speculative.checkpoints.checkpoint import read_settings
from speculative.models import T5, T5Config
from tests import saved

CONFIG = T5Config(40, 16, 2, 8, 24, 2, 1)


@pytest.fixture(scope="module")
def params() -> dict:
    return jax.tree.map(np.asarray, T5(CONFIG).init(jax.random.key(3)))


def flat(tree: dict) -> dict[str, Any]:
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def test_float32_returns_every_bit(tmp_path: pathlib.Path, params: dict) -> None:
    native.save(tmp_path / "model", CONFIG, params)
    config, loaded = native.load(tmp_path / "model")
    assert config == CONFIG
    assert flat(loaded).keys() == flat(params).keys()
    for name, value in flat(params).items():
        np.testing.assert_array_equal(flat(loaded)[name], value)


def test_int8_is_within_half_a_step_of_each_output(tmp_path: pathlib.Path, params: dict) -> None:
    native.save(tmp_path / "model", CONFIG, params, storage="int8")
    _, loaded = native.load(tmp_path / "model")
    for name, value in flat(params).items():
        got = flat(loaded)[name]
        assert got.dtype == np.float32
        if name.endswith("kernel"):
            step = np.abs(value).max(axis=0, keepdims=True) / 127
        elif name.endswith("token_embedder/embedding"):
            step = np.abs(value).max(axis=1, keepdims=True) / 127
        else:
            np.testing.assert_array_equal(got, value)
            continue
        assert np.all(np.abs(got - value) <= step * 0.5001)
        assert not np.array_equal(got, value)


def test_saving_what_int8_gave_changes_nothing(tmp_path: pathlib.Path, params: dict) -> None:
    native.save(tmp_path / "a", CONFIG, params, storage="int8")
    once = native.load(tmp_path / "a")[1]
    native.save(tmp_path / "b", CONFIG, once, storage="int8")
    for name, value in flat(native.load(tmp_path / "b")[1]).items():
        np.testing.assert_allclose(value, flat(once)[name], rtol=1e-6)


def test_bfloat16_keeps_eight_bits(tmp_path: pathlib.Path, params: dict) -> None:
    native.save(tmp_path / "model", CONFIG, params, storage="bfloat16")
    for name, value in flat(native.load(tmp_path / "model")[1]).items():
        np.testing.assert_allclose(value, flat(params)[name], rtol=2**-8)


def test_big_models_are_cut_into_files(
    tmp_path: pathlib.Path, params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FILE_BYTES", 2**17 + 4096)
    native.save(tmp_path / "model", CONFIG, params)
    pieces = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(pieces) > 3
    assert pieces[0].name == f"model-00001-of-{len(pieces):05}.safetensors"
    for name, value in flat(native.load(tmp_path / "model")[1]).items():
        np.testing.assert_array_equal(value, flat(params)[name])


def test_vocabulary_travels_with_its_checksum(tmp_path: pathlib.Path, params: dict) -> None:
    vocabulary = tmp_path / "pieces.model"
    vocabulary.write_bytes(b"pieces")
    native.save(tmp_path / "model", CONFIG, params, vocabulary)
    assert read_settings(tmp_path / "model")["vocabulary"] == "pieces.model"
    native.load(tmp_path / "model")
    (tmp_path / "model" / "pieces.model").write_bytes(b"Pieces")
    with pytest.raises(ValueError, match=r"pieces\.model was altered"):
        native.open(tmp_path / "model").open_vocabulary()


def test_an_existing_folder_is_not_overwritten(tmp_path: pathlib.Path, params: dict) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        native.save(tmp_path / "model", CONFIG, params)


def test_parameters_that_do_not_fit_leave_nothing(tmp_path: pathlib.Path, params: dict) -> None:
    wrong = CONFIG.replace(mlp_dim=32)
    with pytest.raises(ValueError, match=r"decoder/layers_0/mlp/wi_0/kernel .* \(16, 24\)"):
        native.save(tmp_path / "model", wrong, params)
    broken = jax.tree.map(lambda x: x * np.nan, params)
    with pytest.raises(ValueError, match="not finite"):
        native.save(tmp_path / "model", CONFIG, broken)
    assert not list(tmp_path.iterdir())


def rewritten(folder: pathlib.Path, change) -> None:
    path = folder / "config.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-1]
            ),
            r"model\.safetensors was altered or cut off",
        ),
        (
            lambda f: rewritten(f, lambda d: d.update(format_version=9)),
            "is of format .*9",
        ),
        (
            lambda f: rewritten(f, lambda d: d["model"].update(num_encoder_layers=3)),
            "lacks the tensor encoder/layers_2/attention/key/kernel",
        ),
        (
            lambda f: rewritten(f, lambda d: d["model"].update(num_encoder_layers=1)),
            "has a tensor encoder/layers_1/attention/key/kernel, unknown",
        ),
        (
            lambda f: rewritten(f, lambda d: d["model"].update(vocab_size=41)),
            r"decoder/logits_dense/kernel .* \(16, 40\).*\(16, 41\)",
        ),
    ],
)
def test_damage_is_named(tmp_path: pathlib.Path, params: dict, damage, message: str) -> None:
    native.save(tmp_path / "model", CONFIG, params)
    damage(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        native.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: [], "holds no JSON object"),
        (lambda d: {k: v for k, v in d.items() if k != "model"}, "lacks 'model'"),
        (lambda d: d | {"model": d["model"] | {"depth": 3}}, "model of other fields"),
    ],
)
def test_an_edited_description_is_one_sentence(tmp_path, change, message):
    config = T5Config(16, 8, 2, 4, 8, 1, 1)
    native.save(tmp_path / "model", config, T5(config).init(jax.random.key(0)))
    path = tmp_path / "model" / native.CONFIG
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message):
        native.load(tmp_path / "model")


def test_files_are_verified_once_and_when_they_are_read(
    tmp_path: pathlib.Path, params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FILE_BYTES", 2**17 + 4096)
    native.save(tmp_path / "model", CONFIG, params, saved.VOCABULARY, storage="int8")
    weights = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    hashed = saved.hashed(monkeypatch)
    made = checkpoints.open(tmp_path / "model")
    assert hashed == []
    made.read(min(made.tensors))
    assert len(hashed) == 1
    made.load("float32")
    made.numpy()
    assert sorted(hashed) == weights
    made.open_vocabulary()
    assert sorted(hashed) == [saved.VOCABULARY.name, *weights]
    hashed.clear()
    checkpoints.describe(checkpoints.open(tmp_path / "model"))
    assert sorted(hashed) == ["config.json", saved.VOCABULARY.name, *weights]
    hashed.clear()
    checkpoints.convert(tmp_path / "model", tmp_path / "copy", "huggingface")
    assert sorted(hashed) == [saved.VOCABULARY.name, *weights]


def test_altered_values_are_never_given(
    tmp_path: pathlib.Path, params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes are a tensor's: the file is as long as it was, and its header the same."""
    native.save(tmp_path / "model", CONFIG, params)
    path = tmp_path / "model" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]]))
    made = checkpoints.open(tmp_path / "model")
    for read in (
        lambda: made.read(max(made.tensors)),
        lambda: made.read(min(made.tensors)),
        lambda: made.load("float32"),
        made.numpy,
        lambda: checkpoints.describe(made),
        lambda: checkpoints.convert(tmp_path / "model", tmp_path / "copy", "huggingface"),
    ):
        with pytest.raises(ValueError, match=r"model\.safetensors was altered or cut off"):
            read()
    assert not (tmp_path / "copy").exists()


def test_a_vocabulary_is_verified_before_it_is_parsed_or_copied(
    tmp_path: pathlib.Path, params: dict
) -> None:
    native.save(tmp_path / "model", CONFIG, params, saved.VOCABULARY)
    file = tmp_path / "model" / saved.VOCABULARY.name
    file.write_bytes(file.read_bytes()[:-9])
    made = checkpoints.open(tmp_path / "model")
    for read in (
        made.open_vocabulary,
        lambda: checkpoints.convert(tmp_path / "model", tmp_path / "ours", "native"),
        lambda: checkpoints.convert(tmp_path / "model", tmp_path / "theirs", "huggingface"),
    ):
        with pytest.raises(ValueError, match=rf"{file.name} was altered or cut off"):
            read()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    # Another vocabulary may take its place.
    shutil.copy(saved.VOCABULARY, tmp_path / "other.model")
    other = tmp_path / "other.model"
    made = checkpoints.convert(tmp_path / "model", tmp_path / "ours", "native", vocabulary=other)
    assert made.open_vocabulary() is not None
