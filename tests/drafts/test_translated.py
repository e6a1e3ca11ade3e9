"""Drafts of another vocabulary: what tokens stand for, and texts that are the target's own."""

import pathlib

import numpy as np
import pytest
import tokenizers
from sentencepiece import sentencepiece_model_pb2

import speculative
from speculative.checkpoints import native
from speculative.drafts import translated
from speculative.vocabulary import Bytes, SentencePiece, Tokenizer, Vocabulary
from tests import saved

TEXT = "A small naïve editor, 🙂"


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Byte pairs of 600 tokens, learned from the shipped vocabulary's own pieces."""
    pieces = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    pieces.ParseFromString(saved.VOCABULARY.read_bytes())
    words = [one.piece.replace("▁", " ") for one in pieces.pieces[3:3000]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": 600, "special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    made.train_from_iterator(words, tokenizers.trainers.BpeTrainer(show_progress=False, **how))
    path = tmp_path_factory.mktemp("pairs") / "tokenizer.json"
    made.save(str(path))
    return path


def test_what_tokens_stand_for_makes_the_text(byte_pairs: pathlib.Path) -> None:
    for vocabulary in (SentencePiece(saved.VOCABULARY), Tokenizer(byte_pairs), Bytes()):
        tokens = vocabulary.encode(TEXT)[:-1]
        text = b"".join(vocabulary.spelled[token] or b"" for token in tokens).decode()
        if isinstance(vocabulary, SentencePiece):  # It begins with a space, and has no smileys.
            text = text.removeprefix(" ").replace("\N{DOUBLE QUESTION MARK}", "🙂")
            assert text.startswith("A small na")
        else:
            assert text == TEXT


def test_tables_join_equal_texts(byte_pairs: pathlib.Path) -> None:
    target, draft = SentencePiece(saved.VOCABULARY), Tokenizer(byte_pairs)
    found, shared = translated.tables(target, draft, None, draft.size)
    known = np.flatnonzero(found.logits < draft.size)
    assert len(known) == shared > 300
    for token in known:
        place = found.logits[token]
        if token in target.eos_ids:
            assert place in draft.eos_ids
        elif token != target.start_id:
            assert target.spelled[token] == draft.spelled[place] is not None
            assert found.read_as[token] == place
    # Another token is read as the end of what it stands for.
    other = next(i for i in range(300, 8192) if i not in known and target.spelled[i])
    spelled, read = target.spelled[other], draft.spelled[found.read_as[other]]
    assert spelled is not None and read is not None and spelled.endswith(read)
    # With a draft's vocabulary places are among its logits.
    kept = np.sort(found.logits[known])[::2]
    narrow, fewer = translated.tables(target, draft, kept, len(kept))
    assert 0 < fewer < shared
    for token in np.flatnonzero(narrow.logits < len(kept)):
        assert kept[narrow.logits[token]] == found.logits[token]


def test_vocabularies_with_little_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = SentencePiece(saved.VOCABULARY), Bytes(400)
    monkeypatch.setattr(translated, "LEAST", 0.5)
    with pytest.raises(ValueError, match="share [0-9]+ of 659 pieces, too few to guess with"):
        translated.tables(target, draft, None, draft.size)


@pytest.fixture(scope="module")
def folders(byte_pairs: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A target with the shipped vocabulary, and a draft with the pairs; a T5 pair likewise."""
    folder = tmp_path_factory.mktemp("other")
    for name, target, draft in (
        ("gpt", saved.GPT, saved.GPT_DRAFT),
        ("t5", saved.TARGET, saved.DRAFT),
    ):
        saved.save(folder / name, target, 0)
        size = Tokenizer(byte_pairs).size + 8
        config = draft.replace(vocab_size=size)
        native.save(folder / f"{name}_draft", config, saved.random(config, 1), byte_pairs)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt", "t5"])
@pytest.mark.parametrize("tree", [0, 6])
def test_texts_are_the_targets_own(kind: str, tree: int, folders: pathlib.Path) -> None:
    pair = speculative.load(folders / kind, folders / f"{kind}_draft")
    for text in ("A small editor", "Übergröße 🙂"):
        own = pair.generate(text, gamma=0, temperature=0.0, max_length=24)
        found = pair.generate(text, gamma=3, tree=tree, temperature=0.0, max_length=24)
        assert found.tokens == own.tokens
    if not tree:
        pair.check("A small editor", gamma=3, temperature=1.0, max_length=16, seed=2)


def test_a_draft_is_another_one_with_other_tables(folders: pathlib.Path) -> None:
    from speculative.loading import resolve

    found = resolve(folders / "gpt", folders / "gpt_draft")
    assert found.tables is not None
    same = resolve(folders / "gpt", folders / "gpt")
    assert same.tables is None
    assert found.fingerprints["draft"] != found.draft.checkpoint.contents  # pyright: ignore


def test_the_end_is_the_end_in_both(byte_pairs: pathlib.Path) -> None:
    vocabularies: list[Vocabulary] = [SentencePiece(saved.VOCABULARY), Tokenizer(byte_pairs)]
    for one, other in (vocabularies, vocabularies[::-1]):
        found, _ = translated.tables(one, other, None, other.size)
        assert found.logits[one.eos_ids[0]] == other.eos_ids[0]
