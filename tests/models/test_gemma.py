"""Gemma 3 inside a multimodal checkpoint, and Gemmas that transformers does not have."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from speculative import checkpoints
from tests.models import test_decoders

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
OUTSIDE = "vision_tower.layers.0.weight", "multi_modal_projector.mm_soft_emb_norm.weight"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_one(prefix: str, tmp_path: pathlib.Path) -> None:
    """As old and new versions of transformers name its tensors."""
    folder = test_decoders.write("gemma3", tmp_path / "text")
    alone = checkpoints.open(folder)
    tensors = load_file(folder / "model.safetensors")
    whole = {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
    whole |= {name: np.ones((2, 2), np.float32) for name in OUTSIDE}
    settings = json.loads((folder / "config.json").read_text())
    usual = {"attention_bias": False, "vision_config": {"hidden_size": 8}, "eos_token_id": [1, 60]}
    both = {"model_type": "gemma3", "text_config": settings, **usual}
    (multimodal := tmp_path / "multimodal").mkdir()
    (multimodal / "config.json").write_text(json.dumps(both))
    save_file(whole, multimodal / "model.safetensors")
    found = checkpoints.open(multimodal)
    assert found.config == alone.config
    assert found.special.eos_ids == (1, 60)
    jax.tree.map(np.testing.assert_array_equal, found.numpy(), alone.numpy())
    assert "reads more than text; 2 tensors for that are left out" in found.note


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping, which only Gemma 2 has"),
        ({"final_logit_softcapping": -1.0}, "logits_cap must be positive, or 0"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "scales the positions of layers with"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True; supported is"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'; supported is"),
    ],
)
def test_what_is_not_computed(
    changes: dict[str, Any], fragment: str, tmp_path: pathlib.Path
) -> None:
    folder = test_decoders.write("gemma3", tmp_path / "made")
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=fragment):
        checkpoints.open(folder)


def test_windows_that_transformers_has_not(tmp_path: pathlib.Path) -> None:
    original = checkpoints.open(test_decoders.write("gemma3", tmp_path / "made"))
    config = original.config.replace(windows=(0, 9))
    with pytest.raises(ValueError, match="transformers has no Gemma 3 with the windows of"):
        test_decoders.names_of(config).settings(config, "here")
