"""The models of rows: what a sweep opens, hashes, loads and keeps, counted."""

import collections
import dataclasses
import gc
import pathlib
import weakref
from typing import Any

import jax
import pytest

from speculative.checkpoints import Checkpoint, native
from speculative.models.reads import packed
from speculative.pair import Pair
from speculative.rows import weights
from speculative.rows.config import RANDOM, RowConfig
from speculative.studies import sweep
from speculative.tasks.prompts import Prompt
from speculative.training import recipes
from tests import saved
from tests.rows import made

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three models of one kind."""
    for seed, (name, config) in enumerate(
        {"target": saved.TARGET, "other": saved.TARGET, "draft": saved.DRAFT}.items()
    ):
        saved.save(tmp_path / "models" / name, config, seed)
    return tmp_path / "models"


class Counted:
    """Stands for the measurement of rows, and notes what a sweep did before each of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: collections.Counter[str] = collections.Counter()
        self.loaded: list[tuple[str, int]] = []
        """Each model's name, and how many targets were in memory when its tensors were read."""
        self.hashed = saved.hashed(monkeypatch)
        self.weights_hashed: list[int] = []
        """Files of weights that were hashed before each row."""
        self.pairs: list[tuple[str, str]] = []
        self._targets: dict[int, weakref.ref[jax.Array]] = {}
        gc.freeze()  # What is collected below is what comes from now on, which is quick.
        before = {"open": native.open, "load": Checkpoint.load}

        def opens(place: Any) -> Checkpoint:
            self.opened[pathlib.Path(place).name] += 1
            return before["open"](place)

        def loads(checkpoint: Checkpoint, *how: Any) -> Any:
            gc.collect()
            there = sum(ref() is not None for ref in self._targets.values())
            self.loaded.append((pathlib.Path(checkpoint.location).name, there))
            return before["load"](checkpoint, *how)

        def measures(pair: Pair, config: RowConfig, *_: Any) -> Any:
            leaf = jax.tree.leaves(pair.params.target)[0]
            self._targets[id(leaf)] = weakref.ref(leaf)
            self.pairs.append((config.target, config.draft))
            self.weights_hashed.append(self.hashed.count(WEIGHTS))
            return made.record(gin=config.gin())

        monkeypatch.setattr(native, "open", opens)
        monkeypatch.setattr(Checkpoint, "load", loads)
        monkeypatch.setattr(sweep, "run_row", measures)
        monkeypatch.setattr(sweep, "load_prompts", lambda *_: [Prompt("a map", "")])


def rows(folder: pathlib.Path, *pairs: tuple[str, str, float]) -> dict[str, RowConfig]:
    return {
        f"row{number}": RowConfig(
            task="debian_ende",
            target=target,
            draft=draft,
            temperature=temperature,
            gamma=2,
            checkpoints=str(folder),
        )
        for number, (target, draft, temperature) in enumerate(pairs)
    }


def test_three_rows_of_one_target_hash_and_open_it_once(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    asked = rows(folder, ("target", "draft", 0.0), ("target", "draft", 1.0), ("target", "copy", 0))
    sweep.run(asked, tmp_path / "out")
    assert counted.opened == {"target": 1, "draft": 1}
    assert [name for name, _ in counted.loaded] == ["target", "draft", "draft"]
    # Target and draft before the first row, and nothing again.
    assert counted.weights_hashed == [2, 2, 2]
    # The vocabularies of both as they are opened, and that of each pair for its fingerprint.
    assert counted.hashed.count(saved.VOCABULARY.name) == 2 + 2


def test_two_targets_are_never_in_memory(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    asked = rows(folder, ("target", "copy", 0.0), ("other", "copy", 0.0), ("other", "draft", 1.0))
    sweep.run(asked, tmp_path / "out")
    assert counted.pairs == [(c.target, c.draft) for c in asked.values()]
    assert counted.loaded == [("target", 0), ("other", 0), ("draft", 1)]


def test_a_bucket_without_an_answer_is_asked_once() -> None:
    """Its error is told, and not that there is no checkpoint."""
    asked = []

    def silent(path: str) -> Checkpoint:
        asked.append(path)
        raise TimeoutError("no answer")

    (config,) = rows(pathlib.Path("x"), ("target", "copy", 0.0)).values()
    bucket = dataclasses.replace(config, checkpoints="gs://bucket/x")
    with pytest.raises(TimeoutError, match="no answer"):
        weights.find(bucket, "target", silent)
    assert asked == ["gs://bucket/x/debian_ende/target"]


def test_what_is_wrong_with_the_last_row_is_told_before_a_tensor_is_read(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.save(folder / "gpt", saved.GPT_DRAFT, 5)
    counted = Counted(monkeypatch)
    for draft, said in (("gpt", "must be of one kind"), ("bigram", r"needs .*ngrams\.npz")):
        asked = rows(folder, ("target", "draft", 0.0), ("target", draft, 0.0))
        with pytest.raises(ValueError, match=said):
            sweep.run(asked, tmp_path / draft)
    assert counted.loaded == counted.pairs == []
    assert WEIGHTS not in counted.hashed


@pytest.mark.parametrize("target", ["t5_1_1_small", "qwen3_0_6b"])
def test_a_distilled_draft_of_random_weights_has_its_usual_sizes(target: str) -> None:
    """Those of `distil`, here and where models are loaded."""
    given: dict[str, Any] = {"task": "mine", "prefix": "", "checkpoints": RANDOM}
    config = RowConfig(**given, temperature=0.0, target=target, draft="distilled")
    big, small = weights.sizes(config)
    expected = recipes.DraftSettings().model(big)
    reads = dataclasses.replace(expected.reads, draft_vocabulary=packed(range(8192)))
    same = {"dtype": small.dtype, "quantize": small.quantize, "reads": reads}
    assert small == expected.replace(**same)
    assert weights.resolve(config).configs[1] == small
    with pytest.raises(ValueError, match="Random weights are for the sizes"):
        weights.resolve(dataclasses.replace(config, target="distilled"))
