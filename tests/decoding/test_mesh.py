"""One text on several devices: the tokens of one device, however target and draft are shared.

`make test-mesh` runs these tests on eight devices, with all shipped prompts; in the suite there are
four, and a few prompts.
"""

import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import speculative
from speculative import Pair
from speculative.measurement.exactness import compare_greedy
from speculative.models import sharding
from speculative.pair import Result
from speculative.rows import memory
from speculative.tasks import task
from speculative.tasks.prompts import load_prompts
from tests import saved

ALL = bool(os.environ.get("SPECULATIVE_TEST_MESH"))  # As `make test-mesh` sets it.
DEVICES = jax.device_count()
MESHES = ["model:2", "model:4", "data:2,model:2", *["model:8", "data:2,model:4"] * ALL]
PAIRS = {"debian_target": ("debian_ende", 128), "debian_lm": ("debian_lm", 48)}
WAYS = (7, 0), (7, 31)  # Gamma, guesses of a tree.

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        DEVICES < (8 if ALL else 4), reason="XLA was told to make fewer devices of this CPU"
    ),
]


@functools.cache
def loaded(target: str, mesh: str | None = None, shares_draft: bool = False, **how: Any) -> Pair:
    memory.spare_maps()
    return speculative.load(target, mesh=mesh, draft_mesh=mesh if shares_draft else None, **how)


@functools.cache
def own(target: str, quantize: str, temperature: float) -> list[Result]:
    """The texts of the target alone, on one device."""
    return decoded(loaded(target, quantize=quantize), target, temperature, 0)


def prompts(target: str, temperature: float) -> list[str]:
    few = 10 if temperature else 10**6
    texts = [one.source for one in load_prompts(task(PAIRS[target][0]))]
    return texts[: few if ALL else 3]


def decoded(
    pair: Pair, target: str, temperature: float, gamma: int, tree: int = 0, batch_size: int = 1
) -> list[Result]:
    how: dict[str, Any] = {
        "gamma": gamma,
        "tree": tree,
        "max_length": PAIRS[target][1] if ALL else 24,
    }
    how |= {"verification": "coupled", "temperature": temperature, "batch_size": batch_size}
    return pair.generate(prompts(target, temperature), **how)


def require_equal(pair: Pair, target: str, found: list[Result], wanted: list[Result]) -> None:
    """Tokens are equal; of greedy ones, a difference may be a near tie, which is named."""
    for text, one, other in zip(prompts(target, 0.0), found, wanted, strict=False):
        if one.tokens != other.tokens:
            difference = compare_greedy(pair, pair.encode(text), other.tokens, one.tokens)
            assert difference and difference.near_tie, (text, difference)
            print(f"A near tie of {target}: {difference}")


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("target", PAIRS)
@pytest.mark.parametrize("mesh", MESHES if ALL else MESHES[1:2])
def test_greedy_texts_are_those_of_one_device(mesh: str, target: str, quantize: str) -> None:
    pair, wanted = loaded(target, mesh, quantize=quantize), own(target, quantize, 0.0)
    for gamma, tree in WAYS:
        require_equal(pair, target, decoded(pair, target, 0.0, gamma, tree), wanted)


@pytest.mark.parametrize("target", PAIRS if ALL else ["debian_target"])
@pytest.mark.parametrize("mesh", MESHES if ALL else MESHES[2:3])
def test_sampled_texts_are_those_of_one_device(mesh: str, target: str) -> None:
    pair, wanted = loaded(target, mesh, quantize="none"), own(target, "none", 1.0)
    for gamma, tree in WAYS:
        found = decoded(pair, target, 1.0, gamma, tree)
        assert [one.tokens for one in found] == [one.tokens for one in wanted]


@pytest.mark.parametrize("mesh", MESHES if ALL else MESHES[2:3])
def test_batches_share_the_axis_of_data(mesh: str) -> None:
    pair, wanted = loaded("debian_target", mesh, quantize="none"), own("debian_target", "none", 0.0)
    found = decoded(pair, "debian_target", 0.0, 7, batch_size=4)
    require_equal(pair, "debian_target", found, wanted)


@pytest.mark.parametrize("mesh", MESHES if ALL else MESHES[:1])
def test_a_draft_that_devices_share(mesh: str) -> None:
    pair = loaded("debian_target", mesh, True, quantize="none")
    assert sharding.spread(pair.params.draft)
    found = decoded(pair, "debian_target", 0.0, 7)
    require_equal(pair, "debian_target", found, own("debian_target", "none", 0.0))


def test_every_device_has_its_part_alone() -> None:
    pair = loaded("debian_target", "model:4", quantize="none")
    whole = sharding.bytes_a_device(speculative.load(quantize="none").params.target)
    part = sharding.bytes_a_device(pair.params.target)
    table = 8192 * 384 * 4  # Tokens are looked up on every device.
    # Eight heads in place of six: 1.33 times attention's kernels.
    assert part - table < 1.34 * (whole - table) / 4
    kernel = pair.params.target.prepacked["decoder"]["layers_0"]["mlp"]["wo"]["kernel"].values
    assert kernel.addressable_shards[0].data.shape == (256, 384)
    assert not sharding.spread(pair.params.draft)


def test_streams_and_the_reference_loop() -> None:
    pair = loaded("debian_target", "model:2", quantize="none")
    text = prompts("debian_target", 0.0)[0]
    trace = pair.check(text, gamma=3, max_length=12)
    steps = pair.stream(text, gamma=3, max_length=12)
    tokens = np.concatenate([step.tokens[0, : step.count[0]] for step in steps])
    assert tokens.tolist() == trace.tokens


def test_caches_that_devices_share() -> None:
    """Results lie as their names say, so that a stream needs no second program."""
    from speculative.decoding import loop

    pair = loaded("debian_target", "data:2,model:2", quantize="none")
    (request,) = pair.requests(prompts("debian_target", 0.0)[:1], speculative.Settings(gamma=3))
    models = loop.Models(pair.target, pair.draft)
    given = models, pair.params, request.source, request.config, request.config.cache_lengths()[0]
    begun = loop.begin(*given)
    after, step = loop.one_step(*given[:2], begun, request.draws, request.config)
    for cache in (*after.target.keys, *after.target.values):
        assert cache.sharding.shard_shape(cache.shape)[1] == cache.shape[1] // 2
    assert step.tokens.sharding.is_fully_replicated
    assert after.draft.model.keys[0].sharding.is_fully_replicated


@pytest.mark.parametrize("mesh", ["model:4", *["model:8"] * ALL])
def test_a_model_of_eight_heads(mesh: str, tmp_path: pathlib.Path) -> None:
    """Nothing is padded, and each device has whole heads of its own."""
    config = saved.TARGET.replace(num_heads=8, mlp_dim=32)
    saved.save(tmp_path / "target", config, 5)
    one, several = (
        speculative.load(tmp_path / "target", tmp_path / "target", mesh=on) for on in (None, mesh)
    )
    assert several.target.config == one.target.config
    texts = ["A small editor for plain text.", "An archive", "b c d e"]
    for temperature in (0.0, 1.0):
        how: dict[str, Any] = {"verification": "coupled", "temperature": temperature}
        own = one.generate(texts, gamma=0, max_length=24, **how)
        for gamma, tree in ((3, 0), (3, 12)):
            found = several.generate(texts, gamma=gamma, tree=tree, max_length=24, **how)
            assert [x.tokens for x in found] == [x.tokens for x in own]
