"""Past outputs: the automaton against counting in plain Python, the draft, its file."""

import itertools
import pathlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import checkpoints, cli
from speculative.drafts import SuffixDraft, suffix
from speculative.sampling import Sampling
from speculative.training import data
from speculative.types import PyTree
from speculative.vocabulary import Numbers, SentencePiece
from tests.drafts.test_copying import (
    VOCAB,
    check_against_search,
    check_commit,
    check_exact,
    check_reference,
    copied,
)


def sequences(seed: int, number: int = 12, longest: int = 14) -> list[np.ndarray]:
    """Random but skewed, so that some followers are sure; most end with 1, some are empty."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(VOCAB, n, p=(0.1, 0, 0.6, 0.3)) for n in rng.integers(0, longest, number)]
    return [np.append(row, 1) if i % 4 else row for i, row in enumerate(rows)]


def occurrences(rows: list[np.ndarray]) -> Counter[tuple[int, ...]]:
    """How often each text occurs in the sequences, their start tokens before them."""
    counts: Counter[tuple[int, ...]] = Counter()
    for row in (tuple([0, *row.tolist()]) for row in rows if len(row)):
        spans = itertools.combinations(range(len(row) + 1), 2)
        counts.update(row[i:j] for i, j in spans)
    return counts


def longest_known(text: list[int], counts: Counter[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest suffix of a text that the sequences go on from."""
    suffixes = (tuple(text[i:]) for i in range(len(text) + 1))
    return next(s for s in suffixes if any(counts[*s, token] for token in range(VOCAB)))


def followers(known: tuple[int, ...], counts: Counter[tuple[int, ...]]) -> tuple[int, bool]:
    """The most frequent follower, and whether it is sure."""
    often = [counts[*known, token] for token in range(VOCAB)]
    return int(np.argmax(often)), 2 * max(often) - sum(often) >= 2


follow = jax.jit(suffix.follow)


def known_to(params: PyTree, text: list[int]) -> tuple[int, bool]:
    """The guess after a text, and whether it is sure."""
    state = jnp.array([suffix.ROOT])
    for token in text:
        state = follow(params, state, jnp.array([token]))
    return int(params["guesses"][state[0]]), bool(params["sure"][state[0]])


@pytest.mark.parametrize("seed", range(4))
def test_states_are_the_texts_that_occur(seed: int) -> None:
    """Every one of them is read, with its number of occurrences, and no other is."""
    rows = sequences(seed)
    counts = occurrences(rows)
    transitions, links, number = suffix.build([[0, *row.tolist()] for row in rows if len(row)])
    state_of: dict[tuple[int, ...], int] = {(): suffix.ROOT}
    for text in sorted(counts, key=len):
        state_of[text] = transitions[state_of[text[:-1]]][text[-1]]
        assert number[state_of[text]] == counts[text]
    for text, state in state_of.items():
        assert set(transitions[state]) == {t for t in range(VOCAB) if counts[*text, t]}
    # A state's link is that of its longest suffix in another state.
    for text, state in state_of.items():
        shorter = [state_of[text[i:]] for i in range(len(text) + 1)]
        assert links[state] == next((s for s in shorter if s != state), suffix.ROOT)
    # As few states as can be: one for each set of places.
    assert len(set(state_of.values())) == len(transitions)


@pytest.mark.parametrize("seed", range(2))
def test_along_any_text_the_longest_suffix_is_known(seed: int) -> None:
    rows = sequences(seed, 40)
    counts, params = occurrences(rows), suffix.automaton(rows, VOCAB)
    guesses, sure = np.asarray(params["guesses"]), np.asarray(params["sure"])
    text = np.random.default_rng(seed).choice(VOCAB, (60, 5), p=(0.1, 0.1, 0.5, 0.3))
    states, seen = jnp.full(5, suffix.ROOT), set()
    for end in range(1, len(text) + 1):
        states = follow(params, states, jnp.array(text[end - 1]))
        known = [longest_known(row, counts) for row in text[:end].T.tolist()]
        expected = [followers(suffix, counts) for suffix in known]
        assert list(zip(guesses[states], sure[states], strict=True)) == expected
        seen |= {(len(suffix), sure) for suffix, (_, sure) in zip(known, expected, strict=True)}
    assert {(n, sure) for n in range(1, 4) for sure in (False, True)} <= seen


@pytest.mark.parametrize("decoder_only", [False, True])
def test_the_context_where_it_matches_and_past_outputs_where_they_are_sure(
    decoder_only: bool,
) -> None:
    rows = sequences(8)
    counts, params = occurrences(rows), suffix.automaton(rows, VOCAB)
    enough, if_sure = (3, 5) if decoder_only else (1, 2)
    chosen: Counter[tuple[int, bool]] = Counter()

    def following(text: list[int]) -> int:
        # A source is none of the target's outputs.
        output = text if decoder_only else text[text.index(0) :]
        past, sure = followers(longest_known(output, counts), counts)
        token, length = copied(text)
        chosen[min(length, if_sure), sure] += 1
        return past if length < enough or (length < if_sure and sure) else token

    for seed in range(2):
        check_against_search(SuffixDraft(decoder_only), params, decoder_only, following, seed)
    assert all(chosen[length, sure] for length in range(if_sure + 1) for sure in (False, True))


