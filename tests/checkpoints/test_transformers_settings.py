"""Every setting of transformers' T5 and GPT-2 is applied, refused, or changes nothing computed.

The fields are those of transformers 5.24's `T5Config` and `GPT2Config`, of the names they know them
by beside, and of what its `PreTrainedConfig` or older versions add that could change a model.
"""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from speculative import checkpoints
from speculative.models import model_of
from speculative.models.t5 import T5Names
from tests import saved
from tests.checkpoints.test_formats import DATA, edit_tensors

T5, GPT2 = DATA / "transformers_v1_1", DATA / "transformers_gpt2"

# A field's other value, and what comes of it: the fields of our configuration that it changes, the
# sentence by which it is refused, or None where nothing is computed by it.
SIZES = "its configuration asks for|lacks the tensor|unknown to its configuration|too few for"
Case = tuple[str, Any, str | dict[str, Any] | None]
OF_T5: list[Case] = [
    ("vocab_size", 95, SIZES),
    ("d_model", 23, SIZES),
    ("hidden_size", 25, "has the d_model 24 and the hidden_size 25, which are one setting"),
    ("d_kv", 4, SIZES),
    ("head_dim", 4, "has the d_kv 8 and the head_dim 4"),
    ("d_ff", 41, SIZES),
    ("num_layers", 3, SIZES),
    ("num_hidden_layers", 3, "has the num_layers 2 and the num_hidden_layers 3"),
    ("num_decoder_layers", 2, SIZES),
    ("num_decoder_layers", None, SIZES),  # As many as the encoder's, which are fewer.
    ("num_heads", 6, SIZES),
    ("num_attention_heads", 6, "has the num_heads 3 and the num_attention_heads 6"),
    ("relative_attention_num_buckets", 16, SIZES),
    ("relative_attention_max_distance", 64, {"max_distance": 64}),
    ("layer_norm_epsilon", 1e-5, "has the layer_norm_epsilon 1e-05; supported is 1e-06"),
    ("feed_forward_proj", "gated-silu", {"mlp_activations": ("silu", "linear")}),
    ("feed_forward_proj", "gated-relu", {"mlp_activations": ("relu", "linear")}),
    ("feed_forward_proj", "gated-gelu_pytorch_tanh", {}),
    ("feed_forward_proj", "relu", SIZES),
    ("feed_forward_proj", "gelu", "has the feed_forward_proj 'gelu'; known are relu, gated-gelu"),
    ("feed_forward_proj", "dual-relu", "has the feed_forward_proj 'dual-relu'"),
    ("dense_act_fn", "silu", {"mlp_activations": ("silu", "linear")}),
    ("dense_act_fn", "gelu_pytorch_tanh", {}),
    ("dense_act_fn", "gelu", "has the dense_act_fn 'gelu'; known are relu, gelu_new, "),
    ("is_gated_act", False, SIZES),
    ("tie_word_embeddings", True, "says that logits are tied .* lm_head.weight of their own"),
    ("scale_decoder_outputs", True, "says that logits are tied .* lm_head.weight of their own"),
    ("scale_decoder_outputs", False, {}),
    ("quantization_config", {"bits": 4}, "quantization_config: its tensors .* by others"),
    ("pruned_heads", {"0": [1]}, "has the pruned_heads .*; supported is None or {}"),
    *((name, value, None) for name, value in {
        "dropout_rate": 0.5, "classifier_dropout": 0.5, "initializer_factor": 9.0,  # In training.
        "use_cache": False, "chunk_size_feed_forward": 8, "dtype": "bfloat16",  # Not what, but how.
        "is_decoder": True, "is_encoder_decoder": False,  # Of each stack, which sets it itself.
        "problem_type": "regression", "num_labels": 5, "id2label": {},  # Of classifiers.
        "output_attentions": True, "output_hidden_states": True, "return_dict": False,
        "n_positions": 7, "output_past": False, "architectures": ["T5Model"],
        "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    }.items()),
]  # fmt: skip
OF_GPT2: list[Case] = [
    ("vocab_size", 95, SIZES),
    ("n_positions", 63, SIZES),
    ("max_position_embeddings", 63, "n_positions 64 and the max_position_embeddings 63"),
    ("n_embd", 27, SIZES),
    ("hidden_size", 27, "has the n_embd 24 and the hidden_size 27"),
    ("n_layer", 3, SIZES),
    ("num_hidden_layers", 3, "has the n_layer 2 and the num_hidden_layers 3"),
    ("n_head", 2, {"num_heads": 2, "head_dim": 12}),
    ("num_attention_heads", 2, "has the n_head 3 and the num_attention_heads 2"),
    ("n_inner", 95, SIZES),
    ("n_inner", 96, {}),
    ("n_inner", 0, "mlp_dim must be a positive"),
    ("activation_function", "gelu_pytorch_tanh", {}),
    ("activation_function", "gelu", "has the activation_function 'gelu'; supported is gelu_new"),
    ("layer_norm_epsilon", 1e-6, "has the layer_norm_epsilon 1e-06; supported is 1e-05"),
    ("scale_attn_weights", False, "has the scale_attn_weights False"),
    ("scale_attn_by_inverse_layer_idx", True, "has the scale_attn_by_inverse_layer_idx True"),
    ("add_cross_attention", True, "has the add_cross_attention True"),
    ("tie_word_embeddings", False, r"lacks the tensor lm_head\.weight"),
    ("quantization_config", {"bits": 4}, "has a quantization_config"),
    ("pruned_heads", {"0": [1]}, "has the pruned_heads"),
    *((name, value, None) for name, value in {
        "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "initializer_range": 9.0,
        "summary_type": "mean", "summary_use_proj": False, "summary_activation": "tanh",
        "summary_proj_to_labels": False, "summary_first_dropout": 0.5,  # Of another head.
        "use_cache": False, "chunk_size_feed_forward": 8, "dtype": "bfloat16", "n_ctx": 7,
        # Scores are computed in float32 here in any case.
        "reorder_and_upcast_attn": True, "is_decoder": True, "is_encoder_decoder": False,
        "problem_type": "regression", "num_labels": 5, "output_attentions": True,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "name", "value", "outcome"),
    [(folder, *case) for folder, cases in ((T5, OF_T5), (GPT2, OF_GPT2)) for case in cases],
)
def test_every_setting_is_applied_or_refused(
    folder: pathlib.Path, name: str, value: Any, outcome: Any, tmp_path: pathlib.Path
) -> None:
    made = shutil.copytree(folder, tmp_path / "made")
    said = json.loads((made / "config.json").read_text())
    for derived in ("dense_act_fn", "is_gated_act", "scale_decoder_outputs"):
        said.pop(derived, None)  # Which would decide in place of what they are derived from.
    (made / "config.json").write_text(json.dumps(said | {name: value}))
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=outcome) as raised:
            checkpoints.open(made)
        assert str(made) in str(raised.value)
    else:
        want = checkpoints.open(folder).config.replace(**outcome or {})
        assert checkpoints.open(made).config == want


@pytest.mark.parametrize("name", ["num_layers", "d_model", "d_kv", "num_heads"])
def test_a_setting_may_have_its_other_name(name: str, tmp_path: pathlib.Path) -> None:
    made = shutil.copytree(T5, tmp_path / "made")
    aliases = T5Names.aliases.items()
    other = next(alias for alias, first in aliases if first == name)
    text = (made / "config.json").read_text()
    (made / "config.json").write_text(text.replace(f'"{name}"', f'"{other}"'))
    assert checkpoints.open(made).config == checkpoints.open(T5).config


def test_an_embedding_of_the_decoders_own(tmp_path: pathlib.Path) -> None:
    """Which has each row one further down: it reads the tokens before those that are given."""
    made = shutil.copytree(DATA / "transformers_v1_0", tmp_path / "made")
    table = load_file(made / "model.safetensors")["shared.weight"]
    edit_tensors(made, decoder__embed_tokens__weight=np.roll(table, 1, axis=0))
    with np.load(made / "expected.npz") as file:
        expected = dict(file)
    inputs, tokens = expected["inputs"], expected["decoder_inputs"]
    inputs = np.where(inputs == 0, -1, inputs)
    copies = {made: 1}
    for i, to in enumerate(("native", "huggingface", "native")):
        checkpoints.convert([*copies][-1], tmp_path / str(i), to)
        copies[tmp_path / str(i)] = 1
    for folder in copies:
        checkpoint = checkpoints.open(folder)
        assert not checkpoint.config.shared_embedding and checkpoint.config.logits_via_embedding
        given = inputs, (tokens + 1) % len(table)
        logits = saved.forward(model_of(checkpoint.config), checkpoint.load("float32"), *given)
        np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    with pytest.raises(ValueError, match="no decoder with an embedding of its own, as .*made has"):
        checkpoints.convert(made, tmp_path / "t5x", "t5x")
    edit_tensors(made, encoder__embed_tokens__weight=np.roll(table, 1, axis=0))
    with pytest.raises(
        ValueError, match=r"encoder.embed_tokens.weight next to .* is not its shared"
    ):
        checkpoints.open(made)


def test_any_of_tied_tensors_may_be_stored(tmp_path: pathlib.Path) -> None:
    """And where two of GPT-2 differ, logits are of their own, as transformers 5 computes them."""
    for folder, original, copy in (
        (DATA / "transformers_v1_0", "shared.weight", "decoder.embed_tokens.weight"),
        (GPT2, "transformer.wte.weight", "lm_head.weight"),
    ):
        made = shutil.copytree(folder, tmp_path / folder.name)
        stored = load_file(made / "model.safetensors")
        table = stored.pop(original)
        save_file(stored | {copy: table}, made / "model.safetensors")
        found, want = checkpoints.open(made), checkpoints.open(folder)
        assert found.config == want.config
        for name in want.tensors:
            np.testing.assert_array_equal(found.read(name), want.read(name))
    save_file(
        stored | {original: table, copy: np.roll(table, 1, axis=0)}, made / "model.safetensors"
    )
    opened = checkpoints.open(made)
    given = np.ones((1, 1), np.int32), np.arange(8, dtype=np.int32)[None]
    logits, tied = (
        saved.forward(model_of(one.config), one.load("float32"), *given) for one in (opened, want)
    )
    np.testing.assert_allclose(logits, np.roll(tied, 1, axis=-1), atol=1e-5)


def test_what_no_model_reads_may_be_of_any_type(tmp_path: pathlib.Path) -> None:
    made = shutil.copytree(GPT2, tmp_path / "made")
    edit_tensors(
        made,
        transformer__h__0__attn__bias=np.tril(np.ones((1, 1, 64, 64), bool)),
        transformer__h__1__attn__masked_bias=np.full((), -1e4),
        transformer__position_ids=np.arange(64),
    )
    assert checkpoints.open(made).tensors.keys() == checkpoints.open(GPT2).tensors.keys()
