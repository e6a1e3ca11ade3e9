"""What a checkpoint says of its tokens: ids, ends, sentinels and added tokens.

Right values are those of transformers 5.24 for the same files.
"""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers

import speculative
from speculative import checkpoints
from speculative.checkpoints import huggingface, native
from speculative.models import T5Config
from speculative.models.gpt import DecoderOnlyConfig
from speculative.special_tokens import AddedToken, SpecialTokens
from speculative.vocabulary import Bytes, SentencePiece, Tokenizer, open_vocabulary
from tests import saved

SHIPPED = checkpoints.ASSETS / "debian.model"
PIECES = 8192  # Of the shipped vocabulary.
T5 = T5Config(8448, 16, 2, 8, 32, 1, 1)
GPT = DecoderOnlyConfig(
    300, 16, 2, 8, 32, 1, mlp_activations=("gelu",), norm="layer", positions="learned",
    max_positions=64, biases=True, scaled_attention=True, logits_via_embedding=True,
)  # fmt: skip


def made(folder: pathlib.Path, config: Any = T5, vocabulary: Any = SHIPPED) -> pathlib.Path:
    """A random checkpoint as a Hugging Face folder, with 100 sentinels."""
    sentinels = 100 if isinstance(config, T5Config) else 0
    native.save(
        folder / "native", config, saved.random(config, 3), vocabulary, "float32", sentinels
    )
    checkpoints.convert(folder / "native", folder / "made", "huggingface")
    return folder / "made"


def say(folder: pathlib.Path, **files: Any) -> None:
    """Changes JSON files of a folder, named without their endings."""
    for name, fields in files.items():
        path = folder / f"{name}.json"
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(before | fields))


def trained(folder: pathlib.Path, **ids: Any) -> pathlib.Path:
    """A SentencePiece model of the README with these special ids, and pieces <2de> and <2fr>."""
    corpus = pathlib.Path(__file__).parent.parent / "README.md"
    sentencepiece.SentencePieceTrainer.Train(  # pyright: ignore[reportAttributeAccessIssue]
        input=str(corpus), model_prefix=str(folder / "pieces"), vocab_size=400, minloglevel=2,
        user_defined_symbols=["<2de>", "<2fr>"], **ids,
    )  # fmt: skip
    return folder / "pieces.model"


def test_sentinels_and_control_pieces_in_a_text(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path)
    vocabulary = checkpoints.open(folder).open_vocabulary()
    assert vocabulary is not None
    text = "The <extra_id_0> walks in <extra_id_1> park"
    found = [293, 8291, 907, 350, 347, 260, 271, 8290, 4857, 347, 1]
    np.testing.assert_array_equal(vocabulary.encode(text), found)
    other = "a<extra_id_0>b  c <pad> d</s> e <unk>f"
    found = [265, 8291, 681, 558, 0, 650, 1, 573, 2, 621, 1]
    np.testing.assert_array_equal(vocabulary.encode(other), found)
    tokens = [0, 7267, 6832, 6757, 8290, 2723, 1929, 8290, 355, 1]
    assert vocabulary.decode(tokens) == "NetworkManager integrattendedPS focusS"
    full = "<pad> NetworkManager integrattended<extra_id_1>PS focus<extra_id_1>S"
    assert vocabulary.decode(tokens, special=True) == full
    # As of T5X's checkpoints, a text may spell sentinels, and no control pieces, as in seqio.
    seqio = SentencePiece(SHIPPED, 100)
    np.testing.assert_array_equal(seqio.encode(text), vocabulary.encode(text))
    assert 0 not in seqio.encode("c <pad> d")


