"""Our own checkpoints: what is saved is what is loaded, and damage is named."""

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from speculative import checkpoints
from speculative.checkpoints import native
from speculative.checkpoints.checkpoint import read_settings
from speculative.fingerprints import sha256
from speculative.models import T5Config
from tests import saved

CONFIG = T5Config(40, 16, 2, 8, 24, 2, 1)


@pytest.fixture(scope="module")
def params() -> dict:
    return saved.random(CONFIG, 3)


def flat(tree: dict) -> dict[str, Any]:
    return dict(traverse_util.flatten_dict(tree, sep="/"))


@pytest.mark.parametrize(("storage", "rtol"), [("float32", 0), ("bfloat16", 2**-8)])
def test_what_is_saved_is_loaded(
    tmp_path: pathlib.Path, params: dict, storage: native.Storage, rtol: float
) -> None:
    native.save(tmp_path / "model", CONFIG, params, storage=storage)
    made = native.open(tmp_path / "model")
    assert made.config == CONFIG
    loaded = made.numpy()
    assert flat(loaded).keys() == flat(params).keys()
    for name, value in flat(params).items():
        np.testing.assert_allclose(flat(loaded)[name], value, rtol=rtol)


def test_what_training_took_is_kept(tmp_path: pathlib.Path, params: dict) -> None:
    native.save(tmp_path / "known", CONFIG, params, training_minutes=7.5)
    assert checkpoints.open(tmp_path / "known").training_minutes == 7.5
    copy = checkpoints.convert(tmp_path / "known", tmp_path / "copy", "native", "int8")
    assert copy.training_minutes == 7.5
    assert checkpoints.describe(copy)["training"] == "8 minutes"
    native.save(tmp_path / "unknown", CONFIG, params)
    unknown = checkpoints.open(tmp_path / "unknown")
    assert unknown.training_minutes is None and "training" not in checkpoints.describe(unknown)


def test_int8_is_within_half_a_step_of_each_output(tmp_path: pathlib.Path, params: dict) -> None:
    native.save(tmp_path / "model", CONFIG, params, storage="int8")
    loaded = native.open(tmp_path / "model").numpy()
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
    once = native.open(tmp_path / "a").numpy()
    native.save(tmp_path / "b", CONFIG, once, storage="int8")
    for name, value in flat(native.open(tmp_path / "b").numpy()).items():
        np.testing.assert_allclose(value, flat(once)[name], rtol=1e-6)


