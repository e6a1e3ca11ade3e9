"""From tokenised files to a pair: train, quantise, write, distil; and the training scripts."""

import itertools
import json
import pathlib
import runpy
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

from speculative import checkpoints
from speculative.checkpoints import native
from speculative.checkpoints.checkpoint import read_settings
from speculative.decoding import Decoding
from speculative.models import T5, T5Config, model_of, named
from speculative.models.reads import Reads
from speculative.rows import weights
from speculative.rows.config import experiment, read_row
from speculative.sampling import Sampling
from speculative.studies import sweep
from speculative.training import begun as begun_lib
from speculative.training import data, distil, loop, recipes, written
from speculative.training import train as train_lib
from tests import saved
from tests.training import tiny

ROOT = pathlib.Path(__file__).parents[2]
VOCABULARY = ROOT / "speculative" / "assets" / "debian.model"
OWN = tiny.MODEL.config.replace(emb_dim=16)
READS = OWN.replace(num_encoder_layers=0, reads=Reads(tiny.MODEL.config.emb_dim))


def test_the_greedy_outputs_are_the_argmax_of_the_model_on_them() -> None:
    params = saved.random(tiny.MODEL.config, 4)
    examples = tiny.examples(7, 3)
    decoding = Decoding(tiny.VOCABULARY, Sampling(0.0), max_length=9)
    texts = written.answered(tiny.MODEL, params, examples, decoding, batch_size=4)
    for (given, target), (wanted, _) in zip(texts, examples, strict=True):
        np.testing.assert_array_equal(given, wanted)
        source = np.full((1, 8), -1, np.int32)
        source[0, : len(given)] = given
        before = np.zeros((1, 9), np.int32)
        before[0, 1 : len(target)] = target[:-1]
        logits = saved.forward(tiny.MODEL, params, source, before)[0, : len(target)]
        assert target.tolist() == logits.argmax(-1).tolist()
        assert target[-1] == 1 or len(target) == 9
        assert 1 not in target[:-1]


def test_sampled_outputs_do_not_depend_on_the_batch() -> None:
    params = saved.random(tiny.MODEL.config, 5)
    examples = tiny.examples(7, 3)
    decoding = Decoding(tiny.VOCABULARY, Sampling(1.0), max_length=9)
    one, other = (written.answered(tiny.MODEL, params, examples, decoding, size) for size in (3, 7))
    np.testing.assert_array_equal(one.targets, other.targets)
    assert len({tuple(one[i][1]) for i in range(7)}) == 7


def test_texts_that_do_not_fit_target_or_vocabulary_are_named() -> None:
    """Before they are learned: tokens that are no pieces, and more than there are positions."""
    nothing, texts = [np.zeros(0, int)] * 2, [np.full(3, 5), np.full(9, 7)]
    examples = data.ragged(nothing, texts)
    distil._require_fits("mine", examples, 8, 9)
    with pytest.raises(ValueError, match="mine has token 7, outside a vocabulary of 7 pieces"):
        distil._require_fits("mine", examples, 7, 0)
    with pytest.raises(ValueError, match="Example 1 of mine has 9 tokens, but there are 8 pos"):
        distil._require_fits("mine", examples, 8, 8)
    with pytest.raises(ValueError, match="Example 1 has a prompt of 9 tokens; there are 8 pos"):
        given = data.ragged(texts, nothing)
        written.answered(tiny.MODEL, {}, given, Decoding(tiny.VOCABULARY), 4, positions=8)


