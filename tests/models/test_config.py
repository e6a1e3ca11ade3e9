"""Sizes, and what is said of wrong ones."""

import json

import jax
import numpy as np
import pytest

from speculative.models import (
    SIZES,
    Config,
    DecoderOnlyConfig,
    T5Config,
    abstract_params,
    model_of,
    named,
)
from speculative.models.gpt import LAMDA
from speculative.models.reads import Reads, packed, unpacked

TINY = T5Config(100, 16, 2, 8, 32, 1, 1)
GPT = DecoderOnlyConfig(100, 16, 2, 8, 32, 1, max_positions=8)


def test_an_unknown_size_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'t5_1_1_tiny'") as raised:
        named("t5_1_1_tiny")
    assert all(size in str(raised.value) for size in SIZES)


def test_named_takes_changes() -> None:
    assert named("t5_1_1_xxl", dtype="bfloat16") == SIZES["t5_1_1_xxl"].replace(dtype="bfloat16")


def test_json_and_back() -> None:
    config = TINY.replace(mlp_activations=("relu",), logits_via_embedding=True)
    again = T5Config.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        # Raffel et al. section 2.3 print 60, 220, 770 million, 2.8 and 11 billion; T5X's
        # v1.1 sizes are 77, 248, 783 million, 2.8 and 11 billion.
        ("t5_small", 60),
        ("t5_base", 223),
        ("t5_large", 738),
        ("t5_3b", 2852),
        ("t5_11b", 11307),
        # Published as mT5's 300 million and 13 billion, umT5's, ByT5's 300 and 582 million and 12.9
        # billion, and UL2's 20 billion.
        ("mt5_small", 300.176768),
        ("mt5_xxl", 12921),
        ("umt5_small", 306.601984),
        ("byt5_small", 299.637760),
        ("byt5_base", 581.653248),
        ("byt5_xxl", 12921),
        ("ul2", 19459),
        ("madlad400_3b", 2940),
        ("madlad400_10b", 10_700),
        ("t5_1_1_small", 77),
        ("t5_1_1_base", 248),
        ("t5_1_1_large", 783),
        ("t5_1_1_xl", 2850),
        ("t5_1_1_xxl", 11135),
        # Leviathan et al., section 4.1, print 97 and 6 million, which they come near to with
        # logits of their own: 8192 more rows of 768 and of 256.
        ("gpt_97m", 98.4),
        ("gpt_6m", 6.04),
        # Radford et al. print 117, 345, 762 and 1542 million; these are what they published.
        ("gpt2", 124.439808),
        ("gpt2_medium", 354.823168),
        ("gpt2_large", 774.030080),
        ("gpt2_xl", 1557.611200),
        # Thoppilan et al. print 137, 8 and 2 billion (8.6 and 2.1 beside the embedding).
        ("lamda_137b", 137_702),
        ("lamda_8b", 8_721),
        ("lamda_2b", 2_179),
        ("lamda_100m", 100),
    ],
)
def test_public_sizes_have_their_number_of_parameters(size: str, millions: float) -> None:
    shapes = jax.tree.leaves(abstract_params(SIZES[size]))
    assert sum(np.prod(x.shape) for x in shapes) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    "config",
    [
        T5Config(100, 16, 2, 8, 32, 2, 3),
        T5Config(100, 16, 2, 8, 32, 3, 2, shared_positions=False),
        T5Config(100, 16, 2, 8, 32, 0, 3, reads=Reads(24)),
        T5Config(100, 16, 2, 8, 32, 0, 3, reads=Reads(24, ("decoder/layers_0",))),
        T5Config(100, 16, 2, 8, 32, 2, 3, reads=Reads(draft_vocabulary=packed([1, 5, 99]))),
        DecoderOnlyConfig(100, 16, 2, 8, 32, 3, max_positions=48),
    ],
)
def test_shapes_are_those_of_a_random_model(config: Config) -> None:
    """Every layer of it, where `abstract_params` looks at one a stack."""
    params = jax.eval_shape(model_of(config).init, jax.random.key(0))
    assert params == abstract_params(config)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (TINY, "vocab_size", 0),
        (TINY, "emb_dim", -4),
        (TINY, "num_heads", 2.0),
        (TINY, "num_decoder_layers", "3"),
        (TINY, "dtype", "float16"),
        (TINY, "dropout_rate", 1.0),
        (TINY, "dropout_rate", -0.1),
        (TINY, "mlp_activations", ()),
        (TINY, "mlp_activations", ("gelu", "linear", "relu")),
        (TINY, "num_buckets", 1),
        (TINY, "num_buckets", 3),
        (TINY, "max_distance", 16),
        (TINY, "num_encoder_layers", 0),
        (TINY, "num_kv_heads", 1),
        (TINY, "norm", "layer"),
        (TINY, "norm", "batch"),
        (TINY, "positions", "learned"),
        (TINY, "biases", True),
        (TINY, "scaled_attention", True),
        (TINY, "max_positions", 8),
        (GPT, "num_kv_heads", 4),
        (GPT, "max_positions", 0),
        (GPT, "mlp_activations", ("gelu", "linear")),
    ],
)
def test_a_wrong_value_is_named_with_its_field(config: Config, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field}\b.* must be .*, not .*") as raised:
        config.replace(**{field: value})
    assert repr(value) in str(raised.value)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="mlp_activations has 'swish'; known: gelu, silu"):
        TINY.replace(mlp_activations=("gelu", "swish"))


