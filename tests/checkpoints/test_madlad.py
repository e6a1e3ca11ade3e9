"""MADLAD-400: a T5 v1.1 without sentinels, whose sources begin with the tag of a language."""

import json
import pathlib

import numpy as np
from sentencepiece import sentencepiece_model_pb2

import speculative
from speculative import checkpoints
from tests import saved

TAGS = "<2de>", "<2pt>"


def test_tags_are_pieces_and_there_are_no_sentinels(tmp_path: pathlib.Path) -> None:
    saved.save(tmp_path / "ours", saved.TARGET.replace(logits_via_embedding=False), 3)
    checkpoints.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    pieces = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    pieces.ParseFromString(saved.VOCABULARY.read_bytes())
    for piece, tag in zip(pieces.pieces[-len(TAGS) :], TAGS, strict=True):
        piece.piece, piece.type, piece.score = tag, piece.USER_DEFINED, 0.0
    (tmp_path / "theirs" / "spiece.model").write_bytes(pieces.SerializeToString())
    path = tmp_path / "theirs" / "tokenizer_config.json"
    said = json.loads(path.read_text())
    del said["extra_ids"]
    path.write_text(json.dumps(said))
    checkpoint = checkpoints.open(tmp_path / "theirs")
    assert checkpoint.config.vocab_size == 8192 and checkpoint.extra_ids == 0
    pair = speculative.load(tmp_path / "theirs", "copy")
    tokens = pair.vocabulary.encode("<2de> Good morning.")
    plain = pair.vocabulary.encode("Good morning.")
    assert tokens[0] == 8192 - 2 or tokens[1] == 8192 - 2
    np.testing.assert_array_equal(tokens[-len(plain) :], plain)
    assert pair.vocabulary.decode(tokens).replace(" ", "") == "<2de>Goodmorning."
    found = pair.generate("<2de> Good morning.", gamma=3, temperature=0.0, max_length=12)
    own = pair.generate("<2de> Good morning.", gamma=0, temperature=0.0, max_length=12)
    assert found.tokens == own.tokens
