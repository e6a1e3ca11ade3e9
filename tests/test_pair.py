"""Pairs of either kind, by name: what they encode, what they refuse, and drafts without a model."""

import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from speculative import checkpoints, loading
from speculative.checkpoints import native
from speculative.decoding import Token
from speculative.decoding.rules import EXACT, Simulated
from speculative.drafts import ngram, suffix
from speculative.drafts.named import MODEL_FREE
from speculative.loading import load
from speculative.pair import Pair
from speculative.settings import Settings
from speculative.vocabulary import SentencePiece
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
    vocabulary = SentencePiece(saved.VOCABULARY)
    texts = [vocabulary.encode(text) for text in (TEXT, "an editor", "a library for text")]
    table = ngram.count_ngrams(texts, 3, vocabulary.size)
    for name in ("t5", "gpt"):
        ngram.TABLE.save(folder / name / ngram.TABLE.file, vocabulary, table)
        suffix.save(folder / name / suffix.TABLE.file, texts, vocabulary)
    return folder


@pytest.mark.parametrize(
    ("kind", "draft", "temperature"),
    [
        (kind, draft, float((number + (kind == "gpt")) % 2))
        for number, draft in enumerate([*MODEL_FREE, "model", "+suffix"])
        for kind in ("t5", "gpt")
    ],
)
def test_every_draft_of_both_kinds_is_exact(
    folder: pathlib.Path, kind: str, draft: str, temperature: float
) -> None:
    """By the traced loop, which checks every proposal and compares with the fast path.

    Each draft meets both kinds of models and both temperatures, not each with each.
    """
    name = draft
    if draft not in MODEL_FREE:
        name = str(folder / f"{kind}_draft") + draft.removeprefix("model")
    pair = load(str(folder / kind), name)
    found = pair.check(TEXT, gamma=3, max_length=12, temperature=temperature, seed=4)
    assert found.tokens
    if temperature == 0:
        assert found.tokens == pair.generate(TEXT, gamma=0, max_length=12).tokens


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
    assert pair.generate("", max_length=12, gamma=3, temperature=1.0).tokens
    with pytest.raises(ValueError, match="prompt is empty"):
        load(str(folder / "t5"), "copy").encode("")


def test_an_error_says_which_of_several_texts_it_is_about(folder: pathlib.Path) -> None:
    pair = load(str(folder / "t5"), "copy")
    with pytest.raises(ValueError, match="^Text 3 of 4: The prompt is empty"):
        pair.generate([TEXT, TEXT, " ", ""], max_length=4)
    with pytest.raises(ValueError, match="^The prompt is empty"):
        pair.generate(" ", max_length=4)


def test_the_end_of_a_long_prompt_is_kept(folder: pathlib.Path) -> None:
    pair = language_model(folder)
    text = "word " * 600 + TEXT
    tokens = pair.vocabulary.prompt(text)
    assert 512 < len(tokens) <= 1024
    whole = np.asarray(pair.encode(text))[0]
    np.testing.assert_array_equal(whole, [*tokens, *[-1] * (1024 - len(tokens))])
    assert pair.truncated([text, TEXT], 512) == 1
    kept = np.asarray(pair.encode(text, 512))[0]
    np.testing.assert_array_equal(kept, tokens[-512:])