def test_logits_that_are_not_finite_are_named() -> None:
    """Of the fourth example alone, which has a token that no other has."""
    params = saved.random(tiny.MODEL.config, 4)
    params["token_embedder"]["embedding"][tiny.VOCABULARY - 1] = np.nan
    sources = [np.array([5 + i, 1]) for i in range(6)]
    sources[3] = np.array([tiny.VOCABULARY - 1, 1])
    examples = data.ragged(sources, sources)
    decoding = Decoding(tiny.VOCABULARY, Sampling(0.0), max_length=9)
    with pytest.raises(ValueError, match=r"Logits are not finite for example 3\."):
        written.answered(tiny.MODEL, params, examples, decoding, 4)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A vocabulary of as many pieces as the tiny model knows."""
    prefix = tmp_path_factory.mktemp("pieces") / "tiny"
    letters = ["".join(letters) for letters in itertools.permutations("abcdefghijklmnopqrst", 2)]
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore
        sentence_iterator=iter(letters), model_prefix=str(prefix), vocab_size=tiny.VOCABULARY,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


@pytest.mark.long
@pytest.mark.parametrize("model", [OWN, READS], ids=["own encoder", "target's encoder"])
def test_a_draft_learns_from_a_target(
    tmp_path: pathlib.Path, model: T5Config, pieces: pathlib.Path
) -> None:
    """Target saved in int8 -> its text -> draft: acceptance rises, and stages are not redone."""
    params = saved.random(tiny.MODEL.config, 4)
    native.save(tmp_path / "target", tiny.MODEL.config, params, pieces, "int8")
    for name, count in (("train", 150), ("held", 30)):
        tiny.examples(count, count).save(tmp_path / f"{name}.npz")
    arguments = {
        "model": model,
        "config": tiny.CONFIG,
        "files": train_lib.Files({"train": 1.0}, ["held"]),
        "target_dir": tmp_path / "target",
        "data_dir": tmp_path,
        "work_dir": tmp_path / "work",
        "out_dir": tmp_path / "draft",
        "max_length": 12,
        "generation_batch": 50,
    }
    assert not distil.distil(**arguments, max_minutes=0)
    assert distil.distil(**arguments, max_minutes=None)
    lines = [json.loads(x) for x in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    first, last = (line for line in lines if "held_sampled/alpha" in line)
    for kind in ("greedy/agreement", "sampled/alpha"):
        assert last[f"held_{kind}"] > first[f"held_{kind}"]
    # The log's last alpha is that of float32 weights; the saved ones are within int8 of it.
    draft, target = (native.open(tmp_path / name) for name in ("draft", "target"))
    held = data.load(tmp_path / "work" / "texts" / "held_sampled.npz")
    alpha = tokens = 0.0
    models = model_of(draft.config), model_of(target.config)
    objective = jax.jit(distil.Distillation(*models, tiny.VOCABULARY))
    params = draft.numpy(), target.numpy()
    batches = data.Mixture([(held, 1.0)], 8, tiny.SOURCE, tiny.TARGET).once()
    for batch in tiny.on_device(batches):
        alpha += float(objective(*params, batch, None)[1]["alpha"])
        tokens += int(batch["decoder_loss_weights"].sum())
    assert last["held_sampled/alpha"] == pytest.approx(alpha / tokens, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("model", [OWN, READS], ids=["own encoder", "target's encoder"])
def test_a_draft_learns_from_a_target_that_devices_share(
    tmp_path: pathlib.Path, model: T5Config, pieces: pathlib.Path
) -> None:
    """The same texts and, to rounding, the same losses as on one device."""
    native.save(tmp_path / "target", tiny.MODEL.config, saved.random(tiny.MODEL.config, 4), pieces)
    for name, count in (("train", 60), ("held", 10)):
        tiny.examples(count, count).save(tmp_path / f"{name}.npz")
    found = []
    for mesh in (None, "data:2,model:2"):
        out = tmp_path / f"{mesh}"
        files = train_lib.Files({"train": 1.0}, ["held"])
        folders = tmp_path / "target", tmp_path, out / "work", out / "draft"
        given = model, tiny.CONFIG, files, *folders
        assert distil.distil(*given, max_length=12, generation_batch=20, mesh=mesh)
        texts = data.load(out / "work" / "texts" / "train_sampled.npz")
        losses = [line["loss"] for line in loop.Log(out / "work").lines()]
        found.append((texts.targets.tolist(), losses))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 25}, "vocabulary of 25, its target in .* one of 24"),
        ({"num_encoder_layers": 0, "reads": Reads(8)}, "source_dim is 8, .* has 32 features"),
    ],
)
def test_target_and_draft_must_fit(
    tmp_path: pathlib.Path, change: dict[str, int], said: str
) -> None:
    params = saved.random(tiny.MODEL.config, 4)
    native.save(tmp_path / "target", tiny.MODEL.config, params)
    with pytest.raises(ValueError, match=said):
        distil.distil(
            tiny.MODEL.config.replace(**change),
            tiny.CONFIG,
            train_lib.Files({}, []),
            tmp_path / "target",
            tmp_path,
            tmp_path,
            tmp_path / "draft",
            VOCABULARY,
        )


SHORT = {
    "loop.TrainConfig.batch_size": 4,
    "loop.TrainConfig.source_length": 24,
    "loop.TrainConfig.target_length": 24,
    "loop.TrainConfig.log_every": 2,
}
SMALL = SHORT | {
    "config.T5Config.emb_dim": 16,
    "config.T5Config.mlp_dim": 16,
    "config.T5Config.num_encoder_layers": 1,
    "config.T5Config.num_decoder_layers": 1,
    "config.T5Config.dtype": "'float32'",
    "loop.TrainConfig.steps": 4,
    "loop.TrainConfig.warmup_steps": 1,
    "loop.TrainConfig.evaluate_every": 4,
    "loop.TrainConfig.checkpoint_every": 4,
}


def run(
    monkeypatch: pytest.MonkeyPatch,
    folder: pathlib.Path,
    bindings: dict,
    *flags: str,
    config: str = "configs/training/target.gin",
) -> int:
    """The exit code of scripts/train.py."""
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "train.py",
            f"--config={config}",
            f"--data_dir={folder}",
            f"--work_dir={folder / 'work'}",
            f"--out_dir={folder / 'out'}",
            *(f"--gin={key}={value}" for key, value in bindings.items()),
            *flags,
        ],
    )
    monkeypatch.chdir(ROOT)  # From where gin files name one another, and the vocabulary.
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.long
def test_the_target_config_trains_and_saves(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped and gone on with; with other data or settings it is refused, finished or not."""
    for task in ("debian_ende", "debian_synopsis"):
        for split, count in (("train", 60), ("validation", 9)):
            tiny.examples(count, count).save(tmp_path / f"{task}_{split}.npz")
    assert run(monkeypatch, tmp_path, SMALL, "--max_minutes=0") == loop.UNFINISHED
    (tmp_path / "other").mkdir()
    for file in tmp_path.glob("*.npz"):
        tiny.examples(40, 3).save(tmp_path / "other" / file.name)
    other: dict[str, tuple[dict[str, Any], list[str]]] = {
        "TrainConfig.steps is 4, not 6": ({"loop.TrainConfig.steps": 6}, []),
        "TrainConfig.learning_rate is 0.02, not 0.1": ({"loop.TrainConfig.learning_rate": 0.1}, []),
        "TrainConfig.batch_size is 4, not 8": ({"loop.TrainConfig.batch_size": 8}, []),
        "train.storage is 'int8', not 'float32'": ({"train.train.storage": "'float32'"}, []),
        "texts changed since it began": ({}, [f"--data_dir={tmp_path / 'other'}"]),
    }

    def refused() -> None:
        for said, (change, flags) in other.items():
            assert run(monkeypatch, tmp_path, SMALL | change, *flags) == 2
            assert f"work holds a run whose {said}" in capsys.readouterr().err

    refused()
    capsys.readouterr()
    assert run(monkeypatch, tmp_path, SMALL | {"train.train.max_minutes": None}) == 0
    assert read_settings(tmp_path / "out")["quantisation"] == "int8"
    assert "left out" not in capsys.readouterr().err
    refused()
    assert run(monkeypatch, tmp_path, SMALL) == 0
    assert f"{tmp_path / 'out'} is finished" in capsys.readouterr().out
    # What another work folder made is not this one's.
    assert run(monkeypatch, tmp_path, SMALL, f"--work_dir={tmp_path / 'new'}") == 2
    assert f"{tmp_path / 'out'} exists already" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


