"""T5X: its T5 and its sampler, combined as in its EncoderDecoderModel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from t5x import decoding  # pyright: ignore[reportMissingImports]
from t5x.examples.t5 import network  # pyright: ignore[reportMissingImports]

from benchmarks.peers.ours import padded
from benchmarks.peers.system import Setting
from speculative import checkpoints
from speculative.types import EOS_ID


class T5X:
    """See `system.System`."""

    ways = ("autoregressive",)

    def __init__(self, setting: Setting) -> None:
        """Loads the target from its export."""
        checkpoint = checkpoints.open(setting.exported)
        given = checkpoint.config.to_json()
        known = network.T5Config.__dataclass_fields__
        config = {name: value for name, value in given.items() if name in known}
        config |= {"dtype": jnp.float32, "mlp_activations": tuple(config["mlp_activations"])}
        self._module = network.Transformer(network.T5Config(**config))
        self._params = checkpoint.load("float32")
        self._eos = EOS_ID if setting.ends else -1
        self._length = setting.max_length
        self._predict = jax.jit(self._predicted)
        self._encode = jax.jit(functools.partial(self._apply, method=self._module.encode))

    def decode(self, way: str, source: list[int]) -> list[int]:
        """See `system.System`."""
        tokens = np.asarray(self._predict(self._params, padded(source)))
        tokens = tokens[0, -1].tolist()
        return tokens[: tokens.index(self._eos) + 1] if self._eos in tokens else tokens

    def prefill(self, source: list[int]) -> None:
        """The encoder alone, because T5X computes the projections again for each token."""
        jax.block_until_ready(self._encode(self._params, padded(source)))

    def _apply(self, params: Any, *args: Any, **options: Any) -> Any:
        return self._module.apply({"params": params}, *args, enable_dropout=False, **options)

    def _predicted(self, params: Any, source: jax.Array) -> jax.Array:
        encoded = self._apply(params, source, method=self._module.encode)
        empty = jnp.zeros((1, self._length), jnp.int32)
        ones = jnp.ones_like(source), jnp.ones_like(empty), jnp.ones_like(empty)
        cache = self._apply(params, *ones, decode=True, mutable=["cache"])[1]["cache"]

        def logits(state: Any) -> tuple[jax.Array, Any]:
            found, changed = self._module.apply(
                {"params": params, "cache": state.cache},
                encoded,
                source,
                state.cur_token,
                state.cur_token,
                enable_dropout=False,
                decode=True,
                max_decode_length=self._length,
                mutable=["cache"],
                method=self._module.decode,
            )
            return jnp.squeeze(found, axis=1), changed["cache"]

        tokens, _ = decoding.temperature_sample(
            inputs=empty,
            cache=cache,
            tokens_to_logits=logits,
            eos_id=self._eos,
            temperature=0.0,
        )
        return tokens
