"""Past outputs as a draft: tokens that the target wrote after the same ones in other texts.

Past outputs form one suffix automaton, built on the host and followed on the device. It never
learns while decoding; otherwise an output would depend on the texts decoded before it.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.drafts.base import Draft, Proposal
from speculative.drafts.copying import CopyDraft, TextSoFar
from speculative.drafts.tables import COMMAND, FileKind
from speculative.sampling import Sampling
from speculative.types import PAD_ID, Flags, PyTree, Rows
from speculative.vocabulary import Vocabulary

TABLE = FileKind(
    "past_outputs.npz", "past outputs", f"{COMMAND} --kind outputs", ("tokens", "offsets")
)
ROOT = 0  # The state of the empty text.

# Source and output; the automaton's state [B] for their longest suffix that past outputs continue.
# A proposal has states [G + 1, B], before the guesses and after each of them.
SuffixState = tuple[TextSoFar, Array]


@dataclasses.dataclass(frozen=True)
class SuffixDraft(Draft):
    """Guesses from the text itself (`CopyDraft`) or, after short matches, from past outputs.

    Its parameters come from `automaton`, and its proposals are deterministic. For `decoder_only`
    see `CopyDraft`.
    """

    decoder_only: bool = False

    def start(self, params, inputs, cache_length, target) -> SuffixState:
        """Follows a prompt up to its last token; a source, which is no output, is skipped."""
        text = CopyDraft(self.decoder_only).start(params, inputs, cache_length, target)
        root = jnp.full(inputs.shape[0], ROOT, jnp.int32)
        if not self.decoder_only:
            return text, root
        _, states = self.follow(params, (text, root), inputs[:, 0], inputs[:, 1:])
        read = (inputs >= 0).sum(axis=1) - 1
        states = jnp.concatenate([root[None], states])
        return text, jnp.take_along_axis(states, read[None], axis=0)[0]

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Uses past outputs where the text itself has no match long enough to copy from.

        A match of one token is enough, or of two where past outputs are sure of their guess; a
        decoder-only target needs three or five. With the bundled models more guesses are accepted
        than if the longer match won: past outputs are many, so their matches are longer, but they
        lack the names in a source.
        """
        enough, if_sure = (3, 5) if self.decoder_only else (1, 2)

        def follow_guess(carry: tuple[TextSoFar, Rows], _: None) -> Any:
            text, states = carry
            copied, matched = CopyDraft(self.decoder_only).following(text, vocab_size)
            past = (matched < enough) | ((matched < if_sure) & params["sure"][states])
            token = jnp.where(past, params["guesses"][states], copied)
            states = follow(params, states, token)
            return (text.extended(token[:, None]), states), (token, states)

        first = follow(params, state[1], last)
        begun = state[0].extended(last[:, None]), first
        (text, _), (guesses, states) = lax.scan(follow_guess, begun, length=numbers.shape[1])
        return Proposal(guesses.T, None, (text, jnp.concatenate([first[None], states])))

    def sure(
        self, params: PyTree, state: SuffixState, last: Rows, vocab_size: int, sampling: Sampling
    ) -> Flags:
        """See `CopyDraft.sure`: past outputs are right less often than a trained model."""
        return CopyDraft(self.decoder_only).sure((), state[0], last, vocab_size, sampling)

    def follow(self, params, state, last, guesses) -> SuffixState:
        """The state after proposing these guesses."""
        text, states = state
        new = jnp.concatenate([last[:, None], guesses], axis=1)

        def read(states: Rows, tokens: Rows) -> tuple[Rows, Rows]:
            states = follow(params, states, tokens)
            return states, states

        return text.extended(new), lax.scan(read, states, new.T)[1]

    def commit(self, params, proposal, accepted, hidden) -> SuffixState:
        """Removes the rejected guesses, and restores the automaton's state before them."""
        text, states = proposal.state
        kept = jnp.take_along_axis(states, accepted[None], axis=0)[0]
        return text.rewound(proposal.guesses.shape[1] - accepted), kept


