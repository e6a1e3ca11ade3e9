"""Layers with windows hold only the last tokens of a long prompt, and nothing else changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.drafts import HiddenDraft
from speculative.models import decoder_only, model_of
from speculative.models.interface import Chunk
from speculative.models.reads import Reads
from speculative.sampling import Sampling
from tests import saved
from tests.layouts import LAYOUTS
from tests.models.test_decoders import NEAR, golden, opened  # noqa: F401 (a fixture)
from tests.saved import forward

WINDOWED = ["gemma2", "gemma3", "mistral", "qwen2"]
ROOM = 16  # Positions after a prompt.


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_only, "AT_ONCE", 8)
    monkeypatch.setattr(decoder_only, "TURN", 2)


def cut(texts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The first `lengths` tokens of each text, padded to 32."""
    return np.where(np.arange(32) < lengths[:, None], texts[:, :32], -1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WINDOWED)
def test_chunks_and_branches_after_long_prompts(name: str, layout: str, opened: Any) -> None:  # noqa: F811
    """Of several lengths, one of which is read in the first of four parts."""
    model, stored, _ = opened(name)
    params, texts = LAYOUTS[layout](stored), golden(name)["texts"]
    lengths = np.array([29, 5])
    state = model.start(params, cut(texts, lengths), ROOM).state
    window = max(model.config.windows)
    rooms = [keys.shape[2] for keys in state.keys]
    assert max(rooms) == 32 + ROOM if 0 in model.config.windows else max(rooms) < 32 + ROOM
    assert min(rooms) == window + 2 * 2 + ROOM
    np.testing.assert_array_equal(state.dropped, np.maximum(lengths - 1 - window - 2 * 2, 0))
    # The prompt's last token, then two branches, of which the second is kept, then a chain.
    own = np.array([[3, 40, 17, 5, 58], [9, 8, 50, 31, 22]])
    first = np.take_along_axis(texts, lengths[:, None] - 1, axis=1)
    positions = jnp.array([[0, 1, 1, 2, 2]])
    seen = np.eye(5, dtype=bool)
    seen[:, 0] = seen[3, 1] = seen[4, 2] = True
    tokens = np.concatenate([first, own[:, :4]], axis=1)
    branching = Chunk(jnp.asarray(tokens), positions, jnp.asarray(seen)[None])
    logits, state, _ = model.extend(params, state, branching)
    state = model.keep(state, 5, jnp.array([[0, 2, 4, 4]] * 2), jnp.array([3, 2]))
    more, _, _ = model.extend(params, state, Chunk(jnp.asarray(own[:, 4:])))
    for row, length in enumerate(lengths):
        for path in ([0, 1, 3], [0, 2, 4]):
            text = np.concatenate([texts[row, : length - 1], tokens[row, path]])[None]
            wanted = forward(model, stored, text, text)[0, length - 1 :]
            assert np.abs(np.asarray(logits)[row, path] - wanted).max() < NEAR
        text = np.concatenate([text[0, : length + (2, 1)[row]], own[row, 4:]])[None]
        assert np.abs(more[row, 0] - forward(model, stored, text, text)[0, -1]).max() < NEAR


@pytest.mark.parametrize(("known", "read_again"), [(31, False), (28, False), (16, True)])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_later_turn(name: str, known: int, read_again: bool, opened: Any) -> None:  # noqa: F811
    """Read on from an earlier prompt of 29 tokens, or again if the windows lack what it sees."""
    model, params, _ = opened(name)
    texts = golden(name)["texts"][:1]
    begun = model.start(params, cut(texts, np.array([29])), ROOM)
    _, state, _ = model.extend(params, begun.state, Chunk(jnp.asarray(texts[:, 28:38])))
    other = np.concatenate([texts[:, :known], texts[:, 2:10]], axis=1)
    inputs = np.pad(other, ((0, 0), (0, 48 - other.shape[1])), constant_values=-1)
    begun = begun._replace(state=state)
    found = model.resume(params, begun, jnp.int32(known), inputs, ROOM)
    last = np.concatenate([other[:, -1:], texts[:, :3]], axis=1)
    logits, _, _ = model.extend(params, found.state, Chunk(jnp.asarray(last)))
    text = np.concatenate([other[:, :-1], last], axis=1)
    wanted = forward(model, params, text, text)[:, -4:]
    assert np.abs(np.asarray(logits) - wanted).max() < NEAR
    blank = begun._replace(state=jax.tree.map(jnp.zeros_like, begun.state))
    blank = blank._replace(state=blank.state.replace(dropped=begun.state.dropped))
    state = model.resume(params, blank, jnp.int32(known), inputs, ROOM).state
    for i, keys in enumerate(state.keys):  # At the last token that need not be read again.
        last = known // 2 * 2 - 1 - (int(state.dropped[0]) if model.config.window(i) else 0)
        assert bool(np.asarray(keys)[:, :, last].any()) == read_again


def test_a_draft_with_a_window(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It reads long prompts in parts too, with its target's hidden states."""
    model, params, _ = opened("gemma3")
    layers = ("decoder/layers_1",)
    config = model.config.replace(num_layers=1, reads=Reads(model.config.emb_dim, layers))
    draft, own = HiddenDraft(model_of(config)), saved.drawn(config, 1, 0.5)
    inputs, found = jnp.asarray(cut(golden("gemma3")["texts"], np.array([29, 5]))), []
    uniforms = jnp.asarray(np.random.default_rng(0).random((2, 3)), jnp.float32)
    for at_once in (64, 8):
        monkeypatch.setattr(decoder_only, "AT_ONCE", at_once)
        begun = model.start(params, inputs, ROOM, layers=layers)
        state = draft.start(own, inputs, ROOM, begun)
        found.append(draft.propose(own, state, model.first(inputs), uniforms, Sampling(1.0), 64))
    rooms = [x.state[0].model.keys[0].shape[2] for x in found]
    assert rooms == [32 + ROOM, max(config.windows) + 2 * 2 + ROOM]
    np.testing.assert_array_equal(found[0].guesses, found[1].guesses)
    np.testing.assert_allclose(found[0].q, found[1].q, atol=1e-5)
