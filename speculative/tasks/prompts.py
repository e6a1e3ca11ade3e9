"""The texts on which a task is measured: shipped with the package, from seqio, or local files."""

import dataclasses
import itertools
import json
import pathlib

from speculative import checkpoints, disk, tasks

# The names that source and reference may have in a line of JSON, and in messages.
COLUMNS = (("article", "highlights"), ("inputs", "targets"), ("source", "reference"))
NAMES = ", or ".join(" and ".join(names) for names in COLUMNS)
KINDS = (
    f"FILE.tsv (source, tab, reference), FILE.jsonl (objects with {NAMES}) or SOURCES,REFERENCES "
    "(two files of parallel lines)"
)
"""The kinds of file that `load_prompts` reads, for messages."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to decode."""

    source: str  # The task's prefix and the text; for a language model, the text to continue.
    reference: str  # The output that a person wrote.


def load_prompts(
    task: str, limit: int | None = None, data_file: str | pathlib.Path | None = None
) -> list[Prompt]:
    """The first `limit` prompts of a task, or all.

    They are those of `data_file`, local text without the task's prefix, in UTF-8, see `KINDS`; or
    without it those that ship with the package, or else those of the task's split in seqio. Raises
    ValueError if there is no such task, the limit is below 1, the split cannot be read, or the
    file is missing, empty or malformed; the message says in which line.
    """
    known = tasks.task(task)
    if limit is not None and limit < 1:
        raise ValueError(f"The limit on prompts must be at least 1, not {limit}.")
    shipped = checkpoints.ASSETS / "prompts" / f"{task}.jsonl"
    if data_file is None and not shipped.is_file():
        return _of_split(known, limit)
    file = str(shipped if data_file is None else data_file)
    pairs = read_pairs(file)
    for number, (source, _) in enumerate(pairs, 1):
        # A language model, whose task has no prefix, may continue an empty text.
        if known.prefix and not source.strip():
            raise ValueError(f"Line {number} of {file} has an empty source; give a text.")
    return [Prompt(known.prefix + source, reference) for source, reference in pairs[:limit]]


def _of_split(task: tasks.Task, limit: int | None) -> list[Prompt]:
    """The first prompts of the split that is evaluated; the others are not read.

    A language model, which has no source, continues the first half of a text, at most 16 words.
    """
    registered = tasks.get_task(task.name)
    prompts = []
    try:
        dataset = registered.get_dataset(None, task.split, shuffle=False, try_in_mem_cache=False)
        for example in itertools.islice(dataset.as_numpy_iterator(), limit):
            # seqio keeps the prefixed text beside its tokens.
            source = example["inputs_pretokenized"].decode()
            reference = example["targets_pretokenized"].decode()
            if not source:
                words = reference.split()
                count = min(len(words) // 2, 16)
                source, reference = " ".join(words[:count]), " ".join(words[count:])
            prompts.append(Prompt(source, reference))
    # TFDS and TensorFlow raise errors of every kind if they cannot read a dataset.
    except Exception as error:
        raise ValueError(
            f"The {task.split} split of task {task.name!r} cannot be read "
            f"({type(error).__name__}: {error}); see that TFDS finds it (TFDS_DATA_DIR), or give "
            f"a data file: {KINDS}."
        ) from error
    return prompts


def read_pairs(files: str) -> list[tuple[str, str]]:
    """Source and reference of every line of a file, or of two parallel files; see `KINDS`.

    Raises ValueError if a file is missing, empty or malformed; the message says in which line.
    """
    first, comma, second = files.partition(",")
    parse = {".tsv": _columns, ".jsonl": _fields}.get(pathlib.Path(files).suffix)
    if comma and not (parse and pathlib.Path(files).is_file()):
        sources, references = _lines(first), _lines(second)
        if len(sources) != len(references):
            shorter = first if len(sources) < len(references) else second
            raise ValueError(
                f"{first} has {len(sources)} lines and {second} has {len(references)}, but they "
                f"must be parallel; {shorter} lacks line {min(len(sources), len(references)) + 1}."
            )
        return list(zip(sources, references, strict=True))
    if parse is None:
        raise ValueError(f"{files!r} is no known kind of data file; give {KINDS}.")
    return [parse(line, f"Line {n} of {files}") for n, line in enumerate(_lines(files), 1)]


def _columns(line: str, where: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise ValueError(
            f"{where} has {len(columns)} column{'s' * (len(columns) != 1)}, not 2; put one tab "
            "between source and reference."
        )
    return columns[0], columns[1]


def _fields(line: str, where: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # JSON can say halves of a character.
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where} is no JSON ({error}); give an object a line.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object but {line[:40]!r}; give an object a line.")
    for source, reference in COLUMNS:
        if source in record and reference in record:
            for name in (source, reference):
                if not isinstance(record[name], str):
                    raise ValueError(f"{where} has {record[name]!r} as {name}; give a text.")
            return record[source], record[reference]
    raise ValueError(f"{where} has the columns {', '.join(record) or 'none'}; it needs {NAMES}.")


def _lines(file: str) -> list[str]:
    """The lines of a text file, without their ends."""
    if not pathlib.Path(file).is_file():
        raise ValueError(f"There is no file {file!r}; give {KINDS}.")
    text = disk.text(file)
    if not text.strip():
        raise ValueError(f"{file} is empty; give a prompt a line.")
    return disk.lines(text)