def follow(params: PyTree, states: Rows, tokens: Rows) -> Rows:
    """The automaton's states [B] after `tokens` [B] are appended to the texts of `states` [B].

    A state's transitions are searched by bisection. If none is for the token, the search continues
    at the next shorter suffix, and finally at the root, which has one for every token.
    """
    offsets, token, link = params["offsets"], params["tokens"], params["links"]

    def lost(carry: tuple[Rows, Rows, Rows]) -> Array:
        state, low, high = carry
        return jnp.any((state != ROOT) & (token[(low + high) // 2] != tokens))

    def search(carry: tuple[Rows, Rows, Rows]) -> tuple[Rows, Rows, Rows]:
        state, low, high = carry
        middle = (low + high) // 2
        # A row that has found its transition stays as it is.
        low = jnp.where(token[middle] < tokens, middle + 1, low)
        high = jnp.where(token[middle] > tokens, middle, high)
        empty = low >= high
        state = jnp.where(empty, link[state], state)
        low = jnp.where(empty, offsets[state], low)
        return state, low, jnp.where(empty, offsets[state + 1], high)

    window = (states, offsets[states], offsets[states + 1])
    state, low, high = lax.while_loop(lost, search, window)
    following = params["next"][(low + high) // 2]
    return jnp.where(state == ROOT, params["first"][tokens], following)


def automaton(sequences: Sequence[np.ndarray], vocab_size: int, start: int = PAD_ID) -> PyTree:
    """Parameters of a `SuffixDraft`: the suffix automaton of past outputs.

    A state stands for the texts that occur at the same positions of the sequences (Blumer et al.,
    1985). For M states and E transitions, guessing needs these arrays, in int32:

        offsets [M + 1]: a state's transitions are those from offsets[i] to offsets[i + 1].
        tokens, next [E]: their tokens, ascending, and the states to which they lead.
        links [M]: the state of the longest suffix that also occurs elsewhere.
        first [V]: the state to which each token leads from the root.
        guesses [M]: the token that followed most often; the smallest of several.
        sure [M] bool: whether it followed at least two times more than all others together.

    A text that nothing ever follows has no state: transitions lead to the state of its longest
    suffix that something follows. The token `start` is put before each sequence [length].

    Raises:
        ValueError: there are no sequences, or a token lies outside the vocabulary of V pieces.
    """
    rows = [np.asarray(sequence).tolist() for sequence in sequences if len(sequence)]
    if not rows:
        raise ValueError("Past outputs need at least one sequence that is not empty.")
    for i, row in enumerate(rows):
        for token in (min(row), max(row)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"Past output {i} holds token {token}, outside a vocabulary of {vocab_size} "
                    "pieces; collect outputs again with this vocabulary."
                )
    transitions, links, counts = build([[start, *row] for row in rows])
    degrees = np.fromiter(map(len, transitions), np.int64)
    states = np.repeat(np.arange(len(degrees)), degrees)
    pairs = itertools.chain.from_iterable(sorted(leads.items()) for leads in transitions)
    tokens, leads = np.fromiter(pairs, np.dtype((np.int64, 2))).T

    # States with transitions are renumbered in order; the others get their suffix's number.
    continues = degrees > 0
    kept = np.arange(len(degrees))
    while not continues[kept].all():
        kept = np.where(continues[kept], kept, links[kept])
    renamed = (np.cumsum(continues) - 1)[kept]
    best = np.lexsort((tokens, -counts[leads], states))
    best = best[(np.cumsum(degrees) - degrees)[continues]]
    total = np.bincount(states, counts[leads], minlength=len(degrees))[continues]
    first, starts = np.zeros(vocab_size, np.int64), slice(degrees[ROOT])
    first[tokens[starts]] = renamed[leads[starts]]
    params = {
        "offsets": np.append(0, np.cumsum(degrees[continues])),
        "tokens": tokens,
        "next": renamed[leads],
        "links": renamed[links[continues]],
        "first": first,
        "guesses": tokens[best],
        "sure": 2 * counts[leads[best]] - total >= 2,
    }
    return jax.device_put(params)


def build(rows: list[list[int]]) -> tuple[list[dict[int, int]], np.ndarray, np.ndarray]:
    """Transitions, suffix links and numbers of occurrences of every state; state 0 is the root.

    Blumer's construction, one token at a time, from the root for each row. The root links to
    itself.
    """
    transitions: list[dict[int, int]] = [{}]
    links, lengths, counts = [-1], [0], [0]

    def add(state: int, token: int, old: int | None = None) -> tuple[int, int]:
        """Adds a state for the longest text of `state` and a token, in the place of `old`.

        Transitions lead to it along the links of `state`, up to the second result.
        """
        new = len(links)
        transitions.append({} if old is None else transitions[old].copy())
        links.append(ROOT if old is None else links[old])
        lengths.append(lengths[state] + 1)
        counts.append(0)
        while state >= 0 and transitions[state].get(token) == old:
            transitions[state][token] = new
            state = links[state]
        return new, state

    def split(state: int, token: int) -> int:
        """Gives the longest text of `state`, extended by `token`, a state of its own."""
        whole = transitions[state][token]
        if lengths[whole] > lengths[state] + 1:
            links[whole], _ = add(state, token, whole)
            return links[whole]
        return whole

    for row in rows:
        last = ROOT
        for token in row:
            if token in transitions[last]:
                last = split(last, token)
            else:
                last, state = add(last, token)
                if state >= 0:
                    links[last] = split(state, token)
            counts[last] += 1
    # An occurrence of a text is also one of each of its suffixes.
    for state in sorted(range(1, len(links)), key=lengths.__getitem__, reverse=True):
        counts[links[state]] += counts[state]
    links[ROOT] = ROOT
    return transitions, np.array(links), np.array(counts)


def save(path: str | pathlib.Path, sequences: Sequence[np.ndarray], vocabulary: Vocabulary) -> None:
    """Writes past outputs, at least one, for `load`."""
    offsets = np.cumsum([0, *map(len, sequences)])
    TABLE.save(path, vocabulary, {"tokens": np.concatenate(sequences), "offsets": offsets})


def load(path: str | pathlib.Path, vocabulary: Vocabulary) -> PyTree:
    """The `automaton` of past outputs that `save` wrote; errors are its and `FileKind.loaded`'s."""
    with TABLE.loaded(path, vocabulary) as arrays:
        tokens, offsets = arrays["tokens"].astype(np.int64), arrays["offsets"].astype(np.int64)
        steps = np.diff(offsets, prepend=0, append=len(tokens))
        if steps[0] or steps[-1] or (steps < 0).any():
            raise ValueError(
                f"The offsets do not fit the tokens; make it again with {TABLE.command}."
            )
        return automaton(np.split(tokens, offsets[1:-1]), vocabulary.size, vocabulary.start_id)
