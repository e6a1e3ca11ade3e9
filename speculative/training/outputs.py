"""What a model writes for tokenised inputs, in big batches, and how good it is."""

import collections
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from speculative.decoding import Decoding, autoregressive, random_draws
from speculative.models import FlaxModel, for_decoding
from speculative.training.examples import Examples, ragged
from speculative.types import PAD_ID, PyTree
from speculative.vocabulary import Vocabulary

SOURCE_LENGTHS = (32, 128, 512)
"""Inputs are padded to one of these: each costs a compilation, a wide one costs memory reads."""


def write(
    model: FlaxModel,
    params: PyTree,
    examples: Examples,
    decoding: Decoding,
    seed: int = 0,
    batch_size: int = 1024,
) -> Examples:
    """The same inputs with the model's own outputs as targets, in the same order.

    Args:
        model: writes.
        params: its parameters.
        examples: their inputs are read, their targets are not.
        decoding: sampling and the longest output; a longer one ends without end of sequence.
        seed: of sampling; each example draws its own numbers.
        batch_size: examples decoded at a time.

    Raises:
        ValueError: an input is too long, or the model's logits are not finite.
    """
    sizes = np.diff(examples.inputs_offsets)
    if sizes.max() > SOURCE_LENGTHS[-1]:
        raise ValueError(
            f"Example {sizes.argmax()} has {sizes.max()} source tokens; at most "
            f"{SOURCE_LENGTHS[-1]} can be decoded."
        )
    params = for_decoding(jax.tree.map(jnp.asarray, params))
    buckets = collections.defaultdict(list)
    # Sorted, because a batch runs as long as its longest output, and lengths go together.
    for i in np.argsort(sizes, kind="stable"):
        buckets[next(length for length in SOURCE_LENGTHS if sizes[i] <= length)].append(int(i))
    targets: list[np.ndarray] = [np.zeros(0, np.int32)] * len(examples)
    for length, members in buckets.items():
        for begin in range(0, len(members), batch_size):
            chosen = members[begin : begin + batch_size]
            # One shape a bucket: a short last batch is filled up with its own first example.
            rows = chosen + chosen[:1] * (batch_size - len(chosen))
            inputs = np.full((batch_size, length), model.pad_id, np.int32)
            for row, i in zip(inputs, rows, strict=True):
                row[: sizes[i]] = examples.input(i)
            draws = random_draws(seed, np.array(rows), decoding.capacity)
            output = autoregressive.generate(model, params, jnp.asarray(inputs), draws, decoding)
            tokens, lengths, finite = jax.device_get((output.tokens, output.lengths, output.finite))
            if not finite.all():
                raise ValueError(f"Logits are not finite for example {rows[finite.argmin()]}.")
            for row, i in enumerate(chosen):
                targets[i] = tokens[row, : lengths[row]]
    return ragged([examples.input(i) for i in range(len(examples))], targets)


def prompts(texts: Examples) -> Examples:
    """What a decoder-only model is asked to go on from: the first words of each target.

    The start token and 4 to 23 tokens, fewer of short texts, so that prompts of all lengths occur.
    """
    beginnings = [
        texts.target(i)[: min(4 + i % 20, len(texts.target(i)) // 2)] for i in range(len(texts))
    ]
    nothing = np.zeros(0, np.int32)
    return ragged([np.append(PAD_ID, b) for b in beginnings], [nothing] * len(beginnings))


def joined(written: Examples) -> Examples:
    """Whole texts as targets: each prompt without its start token, and what was written for it."""
    every = range(len(written))
    whole = [np.concatenate([written.input(i)[1:], written.target(i)]) for i in every]
    return ragged([np.zeros(0, np.int32) for _ in every], whole)


def score(
    outputs: Examples,
    references: Examples,
    vocabulary: Vocabulary,
    metric: Callable[[Sequence[str], Sequence[str]], dict[str, float]],
) -> dict[str, float]:
    """A metric of `measurement.quality` on decoded text.

    Raises:
        ValueError: the two do not have as many examples.
    """
    if len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs for {len(references)} references.")
    texts = [
        [vocabulary.decode(examples.target(i)) for i in range(len(examples))]
        for examples in (references, outputs)
    ]
    return metric(texts[0], texts[1])
