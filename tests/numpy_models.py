"""Models in float64 NumPy, one row at a time and without caches: what the package's must compute.

Written from Raffel et al. (T5, section 2.1), Radford et al. (GPT-2, 2019) and Thoppilan et al.
(LaMDA, 2022, section 4) with T5X's parameter names; it shares no code with the package.
"""

from typing import Any

import numpy as np

from speculative.models import Config, T5Config

Tree = dict[str, Any]


def bucket(distance: int, bidirectional: bool, buckets: int = 32, furthest: int = 128) -> int:
    """The bucket of one distance (key minus query), in whole numbers.

    Beyond the exact half of n buckets, a distance d falls in bucket
    exact + floor(log(d / exact) / log(furthest / exact) * rest): the largest k with
    (d / exact)^rest >= (furthest / exact)^k, which needs no logarithm.
    """
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        away = abs(distance)
    else:
        away = max(-distance, 0)
    exact = buckets // 2
    rest = buckets - exact
    if away < exact:
        return offset + away
    k = 0
    while k < rest - 1 and away**rest * exact ** (k + 1) >= exact**rest * furthest ** (k + 1):
        k += 1
    return offset + exact + k


def logits(params: Tree, config: T5Config, source: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logits [L, V] of one row: source [S] without padding, decoder inputs [L]."""
    return decode(params, config, encode(params, config, source), tokens)


def encode(params: Tree, config: T5Config, source: np.ndarray) -> np.ndarray:
    """The encoder's output [S, D]."""
    tree = _float64(params)
    x, encoder = tree["token_embedder"]["embedding"][source], tree["encoder"]
    for i in range(config.num_encoder_layers):
        layer = encoder[f"layers_{i}"]
        bias = _bias(encoder, layer, len(source), bidirectional=True)
        y = _norm(x, layer["pre_attention_layer_norm"])
        x = x + _attention(layer["attention"], config, y, y, bias)
        x = x + _mlp(layer["mlp"], config, _norm(x, layer["pre_mlp_layer_norm"]))
    return _norm(x, encoder["encoder_norm"])


def decode(
    params: Tree,
    config: Config,
    encoded: np.ndarray | None,
    tokens: np.ndarray,
    hidden: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Logits [L, V] of tokens [L], on an encoded source [S, D] if the model has one.

    `hidden` receives the states [L, D] by name.
    """
    hidden = {} if hidden is None else hidden
    tree, length = _float64(params), len(tokens)
    embedding, decoder = tree["token_embedder"]["embedding"], tree["decoder"]
    x = embedding[tokens]
    if config.positions == "learned":
        x = x + decoder["position_embedder"]["embedding"][:length]
    later = np.arange(length)[None, :] > np.arange(length)[:, None]
    for i in range(config.decoder_layers):
        layer = decoder[f"layers_{i}"]
        bias = np.where(later, -np.inf, _bias(decoder, layer, length, bidirectional=False))
        y = _norm(x, layer["pre_self_attention_layer_norm"])
        x = x + _attention(layer["self_attention"], config, y, y, bias)
        if encoded is not None:
            y = _norm(x, layer["pre_cross_attention_layer_norm"])
            x = x + _attention(layer["encoder_decoder_attention"], config, y, encoded, 0.0)
        x = x + _mlp(layer["mlp"], config, _norm(x, layer["pre_mlp_layer_norm"]))
        hidden[f"decoder/layers_{i}"] = x
    x = hidden["decoder/decoder_norm"] = _norm(x, decoder["decoder_norm"])
    if not config.logits_via_embedding:
        return x @ decoder["logits_dense"]["kernel"]
    return (x / np.sqrt(config.emb_dim) if isinstance(config, T5Config) else x) @ embedding.T


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _float64(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)


def _norm(x: np.ndarray, layer: Tree) -> np.ndarray:
    """GPT-2's has a shift and removes the mean; T5's does neither."""
    if "bias" not in layer:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * layer["scale"]
    variance = x.var(axis=-1, keepdims=True)
    normal = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(variance + 1e-5)
    return normal * layer["scale"] + layer["bias"]


def _bias(stack: Tree, layer: Tree, length: int, bidirectional: bool) -> np.ndarray | float:
    """[N, query, key], by the table of the stack or of the layer (umT5), if there is one."""
    if (table := layer.get("relative_posemb") or stack.get("relpos_bias")) is None:
        return 0.0
    # By the distance, which is an index from the end where it is below 0.
    buckets = np.array([bucket(d, bidirectional) for d in [*range(length), *range(1 - length, 0)]])
    places = np.arange(length)
    return table["rel_embedding"][:, buckets[places - places[:, None]]]


def _dense(layer: Tree, x: np.ndarray) -> np.ndarray:
    return x @ layer["kernel"] + layer.get("bias", 0.0)


def _attention(
    layer: Tree, config: Config, x: np.ndarray, seen: np.ndarray, bias: np.ndarray | float
) -> np.ndarray:
    given = {"query": x, "key": seen, "value": seen}
    heads = (-1, config.num_heads, config.head_dim)
    query, key, value = (_dense(layer[name], y).reshape(heads) for name, y in given.items())
    # GPT-2 divides by the root of the heads' size, T5 by nothing.
    scale = np.sqrt(config.head_dim) if config.scaled_attention else 1.0
    scores = np.einsum("qnh,knh->nqk", query, key) / scale + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("nqk,knh->qnh", weights, value)
    return _dense(layer["out"], mixed.reshape(len(x), -1))


def activated(name: str, x: np.ndarray) -> np.ndarray:
    """An activation, by name."""
    if name == "gelu":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if name == "silu":
        return x / (1 + np.exp(-x))
    return np.maximum(x, 0) if name == "relu" else x


def _mlp(layer: Tree, config: Config, x: np.ndarray) -> np.ndarray:
    inputs = ("wi",) if "wi" in layer else ("wi_0", "wi_1")
    given = zip(config.mlp_activations, inputs, strict=True)
    active = [activated(activation, _dense(layer[name], x)) for activation, name in given]
    return _dense(layer["wo"], np.prod(active, axis=0))
