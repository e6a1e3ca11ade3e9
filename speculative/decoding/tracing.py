"""Runs a generation step by step on the host, with every draft and rule.

It emits the same tokens as `loop.generate` from the same random numbers, verifies in float64 where
the rule has a counterpart in NumPy (`reference`), and checks the draft's proposals.
"""

import dataclasses

import jax
import numpy as np

from speculative.decoding.loop import Params, propose
from speculative.decoding.reference import cut, ended, one_hot, standardise
from speculative.decoding.settings import Decoding
from speculative.drafts.base import DRAWN_TOLERANCE, TOLERANCE, Draft, Proposal, require_shapes
from speculative.models.interface import Model
from speculative.processors import NO_TOKEN, History


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """One step of Algorithm 1; for a tree of guesses, along the accepted path."""

    guesses: list[int]
    p: np.ndarray  # [G + 1, V] the target's standardised distributions.
    q: np.ndarray  # [G, V] the draft's.
    accepted: int
    next_token: int  # The correction, or the bonus token if all guesses were accepted.
    emitted: list[int]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A whole generation, step by step."""

    steps: list[TraceStep]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the output."""
        return [token for step in self.steps for token in step.emitted]


start_target = jax.jit(lambda target, *given: target.start(*given), static_argnums=(0, 3, 5))
start_draft = jax.jit(lambda draft, *given: draft.start(*given), static_argnums=(0, 3))
_extend = jax.jit(
    lambda target, layers, *given: target.extend(*given, layers=layers), static_argnums=(0, 1)
)
_propose = jax.jit(propose, static_argnums=0)
_numbers = jax.jit(lambda config, *given: config.step_draws(*given))
_commit = jax.jit(lambda draft, *given: draft.commit(*given), static_argnums=0)
_processed = jax.jit(History.process_block)
_keep = jax.jit(lambda target, *given: target.keep(*given), static_argnums=(0, 2))


def _require_proper(proposal: Proposal, uniforms: np.ndarray, vocab_size: int, number: int) -> None:
    """Raises ValueError unless guesses are tokens drawn from a proper q: `fault_of` in float64."""
    guesses = np.asarray(proposal.guesses)[0]
    at = f"In step {number} the draft"
    if guesses.min() < 0 or guesses.max() >= vocab_size:
        raise ValueError(
            f"{at} guessed {guesses.tolist()}; tokens are 0 to {vocab_size - 1} (-1: from logits "
            "that are not finite)."
        )
    if proposal.q is None:
        return
    q = np.asarray(proposal.q, np.float64)[0]
    if not np.isfinite(q).all() or q.min() < 0:
        raise ValueError(
            f"{at}'s q has a probability of {q.min()}; they must be finite and at least 0."
        )
    sums = q.sum(axis=-1)
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > TOLERANCE:
        raise ValueError(f"{at}'s q of guess {worst + 1} sums to {sums[worst]:.6g}; it must be 1.")
    for i, (guess, uniform) in enumerate(zip(guesses, uniforms[0], strict=True)):
        if q[i, guess] == 0:
            raise ValueError(
                f"{at}'s q of guess {i + 1} is 0 for the token guessed; a guess must be drawn from "
                "the q that is reported."
            )
        low, high = q[i, :guess].sum() / sums[i], q[i, : guess + 1].sum() / sums[i]
        if not low - DRAWN_TOLERANCE < uniform < high + DRAWN_TOLERANCE:
            raise ValueError(
                f"{at}'s guess {i + 1} is token {guess}, which its number {uniform:.6g} does not "
                f"draw from the q that is reported: that is for numbers from {low:.6g} to "
                f"{high:.6g} (`sampling.categorical`)."
            )


