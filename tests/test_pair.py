"""Pairs of either kind, by name: what they encode, what they refuse, and drafts without a model."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from speculative import pair as pair_lib
from speculative.drafts import ngram, suffix
from speculative.drafts.named import MODEL_FREE, NGRAMS, PAST_OUTPUTS, TABLES
from speculative.pair import Pair, load, load_random
from speculative.vocabulary import Vocabulary
from tests import saved

TEXT = "a small editor for text files"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Targets and drafts of both kinds; the targets have tables beside them."""
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, config) in enumerate(
        {
            "t5": saved.TARGET,
            "t5_draft": saved.DRAFT,
            "gpt": saved.GPT,
            "gpt_draft": saved.GPT_DRAFT,
            "bare": saved.GPT,
        }.items()
    ):
        saved.save(folder / name, config, seed)
    vocabulary = Vocabulary(saved.VOCABULARY)
    texts = [vocabulary.encode(text) for text in (TEXT, "an editor", "a library for text")]
    table = ngram.count_ngrams(texts, 3, vocabulary.size)
    for name in ("t5", "gpt"):
        ngram.save(folder / name / NGRAMS, table, vocabulary)
        suffix.save(folder / name / PAST_OUTPUTS, texts, vocabulary)
    return folder


@pytest.mark.parametrize("draft", [*MODEL_FREE, "model"])
@pytest.mark.parametrize("kind", ["t5", "gpt"])
def test_every_draft_of_both_kinds_is_exact_at_temperature_0(
    folder: pathlib.Path, kind: str, draft: str
) -> None:
    """Also by the reference loop, which checks every proposal."""
    name = str(folder / f"{kind}_draft") if draft == "model" else draft
    pair = load(str(folder / kind), name)
    plain = pair.generate(TEXT, gamma=0, max_length=12)
    assert pair.generate(TEXT, gamma=3, max_length=12).tokens == plain.tokens
    assert pair.check(TEXT, gamma=3, max_length=12).tokens == plain.tokens
    sampled = pair.check(TEXT, gamma=2, max_length=8, temperature=1.0, seed=4)
    assert (
        sampled.tokens == pair.generate(TEXT, gamma=2, max_length=8, temperature=1.0, seed=4).tokens
    )


def language_model(folder: pathlib.Path) -> Pair:
    return load(str(folder / "gpt"), "copy")


def test_a_prompt_begins_with_the_start_token_and_has_no_end(folder: pathlib.Path) -> None:
    pair = language_model(folder)
    tokens = pair.vocabulary.encode(TEXT)[:-1]
    got = np.asarray(pair.encode(TEXT))[0]
    np.testing.assert_array_equal(got[: len(tokens) + 1], [0, *tokens])
    assert (got[len(tokens) + 1 :] == -1).all()


def test_a_language_model_may_begin_with_nothing(folder: pathlib.Path) -> None:
    pair = language_model(folder)
    np.testing.assert_array_equal(pair.encode("")[0, :2], [0, -1])
    assert pair.generate("", max_length=4, gamma=2).tokens
    with pytest.raises(ValueError, match="prompt is empty"):
        load(str(folder / "t5"), "copy").encode("")


def test_the_end_of_a_long_prompt_is_kept(folder: pathlib.Path) -> None:
    pair = language_model(folder)
    text = "word " * 600 + TEXT
    with pytest.raises(ValueError, match="the limit is 512"):
        pair.encode(text)
    kept = np.asarray(pair.encode(text, truncate=True))[0]
    np.testing.assert_array_equal(kept, pair.vocabulary.prompt(text)[-512:])


@pytest.mark.parametrize(
    ("draft", "settings", "needed"),
    [("copy", {"max_length": 64, "gamma": 3}, 101), ("model", {"max_length": 48, "gamma": 3}, 85)],
)
def test_too_few_positions_are_told(
    folder: pathlib.Path, draft: str, settings: dict[str, int], needed: int
) -> None:
    """Of the target (96), or of its draft (80)."""
    pair = load(str(folder / "gpt"), str(folder / "gpt_draft") if draft == "model" else draft)
    decode: Callable[..., Any]
    for decode in (pair.generate, pair.stream):
        with pytest.raises(ValueError, match=rf"positions, but .* needs {needed}"):
            decode(TEXT, **settings)
    assert pair.generate(TEXT, max_length=40, gamma=3).tokens


@pytest.mark.parametrize("draft", sorted(TABLES))
def test_a_missing_table_is_named_with_the_script_that_makes_it(
    folder: pathlib.Path, draft: str
) -> None:
    with pytest.raises(ValueError, match=rf"'{draft}' needs .*bare.*{TABLES[draft]}.*scripts/"):
        load(str(folder / "bare"), draft)


def test_kinds_must_agree(folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"is a decoder-only model, but .* an encoder-decoder"):
        load(str(folder / "t5"), str(folder / "gpt_draft"))
    with pytest.raises(ValueError, match=r"is an encoder-decoder, but .* a decoder-only model"):
        load(str(folder / "gpt"), str(folder / "t5_draft"))


def test_random_weights_have_nothing_to_count() -> None:
    with pytest.raises(ValueError, match="no text to count for bigram"):
        load_random("gpt_6m", "bigram")


def test_each_shipped_target_has_a_draft_of_its_own() -> None:
    for target, draft in pair_lib.DRAFTS.items():
        pair = load(target)
        assert pair.names == (target, draft)
        prompt = TEXT if pair.target.continues else f"summarize: {TEXT}"
        plain = pair.generate(prompt, gamma=0, max_length=16)
        assert pair.generate(prompt, gamma=4, max_length=16).tokens == plain.tokens
