"""N-gram drafts against dictionaries in float64; their files; exactness with them."""

import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import checkpoints, cli
from speculative.drafts import NgramDraft, NgramParams, Proposal, count_ngrams, ngram, ngram_params
from speculative.sampling import Sampling
from speculative.training import data
from speculative.vocabulary import Numbers, SentencePiece
from tests import ngrams, toy
from tests.drafts.test_copying import check_exact, check_reference

PIECES = 7
TEXTS = ngrams.texts(PIECES)
SHIPPED = checkpoints.SHIPPED["debian_target"] / "ngrams.npz"
DEBIAN = checkpoints.ASSETS / "debian.model"


@functools.cache
def params(order: int, **cuts: Any) -> NgramParams:
    return ngram_params(count_ngrams(TEXTS, order, PIECES, **cuts), order)


@functools.cache
def dictionary(context: tuple[int, ...]) -> np.ndarray:
    return ngrams.row(TEXTS, context, PIECES)


def contexts(size: int) -> np.ndarray:
    """All of this many tokens, and those in which the oldest are missing."""
    found = [
        (-1,) * missing + context
        for missing in range(size + 1)
        for context in itertools.product(range(PIECES), repeat=size - missing)
    ]
    return np.array(found, np.int32).reshape(len(found), size)


def rows(table: NgramParams, context: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(ngram.distribution)(table, jax.device_put(context)))


@pytest.mark.parametrize("cuts", [{}, {"width": 2}, {"width": 3, "min_count": 2}], ids=str)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_rows_are_those_of_the_formula(order: int, cuts: dict[str, int]) -> None:
    some = contexts(order - 1)[::3]
    got = rows(params(order, **cuts), some)
    want = [ngrams.row(TEXTS, context, PIECES, **cuts) for context in some.tolist()]
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-6)
    assert params(order, **cuts).width == (0 if order == 1 else cuts.get("width", PIECES))


def test_texts_without_long_contexts() -> None:
    texts = [np.array([1]), np.array([2])]
    table = ngram_params(count_ngrams(texts, 3, 4), 3)
    some = np.array([[-1, 0], [1, 2]])
    want = [ngrams.row(texts, context, 4) for context in some.tolist()]
    np.testing.assert_allclose(rows(table, some), want, atol=1e-7)


propose = functools.partial(jax.jit, static_argnums=(0, 5, 6))(NgramDraft.propose)


@pytest.mark.parametrize("decoder_only", [False, True])
@pytest.mark.parametrize(
    ("order", "sampling"),
    [
        *((order, Sampling()) for order in (1, 2, 3)),
        (3, Sampling(0.5, top_k=2)),
        *((order, Sampling(0.0)) for order in (2, 3)),
    ],
    ids=str,
)
def test_guesses_walk_the_table(order: int, decoder_only: bool, sampling: Sampling) -> None:
    """Ragged rows, each number of accepted guesses: rows follow from the true text alone."""
    rng, gamma, table = np.random.default_rng(order), 3, params(order)
    draft = NgramDraft(order, decoder_only)
    prompts = [[2], [0, 3, 2, 1, 0], [0, 0, 2]] if decoder_only else [[0], [0], [0]]
    inputs = np.full((3, 6), -1 if decoder_only else 5, np.int32)
    for i, prompt in enumerate(prompts if decoder_only else []):
        inputs[i, : len(prompt)] = prompt
    state = draft.start(table, jax.device_put(inputs), 64, toy.NOTHING)
    known = [list(prompt) for prompt in prompts]
    for step in range(6):
        uniforms = rng.random((3, gamma)).astype(np.float32)
        last = jnp.array([text[-1] for text in known], jnp.int32)
        # One of the seven pieces may not be guessed.
        proposal: Proposal = propose(draft, table, state, last, uniforms, sampling, PIECES - 1)
        guesses = np.asarray(proposal.guesses)
        for i, j in np.ndindex(3, gamma):
            before = (-1,) * order + (*known[i], *guesses[i, :j].tolist())
            row = dictionary(before[len(before) - order + 1 :])[: PIECES - 1]
            if sampling.greedy:
                assert proposal.q is None
                assert row[guesses[i, j]] >= row.max() - 1e-7
                continue
            assert proposal.q is not None
            q = toy.standardise(np.log(row), sampling)
            np.testing.assert_allclose(proposal.q[i, j], q, atol=1e-6)
            assert guesses[i, j] == (q.cumsum() <= uniforms[i, j]).sum()
        accepted = (np.arange(3) + step) % (gamma + 1)
        state = draft.commit(params, proposal, jnp.asarray(accepted, jnp.int32), {})
        assert state.shape == (3, max(order - 2, 0))
        for i, text in enumerate(known):
            text += [*guesses[i, : accepted[i]].tolist(), int(rng.integers(0, PIECES))]


