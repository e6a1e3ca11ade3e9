"""The algorithm on one page: against enumeration, and against the fast loop on the bundled pair."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import speculative
from speculative.decoding import reference
from speculative.decoding.reference import decode, decode_coupled, grow, next_logits
from speculative.drafts.transformer import TransformerDraft
from speculative.sampling import Sampling

VOCABULARY, END, LENGTH, SAMPLES = 4, 0, 3, 4000
P, Q = (np.random.default_rng(seed).normal(0, 1.5, (VOCABULARY + 1,) + (VOCABULARY,))
        for seed in (0, 1))  # fmt: skip


def target(text: list[int]) -> np.ndarray:
    return P[text[-1] if text else VOCABULARY]


def draft(text: list[int]) -> np.ndarray:
    return Q[text[-1] if text else VOCABULARY]


def expected(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of every output, by multiplying the target's own along it."""
    found: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        if END in text:
            text = text[: text.index(END) + 1]
        probability = 1.0
        for i, token in enumerate(text):
            probability *= reference.standardise(target([*text[:i]]), sampling)[token]
        found[text] = probability
    return found


def p_value(texts: list[tuple[int, ...]], sampling: Sampling) -> float:
    """Of a chi-square test; outputs that are expected less than five times share a cell."""
    chances = expected(sampling)
    assert set(texts) <= {text for text, chance in chances.items() if chance > 0}
    rare = [text for text, chance in chances.items() if chance * len(texts) < 5]
    cells = [[text] for text in chances if text not in rare] + [rare]
    counts = [sum(texts.count(text) for text in cell) for cell in cells]
    wanted = [len(texts) * sum(chances[text] for text in cell) for cell in cells]
    kept = [i for i, x in enumerate(wanted) if x > 0]
    return stats.chisquare([counts[i] for i in kept], [wanted[i] for i in kept]).pvalue


def samples(way: str, sampling: Sampling, **changed: Any) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    how: dict[str, Any] = {"gamma": 2, "sampling": sampling, "max_length": LENGTH, "eos_ids": {END}}
    texts = []
    for _ in range(SAMPLES):
        if way == "token":
            steps = decode(target, draft, rng.random((LENGTH + 2, 3)), **how, **changed)
        else:
            noise = rng.gumbel(size=(LENGTH + 3, VOCABULARY))
            steps = decode_coupled(target, draft, noise, **how)
        texts.append(tuple(token for step in steps for token in step))
    return texts


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=3)], ids=str)
@pytest.mark.parametrize("way", ["token", "coupled"])
def test_outputs_are_distributed_as_the_targets(way: str, sampling: Sampling) -> None:
    """A right decoder fails with probability 0.001 in each of the four cases."""
    assert p_value(samples(way, sampling), sampling) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_and_no_tree_changes_a_coupled_text(temperature: float) -> None:
    noise = np.random.default_rng(2).gumbel(size=(40, VOCABULARY))
    how: dict[str, Any] = {"sampling": Sampling(temperature), "max_length": 30, "eos_ids": ()}
    alone: list[int] = []
    for position in range(30):
        scores = reference.perturbed(target(alone), how["sampling"], noise[position])
        alone.append(int(scores.argmax()))
    for guesser, nodes in ((draft, 0), (draft, 6), (target, 0), (target, 5)):
        steps = decode_coupled(target, guesser, noise, gamma=4, nodes=nodes, **how)
        assert [token for step in steps for token in step] == alone
        if guesser is target and not nodes:  # Every guess is right: five tokens per call.
            assert [len(step) for step in steps] == [5] * 6


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_a_tree_has_the_likeliest_paths(nodes: int) -> None:
    noise = np.zeros((8, VOCABULARY))
    found = grow(draft, [1], noise, Sampling(1.0), 3, nodes)
    chances = {}
    for length in (1, 2, 3):
        for path in itertools.product(range(VOCABULARY), repeat=length):
            parts = [draft([1, *path[:i]]) for i in range(length)]
            p = [reference.standardise(logits, Sampling(1.0)) for logits in parts]
            chances[path] = np.prod([row[token] for row, token in zip(p, path, strict=True)])
    assert found == set(sorted(chances, key=chances.__getitem__)[-nodes:])
    assert all(path[:-1] in found for path in found if len(path) > 1)


def test_the_test_finds_a_correction_from_the_whole_target() -> None:
    def wrong(guesses: Any, p: Any, q: Any, r: Any, correct: Any) -> tuple[int, int]:
        n, _ = reference.verify(guesses, p, q, r, correct)
        return n, reference.draw(p[n], correct[n])

    found = samples("token", Sampling(1.0), verify=wrong)
    assert p_value(found, Sampling(1.0)) < 1e-6


@pytest.mark.parametrize(
    ("temperature", "verification", "tree"),
    [
        pytest.param(0.0, "token", 0, marks=pytest.mark.long),  # docs/extending.md has it too.
        (1.0, "token", 0),
        (1.0, "coupled", 15),
        pytest.param(0.0, "coupled", 15, marks=pytest.mark.long),
        pytest.param(1.0, "coupled", 0, marks=pytest.mark.long),
    ],
)
def test_it_equals_the_fast_loop_on_the_bundled_pair(
    temperature: float, verification: str, tree: int
) -> None:
    pair = speculative.load("debian_target", "debian_draft")
    text = "translate English to German: This package contains a small editor for text files."
    (request,) = pair.requests(
        [text],
        speculative.Settings(
            gamma=4, temperature=temperature, verification=verification, tree=tree, max_length=24
        ),
    )
    fast = pair.answer(request)
    config, source = request.config, request.source
    assert isinstance(pair.draft, TransformerDraft) and pair.draft.reads_target
    begun = pair.target.start(pair.params.target, source, 1, layers=("encoder",))
    size, encoded = config.vocab_size, begun.hidden["encoder"]
    of_target = next_logits(pair.target, pair.params.target, source, size)
    of_draft = next_logits(pair.draft.model, pair.params.draft, source, size, encoded)
    how: dict[str, Any] = {
        "gamma": 4, "sampling": config.sampling, "max_length": 24, "eos_ids": config.eos_ids
    }  # fmt: skip
    draws = config.draws(0, np.array([0]))
    if verification == "token":
        steps = decode(of_target, of_draft, np.asarray(draws, np.float64)[0], **how)
        assert len(steps) == fast.target_calls
    else:
        noise = [config.step_draws(draws, jnp.array([at]))[0, 0] for at in range(32)]
        steps = decode_coupled(of_target, of_draft, np.array(noise, float), nodes=tree, **how)
        assert tree or len(steps) == fast.target_calls
        # The compiled loop weighs the paths of a tree somewhat differently.
        assert not tree or abs(len(steps) - fast.target_calls) <= 1
    assert [token for step in steps for token in step] == fast.tokens
