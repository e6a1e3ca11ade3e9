"""What models need of memory, against shapes written by hand."""

import dataclasses
import pathlib
import re

import jax
import pytest

from speculative import checkpoints, cli
from speculative.gin_files import CONFIGS
from speculative.models.gemma import SIZES
from speculative.rows import memory, weights
from speculative.rows.config import RANDOM, RowConfig, read_row

XXL = read_row(CONFIGS / "runs" / "table2" / "ende_small_t0.gin")


def t5_1_1(dim: int, mlp: int, heads: int, layers: int) -> int:
    """Parameters of a T5 v1.1, counted from Raffel et al.'s description."""
    attention = 4 * dim * heads * 64
    feed_forward = 3 * dim * mlp
    encoder = layers * (attention + feed_forward + 2 * dim)
    decoder = layers * (2 * attention + feed_forward + 3 * dim)
    ends = 2 * 32128 * dim + 2 * dim + 2 * 32 * heads
    return encoder + decoder + ends


def test_the_papers_models_in_bfloat16() -> None:
    sizes = weights.sizes(dataclasses.replace(XXL, quantize_draft="none"))
    target, draft = (memory.need([size], XXL.gamma, XXL.max_length) for size in sizes)
    assert target.weights == 2 * t5_1_1(4096, 10240, 64, 24)
    assert draft.weights == 2 * t5_1_1(512, 1024, 6, 8)
    # Keys and values, 24 layers, 64 heads of 64, 512 source and 144 target positions.
    assert target.caches == 2 * 24 * 64 * 64 * (512 + 144) * 2
    assert 0 < target.activations < 2**30
    both = memory.need(sizes, XXL.gamma, XXL.max_length)
    assert both == tuple(a + b for a, b in zip(target, draft, strict=True))


@pytest.mark.parametrize(("prompt", "windows"), [(512, 512 + 144), (4096, 512 + 128 + 512)])
def test_windows_hold_little_of_a_long_prompt(prompt: int, windows: int) -> None:
    """Gemma 3 1B, of whose 26 layers 22 have windows of 512; one key of 256 per layer."""
    need = memory.need([SIZES["gemma3_1b"]], XXL.gamma, XXL.max_length, prompt)
    assert need.caches == 2 * 256 * 4 * (4 * (prompt + 144) + 22 * windows)


@pytest.mark.parametrize("cpu", [True, False])
def test_the_papers_target_in_int8(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but embedding, norms and relative positions are a byte each."""
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "cpu" if cpu else "tpu")
    size = weights.sizes(dataclasses.replace(XXL, quantize="int8"))[0]
    need = memory.need([size], XXL.gamma, XXL.max_length)
    whole = t5_1_1(4096, 10240, 64, 24)
    others = 32128 * 4096 + (24 * 5 + 2) * 4096 + 2 * 32 * 64
    assert need.weights == whole - others + 2 * others
    # A CPU holds its panels beside them.
    assert need.copies == (whole - others + 4 * others) * cpu


def test_a_table_needs_nothing_and_a_checkpoint_tells_its_own_sizes() -> None:
    config = RowConfig(
        task="debian_ende", target="debian_target", draft="bigram", temperature=0.0, gamma=3
    )
    need = memory.need(weights.resolve(config).configs, 3, 128)
    assert need.weights == 4 * checkpoints.open("debian_target").parameters


def test_a_run_that_does_not_fit_ends_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: ("a small device", 2**34))
    config = dataclasses.replace(XXL, checkpoints=RANDOM, quantize_draft="none")
    models = weights.resolve(config).configs
    # On CPU another 4 bytes a parameter: 21 and 42 GiB.
    with pytest.raises(ValueError, match=r"needs 63\.\d GiB for .* 512 tokens, but a small"):
        memory.require(config, models)
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match=r"needs 21\.\d GiB for .* but a small device has 16"):
        memory.require(config, models)


def test_a_long_prompt_that_does_not_fit_ends_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its keys and values grow with it; what is alive beside them hardly does."""
    size = checkpoints.open("debian_lm").config
    short, long = (memory.need([size], 1, 8, length) for length in (600, 900))
    each = 2 * size.decoder_layers * size.emb_dim * 4  # Of a token.
    assert long.caches - short.caches == 300 * each
    scores = 300 * size.num_heads * 512 * 4
    assert long.activations - short.activations == scores
    there = sum(long) - 100 * each
    monkeypatch.setattr(memory, "device_bytes", lambda: ("a small device", there))
    options = ["generate", "--target=debian_lm", "--draft=copy", "--max_length=8", "--gamma=1"]
    assert cli.main([*options, "word " * 900]) == 2
    said = capsys.readouterr().err
    assert re.search(r"GiB for texts of 901 tokens, but a small device has", said), said


def test_as_many_rows_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    models = weights.sizes(XXL)
    asked = models, XXL.gamma, XXL.max_length
    need = memory.need(*asked)
    there = need.weights + 20 * (need.caches + need.activations)
    monkeypatch.setattr(memory, "device_bytes", lambda: ("a device", there))
    assert memory.batch(*asked, 128) == 10
    assert memory.batch(*asked, 4) == 4


def test_programs_are_forgotten_before_a_process_has_no_maps_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long table was ended by the compiler: LLVM compilation error: Cannot allocate memory."""
    limit, compiled = tmp_path / "max_map_count", []
    monkeypatch.setattr(memory, "MOST_MAPS", limit)
    # Those of all other tests stay.
    forget = lambda: program.clear_cache()  # noqa: E731  # pyright: ignore
    monkeypatch.setattr(memory.jax, "clear_caches", forget)

    @jax.jit
    def program(x: int) -> int:
        compiled.append(x)
        return x + 1

    def runs() -> int:
        memory.spare_maps()
        program(1)
        return len(compiled)

    assert (runs(), runs()) == (1, 1)  # There is no such file.
    limit.write_text("100000000\n")
    assert runs() == 1
    limit.write_text("3\n")
    monkeypatch.setattr(memory, "MAPS", tmp_path / "maps")
    (tmp_path / "maps").write_text("7f0-7f1 r-xp\n")
    assert runs() == 1
    (tmp_path / "maps").write_text("7f0-7f1 r-xp\n" * 2)
    assert runs() == 2
