"""Decoder-only models in float64 NumPy, one text at a time and without caches.

GPT-2 as Radford et al. (2019) and LaMDA as Thoppilan et al. (2022, section 4) describe them; shares
no code with the package.
"""

from typing import Any

import numpy as np

from speculative.models import DecoderOnlyConfig
from tests.numpy_t5 import bucket

Tree = dict[str, Any]


def logits(
    params: Tree,
    config: DecoderOnlyConfig,
    text: np.ndarray,
    hidden: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Logits [L, V] of one text [L]; `hidden` receives the states [L, D] by name."""
    hidden = {} if hidden is None else hidden
    tree, length = _float64(params), len(text)
    embedding, decoder = tree["token_embedder"]["embedding"], tree["decoder"]
    bias = np.where(np.arange(length)[None, :] > np.arange(length)[:, None], -np.inf, 0.0)
    x = embedding[text]
    if config.positions == "learned":
        x = x + decoder["position_embedder"]["embedding"][:length]
    else:
        table, places = decoder["relpos_bias"]["rel_embedding"], range(length)
        bias = bias + table[:, [[bucket(k - q, False) for k in places] for q in places]]
    for i in range(config.num_layers):
        layer = decoder[f"layers_{i}"]
        y = _norm(x, layer["pre_self_attention_layer_norm"])
        x = x + _attention(layer["self_attention"], config, y, bias)
        x = x + _mlp(layer["mlp"], _norm(x, layer["pre_mlp_layer_norm"]))
        hidden[f"decoder/layers_{i}"] = x
    x = hidden["decoder/decoder_norm"] = _norm(x, decoder["decoder_norm"])
    if config.logits_via_embedding:
        return x @ embedding.T
    return x @ decoder["logits_dense"]["kernel"]


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


def _dense(layer: Tree, x: np.ndarray) -> np.ndarray:
    return x @ layer["kernel"] + layer.get("bias", 0.0)


def _attention(
    layer: Tree, config: DecoderOnlyConfig, x: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    heads = (-1, config.num_heads, config.head_dim)
    query, key, value = (
        _dense(layer[name], x).reshape(heads) for name in ("query", "key", "value")
    )
    # GPT-2 divides by the root of the heads' size, T5 by nothing.
    scale = np.sqrt(config.head_dim) if config.scaled_attention else 1.0
    scores = np.einsum("qnh,knh->nqk", query, key) / scale + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("nqk,knh->qnh", weights, value)
    return _dense(layer["out"], mixed.reshape(len(x), -1))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mlp(layer: Tree, x: np.ndarray) -> np.ndarray:
    if "wi" in layer:
        return _dense(layer["wo"], _gelu(_dense(layer["wi"], x)))
    return _dense(layer["wo"], _gelu(_dense(layer["wi_0"], x)) * _dense(layer["wi_1"], x))
