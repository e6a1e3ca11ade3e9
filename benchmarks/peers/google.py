"""T5X: its T5 and its sampler, combined as in its EncoderDecoderModel."""
# pyright: reportMissingImports=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from t5x import decoding
from t5x.examples.t5 import network

from benchmarks.peers.ours import padded
from benchmarks.peers.system import Setting
from speculative import checkpoints
from speculative.types import EOS_ID


class T5X:
    """See `system.Program`."""

    ways = ("autoregressive",)

    def __init__(self, setting: Setting) -> None:
        checkpoint = checkpoints.open(setting.exported)
        known = network.T5Config.__dataclass_fields__
        settings = checkpoint.config.to_json().items()
        config = {name: value for name, value in settings if name in known}
        config |= {"dtype": jnp.float32, "mlp_activations": tuple(config["mlp_activations"])}
        self._module = network.Transformer(network.T5Config(**config))
        self._apply = functools.partial(self._module.apply, enable_dropout=False)
        self._params = {"params": checkpoint.load("float32")}
        self._eos = -1 if setting.random else EOS_ID
        self._length = setting.max_length
        self._predict = jax.jit(self._predicted)
        self._encode = jax.jit(functools.partial(self._apply, method=self._module.encode))

    def decode(self, way: str, source: list[int]) -> list[int]:
        tokens = np.asarray(self._predict(self._params, padded(source)))[0, -1].tolist()
        return tokens[: tokens.index(self._eos) + 1] if self._eos in tokens else tokens

    def prefill(self, source: list[int]) -> None:
        """Runs only the encoder, because T5X recomputes the projections for each token."""
        jax.block_until_ready(self._encode(self._params, padded(source)))

    def _predicted(self, params: Any, source: jax.Array) -> jax.Array:
        encoded = self._apply(params, source, method=self._module.encode)
        empty = jnp.zeros((1, self._length), jnp.int32)
        ones = jnp.ones_like(source), jnp.ones_like(empty), jnp.ones_like(empty)
        apply = functools.partial(self._apply, decode=True, mutable=["cache"])
        cache = apply(params, *ones)[1]["cache"]
        step = functools.partial(apply, method=self._module.decode, max_decode_length=self._length)

        def logits(state: Any) -> tuple[jax.Array, Any]:
            variables, token = params | {"cache": state.cache}, state.cur_token
            values, changed = step(variables, encoded, source, token, token)
            return jnp.squeeze(values, axis=1), changed["cache"]

        return decoding.temperature_sample(
            inputs=empty, cache=cache, tokens_to_logits=logits, eos_id=self._eos, temperature=0.0
        )[0]