@pytest.mark.parametrize(
    ("draft", "positions"),
    [
        ("copy", 96),
        ("model", 80),
        pytest.param("+suffix", 80, marks=pytest.mark.long),  # A mixture's model has a limit too.
    ],
)
def test_a_text_may_have_as_many_tokens_as_there_are_positions(
    folder: pathlib.Path, draft: str, positions: int
) -> None:
    """Of the target (96), or of its draft (80); guesses of the last step may lie beyond.

    The last token is not read. The prompt counts by its tokens, not as it is padded (to 32).
    """
    small = str(folder / "gpt_draft")
    pair = load(
        str(folder / "gpt"), draft if draft == "copy" else small + draft.removeprefix("model")
    )
    prompt = len(pair.vocabulary.prompt(TEXT))
    most, said = positions + 1 - prompt, f"{positions} positions, but a prompt of {prompt} tokens"
    decode: Callable[..., Any]
    for decode in (pair.generate, pair.stream):
        with pytest.raises(ValueError, match=f"{said} .* = {most + 1} needs {positions + 1};"):
            decode(TEXT, max_length=most + 1, gamma=3)
    alone = pair.generate(TEXT, max_length=most, gamma=0).tokens
    assert len(alone) == most
    for gamma in (3, 11):
        assert pair.generate(TEXT, max_length=most, gamma=gamma).tokens == alone
    logits = saved.forward(
        pair.target,
        checkpoints.open(folder / "gpt").load("float32"),
        None,
        np.array([[*pair.vocabulary.prompt(TEXT), *alone[:-1]]]),
    )
    near = np.asarray(logits)[0, prompt - 1 :, : pair.vocabulary.size]
    assert near.argmax(-1).tolist() == alone


@pytest.mark.parametrize(
    ("draft", "made_by"),
    [
        *((name, r"ngrams.npz.*speculative count") for name in ("unigram", "bigram", "trigram")),
        ("suffix", r"past_outputs.npz.*speculative count --kind outputs"),
    ],
)
def test_a_missing_table_is_named_with_the_script_that_makes_it(
    folder: pathlib.Path, draft: str, made_by: str
) -> None:
    with pytest.raises(ValueError, match=rf"'{draft}' needs .*bare.*{made_by}"):
        load(str(folder / "bare"), draft)


@pytest.mark.long
def test_each_shipped_target_has_a_draft_of_its_own() -> None:
    for target, draft in loading.DRAFTS.items():
        pair = load(target)
        assert pair.names == (target, draft)
        prompt = TEXT if pair.target.decoder_only else f"summarize: {TEXT}"
        # The README's settings: compiled once for both.
        autoregressive = pair.generate(prompt, gamma=0)
        assert pair.generate(prompt, gamma=5).tokens == autoregressive.tokens


@pytest.mark.parametrize(
    ("kind", "settings"), [("t5", {}), ("gpt", {"temperature": 1.0, "seed": 3})]
)
def test_a_list_of_texts_is_decoded_at_once(
    folder: pathlib.Path, kind: str, settings: dict[str, Any]
) -> None:
    """Each as it would be alone, its number in the list being its example's."""
    pair = load(str(folder / kind), str(folder / f"{kind}_draft"))
    texts = [TEXT, "an editor", "a library for text files, and an editor"]
    asked: dict[str, Any] = {"gamma": 3, "max_length": 12} | settings
    together = pair.generate(texts, example=5, **asked)
    alone = [pair.generate(text, example=5 + i, **asked) for i, text in enumerate(texts)]
    assert together == alone
    assert pair.generate(texts[:1], **asked) == [pair.generate(texts[0], **asked)]


def test_samples_of_a_text_differ_and_the_first_is_its_own(folder: pathlib.Path) -> None:
    pair = load(str(folder / "t5"), str(folder / "t5_draft"))
    asked: dict[str, Any] = {"gamma": 3, "max_length": 12, "temperature": 1.0, "seed": 2}
    found = pair.samples(TEXT, 6, batch_size=4, **asked)
    assert found[0] == pair.generate(TEXT, **asked)
    assert len({tuple(result.tokens) for result in found}) == 6
    assert found[:2] == pair.samples(TEXT, 2, **asked)
    with pytest.raises(ValueError, match="count must be .*2047.*, not 2048"):
        pair.samples(TEXT, 2048, **asked)
    with pytest.raises(ValueError, match="batch_size must be"):
        pair.generate([TEXT], batch_size=0, **asked)