def _longest(
    config: Decoding, guesses: list[int], parents: np.ndarray, rows: np.ndarray, numbers: np.ndarray
) -> list[int]:
    """The places in a tree along the target's own tokens, and the token after them.

    Guesses and their parents belong to the places from 1 on; logits `rows` [G + 1, V] follow each
    place, and numbers [depth + 1, ...] belong to the positions.
    """
    place, depth, path = 0, 0, [0]
    while True:
        arguments = rows[place, None], config.sampling, numbers[depth, None]
        token = int(config.rule.choices_reference(*arguments)[0])
        after = [
            i for i, parent in enumerate(parents, 1) if parent == place and guesses[i - 1] == token
        ]
        if not after:
            return [*path, token]
        place, depth = after[0], depth + 1
        path.append(place)


def generate(
    target: Model,
    draft: Draft,
    params: Params,
    inputs: np.ndarray,
    draws: np.ndarray,
    config: Decoding,
) -> Trace:
    """Decodes one example, from inputs [S] and its row of `Decoding.draws`.

    Raises:
        ValueError: gamma is 0, or a proposal has a wrong shape, tokens that do not exist or a q
            that is not the distribution of its guesses; the message names the step.
    """
    if config.gamma < 1:
        raise ValueError(f"The traced loop needs gamma of at least 1, not {config.gamma}.")
    gamma, vocab_size = config.gamma, config.vocab_size
    draws, source = np.asarray(draws)[None], np.asarray(inputs)[None]
    size, layers = config.cache_lengths()[-1], draft.layers
    begun = start_target(target, params.target, source, size, None, layers)
    target_state, draft_state = begun.state, start_draft(draft, params.draft, source, size, begun)
    output, last, steps = [], int(target.first(jax.device_put(source))[0]), []
    while len(output) < config.max_length and not ended(output, config.eos_ids):
        at = len(output)
        here = np.asarray(_numbers(config, draws, np.array([at], np.int32)), np.float64)
        newest = np.array([last], np.int32)
        to_guess = np.asarray(config.rule.to_guess(here), np.float32)
        text = np.array([[*output, *[NO_TOKEN] * (config.capacity - at)]], np.int32)
        history = config.history(*jax.device_put((text, np.array([at], np.int32))))
        proposal = _propose(draft, params.draft, draft_state, newest, to_guess, config, history)
        require_shapes(proposal, 1, config.guesses, vocab_size)
        _require_proper(proposal, to_guess, vocab_size, len(steps) + 1)
        guesses, tree = np.asarray(proposal.guesses)[0].tolist(), proposal.tree
        logits, target_state, hidden = _extend(
            target, layers, params.target, target_state, proposal.chunk(newest)
        )
        if history:
            logits = _processed(history, logits[..., :vocab_size], proposal.guesses, tree)
        rows = np.asarray(logits)[0, :, :vocab_size]
        q = None if proposal.q is None else np.asarray(proposal.q, np.float64)[0]
        if tree is None:
            n, next_token = config.rule.verify_reference(guesses, rows, q, config.sampling, here[0])
            path = np.arange(gamma + 1)[None]
        else:
            parents = np.asarray(tree.parents)[0]
            *places, next_token = _longest(config, guesses, parents, rows, here[0])
            n, guesses = len(places) - 1, [guesses[place - 1] for place in places[1:]]
            rows, path = rows[places], np.array([places + [0] * (gamma + 1 - len(places))])
            proposal = proposal.along(path)
            hidden = {name: x[:, path[0]] for name, x in hidden.items()}
        block = cut([*guesses[:n], next_token], config.max_length - at, config.eos_ids)
        output, last = output + block, next_token
        kept, accepted = np.array([[len(block)], [n]], np.int32)
        target_state = _keep(target, target_state, config.guesses + 1, path, kept)
        draft_state = _commit(draft, params.draft, proposal, accepted, hidden)
        q = one_hot(np.array(guesses, int), vocab_size) if q is None else q
        p = standardise(rows, config.sampling)
        steps.append(TraceStep(guesses, p, q, n, next_token, block))
    return Trace(steps)