@functools.cache
def toy_params() -> NgramParams:
    """For a target whose text is another."""
    return ngram_params(count_ngrams(ngrams.texts(toy.VOCABULARY), 3, toy.VOCABULARY), 3)


@pytest.mark.parametrize("gamma", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_trigram_draft_is_exact(gamma: int) -> None:
    check_exact(NgramDraft(3), toy_params(), gamma, Sampling(1.3, top_p=0.8))


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.7, top_k=3)], ids=str)
def test_the_device_loop_is_the_reference_loop(sampling: Sampling) -> None:
    check_reference(NgramDraft(3), toy_params(), sampling)


@pytest.mark.parametrize(
    ("sequences", "arguments", "said"),
    [
        ([], {}, "at least one sequence"),
        ([[]], {}, "at least one sequence"),
        ([[2, 7, 1]], {}, "Token 7 .* 7 pieces"),
        ([[2, -1, 1]], {}, "Token -1 .* 7 pieces"),
        ([[2, 1]], {"order": 0}, "order .* 0"),
        ([[2, 1]], {"order": 4}, r"order .* in \[1, 3\], not 4"),
        ([[2, 1]], {"width": 0}, "width .* 0"),
        ([[2, 1]], {"min_count": 0}, "min_count .* 0"),
        ([[2, 1]], {"min_count": 2}, "2 times; lower min_count"),
    ],
)
def test_what_cannot_be_counted(sequences: list[Any], arguments: dict[str, Any], said: str) -> None:
    settings = {"order": 2, **arguments}
    with pytest.raises(ValueError, match=said):
        count_ngrams([np.array(s, int) for s in sequences], vocab_size=PIECES, **settings)


def test_orders_that_are_none() -> None:
    for order in (0, 4):
        with pytest.raises(ValueError, match=f"order .* {order}"):
            NgramDraft(order)
    with pytest.raises(ValueError, match="order .* -1"):
        ngram_params(count_ngrams(TEXTS, 3, PIECES), -1)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "ngrams.npz"
    ngram.TABLE.save(path, Numbers(PIECES), count_ngrams(TEXTS, 3, PIECES, width=3))
    return path


def test_a_file_keeps_the_table(file: pathlib.Path) -> None:
    """It serves lower orders, too."""
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    for order in (1, 2, 3):
        found = ngram.load(file, Numbers(PIECES), order)
        jax.tree.map(np.testing.assert_array_equal, found, params(order, width=3))


def test_files_that_do_not_fit(file: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="none.npz does not exist.*speculative count"):
        ngram.load(file.with_name("none.npz"), Numbers(PIECES), 2)
    for other in (Numbers(PIECES + 1), SentencePiece(DEBIAN)):
        with pytest.raises(ValueError, match=f"ngrams.npz .* another vocabulary .* {other.path}"):
            ngram.load(file, other, 2)
    ngram.TABLE.save(file, Numbers(PIECES), count_ngrams(TEXTS, 2, PIECES))
    with pytest.raises(ValueError, match="ngrams.npz.* 2 tokens, not 3: .* --order=3"):
        ngram.load(file, Numbers(PIECES), 3)
    ngram.TABLE.save(file, Numbers(PIECES), count_ngrams(TEXTS, 3, PIECES + 1))
    with pytest.raises(ValueError, match=f"of {PIECES + 1} pieces, but .* has {PIECES}"):
        ngram.load(file, Numbers(PIECES), 2)


