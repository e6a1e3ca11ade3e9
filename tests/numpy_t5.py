"""T5 in float64 NumPy, one row at a time and without caches: what the package's T5 must compute.

Written from Raffel et al. (section 2.1) and T5X's parameter names; it shares no code with the
package.
"""

from typing import Any

import numpy as np

from speculative.models import T5Config

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
    x = tree["token_embedder"]["embedding"][source]
    encoder = tree["encoder"]
    for i in range(config.num_encoder_layers):
        layer = encoder[f"layers_{i}"]
        bias = _bias(_table(encoder, layer), len(source), bidirectional=True)
        y = _norm(x, layer["pre_attention_layer_norm"])
        x = x + _attention(layer["attention"], config, y, y, bias)
        x = x + _mlp(layer["mlp"], config, _norm(x, layer["pre_mlp_layer_norm"]))
    return _norm(x, encoder["encoder_norm"])


def decode(
    params: Tree,
    config: T5Config,
    encoded: np.ndarray,
    tokens: np.ndarray,
    hidden: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Logits [L, V] on an encoded source [S, D]; `hidden` receives the states [L, D] by name."""
    hidden = {} if hidden is None else hidden
    tree = _float64(params)
    embedding = tree["token_embedder"]["embedding"]
    x = embedding[tokens]
    decoder = tree["decoder"]
    length = len(tokens)
    later = np.arange(length)[None, :] > np.arange(length)[:, None]
    for i in range(config.num_decoder_layers):
        layer = decoder[f"layers_{i}"]
        bias = _bias(_table(decoder, layer), length, bidirectional=False)
        bias = np.where(later, -np.inf, bias)
        y = _norm(x, layer["pre_self_attention_layer_norm"])
        x = x + _attention(layer["self_attention"], config, y, y, bias)
        y = _norm(x, layer["pre_cross_attention_layer_norm"])
        x = x + _attention(layer["encoder_decoder_attention"], config, y, encoded, 0.0)
        x = x + _mlp(layer["mlp"], config, _norm(x, layer["pre_mlp_layer_norm"]))
        hidden[f"decoder/layers_{i}"] = x
    x = hidden["decoder/decoder_norm"] = _norm(x, decoder["decoder_norm"])
    if config.logits_via_embedding:
        return (x / np.sqrt(config.emb_dim)) @ embedding.T
    return x @ decoder["logits_dense"]["kernel"]


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _float64(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)


def _norm(x: np.ndarray, layer: Tree) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * layer["scale"]


def _table(stack: Tree, layer: Tree) -> np.ndarray:
    """The positions of a stack, or of a layer (umT5)."""
    return (layer.get("relative_posemb") or stack["relpos_bias"])["rel_embedding"]


def _bias(table: np.ndarray, length: int, bidirectional: bool) -> np.ndarray:
    """[N, buckets] -> [N, query, key]."""
    places = range(length)
    return table[:, [[bucket(k - q, bidirectional) for k in places] for q in places]]


def _attention(
    layer: Tree, config: T5Config, x: np.ndarray, seen: np.ndarray, bias: np.ndarray | float
) -> np.ndarray:
    heads = (-1, config.num_heads, config.head_dim)
    query = (x @ layer["query"]["kernel"]).reshape(heads)
    key = (seen @ layer["key"]["kernel"]).reshape(heads)
    value = (seen @ layer["value"]["kernel"]).reshape(heads)
    scores = np.einsum("qnh,knh->nqk", query, key) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("nqk,knh->qnh", weights, value)
    return mixed.reshape(len(x), -1) @ layer["out"]["kernel"]


def _mlp(layer: Tree, config: T5Config, x: np.ndarray) -> np.ndarray:
    if config.mlp_activations == ("relu",):
        return np.maximum(x @ layer["wi"]["kernel"], 0) @ layer["wo"]["kernel"]
    gate = x @ layer["wi_0"]["kernel"]
    active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    if config.mlp_activations[0] == "silu":
        active = gate / (1 + np.exp(-gate))
    return (active * (x @ layer["wi_1"]["kernel"])) @ layer["wo"]["kernel"]
