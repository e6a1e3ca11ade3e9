"""Against the installed transformers, live: `make test-peers` runs these."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import checkpoints
from speculative.models import T5

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
golden = runpy.run_path(str(ROOT / "scripts" / "make_transformers_golden.py"))
VERSIONS = sorted(golden["VERSIONS"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_files_are_what_it_computes_today(version: str) -> None:
    model = golden["make"](version)
    with np.load(ROOT / "tests" / "data" / version / "expected.npz") as stored:
        for name, value in golden["expected"](model).items():
            np.testing.assert_allclose(value, stored[name], atol=1e-4)


@pytest.mark.parametrize("shards", ["one file", "shards", "torch"])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_it_saves_is_what_we_compute(
    tmp_path: pathlib.Path, version: str, shards: str
) -> None:
    model = golden["make"](version)
    if shards == "torch":
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        model.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "shards" else "1GB")
    checkpoint = checkpoints.open(tmp_path)
    expected = golden["expected"](model)
    arguments = (jnp.asarray(expected[name]) for name in ("inputs", "decoder_inputs"))
    logits = jax.jit(T5(checkpoint.config).forward)(checkpoint.load("float32"), *arguments)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_loads_what_we_write(
    tmp_path: pathlib.Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing missing, nothing unexpected, and the same logits; in one file and in shards."""
    golden["make"](version).save_pretrained(tmp_path / "theirs")
    expected = golden["expected"](golden["make"](version))
    for size in (2**30, 20_000):
        monkeypatch.setattr(checkpoints.FORMATS["huggingface"], "SHARD_BYTES", size)
        checkpoints.convert(tmp_path / "theirs", tmp_path / str(size), "huggingface")
        model, said = transformers.T5ForConditionalGeneration.from_pretrained(
            tmp_path / str(size), output_loading_info=True
        )
        assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        found = golden["expected"](model.eval())
        np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-5)
        np.testing.assert_array_equal(found["greedy"], expected["greedy"])
