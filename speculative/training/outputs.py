"""A model's outputs for examples, as examples that a draft learns from or that are scored."""

import jax
import numpy as np

from speculative.backends import for_decoding
from speculative.decoding import Decoding, Params, loop
from speculative.drafts.base import Draft
from speculative.models import FlaxModel
from speculative.pair import SOURCE_LENGTHS
from speculative.training.examples import Examples, ragged
from speculative.types import PAD_ID, PyTree

WIDTHS = SOURCE_LENGTHS[::2]  # Inputs are padded to one of these, each of which is compiled once.

MOST_PROMPT = 23  # Tokens of a text that `prompts` takes at most, without the start token.


def write(
    model: FlaxModel,
    params: PyTree,
    examples: Examples,
    decoding: Decoding,
    seed: int = 0,
    batch_size: int = 1024,
    draft: Draft | None = None,
    draft_params: PyTree = (),
) -> Examples:
    """The same inputs with the model's own outputs as targets, in the same order.

    Outputs are cut at the `max_length` of `decoding`. Each example has its own random numbers, from
    `seed`; `batch_size` examples are decoded at a time. A `draft` guesses as `decoding` says.
    Raises ValueError if an input is too long, or if the model's logits are not finite.
    """
    sizes = np.diff(examples.inputs_offsets)
    if sizes.max() > WIDTHS[-1]:
        raise ValueError(
            f"Example {sizes.argmax()} has {sizes.max()} source tokens; at most {WIDTHS[-1]} can "
            "be decoded."
        )
    params, draft_params = jax.device_put((params, draft_params))
    used = Params(for_decoding(params), for_decoding(draft_params, draft=True) if draft else ())
    targets: list[np.ndarray] = [np.zeros(0, np.int32)] * len(examples)
    # Sorted, because a batch takes as long as its longest output, and long inputs have long ones.
    order = np.argsort(sizes, kind="stable")
    bounds = [0, *np.searchsorted(sizes[order], WIDTHS, side="right")]
    for width, low, high in zip(WIDTHS, bounds, bounds[1:], strict=False):
        for begin in range(low, high, batch_size):
            chosen = order[begin : min(begin + batch_size, high)].tolist()
            # All batches of a width have the same shape: the last repeats its first example.
            rows = chosen + chosen[:1] * (batch_size - len(chosen))
            inputs = np.full((batch_size, width), model.pad_id, np.int32)
            for row, i in zip(inputs, rows, strict=True):
                row[: sizes[i]] = examples.input(i)
            draws = decoding.draws(seed, np.array(rows))
            sources = jax.device_put(inputs)
            output = loop.generate(model, draft, used, sources, draws, decoding)
            tokens, lengths, finite = jax.device_get((output.tokens, output.lengths, output.finite))
            if not finite.all():
                raise ValueError(f"Logits are not finite for example {rows[finite.argmin()]}.")
            for row, i in enumerate(chosen):
                targets[i] = tokens[row, : lengths[row]]
    return ragged([source for source, _ in examples], targets)


def prompts(texts: Examples, start_id: int = PAD_ID) -> Examples:
    """Prompts for a decoder-only model: the start token and the beginning of each target.

    Beginnings of 4 to `MOST_PROMPT` tokens take turns, but none is longer than half of its text.
    """
    beginnings = [
        np.append(start_id, target[: min(4 + i % (MOST_PROMPT - 3), len(target) // 2)])
        for i, (_, target) in enumerate(texts)
    ]
    return ragged(beginnings, [np.zeros(0, np.int32)] * len(beginnings))


def whole_texts(written: Examples) -> Examples:
    """Examples without inputs, whose targets are each prompt and its continuation joined."""
    texts = [np.concatenate([prompt[1:], target]) for prompt, target in written]
    return ragged([np.zeros(0, np.int32)] * len(texts), texts)
