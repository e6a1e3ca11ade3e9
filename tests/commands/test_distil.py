"""`distil`: from texts, or a gin file, and a target of random weights to a draft."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from speculative import checkpoints, cli
from speculative.checkpoints import native
from speculative.models import Config, DecoderOnlyConfig, T5Config
from speculative.models.reads import Reads, unpacked
from speculative.training.data import load as load_examples
from speculative.training.data import ragged
from speculative.training.loop import UNFINISHED
from speculative.training.recipes import FEWEST, DraftSettings, divided
from tests import saved

LESS = ["--steps", "25", "--max_length", "8", "--batch_size", "8", "--keep", "500"]


@pytest.fixture(scope="module")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    return saved.save_pair_of_few_pieces(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def texts(tmp_path: pathlib.Path) -> pathlib.Path:
    words = "small large editor archive library tool text files for of with".split()
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 9)) for i in range(FEWEST)]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.long
def test_a_draft_is_made_and_used(
    texts: pathlib.Path,
    saved_pair: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped, gone on with, and then a draft whose texts are the target's own."""
    target, draft, few = tmp_path / "target", tmp_path / "draft", tmp_path / "few.model"
    shutil.copytree(saved_pair[0], target)
    shutil.copy(target / "few.model", few)
    reader = ["--target", "debian_draft", "--output", str(tmp_path / "none")]
    assert cli.main(["distil", str(texts), *reader]) == 2
    assert "debian_draft reads its target's encoder, so it can be" in capsys.readouterr().err
    given = ["distil", str(texts), "--target", str(target), "--output", str(draft), *LESS]
    assert cli.main([*given, "--max_minutes", "0"]) == UNFINISHED
    assert "rerun to resume" in capsys.readouterr().out
    assert cli.main([*given, "--seed", "1"]) == 2
    assert "holds a run whose seed is 0, not 1;" in capsys.readouterr().err
    whole = texts.read_text()
    texts.write_text(whole.replace("editor", "archive"))
    assert cli.main(given) == 2
    assert "holds a run whose texts changed since it began" in capsys.readouterr().err
    texts.write_text(whole)
    shutil.rmtree(target)
    saved.save(target, saved.TARGET.replace(vocab_size=saved.FEW), 9, vocabulary=few)
    assert cli.main(given) == 2
    assert "holds a run whose target changed since it began" in capsys.readouterr().err
    shutil.rmtree(target)
    shutil.copytree(saved_pair[0], target)  # The same weights, where they were.
    assert cli.main(given) == 0
    said = capsys.readouterr().out
    assert "guess 3" in said and f"Written: {draft}" in said
    made = checkpoints.open(draft).config
    assert (made.emb_dim, made.reads.source_dim, made.decoder_layers) == (64, 16, 1)
    assert made.reads.target_layers and 0 < made.logits <= 500
    assert cli.main(given) == 2
    assert f"{draft} exists already; remove it or choose another folder" in capsys.readouterr().err

    asked = ["generate", "small editor", "--target", str(target), "--max_length", "8", "--json"]
    tokens = []
    for other in (["--draft", str(draft), "--gamma", "3"], ["--gamma", "1", "--draft", "copy"]):
        assert cli.main([*asked, *other]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["tokens"])
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_a_draft_knows_pieces_alone(
    texts: pathlib.Path,
    saved_pair: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the embedding has more rows, which random weights make as likely."""
    (vocabulary,) = {checkpoints.open(path).vocabulary for path in saved_pair[:1]}
    assert vocabulary
    saved.save(tmp_path / "target", saved.TARGET.replace(vocab_size=2048), 0, vocabulary=vocabulary)
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    given = ["distil", str(texts), "--target", target, "--output", draft, *LESS, "--keep", "2000"]
    assert cli.main(given) == 0
    tokens = unpacked(checkpoints.open(draft).config.reads.draft_vocabulary)
    assert 0 < len(tokens) and tokens.max() < saved.FEW
    for file in (tmp_path / "draft.training" / "texts").iterdir():
        assert load_examples(file).targets.max() < saved.FEW
    capsys.readouterr()
    asked = ["generate", "small editor", "--target", target, "--max_length", "8", "--json"]
    assert cli.main([*asked, "--draft", draft]) == 0
    assert max(json.loads(capsys.readouterr().out)["tokens"]) < saved.FEW


@pytest.mark.long
def test_texts_of_a_gpt_end_with_its_positions(
    texts: pathlib.Path,
    saved_pair: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
) -> None:
    """With the longest outputs that may be asked for; and they are what `generate` gives there."""
    vocabulary = checkpoints.open(saved_pair[0]).vocabulary
    assert vocabulary
    small = saved.GPT.replace(vocab_size=saved.FEW, max_positions=40)
    saved.save(tmp_path / "gpt", small, 0, vocabulary=vocabulary)
    given = ["distil", str(texts), "--target", str(tmp_path / "gpt"), *LESS, "--max_length", "128"]
    assert cli.main([*given, "--output", str(tmp_path / "draft")]) == 0
    longest = 0
    for file in (tmp_path / "draft.training" / "texts").iterdir():
        lengths = [len(text) for _, text in load_examples(file)]
        longest = max(longest, *lengths)
    assert longest == 40
    assert checkpoints.open(tmp_path / "draft").config.max_positions == 40


GIN = """from __gin__ import dynamic_registration
from speculative.models import reads
from speculative.models.t5 import config
from speculative.training import distil
from speculative.training import loop
from speculative.training import train

include "configs/training/draft_hidden.gin"

config.T5Config.vocab_size = 1024
config.T5Config.emb_dim = 16
config.T5Config.num_heads = 2
config.T5Config.head_dim = 8
config.T5Config.mlp_dim = 24
config.T5Config.reads = @reads.Reads()
reads.Reads.source_dim = 16
reads.Reads.target_layers = ("decoder/layers_0",)
loop.TrainConfig.steps = 4
loop.TrainConfig.warmup_steps = 1
loop.TrainConfig.source_length = 32
loop.TrainConfig.target_length = 32
loop.TrainConfig.log_every = 2
loop.TrainConfig.evaluate_every = 4
loop.TrainConfig.checkpoint_every = 4
train.Files.train = {"seen": 1.0}
train.Files.held_out = ["unseen"]
distil.distil.references = {"seen": 0.5}
distil.distil.max_length = 8
distil.distil.generation_batch = 16
distil.distil.keep = 300
"""


@pytest.fixture
def config(tmp_path: pathlib.Path) -> list[str]:
    """A gin file that changes the sizes of a shipped one, and where its tokenised files are."""
    rng = np.random.default_rng(0)
    for name, count in (("seen", 40), ("unseen", 9)):
        rows = [np.append(rng.integers(3, saved.FEW, 6), 1) for _ in range(2 * count)]
        ragged(rows[:count], rows[count:]).save(tmp_path / f"{name}.npz")
    (tmp_path / "small.gin").write_text(GIN)
    return ["--config", str(tmp_path / "small.gin"), "--data_dir", str(tmp_path)]


@pytest.mark.long
def test_a_gin_file_says_all(
    config: list[str],
    saved_pair: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its texts are written once, and a run of something else is told from it by a binding."""
    target, draft, work = str(saved_pair[0]), tmp_path / "draft", tmp_path / "work"
    size = T5Config(saved.FEW, 16, 2, 8, 24, 0, 1, reads=Reads(16))
    native.save(tmp_path / "begun", size, saved.random(size, 3))
    given = ["distil", *config, "--work_dir", str(work), "--init_from", str(tmp_path / "begun")]
    made = [*given, "--target", target, "--output", str(draft)]
    assert cli.main([*made, "--max_minutes", "0"]) == UNFINISHED
    assert "rerun to resume" in capsys.readouterr().out
    refused = {
        "TrainConfig.seed is 0, not 1;": [*made, "--gin", "loop.TrainConfig.seed = 1"],
        "Files.held_out is ['unseen'], not ['seen'];": [
            *made,
            "--gin=train.Files.held_out=['seen']",
        ],
        f"target is '{target}', not ": [*given, "--target", f"{target}/", "--output", str(draft)],
    }
    for said, command in refused.items():
        assert cli.main(command) == 2
        assert f"{work} holds a run whose {said}" in capsys.readouterr().err
    assert cli.main(made) == 0
    said = capsys.readouterr().out
    assert said.count("outputs, ") == 4 and "unseen, T = 1" in said and f"Written: {draft}" in said
    opened = checkpoints.open(draft)
    assert (
        opened.config.reads.target_layers == ("decoder/layers_0",) and opened.config.logits <= 300
    )
    assert cli.main(made) == 2
    assert f"{draft} exists already; remove it or choose another folder" in capsys.readouterr().err
    again = tmp_path / "again"
    assert cli.main([*given, "--target", target, "--output", str(again)]) == 0
    assert "outputs, " not in capsys.readouterr().out
    for name in opened.tensors:
        np.testing.assert_array_equal(checkpoints.open(again).read(name), opened.read(name))


@pytest.mark.parametrize("config", [saved.TARGET, saved.GPT], ids=["t5", "gpt"])
def test_texts_are_divided(config: Config) -> None:
    """Sources of an encoder-decoder, texts of a GPT; none is lost, twice there, or too long."""
    texts = [np.append(np.full(3 + i * 7, i + 2), 1) for i in range(80)]
    parts = divided(texts, config, 512, config is saved.TARGET)
    pairs = [pair for part in parts.values() for pair in part]
    sources, targets = zip(*pairs, strict=True)
    read, empty = (sources, targets) if config is saved.TARGET else (targets, sources)
    assert not any(map(len, empty)) and len(parts["held_out"]) == 8
    assert sorted(text[0] for text in read) == [text[0] for text in texts]
    most = 512 if config is saved.TARGET else saved.GPT.max_positions
    for text in read:
        whole = texts[text[0] - 2]
        assert len(text) == min(most, len(whole)) and text[-1] == 1
        assert (text[:-1] == whole[: len(text) - 1]).all()


def test_sizes_are_the_targets_in_small() -> None:
    """Of the shipped targets' shapes: those of the drafts that ship."""
    t5 = DraftSettings().model(T5Config(8192, 384, 6, 64, 1536, 4, 8))
    assert (t5.emb_dim, t5.num_heads, t5.mlp_dim, t5.reads.source_dim) == (192, 3, 768, 384)
    assert t5.reads.target_layers == tuple(f"decoder/layers_{i}" for i in (2, 5, 7))
    gpt = DraftSettings().model(DecoderOnlyConfig(8192, 320, 5, 64, 1280, 6, max_positions=1024))
    assert (gpt.emb_dim, gpt.num_heads, gpt.max_positions) == (128, 2, 1024)
    assert gpt.reads.target_layers == tuple(f"decoder/layers_{i}" for i in (1, 3, 5))
    xxl = DraftSettings().model(T5Config(32128, 4096, 64, 64, 10240, 24, 24))
    assert (xxl.emb_dim, xxl.reads.target_layers[0]) == (1024, "decoder/layers_7")
    assert DraftSettings(dim=256, layers=2).model(xxl).decoder_layers == 2