def test_a_stop_string_cuts_the_text_that_would_have_come(folder: pathlib.Path) -> None:
    """Wherever in a block or a token it ends; texts thereby keep their distribution."""
    pair = load(str(folder / "t5"), str(folder / "t5"))  # All guesses are accepted.
    asked: dict[str, Any] = {"gamma": 3, "max_length": 20, "temperature": 1.0}
    texts = [TEXT, "an editor", "a library for text files"]
    whole = pair.generate(texts, logprobs=True, **asked)
    ends = set()
    for at in range(1, 12, 2):
        stop = (whole[0].text[at : at + 3], whole[1].text[at + 1 : at + 3])
        found = pair.generate(texts, logprobs=True, stop=stop, batch_size=2, **asked)
        assert found[0] == pair.generate(texts[0], logprobs=True, stop=stop, **asked)
        for one, full in zip(found, whole, strict=True):
            places = [full.text.find(end) for end in stop if end in full.text]
            assert one.text == (full.text[: min(places)] if places else full.text)
            assert one.tokens == full.tokens[: len(one.tokens)]
            assert full.logprobs and one.logprobs == full.logprobs[: len(one.tokens)]
            if places:
                assert one.finish_reason == "stop"
                shorter = pair.vocabulary.decode(one.tokens[:-1])
                assert not any(end in shorter for end in stop)
                ends.add(len(one.tokens) % 4)
    assert len(ends) > 2  # In the middle of blocks too.
    assert pair.generate(texts, logprobs=True, stop=("no such text",), **asked) == whole


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (("",), "A stop string must have 1 to 256 characters, not 0."),
        (("a" * 257,), "A stop string must have 1 to 256 characters, not 257."),
        ((3,), "A stop string must be of type str, not 3"),
        ("text", "stop must be of type list or tuple, not 'text'"),
    ],
)
def test_stop_strings_are_checked(folder: pathlib.Path, stop: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(str(folder / "t5"), "copy").generate([TEXT], stop=stop)


@pytest.mark.long
def test_a_stop_string_ends_what_is_counted(folder: pathlib.Path) -> None:
    """Guesses and passes as a text has them that ends with its token there, however it is decoded.

    Wherever in a step that is; the ones before are of the same random numbers.
    """
    pair = load(str(folder / "t5"), str(folder / "t5"))
    asked: dict[str, Any] = {"gamma": 3, "max_length": 20, "temperature": 1.0, "seed": 4}
    whole, seen = pair.generate(TEXT, **asked), set[int]()
    for at in range(len(whole.text) - 3):
        stop = [whole.text[at : at + 3]]
        found = pair.generate(TEXT, stop=stop, **asked)
        shorter: dict[str, Any] = asked | {"max_length": len(found.tokens)}
        ended = pair.generate(TEXT, **shorter)
        assert found.tokens == ended.tokens
        for name in ("target_calls", "draft_tokens", "tested_by_position", "accepted_by_position"):
            assert getattr(found, name) == getattr(ended, name), (stop, name)
        assert found.accepted <= len(found.tokens)
        assert pair.collect(pair.stream(TEXT, **asked), tuple(stop)) == found
        seen.add(len(found.tokens))
    assert len(seen) > 8


@pytest.mark.parametrize("verification", ["token", pytest.param("block", marks=pytest.mark.long)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_whose_logits_are_not_finite_is_refused(
    folder: pathlib.Path, verification: str, temperature: float
) -> None:
    """Its weights are, but too large."""
    config, name = saved.DRAFT, folder / "large"
    if not name.exists():
        params = saved.random(config, 5)
        params["decoder"]["logits_dense"]["kernel"] *= np.float32(1e38)
        params["decoder"]["decoder_norm"]["scale"] *= np.float32(1e30)
        native.save(name, config, params, saved.VOCABULARY)
    for draft in (str(name), f"{name}+copy"):
        with pytest.raises(ValueError, match=r"The draft .*large.* (not finite|NaN or infinity):"):
            load(str(folder / "t5"), draft).generate(
                TEXT, temperature=temperature, verification=verification, max_length=12
            )


@pytest.mark.parametrize(
    "more", [{}, {"tree": 12, "verification": "coupled"}], ids=["chain", "tree"]
)
def test_streaming_gives_the_same_result(folder: pathlib.Path, more: dict[str, Any]) -> None:
    """Also where the text outgrows its first cache, of 64 positions."""
    pair = load(str(folder / "t5"), str(folder / "t5"))
    asked: dict[str, Any] = {"gamma": 3, "temperature": 1.0, "max_length": 70} | more
    found = pair.collect(pair.stream(TEXT, seed=3, **asked))
    assert found == pair.generate(TEXT, seed=3, **asked)
    assert 0 < found.accepted <= found.tested
    assert (len(found.tokens), found.finish_reason) == (70, "length")
    stop = [found.text[20:23], found.text[9:12]]
    (request,) = pair.requests([TEXT], Settings(seed=3, stop=stop, **asked))
    steps = list(pair.steps(request))
    assert len(steps) < found.target_calls
    assert pair.collect(steps, request.stop) == pair.generate(TEXT, seed=3, stop=stop, **asked)


def test_a_text_that_ends_says_so(folder: pathlib.Path) -> None:
    pair = load(str(folder / "t5"), str(folder / "t5_draft"))
    asked: dict[str, Any] = {"gamma": 3, "max_length": 12, "temperature": 1.0}
    tokens = pair.generate(TEXT, **asked).tokens
    pair.vocabulary.eos_ids = (*pair.vocabulary.eos_ids, tokens[-1])
    ended = pair.generate(TEXT, **asked)
    assert (ended.tokens, ended.finish_reason) == (tokens, "stop")  # With its last token.


def test_no_text_is_refused(folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="no text to decode"):
        load(str(folder / "gpt"), "copy").generate([])


def test_without_guesses_the_target_decodes_alone() -> None:
    """Whatever the rule is."""
    for rule in (Token(0.1), Simulated(0.5)):
        assert Settings(gamma=0, verification=rule).decoding(10, (1,)).rule == EXACT
        assert Settings(gamma=2, verification=rule).decoding(10, (1,)).rule == rule
    with pytest.raises(ValueError, match="give it to the rule itself"):
        Settings(verification=Token(), lenience=0.5)


def test_a_text_passes_few_functions_on_its_way(folder: pathlib.Path) -> None:
    """Between `Pair.generate` and its tokens, once its programs are compiled.

    Neither checks of settings, nor what is told of settings alone, nor JAX's flattening of them.
    """
    pair = load(str(folder / "t5"), str(folder / "t5_draft"))
    pair.generate(TEXT, max_length=12)
    package, passed = str(pathlib.Path(loading.__file__).parent), set[tuple[str, str]]()
    apart: list[Any] = []

    def called(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if apart or not code.co_filename.startswith(package):
            if apart and apart[-1] is frame and event == "return":
                apart.pop()
        elif event == "call":
            told = code.co_varnames[: code.co_argcount] == ("self",)
            if told or code.co_name in ("__post_init__", "tree_flatten", "_parted"):
                apart.append(frame)
            elif "<" not in code.co_name and not code.co_filename.endswith("checks.py"):
                passed.add((code.co_filename, code.co_name))

    sys.setprofile(called)
    try:
        pair.generate(TEXT, max_length=12)
    finally:
        sys.setprofile(None)
    assert 10 < len(passed) <= 15
    assert len({file for file, _ in passed}) <= 9


def test_editors_show_every_setting() -> None:
    """By name alone, with its type and default, in the order of the dataclass."""
    fields = dataclasses.fields(Settings)
    for method in (Pair.generate, Pair.stream, Pair.samples, Pair.check):
        shown = [
            (one.name, one.annotation, one.default)
            for one in inspect.signature(method).parameters.values()
            if one.kind == one.KEYWORD_ONLY
        ]
        assert shown == [(field.name, field.type, field.default) for field in fields]
    with pytest.raises(TypeError, match="gama"):
        Pair.stream(None, TEXT, gama=3)  # pyright: ignore