def test_big_models_are_cut_into_files(
    tmp_path: pathlib.Path, params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FILE_BYTES", 2**17 + 4096)
    native.save(tmp_path / "model", CONFIG, params)
    pieces = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(pieces) > 3
    assert pieces[0].name == f"model-00001-of-{len(pieces):05}.safetensors"
    for name, value in flat(native.open(tmp_path / "model").numpy()).items():
        np.testing.assert_array_equal(value, flat(params)[name])


def test_vocabulary_travels_with_its_checksum(tmp_path: pathlib.Path, params: dict) -> None:
    vocabulary = tmp_path / "pieces.model"
    vocabulary.write_bytes(b"pieces")
    native.save(tmp_path / "model", CONFIG, params, vocabulary)
    assert read_settings(tmp_path / "model")["vocabulary"] == "pieces.model"
    assert native.open(tmp_path / "model").vocabulary
    (tmp_path / "model" / "pieces.model").write_bytes(b"Pieces")
    with pytest.raises(ValueError, match=r"pieces\.model was altered"):
        native.open(tmp_path / "model").open_vocabulary()


def test_checkpoints_side_by_side_may_share_a_vocabulary(
    tmp_path: pathlib.Path, params: dict
) -> None:
    """It lies above them; one that lies within is taken first."""
    for name in ("one", "two"):
        native.save(tmp_path / name, CONFIG, params, saved.VOCABULARY)
    shared = (tmp_path / "one" / saved.VOCABULARY.name).rename(tmp_path / saved.VOCABULARY.name)
    assert native.open(tmp_path / "two").vocabulary != shared
    (tmp_path / "two" / shared.name).unlink()
    for name in ("one", "two"):
        made = native.open(tmp_path / name)
        found = made.open_vocabulary()
        assert found is not None and (made.vocabulary, found.size) == (shared, 8192)
    moved = checkpoints.convert(tmp_path / "one", tmp_path / "elsewhere" / "one", "native")
    assert moved.vocabulary == tmp_path / "elsewhere" / "one" / shared.name
    shared.write_bytes(b"pieces")
    with pytest.raises(ValueError, match=r"debian\.model was altered"):
        native.open(tmp_path / "one").open_vocabulary()
    shared.unlink()
    with pytest.raises(ValueError, match=r"one/debian\.model is missing"):
        native.open(tmp_path / "one")


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


@pytest.fixture
def small(tmp_path: pathlib.Path) -> pathlib.Path:
    config = T5Config(16, 8, 2, 4, 8, 2, 1)
    native.save(tmp_path / "model", config, saved.random(config, 0))
    return tmp_path / "model"


def rewritten(change: Callable[[Any], Any]) -> Callable[[pathlib.Path], None]:
    """Changes a description, which is then one without a checksum, as the first were.

    With a checksum it would be that which is wrong.
    """

    def damage(folder: pathlib.Path) -> None:
        path = folder / native.CONFIG
        description = json.loads(path.read_text())
        del description["checksum"]
        path.write_text(json.dumps(change(description)))

    return damage


def said(**changes: Any) -> Callable[[pathlib.Path], None]:
    return rewritten(lambda d: d | changes)


def of_model(**changes: Any) -> Callable[[pathlib.Path], None]:
    """Changes what a description says of the model."""
    return rewritten(lambda d: d | {"model": d["model"] | changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (lambda f: os.truncate(f / "model.safetensors", 1000), r"ors was altered or cut off"),
        (of_model(num_encoder_layers=3), "lacks the tensor encoder/layers_2/attention/key/kernel"),
        (of_model(num_encoder_layers=1), "has a tensor encoder/layers_1/.*/kernel, unknown"),
        (of_model(vocab_size=17), r"decoder/logits_dense/kernel .* \(8, 16\).*\(8, 17\)"),
        (of_model(depth=3), "describes no model: .*'depth'"),
        (of_model(mlp_activations=None), "describes no model"),
        (of_model(num_heads=True), "num_heads must be .* True"),
        (of_model(max_distance=10**30), "below 2\\^31, not 10000"),
        (of_model(logits_via_embedding="no"), "embedding must be True or False, not 'no'"),
        (of_model(num_decoder_layers=10**8), "tensors, too few for the 100000002 layers"),
        (rewritten(lambda d: []), "holds no JSON object"),
        (said(format_version=9), "is of format .*9"),
        (said(format=[]), r"is of format \[\]"),
        (rewritten(lambda d: {"sha256": {}} | dict([*d.items()][:2])), "lacks 'model'"),
        (said(model=[3]), "describes no model"),
        (said(sha256=["model.safetensors"]), "lists no files and checksums"),
        (said(sha256={"../a.safetensors": ""}), "names the file '../a.safetensors'"),
        (said(vocabulary="/etc/hostname"), "names the file '/etc/hostname'; .* plain"),
        (said(vocabulary=".."), r"names the file '\.\.'"),
        (said(vocabulary=3), "names the file 3"),
        (said(extra_ids=-5), "extra_ids -5; .* whole number from 0 to"),
        (said(extra_ids=1.5), r"extra_ids 1\.5; .* whole number from 0 to"),
    ],
)
def test_damage_is_named(small: pathlib.Path, damage: Any, message: str) -> None:
    damage(small)
    with pytest.raises(ValueError, match=message) as raised:
        checkpoints.convert(small, small.with_name("copy"), "huggingface")
    assert str(small) in str(raised.value)
    assert not small.with_name("copy").exists()


def test_a_folder_without_a_description(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        native.open(tmp_path)


@pytest.mark.parametrize("content", ["[" * 10**5, '{"a": "\xff"}', "", "null", "7" * 5000])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_is_no_json_is_named(small: pathlib.Path, name: str, content: str) -> None:
    folder = small.with_name("hub")
    checkpoints.convert(small, folder, "huggingface")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / name).write_text(content, "latin-1")
    with pytest.raises(ValueError, match=rf"{folder / name} (is not JSON|holds no JSON object)"):
        checkpoints.open(folder)


def test_a_configuration_is_under_a_checksum_of_its_own(small: pathlib.Path) -> None:
    """Of what it says: how it is spelled does not count."""
    path = small / native.CONFIG
    description = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(description.items()))))
    assert checkpoints.describe(checkpoints.open(small))["checksums"] == "of every file"
    for field, value in (("max_distance", 28), ("max_distance", 128.0), ("dropout_rate", 0.5)):
        changed = description | {"model": description["model"] | {field: value}}
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"config\.json was altered"):
            checkpoints.open(small)
    path.write_text(json.dumps(description | {"extra_ids": 3}))
    with pytest.raises(ValueError, match=r"config\.json was altered"):
        checkpoints.open(small)


def test_a_configuration_of_old_has_none(small: pathlib.Path) -> None:
    rewritten(lambda d: d)(small)
    old = checkpoints.open(small)
    assert checkpoints.describe(old)["checksums"].startswith("of every file but config.json")
    checkpoints.convert(small, small.with_name("copy"), "native")
    checkpoints.convert(small, small.with_name("hub"), "huggingface")
    for name, said in (("copy", "of every file"), ("hub", "none: ")):
        copied = checkpoints.open(small.with_name(name))
        assert copied.config == old.config
        assert checkpoints.describe(copied)["checksums"].startswith(said)


@pytest.mark.parametrize("name", checkpoints.SHIPPED)
def test_what_ships_is_under_checksums(name: str) -> None:
    description = read_settings(checkpoints.SHIPPED[name])
    assert description["checksum"] == native.checksum(description)


def test_scales_of_another_shape_are_named(small: pathlib.Path) -> None:
    checkpoints.convert(small, small.with_name("int8"), "native", "int8")
    path = small.with_name("int8") / "model.safetensors"
    stored = load_file(path)
    name = next(name for name in stored if name.endswith("kernel.scale"))
    save_file(stored | {name: np.ones((1, 1), np.float32)}, path)
    said(sha256={path.name: sha256(path)})(path.parent)
    with pytest.raises(ValueError, match=rf"{name} .* is \(1, 1\), which are no scales"):
        checkpoints.open(path.parent)


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


def test_a_vocabulary_is_verified_before_it_is_parsed_or_copied(tmp_path: pathlib.Path) -> None:
    saved.save(tmp_path / "model", saved.TARGET, 0)
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
