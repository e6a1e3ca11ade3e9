"""Names that become a target and a draft: what is refused before a tensor is read."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from speculative import checkpoints
from speculative.backends import usual_quantize
from speculative.checkpoints import native
from speculative.decoding import Decoding
from speculative.loading import load, resolve
from speculative.models import SIZES, Config, T5Config, abstract_params
from speculative.models.reads import Reads, packed
from speculative.rows.config import RowConfig
from speculative.rows.weights import sizes
from tests import saved

READER = saved.DRAFT.replace(num_encoder_layers=0, reads=Reads(16))


def save(folder: pathlib.Path, config: Config, vocabulary: pathlib.Path | None) -> str:
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract_params(config))
    native.save(folder, config, params, vocabulary)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in {
        "target": saved.TARGET,
        "draft": saved.DRAFT,
        "gpt_draft": saved.GPT_DRAFT,
        "reader": READER,
        "far_reader": READER.replace(reads=Reads(24)),
        "narrow": saved.DRAFT.replace(vocab_size=100),
        "beyond": saved.DRAFT.replace(
            vocab_size=8200, reads=Reads(draft_vocabulary=packed([5, 8195]))
        ),
    }.items():
        save(folder / name, config, saved.VOCABULARY)
    save(folder / "bare", saved.TARGET, None)
    return folder


def test_nothing_is_hashed_but_vocabularies(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = saved.hashed(monkeypatch)
    found = resolve(str(folder / "target"), str(folder / "reader"), "bfloat16")
    assert hashed == [saved.VOCABULARY.name] * 2
    assert found.names == (str(folder / "target"), str(folder / "reader"))
    models = {saved.TARGET: "none", READER: usual_quantize()}
    assert found.configs == [
        config.replace(dtype="bfloat16", quantize=quantize) for config, quantize in models.items()
    ]
    assert found.vocabulary.size == 8192
    assert found.table is None
    paths = resolve(folder / "target", folder / "reader", "bfloat16")
    assert (paths.names, paths.configs) == (found.names, found.configs)


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ("none", "copy", "There is no checkpoint '.*none'"),
        ("target", "none", "There is no draft '.*none': .* debian_target, .* suffix"),
        ("target", "gpt_draft", "is a decoder-only model, but its target .* an encoder-decoder"),
        ("gpt_draft", "draft", "is an encoder-decoder, but its target .* a decoder-only model"),
        ("reader", None, "reader reads its target's encoder.* can be a draft only"),
        ("reader", "copy", "reader reads its target's encoder.* can be a draft only"),
        ("reader", "draft", "reader reads its target's encoder.* can be a draft only"),
        ("target", None, "No draft is bundled for .*; .* .--draft.: .* training .uniform, copy"),
        ("target", "far_reader", "reads an encoder of 24 features, but that of .* has 16; load"),
        ("target", "none+copy", "There is no draft '.*none'"),
        ("target", "copy+suffix", r"^copy\+suffix mixes no model; give .* in place of copy"),
        ("target", "reader+suffix", r"'suffix' needs .*target/past_outputs\.npz, which does not"),
        ("target", "suffix", r"needs .*target/past_outputs\.npz, which does not exist"),
        ("target", "beyond", "beyond guesses token 8195, but the vocabulary has 8192 pieces"),
        ("target", "narrow", "narrow has 100 embeddings, fewer than the 8192 pieces"),
        ("narrow", "copy", "narrow has 100 embeddings, fewer than the 8192 pieces"),
        ("target", "debian_lm_draft", "one kind"),
        ("bare", "copy", "bare comes without a vocabulary; give one"),
        ("target", "bare", "bare comes without a vocabulary; give one"),
    ],
)
def test_what_is_wrong_is_refused_before_a_tensor_is_read(
    folder: pathlib.Path, target: str, draft: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.Checkpoint, "read", lambda *_: pytest.fail("read"))
    if draft and not draft.startswith(("copy", "suffix", "debian")):
        draft = str(folder / draft)
    with pytest.raises(ValueError, match=said):
        load(folder / target, draft)


def test_a_draft_that_reads_the_decoder_is_for_its_target_alone(tmp_path: pathlib.Path) -> None:
    """Its target is known again in bfloat16 and in int8, and another is not taken for it."""
    layers = ("decoder/layers_0",)
    for seed, name in enumerate(("mine", "other")):
        params = saved.drawn(saved.TARGET, seed)
        native.save(tmp_path / name, saved.TARGET, params, saved.VOCABULARY)
    made = native.MadeFor("mine/target", checkpoints.open(tmp_path / "mine").fingerprint())
    config = READER.replace(reads=Reads(16, layers))
    params = saved.drawn(config, 2)
    native.save(tmp_path / "draft", config, params, saved.VOCABULARY, made_for=made)
    checkpoints.convert(tmp_path / "mine", tmp_path / "half", "native", "bfloat16")
    checkpoints.convert(tmp_path / "half", tmp_path / "int8", "native", "int8")
    for target in ("mine", "half", "int8"):
        pair = resolve(tmp_path / target, tmp_path / "draft").load()
        assert pair.draft.layers == (*layers, "encoder")
    with pytest.raises(ValueError, match="states of the target mine/target, .*other is another"):
        load(tmp_path / "other", tmp_path / "draft")
    copied = checkpoints.convert(tmp_path / "draft", tmp_path / "copied", "native")
    assert copied.made_for == made


def test_a_vocabulary_that_nobody_needs(folder: pathlib.Path) -> None:
    target, bare = str(folder / "target"), str(folder / "bare")
    for draft in ("copy", str(folder / "draft")):
        with pytest.raises(ValueError, match="no use for the vocabulary .*target.* already"):
            resolve(target, draft, vocabulary_file=str(saved.VOCABULARY))
    # One of two needs it.
    assert resolve(target, bare, vocabulary_file=str(saved.VOCABULARY)).vocabulary.size == 8192


def test_a_vocabulary_beside_checkpoints_that_have_none(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bare = str(folder / "bare")
    found = resolve(bare, "uniform", vocabulary_file=str(saved.VOCABULARY))
    assert (found.vocabulary.size, found.vocabulary.extra_ids) == (8192, 0)
    roomy = save(tmp_path / "roomy", saved.TARGET.replace(vocab_size=8192 + 100), None)
    assert resolve(roomy, "uniform", vocabulary_file=str(saved.VOCABULARY)).vocabulary.size == 8292
    # Sentinels of the target are tokens that the draft cannot guess.
    found = resolve(roomy, bare, vocabulary_file=str(saved.VOCABULARY)).tables
    assert found is not None and (found.logits == 8192).sum() == 101  # And the start token.


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (("gpt_6m", "bigram"), {}, "no text to count for bigram"),
        (("debian_target", "copy"), {}, "for the sizes t5_1_1_small, .* not for 'debian_target'"),
        (("t5_small", "debian_draft"), {}, "for the sizes .*, not for 'debian_draft'"),
        (("t5_small", "gpt_6m"), {}, "must be of one kind"),
        (("gpt2", "gpt_6m"), {}, "gpt_6m has 8192 embeddings, fewer than the 50257 pieces"),
        (
            ("tiny", "copy"),
            {"vocabulary_file": str(saved.VOCABULARY)},
            "tiny has 64 embeddings, fewer than the 8192 pieces",
        ),
    ],
)
def test_random_weights_that_are_refused(
    names: tuple[str, str], more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "tiny", T5Config(64, 8, 2, 4, 16, 1, 1))
    with pytest.raises(ValueError, match=said):
        resolve(*names, random=True, **more)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_bfloat16_is_for_accelerators(
    platform: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all weights are stored in it, or random; and `inspect` and estimates say the same."""
    params = saved.random(saved.TARGET, 1)
    for storage in ("float32", "bfloat16"):
        native.save(tmp_path / storage, saved.TARGET, params, saved.VOCABULARY, storage)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    narrow = "float32" if platform == "cpu" else "bfloat16"
    for storage, dtype in (("float32", "float32"), ("bfloat16", narrow)):
        target = str(tmp_path / storage)
        assert resolve(target, "copy").target.config.dtype == dtype
        assert resolve(target, "copy", "bfloat16").target.config.dtype == "bfloat16"
        said = checkpoints.describe(checkpoints.open(target))["computed in"]
        assert said == f"{dtype} on this device, unless --dtype is given"
        row = RowConfig(task="debian_ende", target=target, draft="copy", temperature=0.0)
        assert [size.dtype for size in sizes(row)] == [dtype]
    random = resolve("t5_small", "t5_small", random=True)
    assert [size.dtype for size in random.configs] == [narrow] * 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("jax_enable_x64", True, "jax_enable_x64 = True .* JAX_ENABLE_X64.* set it to False"),
        ("jax_numpy_dtype_promotion", "strict", "'strict' .* set it to 'standard'"),
        ("jax_numpy_rank_promotion", "raise", "'raise' .* set it to 'allow'"),
    ],
)
def test_settings_of_jax_that_would_break_programs(
    folder: pathlib.Path, name: str, value: Any, said: str
) -> None:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.raises(ValueError, match=said):
            resolve(str(folder / "target"), "copy")
    finally:
        jax.config.update(name, before)


def test_other_keys_by_default_change_no_random_number() -> None:
    config, examples = Decoding(9, max_length=4), np.arange(2)
    want = np.asarray(config.draws(3, examples))
    for name, value in (("jax_default_prng_impl", "rbg"), ("jax_enable_custom_prng", True)):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            jax.clear_caches()
            np.testing.assert_array_equal(config.draws(3, examples), want)
        finally:
            jax.config.update(name, before)


def test_random_weights_decode_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", T5Config(64, 8, 2, 4, 16, 1, 1))
    pair = load("tiny", "tiny", "float32", random=True)
    assert pair.names == ("tiny", "tiny")
    assert pair.vocabulary.decode([2, 63]) == "2 63"
    assert pair.target.config.dtype == "float32"
