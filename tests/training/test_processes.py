"""Training by `scripts/train.py`: several processes, kills, full disks, bad input."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from speculative import checkpoints
from speculative.checkpoints.checkpoint import by_name
from speculative.training import loop
from tests.commands.test_distributed import free_port
from tests.training import tiny

pytestmark = pytest.mark.long

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from __gin__ import dynamic_registration
from speculative.models.t5 import config
from speculative.training import loop
from speculative.training import train

config.T5Config.vocab_size = 8192
config.T5Config.emb_dim = 32
config.T5Config.num_heads = 4
config.T5Config.head_dim = 8
config.T5Config.mlp_dim = 64
config.T5Config.num_encoder_layers = 1
config.T5Config.num_decoder_layers = 1
config.T5Config.dropout_rate = 0.1
loop.TrainConfig.steps = 12
loop.TrainConfig.batch_size = 8
loop.TrainConfig.source_length = 24
loop.TrainConfig.target_length = 24
loop.TrainConfig.warmup_steps = 2
loop.TrainConfig.log_every = 1
loop.TrainConfig.evaluate_every = 6
loop.TrainConfig.checkpoint_every = 2
train.Files.train = {"texts": 1.0}
train.Files.held_out = ["held"]
train.Files.scored = {"held": "bleu"}
train.Files.scored_texts = 8
train.train.model = @config.T5Config()
train.train.config = @loop.TrainConfig()
train.train.files = @train.Files()
train.train.storage = "float32"
train.train.vocabulary = "speculative/assets/debian.model"
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a gin file and tokenised texts."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "tiny.gin").write_text(CONFIG)
    tiny.examples(200, 0).save(folder / "texts.npz")
    tiny.examples(20, 1).save(folder / "held.npz")
    return folder


def command(given: pathlib.Path, out: pathlib.Path, *more: str) -> list[str]:
    folders = f"--data_dir={given}", f"--work_dir={out / 'work'}", f"--out_dir={out / 'model'}"
    config = f"--config={given / 'tiny.gin'}"
    return [sys.executable, str(ROOT / "scripts" / "train.py"), config, *folders, *more]


def start(
    given: pathlib.Path, out: pathlib.Path, *more: str, devices: int = 1
) -> subprocess.Popen[str]:
    flags = os.environ.get("XLA_FLAGS", "").replace("device_count=4", f"device_count={devices}")
    name = "--xla_force_host_platform_device_count"
    flags = flags if name in flags else f"{flags} {name}={devices}"
    return subprocess.Popen(
        command(given, out, *more), env=os.environ | {"XLA_FLAGS": flags}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(given: pathlib.Path, out: pathlib.Path, *more: str, devices: int = 1) -> str:
    """What a run that ends well says."""
    one = start(given, out, *more, devices=devices)
    said, errors = one.communicate(timeout=300)
    assert one.returncode == 0, errors
    return said


def log(out: pathlib.Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "work" / "log.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second", "seconds_a_step", "hours_left")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def weights(out: pathlib.Path) -> dict[str, np.ndarray]:
    return by_name(checkpoints.open(out / "model").numpy())


@pytest.fixture(scope="module")
def undisturbed(
    given: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, str]:
    out = tmp_path_factory.mktemp("undisturbed")
    return out, run(given, out)


def test_a_run_says_what_it_costs_and_what_it_scores(
    undisturbed: tuple[pathlib.Path, str],
) -> None:
    out, said = undisturbed
    assert "12 steps of 8 rows of 24 + 24 tokens" in said and "operations; state of" in said
    scored = [line for line in log(out) if "held/bleu" in line]
    assert [line["step"] for line in scored] == [6, 12]
    assert all(line["score"] == line["held/bleu"] >= 0 for line in scored)
    assert (out / "work" / "training.png").stat().st_size > 10_000


def test_two_processes_train_what_one_does(
    given: pathlib.Path, undisturbed: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    """Each with two devices; the first one writes log and model."""
    port = free_port()
    shared = f"--checkpoint_dir={tmp_path / 'shared'}"
    both = [
        start(
            given, tmp_path / str(k), "--mesh=data:2,model:2", shared,
            f"--distributed=localhost:{port},{k}/2", devices=2,
        )
        for k in (1, 0)
    ]  # fmt: skip
    told = [one.communicate(timeout=300) for one in both]
    assert [one.returncode for one in both] == [0, 0], told
    assert not (tmp_path / "1" / "model").exists()
    out = tmp_path / "0"
    for line, wanted in zip(log(out), log(undisturbed[0]), strict=True):
        assert line == pytest.approx(wanted, abs=1e-4)
    for name, value in weights(undisturbed[0]).items():
        distance = np.linalg.norm(weights(out)[name] - value)
        assert distance < 1e-4 * np.linalg.norm(value)


def test_a_run_that_is_killed_goes_on_bit_for_bit(
    given: pathlib.Path, undisturbed: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    """SIGKILL after 1 line of the log, 4, 7 and 10 more; checkpoints are of every second step."""
    for lines in (1, 4, 7, 10):
        one = start(given, tmp_path)
        file = tmp_path / "work" / "log.jsonl"
        while one.poll() is None and (
            not file.exists() or len(file.read_bytes().splitlines()) < lines
        ):
            time.sleep(0.005)
        one.send_signal(signal.SIGKILL)
        one.communicate()
    run(given, tmp_path)
    assert log(tmp_path) == log(undisturbed[0])
    for name, value in weights(undisturbed[0]).items():
        np.testing.assert_array_equal(weights(tmp_path)[name], value)


def test_a_full_disk_at_a_checkpoint(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One sentence, and what was written before is whole: with room, the run goes on."""
    one = start(given, tmp_path, "--max_minutes=0")
    one.communicate(timeout=300)
    assert one.returncode == loop.UNFINISHED
    # KiB, far less than the embedding's 1024, because orbax packs arrays into files as they come.
    limited = "ulimit -f 256; trap '' XFSZ; exec \"$@\""
    found = subprocess.run(
        ["bash", "-c", limited, "bash", *command(given, tmp_path)], cwd=ROOT, timeout=300,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 2
    # Lines of orbax's threads may follow.
    said = "error: A checkpoint cannot be written into .*that of step 1 is whole. Make room"
    assert re.search(said, found.stderr), found.stderr
    run(given, tmp_path)
    assert [line["step"] for line in log(tmp_path)] == [*range(1, 13)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--mesh=data:3"], "8 rows .* take data:1"),
        (["--mesh=data:8"], "needs 8 devices, and there are 1"),
        (
            ["--gin=train.Files.scored = {'x': 'bleu'}"],
            "has 'x', none of the held-out",
        ),
        (["--gin=train.Files.scored = {'held': 'x'}"], "the metric 'x'; known are bleu"),
        (["--gin=train.Files.train = {'lost': 1.0}"], "lost.npz does not exist; make it with"),
        (
            ["--gin=TrainConfig.remat = 'all'"],
            "remat must be one of none, layers, p",
        ),
        (
            ["--gin=train.train.label_smoothing = 1.0"],
            "label_smoothing must be at least 0",
        ),
        (["--init_from=debian_draft"], "holds .*, but the run is of"),
        (["--distributed=here"], "'here' names no process"),
        (["--gin=TrainConfig.keep = 1"], "keep must be at least 2, not 1"),
    ],
)
def test_bad_input_is_a_sentence_before_any_work(
    more: list[str], said: str, given: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    one = start(given, tmp_path, *more)
    _, errors = one.communicate(timeout=100)
    assert one.returncode == 2
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert re.search(said, line), line
    assert not (tmp_path / "work" / loop.CHECKPOINTS).exists()


def test_checkpoints_of_another_run(
    given: pathlib.Path, undisturbed: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    """Neither gone on with under another work folder, nor forgotten by a run that has them."""
    theirs = f"--checkpoint_dir={undisturbed[0] / 'work' / loop.CHECKPOINTS}"
    one = start(given, tmp_path, theirs)
    _, errors = one.communicate(timeout=100)
    assert one.returncode == 2
    assert "holds checkpoints (of step 12) of a run that" in errors
    one = start(given, undisturbed[0], theirs)
    _, errors = one.communicate(timeout=100)
    assert one.returncode == 2
    assert "whose train.checkpoint_dir is None, not" in errors


def test_an_error_of_the_first_process_ends_all(
    given: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Its model's folder is there already; the others do not wait for its next step."""
    (tmp_path / "0" / "model").mkdir(parents=True)
    port, shared = free_port(), f"--checkpoint_dir={tmp_path / 'shared'}"
    both = [
        start(given, tmp_path / str(k), shared, f"--distributed=localhost:{port},{k}/2")
        for k in (1, 0)
    ]
    told = [one.communicate(timeout=120)[1] for one in both]
    assert [one.returncode for one in both] == [2, 2], told
    assert "The first process cannot go on; its message says why." in told[0]
    assert "model exists already" in told[1]


def test_processes_need_a_folder_that_all_see(given: pathlib.Path, tmp_path: pathlib.Path) -> None:
    port = free_port()
    both = [
        start(given, tmp_path / str(k), f"--distributed=localhost:{port},{k}/2") for k in (1, 0)
    ]
    for one in both:
        assert "need a folder for checkpoints that all" in one.communicate(timeout=120)[1]
        assert one.returncode == 2