def test_special_tokens_in_outputs(tmp_path: pathlib.Path) -> None:
    """They are shown if asked for, and may be stop strings either way."""
    vocabulary = SentencePiece(SHIPPED, 100)
    tokens = [7267, 6757, 8290, 2723, 1929]
    assert vocabulary.before(["<extra_id_1>"], tokens) == "NetworkManagertended"
    assert vocabulary.before(["<extra_id_1>"], tokens, special=True) == "NetworkManagertended"
    assert vocabulary.before(["ended<extra_id_1>"], tokens) == "NetworkManagert"
    assert vocabulary.before(["dedPS"], tokens) == "NetworkManagerten"
    assert vocabulary.before(["dedPS"], tokens, special=True) is None
    shown = vocabulary.before([" focus"], tokens, special=True)
    assert shown == "NetworkManagertended<extra_id_1>PS"
    assert vocabulary.before(["absent"], tokens) is None
    pair = speculative.load(made(tmp_path), "uniform")
    plain = pair.generate("text", max_length=40)
    sentinel = next(token for token in [*plain.tokens, 8200] if token >= PIECES)
    name = pair.vocabulary.pieces[sentinel]
    if sentinel in plain.tokens:
        given = pair.generate("text", max_length=40, stop=[name])
        assert given.tokens == plain.tokens[: plain.tokens.index(sentinel) + 1]
        assert name not in given.text and given.finish_reason == "stop"
        assert name in pair.generate("text", max_length=40, show_special=True).text


def test_ids_of_the_checkpoint(tmp_path: pathlib.Path) -> None:
    """As in MADLAD: unknown 0, padding 1, end 2; texts begin with 0."""
    pieces = trained(tmp_path, unk_id=0, pad_id=1, eos_id=2, bos_id=-1)
    folder = made(tmp_path, T5.replace(vocab_size=500), pieces)
    ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 5}
    say(folder, config=ids)
    pair = speculative.load(folder, "uniform")
    vocabulary = pair.vocabulary
    assert (vocabulary.end_id, vocabulary.eos_ids, vocabulary.start_id) == (2, (2,), 5)
    tokens = vocabulary.encode("<2de> ☃ the target")
    assert (tokens[0], tokens[-1]) != (0, 1) and tokens[-1] == 2 and 0 in tokens
    source = pair.encode("<2de> ☃ the target")
    np.testing.assert_array_equal(pair.target.first(source), [5])
    assert source[0, len(tokens)] == pair.target.pad_id == -1
    # What is unknown, 0, is read like any other piece.
    without = source.at[0, np.flatnonzero(tokens == 0)].set(-1)
    encoded = [pair.target.encode(pair.params.target, x) for x in (source, without)]
    assert not np.allclose(encoded[0][0, 0], encoded[1][0, 0])  # pyright: ignore
    for to in ("native", "huggingface"):
        checkpoints.convert(folder, tmp_path / f"to_{to}", to)
        again = speculative.load(tmp_path / f"to_{to}", "uniform")
        assert again.generate("the target").tokens == pair.generate("the target").tokens
    said = json.loads((tmp_path / "to_huggingface" / "config.json").read_text())
    assert {name: said[name] for name in ids} == ids
    with pytest.raises(ValueError, match=r"start token 5, which T5X's format does not hold"):
        checkpoints.convert(folder, tmp_path / "t5x", "t5x")


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({}, 7, (7,)),
        ({"eos_token_id": [1, 7]}, 1, (1, 7)),
        ({"eos_token_id": 7}, [1, 7], (7,)),
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": None}, None, (1,)),
        # A copy of config.json that no longer agrees with it.
        ({"eos_token_id": 9, "_from_model_config": True}, 7, (7, 9)),
    ],
)
def test_ends(tmp_path: pathlib.Path, generation: Any, config: Any, ends: tuple[int, ...]) -> None:
    folder = made(tmp_path)
    say(folder, generation_config=generation, config={"eos_token_id": config})
    vocabulary = checkpoints.open(folder).open_vocabulary()
    assert vocabulary is not None
    assert (vocabulary.eos_ids, vocabulary.end_id) == (ends, 1)
    assert checkpoints.open(folder).note.endswith("ends a text: 7, 9.") == (ends == (7, 9))
    assert vocabulary.encode("a")[-1] == 1


ADDED = {
    "8292": {"content": "{", "special": False},
    "8293": {"content": "<sep>", "special": True, "lstrip": True, "rstrip": True},
}