@pytest.mark.parametrize("decoder_only", [False, True])
def test_commit_after_any_number_of_guesses(decoder_only: bool) -> None:
    check_commit(SuffixDraft(decoder_only), suffix.automaton(sequences(8), VOCAB), decoder_only)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_reference_loop_says_the_same(temperature: float) -> None:
    params = suffix.automaton(sequences(9), VOCAB)
    check_reference(SuffixDraft(), params, Sampling(temperature))


@pytest.mark.parametrize("gamma", [1, 4])
def test_exact(gamma: int) -> None:
    check_exact(SuffixDraft(), suffix.automaton(sequences(9), VOCAB), gamma, Sampling())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "at least one sequence"),
        ([[]], "at least one sequence"),
        ([[2, 1], [2, -1, 1]], "Past output 1 holds token -1, .* 4 pieces"),
        ([[2, 1], [2, VOCAB, 1]], "Past output 1 holds token 4, .* 4 pieces"),
    ],
)
def test_what_are_no_past_outputs(rows: list[list[int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        suffix.automaton([np.array(row, np.int32) for row in rows], VOCAB)


def test_past_outputs_of_one_token() -> None:
    params = suffix.automaton([np.array([1])], VOCAB)
    for text in ([], [1], [3, 2], [0, 1, 0]):
        assert known_to(params, text) == (int(text[-1:] == [0]), False)


def same(one: PyTree, other: PyTree) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_past_outputs_are_kept(tmp_path: pathlib.Path) -> None:
    path, rows = tmp_path / "past.npz", sequences(1)
    suffix.save(path, rows, Numbers(VOCAB))
    assert [file.name for file in tmp_path.iterdir()] == ["past.npz"]
    assert same(suffix.load(path, Numbers(VOCAB)), suffix.automaton(rows, VOCAB))


def test_files_that_are_no_past_outputs(tmp_path: pathlib.Path) -> None:
    path, rows = tmp_path / "past.npz", sequences(1)
    with pytest.raises(ValueError, match="past.npz does not exist.*speculative count"):
        suffix.load(path, Numbers(VOCAB))
    suffix.save(path, rows, Numbers(VOCAB))
    with pytest.raises(ValueError, match="past.npz holds past outputs of another vocabulary"):
        suffix.load(path, Numbers(VOCAB + 1))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"tokens.npy") + 50] ^= 1
    for damaged in (b"", whole[:40], whole[: len(whole) // 2], whole[:-1], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="past.npz is no .npz of past outputs"):
            suffix.load(path, Numbers(VOCAB))
    vocabulary = np.array(Numbers(VOCAB).fingerprint)
    for offsets in ([0, 3], [1, 2], [0, 3, 1, 2]):
        np.savez(path, tokens=[2, 1], offsets=offsets, vocabulary=vocabulary)
        with pytest.raises(ValueError, match="past.npz: The offsets do not fit"):
            suffix.load(path, Numbers(VOCAB))
    np.savez(path, tokens=[2, 9], offsets=[0, 2], vocabulary=vocabulary)
    with pytest.raises(ValueError, match="past.npz: Past output 0 holds token 9"):
        suffix.load(path, Numbers(VOCAB))


def test_an_even_sample_is_kept(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [np.full(1 + i % 7, 100 + i) for i in range(400)]
    for name, part in (("a.npz", rows[:150]), ("b.npz", rows[150:])):
        data.ragged(part, part).save(tmp_path / name)
    files = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    command = ["count", *files, "--kind=outputs", f"--output={tmp_path / 'kept.npz'}"]

    def keep(*arguments: str) -> list[int]:
        assert cli.main([*command, *arguments]) == 0
        with np.load(tmp_path / "kept.npz") as arrays:
            kept = np.split(arrays["tokens"], arrays["offsets"][1:-1])
        # Whole outputs, each of the number that its tokens say.
        assert all((row == rows[row[0] - 100]).all() for row in kept)
        return [int(row[0]) - 100 for row in kept]

    assert keep() == list(range(400))
    some = keep("--tokens=400")
    assert 380 <= sum(len(rows[i]) for i in some) <= 400
    assert max(np.diff(some)) <= 12
    data.ragged(rows[6:7], rows[6:7]).save(tmp_path / "a.npz")
    assert cli.main([*command[:2], *command[3:], "--tokens=1"]) == 2
    assert "No text has at most 1 tokens; raise --tokens" in capsys.readouterr().err


def test_the_past_outputs_that_ship_are_of_the_vocabulary_that_ships() -> None:
    vocabulary = SentencePiece(checkpoints.ASSETS / "debian.model")
    params = suffix.load(checkpoints.SHIPPED["debian_target"] / "past_outputs.npz", vocabulary)
    # What descriptions begin with goes on with one of the words after it.
    said = vocabulary.encode("Dieses Paket enthält")[:-1].tolist()
    assert [known_to(params, [0, *said[:i]])[0] for i in range(1, 3)] == said[1:3]
