"""Past outputs as a draft: what the target wrote elsewhere after the same words.

Past outputs are one suffix automaton, built on the host and followed on the device, a token at
a time. They are fixed before decoding starts and never learn from it, or an output would depend
on what was decoded before it, in this batch or before a restart.
"""

import dataclasses
import itertools
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from speculative.drafts.base import Proposal
from speculative.drafts.copying import CopyDraft, Text, append, rewind
from speculative.sampling import Sampling
from speculative.types import PAD_ID, Inputs, PyTree, Rows
from speculative.vocabulary import Vocabulary

ROOT = 0
"""The state of the empty text."""


@struct.dataclass
class SuffixDraftState:
    """What the draft knows of a text.

    Attributes:
        text: source and output.
        states: [B] the automaton's, of the longest suffix that past outputs went on from; in a
            proposal [G + 1, B], before the guesses and after each.
    """

    text: Text
    states: Array


@dataclasses.dataclass(frozen=True)
class SuffixDraft:
    """Guesses from the text itself (`CopyDraft`) or, where that has no answer, past outputs.

    Its parameters are those of `automaton`; its guesses are certain: q is None.

    Attributes:
        continues: whether outputs continue the inputs, as of `CopyDraft`.
    """

    continues: bool = False

    @property
    def _copy(self) -> CopyDraft:
        return CopyDraft(self.continues)

    def start(
        self, params: PyTree, inputs: Inputs, cache_length: int, target: Any
    ) -> SuffixDraftState:
        """Follows what is output already: the inputs but for their last token, or nothing."""
        text = self._copy.start(params, inputs, cache_length, target)
        states = jnp.full(inputs.shape[0], ROOT, jnp.int32)
        if self.continues:
            ended = jnp.cumsum(inputs[:, ::-1] >= 0, axis=1)[:, ::-1] <= 1

            def read(states: Rows, now: tuple[Rows, Array]) -> tuple[Rows, None]:
                tokens, ended = now
                return jnp.where(ended, states, follow(params, states, tokens)), None

            states, _ = lax.scan(read, states, (inputs.T, ended.T))
        return SuffixDraftState(text, states)

    def propose(
        self,
        params: PyTree,
        state: SuffixDraftState,
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        """Copies where two tokens match; past outputs decide where none does.

        Where one does, they have their say if they are sure. On what the shipped target writes
        this is worth more than the longer match of the two, which favours past outputs too
        often: these are many, and a name in the source is none of theirs.
        """

        def guess(carry: tuple[Text, Rows], _: None) -> Any:
            text, states = carry
            copied, matched = self._copy.following(text, vocab_size)
            past = (matched == 0) | ((matched == 1) & params["sure"][states])
            token = jnp.where(past, params["guesses"][states], copied)
            states = follow(params, states, token)
            return (append(text, token), states), (token, states)

        first = follow(params, state.states, last)
        (text, _), (guesses, states) = lax.scan(
            guess, (append(state.text, last), first), length=uniforms.shape[1]
        )
        states = jnp.concatenate([first[None], states])
        return Proposal(guesses.T, None, SuffixDraftState(text, states))

    def commit(self, proposal: Proposal, accepted: Rows) -> SuffixDraftState:
        """The text up to the last accepted guess, and the automaton's state there."""
        text = rewind(proposal.state.text, proposal.guesses.shape[1] - accepted)
        states = jnp.take_along_axis(proposal.state.states, accepted[None], axis=0)[0]
        return SuffixDraftState(text, states)


def follow(params: PyTree, states: Rows, tokens: Rows) -> Rows:
    """The automaton's states [B] once `tokens` [B] follow the texts that `states` stand for.

    Searches a state's transitions by bisection; where the token is not among them, goes on to
    the next shorter suffix, at last to the root, which knows where every token leads.
    """
    offsets, token, link = params["offsets"], params["tokens"], params["links"]

    def lost(carry: tuple[Rows, Rows, Rows]) -> Array:
        state, low, high = carry
        return jnp.any((state != ROOT) & (token[(low + high) // 2] != tokens))

    def search(carry: tuple[Rows, Rows, Rows]) -> tuple[Rows, Rows, Rows]:
        state, low, high = carry
        middle = (low + high) // 2
        # A row that has found its transition stays as it is: neither side of it is cut off.
        low = jnp.where(token[middle] < tokens, middle + 1, low)
        high = jnp.where(token[middle] > tokens, middle, high)
        empty = low >= high
        state = jnp.where(empty, link[state], state)
        low = jnp.where(empty, offsets[state], low)
        return state, low, jnp.where(empty, offsets[state + 1], high)

    window = (states, offsets[states], offsets[states + 1])
    state, low, high = lax.while_loop(lost, search, window)
    found = params["next"][(low + high) // 2]
    return jnp.where(state == ROOT, params["first"][tokens], found)


def automaton(sequences: Sequence[np.ndarray], vocab_size: int, start: int = PAD_ID) -> PyTree:
    """Parameters of a `SuffixDraft`: the suffix automaton of past outputs.

    A state stands for the texts that occur in the same places of the sequences (Blumer et al.,
    1985). Of M states and E transitions it keeps what guessing needs, in int32:

        offsets [M + 1]: a state's transitions are those from offsets[i] to offsets[i + 1].
        tokens, next [E]: their tokens, in order, and where they lead.
        links [M]: the state of the longest suffix that also occurs elsewhere.
        first [V]: where each token leads from the root, which has no transitions above.
        guesses [M]: the token that followed most often; the smallest of several.
        sure [M] bool: whether it followed at least twice more than all others together.

    A text that nothing ever follows has no state: transitions lead to its longest suffix that
    something does.

    Args:
        sequences: arrays [length] of tokens, each ending with its end-of-sequence token.
        vocab_size: tokens V.
        start: the token from which decoding starts, put before each sequence.

    Raises:
        ValueError: there are no sequences, or a token lies outside the vocabulary.
    """
    rows = [np.asarray(sequence).tolist() for sequence in sequences if len(sequence)]
    if not rows:
        raise ValueError("Past outputs need at least one sequence that is not empty.")
    for i, row in enumerate(rows):
        if not 0 <= min(row) <= max(row) < vocab_size:
            wrong = next(token for token in row if not 0 <= token < vocab_size)
            raise ValueError(
                f"Past output {i} holds token {wrong}, outside a vocabulary of {vocab_size} "
                "pieces; keep outputs again with this vocabulary."
            )
    transitions, links, counts = _build([[start, *row] for row in rows])
    degrees = np.fromiter(map(len, transitions), np.int64)
    states = np.repeat(np.arange(len(degrees)), degrees)
    tokens = np.fromiter(itertools.chain.from_iterable(transitions), np.int64)
    leads = np.fromiter(itertools.chain.from_iterable(t.values() for t in transitions), np.int64)
    order = np.lexsort((tokens, states))
    tokens, leads = tokens[order], leads[order]

    # States that go on keep their order under new numbers; the others get their suffix's.
    goes_on = degrees > 0
    renamed = np.cumsum(goes_on) - 1
    for state in np.flatnonzero(~goes_on):
        suffix = links[state]
        while not goes_on[suffix]:
            suffix = links[suffix]
        renamed[state] = renamed[suffix]
    best = np.lexsort((tokens, -counts[leads], states))
    best = best[(np.cumsum(degrees) - degrees)[goes_on]]
    total = np.bincount(states, counts[leads], minlength=len(degrees))[goes_on]
    first = np.zeros(vocab_size, np.int64)
    first[tokens[: degrees[ROOT]]] = renamed[leads[: degrees[ROOT]]]
    rest = slice(degrees[ROOT], None)
    degrees[ROOT] = 0  # All of the root's are in `first`.
    offsets = np.concatenate([[0], np.cumsum(degrees[goes_on])])
    params = {
        "offsets": offsets,
        "tokens": tokens[rest],
        "next": renamed[leads[rest]],
        "links": renamed[links[goes_on]],
        "first": first,
        "guesses": tokens[best],
    }
    sure = 2 * counts[leads[best]] - total >= 2
    return {name: jnp.asarray(x, jnp.int32) for name, x in params.items()} | {
        "sure": jnp.asarray(sure)
    }


def _build(rows: list[list[int]]) -> tuple[list[dict[int, int]], np.ndarray, np.ndarray]:
    """Transitions, suffix links and numbers of occurrences of every state; state 0 is the root.

    The construction is Blumer's, a token at a time, begun again at the root for each row. The
    root links to itself.
    """
    transitions: list[dict[int, int]] = [{}]
    links, lengths, counts = [-1], [0], [0]

    def add(length: int, link: int, leads: dict[int, int]) -> int:
        transitions.append(leads)
        links.append(link)
        lengths.append(length)
        counts.append(0)
        return len(links) - 1

    def redirect(state: int, token: int, old: int, new: int) -> None:
        while state >= 0 and transitions[state].get(token) == old:
            transitions[state][token] = new
            state = links[state]

    def split(state: int, token: int) -> int:
        """The state of the longest text of `state` and `token`, on its own from now on."""
        whole = transitions[state][token]
        if lengths[whole] == lengths[state] + 1:
            return whole
        part = add(lengths[state] + 1, links[whole], transitions[whole].copy())
        links[whole] = part
        redirect(state, token, whole, part)
        return part

    for row in rows:
        last = ROOT
        for token in row:
            if token in transitions[last]:
                last = split(last, token)
            else:
                new, state = add(lengths[last] + 1, ROOT, {}), last
                while state >= 0 and token not in transitions[state]:
                    transitions[state][token] = new
                    state = links[state]
                if state >= 0:
                    links[new] = split(state, token)
                last = new
            counts[last] += 1
    # What occurs, its suffixes do too.
    for state in sorted(range(1, len(links)), key=lengths.__getitem__, reverse=True):
        counts[links[state]] += counts[state]
    links[ROOT] = ROOT
    return transitions, np.array(links), np.array(counts)


def save(path: str | pathlib.Path, sequences: Sequence[np.ndarray], vocabulary: Vocabulary) -> None:
    """Writes past outputs, at least one, as the .npz that `load` reads, whole or not at all."""
    path, flat = pathlib.Path(path), np.concatenate(sequences)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=flat.astype(np.int16 if flat.max(initial=0) < 2**15 else np.int32),
            offsets=np.cumsum([0, *map(len, sequences)], dtype=np.int32),
            vocabulary=np.array(vocabulary.fingerprint),
        )
    unfinished.rename(path)


def load(path: str | pathlib.Path, vocabulary: Vocabulary) -> PyTree:
    """The `automaton` of past outputs that `save` wrote.

    Raises:
        ValueError: the file is missing, damaged or empty, or of another vocabulary.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; make it with scripts/keep_outputs.py.")
    try:
        with zipfile.ZipFile(path) as archive:
            # NumPy reads no further than its arrays, and may miss the checksums behind them.
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {damaged} differs")
        with np.load(path) as arrays:
            tokens, offsets = arrays["tokens"], arrays["offsets"]
            fingerprint = str(arrays["vocabulary"])
        if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
            raise ValueError("its offsets do not fit its tokens")
    except Exception as error:  # NumPy and zipfile raise many kinds for a damaged archive.
        raise ValueError(
            f"{path} is no .npz of past outputs ({error}); make it again with "
            "scripts/keep_outputs.py."
        ) from error
    if fingerprint != vocabulary.fingerprint:
        raise ValueError(
            f"{path} holds outputs in another vocabulary (SHA-256 {fingerprint[:12]}) than "
            f"{vocabulary.path} (SHA-256 {vocabulary.fingerprint[:12]}); make it again from this "
            "target's outputs with scripts/keep_outputs.py."
        )
    try:
        return automaton(np.split(tokens, offsets[1:-1]), vocabulary.size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