@pytest.mark.parametrize("file", ["tokenizer_config", "tokenizer", "added_tokens"])
def test_added_tokens_beside_pieces(tmp_path: pathlib.Path, file: str) -> None:
    folder = made(tmp_path)
    files: dict[str, Any] = {
        "tokenizer_config": {"added_tokens_decoder": ADDED},
        "tokenizer": {"added_tokens": [{"id": int(i)} | one for i, one in ADDED.items()]},
        "added_tokens": {one["content"]: int(i) for i, one in ADDED.items()},
    }
    say(folder, **{file: files[file]})
    if file == "added_tokens":
        say(folder, tokenizer_config={"additional_special_tokens": ["<sep>"]})
    for to in ("native", "huggingface", "native"):
        checkpoint = checkpoints.open(folder)
        vocabulary = checkpoint.open_vocabulary()
        assert vocabulary is not None
        assert (vocabulary.size, vocabulary.pieces[8292:]) == (8294, ("{", "<sep>"))
        a, b = vocabulary.encode("a")[0], vocabulary.encode("b")[0]
        np.testing.assert_array_equal(
            vocabulary.encode("a { b <sep> {"), [a, 8292, b, 8293, 8292, 1]
        )
        assert vocabulary.decode([a, 8292, b, 8293, 8292, 1]) == "a{ b{"
        assert vocabulary.decode([a, 8292, b, 8293, 8292], special=True) == "a{ b<sep>{"
        checkpoints.convert(folder, folder := tmp_path / f"{to}_{len(folder.name)}", to)


