"""Drafts without training: n-gram counts of texts like a model's own, or the texts themselves."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from speculative import disk
from speculative.chat import Message
from speculative.drafts import count_ngrams, ngram, suffix
from speculative.drafts.tables import SUFFIX
from speculative.progress import OnProgress
from speculative.tasks.prompts import named_files, read_pairs
from speculative.training import data
from speculative.vocabulary import Vocabulary

ROOM = 50_000_000  # Tokens held in memory at a time.
MOST = {"ngrams": ROOM, "outputs": 300_000}  # The most tokens of each kind of file, by default.


def require(files: Sequence[str]) -> None:
    """Raises ValueError, before long work, if a file is missing or of an unknown kind."""
    for file in files:
        named_files(file, (".tsv", ".jsonl", ".txt", SUFFIX))


def tokens(
    files: Sequence[str],
    vocabulary: Vocabulary,
    columns: str | None = None,
    sources: bool = False,
    on_progress: OnProgress = lambda what, share: None,
    prefix: str = "",
) -> Iterator[np.ndarray]:
    """The tokens [length] of each text that is not empty, with the end of sequence.

    A file is a .txt with one text per line, read as needed; or anything that `read_pairs` takes,
    with `columns`; or tokenised `Examples` (.npz) of this vocabulary. References are taken, or
    sources if `sources` is true or there are no references. The `prefix` is put before texts that
    are not tokenised yet. Raises ValueError if a file is missing, empty or malformed.
    """
    small = np.uint16 if vocabulary.size <= 2**16 else np.int32
    for file in files:
        if file.endswith(SUFFIX):
            yield from (source if sources else target for source, target in data.load(file))
            continue
        shown = 0.0
        on_progress(f"reading {file}", shown)
        empty = True
        for text, share in _texts(file, columns, sources):
            if share >= shown + 0.01:
                on_progress(f"reading {file}", shown := share)
            if text.strip():
                empty = False
                yield vocabulary.encode(prefix + text).astype(small)
        if empty:
            raise ValueError(f"{file} is empty; give texts like those that the target writes.")


def are_chats(files: Sequence[str]) -> bool:
    """Whether files are JSON lines with `messages`; raises ValueError if only some of them are."""
    kinds = {file: '"messages"' in _first_line(file) for file in files}
    if len({*kinds.values()}) > 1:
        one, other = (next(f for f, is_one in kinds.items() if is_one == kind) for kind in (1, 0))
        raise ValueError(f"{one} has chats and {other} has texts; give files of one kind.")
    return all(kinds.values())


def chats(
    files: Sequence[str],
    render: Callable[[Sequence[Message]], str],
    vocabulary: Vocabulary,
    on_progress: OnProgress = lambda what, share: None,
) -> Iterator[np.ndarray]:
    """The tokens of the prompts of chats, one per line, with `messages` rendered by a template.

    Raises ValueError, naming the line, if it has no messages or the template does not accept them.
    """
    for file in files:
        lines = [line for line in disk.lines(disk.text(file)) if line.strip()]
        for number, line in enumerate(lines, 1):
            on_progress(f"reading {file}", number / len(lines))
            with disk.reading(f"Line {number} of {file}", "is no chat"):
                text = render(json.loads(line)["messages"])
            yield vocabulary.prompt(text)


def _first_line(file: str) -> str:
    if not file.endswith(".jsonl"):
        return ""
    with open(file, "rb") as opened:
        return opened.readline().decode(errors="replace")


def most_frequent(texts: Iterable[np.ndarray], most: int, vocab_size: int) -> np.ndarray:
    """The `most` most frequent tokens, or fewer, ascending.

    Raises ValueError if a token is outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        if text.max(initial=0) >= vocab_size:
            raise ValueError(
                f"A text has token {text.max()}, outside a vocabulary of {vocab_size} pieces; "
                "tokenise it with that vocabulary."
            )
        counts += np.bincount(text, minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")[:most]
    return np.sort(order[counts[order] > 0])


def sample(texts: Iterable[np.ndarray], most: int) -> list[np.ndarray]:
    """Whole texts, evenly spread, of at most `most` tokens together; all texts if they fit.

    Every second text is dropped whenever more than `ROOM` tokens, or `most` if larger, are held,
    which bounds memory. Raises ValueError if no text is left.
    """
    held: list[np.ndarray] = []
    size, stride = 0, 1
    for number, text in enumerate(texts):
        if number % stride == 0:
            held.append(text)
            size += len(text)
        if size > max(ROOM, most) and len(held) > 1:
            held, stride = held[::2], 2 * stride
            size = sum(map(len, held))
    share = min(1.0, most / max(1, size))
    kept, due = [], 0.0
    for text in held:
        due += share * len(text)
        if len(text) <= due:
            due -= len(text)
            kept.append(text)
    if not kept:
        raise ValueError(f"No text has at most {most} tokens; raise --tokens.")
    return kept


def write(
    output: disk.Path,
    texts: Sequence[np.ndarray],
    vocabulary: Vocabulary,
    kind: str,
    on_progress: OnProgress,
    **limits: int,
) -> str:
    """Writes a draft made from texts, of a kind in `MOST`, and returns a sentence about it.

    N-grams keep within `limits`, those of `count_ngrams`.
    """
    if kind == "outputs":
        suffix.save(output, texts, vocabulary)
        made = "past outputs: "
    else:
        order = limits.pop("order", ngram.LONGEST)
        size, start = vocabulary.size, vocabulary.start_id
        table = count_ngrams(texts, order, size, start=start, on_progress=on_progress, **limits)
        ngram.TABLE.save(output, vocabulary, table)
        made = f"{len(table['count']):,} n-grams of {len(table['total']):,} contexts, from "
    megabytes = os.path.getsize(output) / 1e6
    return f"{made}{sum(map(len, texts)):,} tokens of {len(texts):,} texts; {megabytes:.2f} MB"


def _texts(file: str, columns: str | None, sources: bool) -> Iterator[tuple[str, float]]:
    """Texts as in `tokens`, each with the share read so far; one line is in memory at a time."""
    if file.endswith(".txt") and os.path.isfile(file):
        size, done = os.path.getsize(file), 0
        with open(file, "rb") as opened:
            for number, line in enumerate(opened, 1):
                done += len(line)
                yield disk.text(file, line, number).rstrip("\r\n"), done / max(size, 1)
    else:
        pairs = read_pairs(file, columns)
        column = int(not sources and any(reference for _, reference in pairs))
        for number, pair in enumerate(pairs, 1):
            yield pair[column], number / len(pairs)