def test_a_damaged_file_is_refused(file: pathlib.Path) -> None:
    """Cut short, a bit changed or of other arrays: an error, or the very table."""
    raw = file.read_bytes()
    for size in range(0, len(raw), 97):
        file.write_bytes(raw[:size])
        with pytest.raises(ValueError, match="ngrams.npz is no .npz of n-gram counts"):
            ngram.load(file, Numbers(PIECES), 3)
    refused = 0
    for place in range(0, len(raw), 7):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        try:
            found = ngram.load(file, Numbers(PIECES), 3)
        except ValueError as error:
            assert str(file) in str(error)
            refused += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, found, params(3, width=3))
    assert refused > len(raw) / 7 / 2
    np.savez(file, inputs=np.arange(3))
    with pytest.raises(ValueError, match="no .npz of n-gram counts"):
        ngram.load(file, Numbers(PIECES), 2)


def at(place: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    """A change of one number."""

    def changed(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.int64)
        values[place] = value
        return values

    return changed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("order", lambda order: order * np.ones(2, int)),
        ("children", at(-1, 1)),
        ("follower", at(0, -1)),
        ("follower", at(-1, PIECES)),
        ("token", at(0, PIECES)),
        ("kept", lambda values: values + 1),
        ("count", lambda values: values / 2),
    ],
)
def test_counts_that_contradict_each_other(
    name: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    table = count_ngrams(TEXTS, 3, PIECES, width=3)
    with pytest.raises(ValueError, match="contradict"):
        ngram_params({**table, name: change(table[name])}, 2)


@pytest.mark.parametrize("which", ["references", "sources"])
def test_counts_of_token_files(
    which: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, others = ngrams.texts(300, seed=1), ngrams.texts(300, seed=2)
    columns = (texts, others) if which == "sources" else (others, texts)
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path, half in zip(files, (slice(25), slice(25, None)), strict=True):
        data.ragged(*(column[half] for column in columns)).save(path)
    output = tmp_path / "counts.npz"
    command = ["count", *map(str, files), "--order=2", "--width=5", f"--output={output}"]
    command += ["--sources"] * (which == "sources")
    assert cli.main([*command, "--min_count=2"]) == 0
    assert f"{sum(map(len, texts)):,} tokens of 40 texts" in capsys.readouterr().out
    vocabulary = SentencePiece(DEBIAN)
    want = ngram_params(count_ngrams(texts, 2, vocabulary.size, 5, 2), 2)
    jax.tree.map(np.testing.assert_array_equal, ngram.load(output, vocabulary, 2), want)
    assert cli.main([*command, "--min_count=1000"]) == 2
    assert "1000 times" in capsys.readouterr().err


def test_the_table_that_ships() -> None:
    table = ngram.load(SHIPPED, SentencePiece(DEBIAN), 3)
    assert SHIPPED.stat().st_size < 4e6
    rng = np.random.default_rng(0)
    # Contexts of both lengths that the table holds, and some that it does not.
    child = np.asarray(table.child)
    parent = np.repeat(np.arange(len(child) - 1), np.diff(child))
    token, singles = np.asarray(table.token), child[1] - 1
    pairs = rng.choice(np.arange(singles + 1, len(token) - 1), 100)
    some = np.concatenate(
        [
            np.stack([token[pairs], token[parent[pairs - 1]]], axis=1),
            np.stack([np.full(singles, -1), token[1 : singles + 1]], axis=1)[:100],
            rng.integers(0, 8192, (100, 2)),
        ]
    )
    found = rows(table, some)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    assert found.min() > 0
    # No text goes on after its end.
    assert 1 not in token[1:-1]