SHARED = "finetune"
"""What other gin files include; no recipe by itself."""
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "training").glob("*.gin"))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != SHARED])
def test_configs_name_only_what_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # What they include is named from there.
    distilled = "draft" in name and not name.endswith("_references")
    recipe = distil.distil if distilled else train_lib.train
    arguments = dict.fromkeys(["data_dir", "work_dir", "out_dir"] + ["target_dir"] * distilled)
    parameters = recipes.configured(recipe, f"configs/training/{name}.gin", [], arguments)
    assert parameters["config"].warmup_steps < parameters["config"].steps
    assert parameters["files"].train
    if not name.startswith((SHARED, "gpt_")):
        assert parameters["model"].vocab_size == 8192
        own = None if distilled else "speculative/assets/debian.model"
        assert parameters.get("vocabulary") == own  # A draft has that of its target.


FINETUNED = {"finetune_ende": "wmt_t2t_ende_v003", "finetune_cnndm": "cnn_dailymail_v002"}


@pytest.mark.parametrize("size", ["t5_1_1_small", "t5_1_1_large"])
@pytest.mark.parametrize("name", FINETUNED)
def test_fine_tuning_is_t5s_at_any_size(
    name: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = dict.fromkeys(["data_dir", "work_dir", "out_dir"])
    parameters = recipes.configured(
        train_lib.train,
        f"configs/training/{name}.gin",
        [f"registry.named.size = '{size}'"],
        arguments,
    )
    assert parameters["model"] == named(size, dropout_rate=0.1, dtype="bfloat16")
    config = parameters["config"]
    assert config.batch_size * config.source_length == 2**16
    rates = [np.asarray(config.schedule()(step)) for step in (0, 1, 999, config.steps)]
    assert rates == pytest.approx([1e-3] * 4)
    files, task = parameters["files"], FINETUNED[name]
    assert [*files.train, *files.held_out] == [f"{task}_train", f"{task}_validation"]


TINY = tiny.MODEL.config.replace(vocab_size=8320, dropout_rate=0.0)
"""Room for the pieces of `VOCABULARY`, for T5's sentinels, and for rows of neither."""

SIZES = ("vocab_size", "emb_dim", "mlp_dim", "num_heads", "head_dim")
DEPTHS = ("num_encoder_layers", "num_decoder_layers")
TINY_FINETUNING = SHORT | {
    **{f"registry.named.{size}": getattr(TINY, size) for size in (*SIZES, *DEPTHS)},
    "loop.TrainConfig.steps": 6,
    "loop.TrainConfig.microbatches": 2,
    "loop.TrainConfig.evaluate_every": 2,
    "loop.TrainConfig.checkpoint_every": 6,
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Checkpoint:
    """The checkpoint from which fine-tuning starts."""
    folder = tmp_path_factory.mktemp("begun") / "made"
    native.save(folder, TINY, saved.random(TINY, 5), VOCABULARY, extra_ids=100)
    return checkpoints.open(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "start"), [("finetune_ende", "huggingface"), ("finetune_cnndm", "t5x")]
)
def test_fine_tuning_starts_from_a_public_format_and_serves_a_table(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: checkpoints.Checkpoint,
    name: str,
    start: str,
) -> None:
    """scripts/train.py from a checkpoint, to the place where `speculative table` looks."""
    task, config = FINETUNED[name], f"configs/training/{name}.gin"
    for split, count in (("train", 60), ("validation", 9)):
        tiny.examples(count, count).save(tmp_path / f"{task}_{split}.npz")
    checkpoints.convert(begun.location, tmp_path / "start", start)
    given = [f"--init_from={tmp_path / 'start'}"]
    out = tmp_path / "checkpoints" / task / "t5_1_1_small"
    given += [f"--out_dir={out}", "--gin=registry.named.size='t5_1_1_small'"]
    if start == "t5x":
        assert run(monkeypatch, tmp_path, TINY_FINETUNING, *given, config=config) == 2
        given += [f"--vocabulary={VOCABULARY}"]
    assert run(monkeypatch, tmp_path, TINY_FINETUNING, *given, config=config) == 0
    stem = f"{name.removeprefix('finetune_')}_small_t0"
    (file,) = [row for row in sweep.rows("2") if experiment(row) == f"table2/{stem}"]
    row = read_row(file, [f"RowConfig.checkpoints = '{tmp_path / 'checkpoints'}'"])
    found = checkpoints.open(weights.find(row, row.draft))
    assert found.config == TINY
    assert found.dtype == "bfloat16" and read_settings(out)["quantisation"] is None
    assert found.vocabulary and found.extra_ids == 100
    # It was the checkpoint that was trained: at 1e-3 six steps change each tensor, by little.
    lines = [json.loads(x) for x in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [pytest.approx(1e-3)] * 3
    assert lines[-1][f"{task}_validation/loss"] < lines[0][f"{task}_validation/loss"]
    for tensor in found.tensors:
        moved = found.read(tensor).astype(np.float32) - begun.read(tensor)
        size = np.sqrt(np.mean(np.square(begun.read(tensor))))
        assert 0 < np.sqrt(np.mean(np.square(moved))) < 0.03 * max(size, 0.1)


TRAINING = "from speculative.training import loop\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from speculative.models import config\nconfig.T5Config.emb_dim = 8",
            "imports speculative.models.config; it may import speculative.models.gpt.config, "
            "speculative.models.reads, "
            "speculative.models.registry, speculative.models.t5.config, ",
        ),
        (f"{TRAINING}loop.TrainConfig2.steps = 8", "loop.TrainConfig2"),
        ("import antigravity", "line 2 of "),
        (f"{TRAINING}train.train.model = @loop.pathlib.os.getcwd()", "@loop.pathlib.os.getcwd"),
        ("steps = 8", "(steps = 8) binds nothing; name its configurable, as in TrainConfig.steps"),
        ("train.train.storage = 'int8'", "missing a required argument: 'model'"),
        ("train.train.config = [", "is not closed"),
        ({}, "debian_ende_train.npz does not exist"),
        ({"loop.TrainConfig.stepz": 3}, "doesn't have a parameter named 'stepz'"),
        ({"loop.TrainConfig.steps": -3}, "steps cannot be -3"),
        ({"train.train.storage": "'int4'"}, "must be one of float32, bfloat16, int8, not 'int4'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    line: str | dict[str, Any],
    said: str,
) -> None:
    """Of a file, which is then named, or of bindings for a shipped one."""
    file = tmp_path / "old.gin"
    file.write_text(f"from __gin__ import dynamic_registration\n{line}\n")
    if of_file := isinstance(line, str):
        assert run(monkeypatch, tmp_path, {}, config=str(file)) == 2
    else:
        assert run(monkeypatch, tmp_path, SMALL | line) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and said in error
    assert not of_file or str(file) in error


def test_examples_that_are_left_out_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long, short, end = np.full(tiny.SOURCE + 1, 5), np.full(3, 5), np.array([1])
    examples = {
        "whole": data.ragged([short] * 3, [end] * 3),
        "long": data.ragged([long, short, short, long], [end, end, np.zeros(0, int), end]),
    }
    files = train_lib.Files({"long": 1.0, "whole": 1.0}, ["long"])
    files.read(examples, tiny.CONFIG, 0)
    assert capsys.readouterr().err.startswith("long: 3 of 4 examples are left out; they have no ")
    train_lib.Files({"whole": 2.0}, ["whole"]).read(examples, tiny.CONFIG, 0)
    assert capsys.readouterr().err == ""
    recipes.divided([np.full(513, 5)] * 2 + [short] * 48, saved.TARGET, 512, True)
    assert "2 of 50 texts are longer than 512 tokens" in capsys.readouterr().err


def test_a_run_that_overflowed_may_have_another_rate(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    rate, made = {begun_lib.RATE: 1.0, "TrainConfig.steps": 4}, {"texts": "1"}
    begun_lib.require_same(tmp_path, rate, made)
    lower = rate | {begun_lib.RATE: 0.1}
    with pytest.raises(ValueError, match="learning_rate is 1.0, not 0.1; use the same"):
        begun_lib.require_same(tmp_path, lower, made)
    begun_lib.allow_another_rate(tmp_path)
    with pytest.raises(ValueError, match="steps is 4, not 5"):
        begun_lib.require_same(tmp_path, lower | {"TrainConfig.steps": 5}, made)
    begun_lib.require_same(tmp_path, lower, made)
    with pytest.raises(ValueError, match="learning_rate is 0.1, not 1.0"):
        begun_lib.require_same(tmp_path, rate, made)
    assert not caplog.messages
    # A folder of before noted the texts alone, beside its settings.
    (tmp_path / begun_lib.FILE).write_text('{"target": "a", "texts": "1"}')
    with pytest.raises(ValueError, match="texts changed since it began, under the same name"):
        begun_lib.require_same(tmp_path, {"target": "a"}, {"target": "2", "texts": "3"})
    begun_lib.require_same(tmp_path, {"target": "a"}, {"target": "2", "texts": "1"})
    assert len(caplog.messages) == 1 and "before results kept fingerprints" in caplog.messages[0]
    with pytest.raises(ValueError, match="run whose target changed since it began"):
        begun_lib.require_same(tmp_path, {"target": "a"}, {"target": "3", "texts": "1"})


def test_a_run_without_a_vocabulary_is_refused(
    tmp_path: pathlib.Path, begun: checkpoints.Checkpoint
) -> None:
    with pytest.raises(ValueError, match=r"random weights brings no vocabulary.*--vocabulary"):
        train_lib.vocabulary_of(TINY, None, None)
    native.save(tmp_path / "start", TINY, begun.numpy())
    with pytest.raises(ValueError, match=r"start brings no vocabulary.*--vocabulary"):
        train_lib.vocabulary_of(TINY, None, tmp_path / "start")
    with pytest.raises(ValueError, match="8192 pieces, but the model has room for 8000"):
        train_lib.vocabulary_of(TINY.replace(vocab_size=8000), VOCABULARY, None)
    assert train_lib.vocabulary_of(TINY, VOCABULARY, None).size == 8292
    assert train_lib.vocabulary_of(TINY.replace(vocab_size=8192), VOCABULARY, None).size == 8192


def test_a_run_may_start_from_a_checkpoint_of_its_sizes(tmp_path: pathlib.Path) -> None:
    params = saved.random(tiny.MODEL.config, 5)
    native.save(tmp_path / "start", tiny.MODEL.config, params)
    found = train_lib.initial(tiny.MODEL, 0, tmp_path / "start")
    jax.tree.map(np.testing.assert_array_equal, found, params)
    wider = T5(tiny.MODEL.config.replace(mlp_dim=2 * tiny.MODEL.config.mlp_dim))
    with pytest.raises(ValueError, match="start holds .* but the run is of"):
        train_lib.initial(wider, 0, tmp_path / "start")


def test_layers_that_a_checkpoint_lacks_begin_as_identities(tmp_path: pathlib.Path) -> None:
    params = saved.random(tiny.MODEL.config, 5)
    native.save(tmp_path / "start", tiny.MODEL.config, params)
    deeper = T5(tiny.MODEL.config.replace(num_encoder_layers=2, num_decoder_layers=3))
    found = train_lib.initial(deeper, 0, tmp_path / "start")
    shapes = jax.eval_shape(deeper.init, jax.random.key(0))
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, shapes)
    # The shapes of the test of greedy outputs above, so that one compiled program serves both.
    inputs, outputs = jnp.arange(2, 10)[None], jnp.arange(3, 12)[None]
    np.testing.assert_allclose(
        saved.forward(deeper, found, inputs, outputs),
        saved.forward(tiny.MODEL, params, inputs, outputs),
        rtol=1e-5,
        atol=1e-5,
    )
    native.save(tmp_path / "deep", deeper.config, found)
    with pytest.raises(ValueError, match="deep holds .* but the run is of"):
        train_lib.initial(tiny.MODEL, 0, tmp_path / "deep")
