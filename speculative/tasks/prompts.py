"""The texts that a task is measured on: shipped ones, seqio's, or local files."""

import dataclasses
import itertools
import json
import pathlib

from speculative import checkpoints, tasks

COLUMNS = (("article", "highlights"), ("inputs", "targets"), ("source", "reference"))
"""The columns of a line of JSON, source and reference, under any of these names."""

KINDS = (
    "FILE.tsv (source, tab, reference), FILE.jsonl (objects with "
    f"{', or '.join(' and '.join(names) for names in COLUMNS)}) or SOURCES,REFERENCES (two files "
    "of parallel lines)"
)
"""The files that `load_prompts` reads, for people."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to decode.

    Attributes:
        source: the task's prefix and the text; a language model goes on from it.
        reference: what a person wrote for it.
    """

    source: str
    reference: str


def load_prompts(
    task: str, limit: int | None = None, data_file: str | pathlib.Path | None = None
) -> list[Prompt]:
    """The first `limit` prompts of a task, or all.

    Args:
        task: a name of `tasks.TASKS`.
        limit: the largest number of prompts.
        data_file: local text, without the task's prefix: one of `KINDS`, in UTF-8. None takes the
            prompts that ship with the package, or else those of the task's split in seqio, in its
            order.

    Raises:
        ValueError: there is no such task, the limit is below 1, the split cannot be read, or the
            file is missing, empty or malformed; the message says in which line.
    """
    known = tasks.task(task)
    if limit is not None and limit < 1:
        raise ValueError(f"The limit on prompts must be at least 1, not {limit}.")
    shipped = checkpoints.ASSETS / "prompts" / f"{task}.jsonl"
    if data_file is None and not shipped.is_file():
        return _of_split(known, limit)
    place = str(shipped if data_file is None else data_file)
    pairs = _pairs(place)
    for number, (source, _) in enumerate(pairs, 1):
        # A language model, whose task has no prefix, may begin with nothing.
        if known.prefix and not source.strip():
            raise ValueError(f"Line {number} of {place} has an empty source; give a text.")
    return [Prompt(known.prefix + source, reference) for source, reference in pairs[:limit]]


def _of_split(task: tasks.Task, limit: int | None) -> list[Prompt]:
    """Prompts of the split that is evaluated; no more of it is read than is asked for."""
    registered = tasks.get_task(task.name)
    try:
        dataset = registered.get_dataset(
            None, split=task.split, shuffle=False, try_in_mem_cache=False
        )
        return [
            # seqio keeps beside the tokens the text from which they come, the prefix included.
            _prompt(*(example[f"{name}_pretokenized"].decode() for name in ("inputs", "targets")))
            for example in itertools.islice(dataset.as_numpy_iterator(), limit)
        ]
    # TFDS and TensorFlow raise errors of every kind where a dataset cannot be had.
    except Exception as error:
        raise ValueError(
            f"The {task.split} split of task {task.name!r} cannot be read "
            f"({type(error).__name__}: {error}); see that TFDS finds it (TFDS_DATA_DIR), or give "
            f"a data file: {KINDS}."
        ) from error


def _prompt(source: str, reference: str) -> Prompt:
    """An example as a prompt; of a text without a source, the first half of its words, up to 16."""
    if source:
        return Prompt(source, reference)
    words = reference.split()
    count = min(len(words) // 2, 16)
    return Prompt(" ".join(words[:count]), " ".join(words[count:]))


def _pairs(place: str) -> list[tuple[str, str]]:
    """Source and reference of every line of a file, or of two parallel ones."""
    first, comma, second = place.partition(",")
    if comma:
        return _parallel(first, second)
    parse = {".tsv": _columns, ".jsonl": _fields}.get(pathlib.Path(place).suffix)
    if parse is None:
        raise ValueError(f"{place!r} is no known kind of data file; give {KINDS}.")
    return [parse(line, f"Line {n} of {place}") for n, line in enumerate(_lines(place), 1)]


def _parallel(first: str, second: str) -> list[tuple[str, str]]:
    sources, references = _lines(first), _lines(second)
    if len(sources) != len(references):
        shorter = first if len(sources) < len(references) else second
        raise ValueError(
            f"{first} has {len(sources)} lines and {second} has {len(references)}, but they must "
            f"be parallel; {shorter} lacks line {min(len(sources), len(references)) + 1}."
        )
    return list(zip(sources, references, strict=True))


def _columns(line: str, place: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise ValueError(
            f"{place} has {len(columns)} column{'s' * (len(columns) != 1)}, not 2; put one tab "
            "between source and reference."
        )
    return columns[0], columns[1]


def _fields(line: str, place: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON ({error}); give an object a line.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place} is no JSON object but {line[:40]!r}; give an object a line.")
    for source, reference in COLUMNS:
        if source in record and reference in record:
            for name in (source, reference):
                if not isinstance(record[name], str):
                    raise ValueError(f"{place} has {record[name]!r} as {name}; give a text.")
            return record[source], record[reference]
    wanted = ", or ".join(" and ".join(names) for names in COLUMNS)
    raise ValueError(f"{place} has the columns {', '.join(record) or 'none'}; it needs {wanted}.")


def _lines(place: str) -> list[str]:
    """The lines of a text file, without their ends.

    Only line feeds end a line: str.splitlines would cut at other characters too, which occur
    within sentences and would set parallel files off against each other.
    """
    path = pathlib.Path(place)
    if not path.is_file():
        raise ValueError(f"There is no file {place!r}; give {KINDS}.")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"Line {number} of {place} is not UTF-8; convert the file.") from None
    if not text.strip():
        raise ValueError(f"{place} is empty; give a prompt a line.")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