def byte_pairs(folder: pathlib.Path, *more: str) -> tokenizers.Tokenizer:
    """Byte pairs with an end of text, and added tokens behind it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["speculative decoding"] * 9, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_tokens([*more])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return tokenizer


def test_added_tokens_beside_byte_pairs(tmp_path: pathlib.Path) -> None:
    """The ids of vocab.json and added_tokens.json are kept, holes among them."""
    tokenizer = byte_pairs(tmp_path, "<user>")
    pieces = json.loads((tmp_path / "vocab.json").read_text())
    end, user = len(pieces) + 3, len(pieces) + 5
    added = (AddedToken("<|endoftext|>", end, special=True), AddedToken("<user>", user))
    found = Tokenizer(tmp_path / "vocab.json", SpecialTokens(added=added))
    assert (found.size, found.end_id, found.eos_ids, found.start_id) == (user + 1, end, (end,), end)
    assert found.pieces[user - 1] == "" and found.pieces[user] == "<user>"
    want = [*tokenizer.encode("spec").ids, user, *tokenizer.encode(" x").ids]
    np.testing.assert_array_equal(found.prompt("spec<user> x"), want)
    assert found.decode([*want, user - 1, end, 5]) == "spec<user> x"
    assert found.prompt("<|endoftext|>").tolist() == [end]
    config = GPT.replace(vocab_size=user + 1)
    folder = made(tmp_path, config, tmp_path / "tokenizer.json")
    said = json.loads((folder / "config.json").read_text())
    assert said["eos_token_id"] == said["bos_token_id"] == len(pieces)
    say(folder, config={"eos_token_id": 40})
    assert speculative.load(folder, "uniform").vocabulary.eos_ids == (40,)


def test_tokenizer_json_alone(tmp_path: pathlib.Path) -> None:
    """T5's pieces as transformers 5 saves them: no spiece.model, and padding without a row."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0), ("▁b", -1.5), ("▁", -3.0), ("b", -2.0)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
    space = {"replacement": "▁", "prepend_scheme": "always"}
    parts = [tokenizers.pre_tokenizers.WhitespaceSplit()]
    parts.append(tokenizers.pre_tokenizers.Metaspace(**space))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    tokenizer.decoder = tokenizers.decoders.Metaspace(**space)
    ending = tokenizers.processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    tokenizer.post_processor = ending
    tokenizer.add_special_tokens(["<unk>", "</s>", "<extra_id_0>", "<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = T5.replace(vocab_size=7)
    native.save(tmp_path / "native", config, saved.random(config, 3))
    folder = tmp_path / "made"
    checkpoints.convert(tmp_path / "native", folder, "huggingface")
    (folder / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    say(folder, tokenizer_config={"pad_token": "<pad>", "eos_token": "</s>"})
    checkpoint = checkpoints.open(folder)
    for to in ("native", "huggingface", "native"):
        vocabulary = checkpoint.open_vocabulary()
        assert type(vocabulary) is Tokenizer and vocabulary.size == 7
        assert (vocabulary.eos_ids, vocabulary.end_id, vocabulary.start_id) == ((1,), 1, 0)
        np.testing.assert_array_equal(vocabulary.encode("a bb"), [2, 3, 5, 1])
        np.testing.assert_array_equal(vocabulary.encode("a<extra_id_0>b"), [2, 6, 3, 1])
        assert vocabulary.encode("<pad>").max() < 7
        assert vocabulary.decode([2, 6, 3, 5, 1, 2]) == "a bb"
        assert vocabulary.decode([2, 6, 3], special=True) == "a<extra_id_0> b"
        checkpoint = checkpoints.convert(
            checkpoint.location, tmp_path / f"{to}{vocabulary.path.parent.name}", to
        )
    tokenizer.add_tokens(["<more>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"'<more>' .* has the id 8, but .* has 7 embeddings"):
        speculative.load(folder, "uniform")


def test_sentinels_of_bytes() -> None:
    vocabulary = Bytes(125)
    want = [3 + ord("a"), 3 + ord(" "), 259, 3 + ord(" "), 383, 1]
    np.testing.assert_array_equal(vocabulary.encode("a <extra_id_0> <extra_id_124>"), want)
    assert vocabulary.decode(want) == "a  "
    assert vocabulary.decode(want, special=True) == "a <extra_id_0> <extra_id_124>"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": 5}},
            r"eos_token_id is 5 in .*generation_config\.json and 1 in .*config\.json, .* correct",
        ),
        (
            {"config": {}, "generation_config": {"decoder_start_token_id": 5}},
            r"decoder_start_token_id is 5 in .* and 0 in",
        ),
        ({"config": {"eos_token_id": 9000}}, r"end token 9000, outside the 8448 rows"),
        ({"config": {"eos_token_id": 8300}}, r"end token 8300 lies outside the vocabulary"),
        ({"config": {"eos_token_id": -1}}, r"eos_token_id of .*config\.json must be .* not -1"),
        ({"config": {"eos_token_id": "</s>"}}, r"eos_token_id of .*config\.json must be"),
        ({"config": {"decoder_start_token_id": 8448}}, r"start token 8448, outside the 8448 rows"),
        ({"added_tokens": {"<x>": 8448}}, r"'<x>' .* has the id 8448, but .* has 8448 embeddings"),
        ({"added_tokens": {"<x>": "a"}}, r"added token '<x>' must be a whole number"),
        (
            {"added_tokens": {"{": 8300}, "tokenizer_config": {"added_tokens_decoder": ADDED}},
            r"'\{' has the id 8292 in .*_config\.json, but .*added_tokens\.json has '\{' with",
        ),
        ({"tokenizer_config": {"eos_token": "<end>"}}, r"The end '<end>' of texts is no piece"),
        ({"tokenizer_config": {"extra_ids": 300}}, r"8448 embeddings, fewer than the 8492 pieces"),
    ],
)
def test_what_does_not_fit(tmp_path: pathlib.Path, files: dict[str, Any], said: str) -> None:
    folder = made(tmp_path)
    say(folder, **files)
    with pytest.raises(ValueError, match=said):
        speculative.loading.resolve(folder, "uniform")


def test_what_is_not_applied_is_named(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path)
    asked = {"num_beams": 4, "no_repeat_ngram_size": 3, "do_sample": True, "temperature": 0.7}
    say(folder, generation_config={**asked, "top_k": 50, "min_length": 0, "suppress_tokens": []})
    note = huggingface.open(folder).note
    assert "generation_config.json has settings" in note
    assert "do_sample True (--temperature 1), temperature 0.7 (--temperature 0.7)" in note
    assert note.endswith("num_beams 4, no_repeat_ngram_size 3.")
    say(folder, generation_config={**dict.fromkeys(asked), "temperature": 0.7})
    assert huggingface.open(folder).note == ""


def test_what_is_said_travels_as_json() -> None:
    added = (AddedToken("{", 5), AddedToken("<x>", 6, special=True, rstrip=True))
    for one in (SpecialTokens(), SpecialTokens((1, 7), 0, 3, "</s>", "<pad>", added, ("<pad>",))):
        assert SpecialTokens.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert open_vocabulary(SHIPPED).special == SpecialTokens()
