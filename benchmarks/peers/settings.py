"""The models on which programs are compared, and the sources or prompts that they decode."""

import pathlib
from itertools import zip_longest

import numpy as np

from benchmarks.peers.system import Setting
from speculative import chat, checkpoints
from speculative.checkpoints import huggingface
from speculative.checkpoints.checkpoint import in_memory
from speculative.models import named, random_params
from speculative.tasks.prompts import load_prompts
from speculative.types import EOS_ID

MAX_LENGTH = 128  # Tokens of an output, except with random weights.

Made = tuple[Setting, list[list[int]]]


def shipped(limit: int | None, gamma: int, folder: pathlib.Path) -> Made:
    """The bundled pair on its test texts, exported into a folder."""
    checkpoint = checkpoints.open("debian_target")
    vocabulary = checkpoint.open_vocabulary()
    assert vocabulary is not None
    # A synopsis after each pair of translations, of which there are twice as many.
    translations = load_prompts("debian_ende", limit)
    synopses = load_prompts("debian_synopsis", limit)
    taken = zip_longest(translations[::2], translations[1::2], synopses)
    prompts = [prompt for group in taken for prompt in group if prompt is not None]
    sources = [vocabulary.encode(prompt.source).tolist() for prompt in prompts]
    exported = folder / "debian_target"
    huggingface.write(exported, checkpoint, "float32")
    arguments = "debian_target", "debian_draft", False, str(exported), MAX_LENGTH, gamma
    return Setting(*arguments), sources


def language_model(limit: int | None, gamma: int, folder: pathlib.Path) -> Made:
    """The bundled language model with its draft on its test texts, exported into a folder."""
    names, exported = ("debian_lm", "debian_lm_draft"), []
    for name in names:
        exported.append(str(folder / name))
        huggingface.write(exported[-1], checkpoints.open(name), "float32")
    vocabulary = checkpoints.open(names[0]).open_vocabulary()
    assert vocabulary is not None
    prompts = [vocabulary.prompt(one.source).tolist() for one in load_prompts(names[0], limit)]
    arguments = *names, False, exported[0], MAX_LENGTH, gamma, True, exported[1]
    return Setting(*arguments), prompts


def chat_model(
    target: str, draft: str, limit: int | None, gamma: int, folder: pathlib.Path
) -> Made:
    """A chat model's folder on our questions: one of each category, or the first `limit`."""
    checkpoint = checkpoints.open(target)
    vocabulary = checkpoint.open_vocabulary()
    assert vocabulary is not None
    exported = folder / pathlib.Path(target).name
    exported.symlink_to(pathlib.Path(target).resolve(), target_is_directory=True)
    questions = [one for one in load_prompts("questions") if len(one.messages) == 1]
    if limit is None:
        questions = list({one.category: one for one in questions}.values())
    rendered = chat.template(checkpoint.special, target)
    prompts = [vocabulary.prompt(rendered(one.messages)).tolist() for one in questions[:limit]]
    return Setting(target, draft, False, str(exported), MAX_LENGTH, gamma, True), prompts


def random(size: str, limit: int | None, length: int, folder: pathlib.Path) -> Made:
    """Random weights of a size of `models.SIZES` on random sources, exported into a folder."""
    config = named(size, dtype="float32")
    huggingface.write(folder / size, in_memory(size, config, random_params(config)), "float32")
    rows = np.random.default_rng(0).integers(2, config.vocab_size, (limit or 4, 63))
    sources = [[*row, EOS_ID] for row in rows.tolist()]
    return Setting(size, None, True, str(folder / size), length, 0), sources


SHIPPED = {"debian": shipped, "debian_lm": language_model}
"""Bundled pairs, by name."""