def test_relative_positions_are_not_counted() -> None:
    with pytest.raises(ValueError, match="max_positions must be 0 where .*, not 8"):
        GPT.replace(positions="relative")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("zz", "draft_vocabulary must be hexadecimal digits, not 'zz'"),
        ("00", "draft_vocabulary must be of at least one token"),
        (packed([3, 100]), "draft_vocabulary must be of tokens below 100, not"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        T5Config(100, 16, 2, 8, 32, 1, 1, reads=Reads(draft_vocabulary=given))
    with pytest.raises(ValueError, match="draft_vocabulary must be empty where logits are tied"):
        GPT.replace(reads=Reads(draft_vocabulary=packed([1])))


def test_what_is_read_of_a_target_is_checked() -> None:
    with pytest.raises(ValueError, match="source_dim must be a non-negative .*, not -1"):
        Reads(-1)
    with pytest.raises(ValueError, match="one of .* must be 0, not 2 and 16"):
        T5Config(100, 16, 2, 8, 32, 2, 3, reads=Reads(16))
    with pytest.raises(ValueError, match="source_dim must be 0 where .*; not 16"):
        GPT.replace(reads=Reads(16))


def test_a_set_of_tokens_is_kept() -> None:
    for tokens in ([0], [7, 8, 9], [0, 5, 32127]):
        assert unpacked(packed(tokens)).tolist() == tokens


def test_a_config_without_positions_is_told_what_relative_ones_need() -> None:
    with pytest.raises(
        ValueError, match=r"relative positions needs positions = 'relative'\), not 0"
    ):
        DecoderOnlyConfig(100, 16, 2, 8, 32, 1)


@pytest.mark.parametrize("config", [GPT, DecoderOnlyConfig(100, 16, 2, 8, 32, 1, **LAMDA)])
def test_a_decoder_only_model_of_the_first_version(config: DecoderOnlyConfig) -> None:
    """Which told the kind of its layers by its positions alone."""
    said = config.to_json()
    new = ("norm", "positions", "biases", "scaled_attention", "num_kv_heads", "source_dim")
    old = {name: value for name, value in said.items() if name not in new}
    assert DecoderOnlyConfig.from_json(old) == DecoderOnlyConfig.from_json(said) == config
    mixed = config.replace(scaled_attention=not config.scaled_attention)
    assert DecoderOnlyConfig.from_json(mixed.to_json()) == mixed
