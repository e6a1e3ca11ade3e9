"""The texts on which a task is measured: bundled with the package, from seqio, or local files."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from speculative import disk, fingerprints, tasks
from speculative.chat import Message
from speculative.tasks import chats

# The names that source and reference have in a line of JSON, unless others are given.
COLUMNS = (("article", "highlights"), ("inputs", "targets"), ("source", "reference"))
NAMES = ", or ".join(" and ".join(names) for names in COLUMNS)
KINDS = (
    f"FILE.tsv (source, tab, reference), FILE.jsonl (objects with {NAMES}, or chats with messages, "
    "or questions with turns), FILE.txt (one source per line), SOURCES,REFERENCES (two files of "
    "parallel lines) or tfds:NAME (with --columns)"
)
"""The kinds of task data, for messages."""
TFDS = "tfds:"
EXAMPLE = "Example "  # A number follows: the place of a text in TFDS or seqio.


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to decode."""

    source: str  # The task's prefix and the text; for a language model, the text to continue.
    reference: str  # The output that a person wrote; empty without one.
    prefix: str = dataclasses.field(default="", compare=False)  # The task's prefix in `source`.
    place: str = dataclasses.field(default="", compare=False)  # Line or example, for messages.
    # All messages of a chat up to the source, which is the last; see `tasks.chats`.
    messages: tuple[Message, ...] = ()
    category: str = ""  # The category of a question; results are shown by category.
    question: str = ""  # The name of a question.


def load_prompts(task: str | tasks.Task, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a task, which may be given by its name, or all.

    They come from the task's data, see `KINDS`, in UTF-8 and without the task's prefix, or, if it
    has none, from the split of seqio's task of that name. Raises ValueError if there is no such
    task, the limit is below 1, the split cannot be read, the file is missing, empty or malformed,
    or a text is empty; the message names the line or example.
    """
    known = tasks.task(task) if isinstance(task, str) else task
    if limit is not None and limit < 1:
        raise ValueError(f"The limit on prompts must be at least 1, not {limit}.")
    data = known.data
    if data is None and known.module is None and not tasks.in_seqio(known.name):
        raise ValueError(f"Task {known.name!r} has no texts; give a data file: {KINDS}.")
    if data is None or data.startswith(TFDS):
        stream = _of_seqio(known) if data is None else _of_tfds(known, data.removeprefix(TFDS))
        try:
            prompts = list(itertools.islice(stream, limit))
        # TFDS and TensorFlow raise errors of many kinds if they cannot read a dataset.
        except Exception as error:
            own = repr(known.name) in str(error) or str(error).startswith(EXAMPLE)
            if isinstance(error, ValueError) and own:
                raise
            raise ValueError(
                f"The {known.split or 'test'} split of task {known.name!r} cannot be read "
                f"({type(error).__name__}: {error}); see that TFDS finds it (TFDS_DATA_DIR), or "
                f"give a data file: {KINDS}."
            ) from error
    else:
        prompts = _chats(data) if known.columns is None else []
        prompts = prompts or [
            Prompt(known.prefix + source, reference, known.prefix, place)
            for place, source, reference in _placed(data, known.columns)
        ]
    for prompt in prompts:
        # A language model, whose task has no prefix, may write a reference from nothing.
        if prompt.prefix or not prompt.reference:
            _require_source(prompt)
    return prompts[:limit]


def require(
    prompts: Sequence[Prompt], metric: str | None = None, decoder_only: bool = False
) -> None:
    """Raises ValueError, which names the line or example, if a text cannot be decoded or scored.

    That is an empty text, which only a decoder-only model can continue, or one without a reference
    if there is a `metric`.
    """
    for prompt in prompts:
        if not decoder_only:
            _require_source(prompt)
        if metric and not prompt.reference.strip():
            raise ValueError(
                f"{prompt.place} has no reference, so that outputs cannot be scored by {metric}; "
                "give a reference for each text."
            )


def _require_source(prompt: Prompt) -> None:
    if not prompt.source.removeprefix(prompt.prefix).strip():
        raise ValueError(f"{prompt.place} has an empty source; give a text.")


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """The fingerprint of texts and their references, see `fingerprints.of_value`."""
    texts = [
        [one.source, one.reference, *([one.messages] if one.messages else [])] for one in prompts
    ]
    return fingerprints.of_value(texts)


def _chats(data: str) -> list[Prompt]:
    """The chats or questions of a file, one prompt per turn; none if its lines are not chats."""
    [file, *more] = named_files(data)
    if more or not file.endswith(".jsonl"):
        return []
    turns = list[Prompt]()
    for number, line in enumerate(_lines(file), 1):
        where = f"Line {number} of {file}"
        record = _object(line, where)
        if not chats.is_chat(record):
            if number == 1:
                return []
            raise ValueError(f"{where} has neither messages nor turns, unlike the lines before it.")
        turns += [Prompt(**fields, place=where) for fields in chats.of_record(record, where)]
    return turns


def _of_seqio(task: tasks.Task) -> Iterator[Prompt]:
    """The prompts of a registered task, which itself puts its prefix before each text.

    A language model, which has no source, continues the first half of a text, at most 16 words.
    """
    registered = tasks.get_task(task.name)
    split = _split(task, registered.splits)
    dataset = registered.get_dataset(None, split, shuffle=False, try_in_mem_cache=False)
    continues = False  # Whether texts have no source; the first one decides.
    for number, example in enumerate(dataset.as_numpy_iterator(), 1):
        place = f"{EXAMPLE}{number} of task {task.name!r}"
        # seqio keeps the prefixed text as well as its tokens.
        names = "inputs_pretokenized", "targets_pretokenized"
        source, reference = (_decoded(example[name], place) for name in names)
        continues = number == 1 and not source or continues
        if continues == bool(source):
            empty = place if not source else f"{EXAMPLE}1 of task {task.name!r}"
            raise ValueError(f"{empty} has an empty source, but others have one; give a text.")
        if continues:
            words = reference.split()
            count = min(len(words) // 2, 16)
            source, reference = " ".join(words[:count]), " ".join(words[count:])
        prefix = task.prefix if source.startswith(task.prefix) else ""
        yield Prompt(source, reference, prefix, place)


def _of_tfds(task: tasks.Task, name: str) -> Iterator[Prompt]:
    """The prompts of a TFDS dataset, from the columns that the task names."""
    if not task.columns:
        raise ValueError(f"Task {task.name!r} reads {TFDS}{name}; name its columns (--columns).")
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ValueError(
            f"Task {task.name!r} needs TFDS, which cannot be imported ({error}); install it with "
            "pip install 'speculative[tasks]'."
        ) from error
    builder: Any = tensorflow_datasets.builder(name)
    builder.download_and_prepare()
    dataset = builder.as_dataset(_split(task, builder.info.splits), shuffle_files=False)
    for number, example in enumerate(tensorflow_datasets.as_numpy(dataset), 1):
        place, names = f"{EXAMPLE}{number} of {TFDS}{name}", _names(task.columns)
        row = {key: _decoded(x, place) if key in names else x for key, x in example.items()}
        source, reference = _pair(row, names, place)
        yield Prompt(task.prefix + source, reference, task.prefix, place)


def _decoded(value: Any, place: str) -> Any:
    """A text from TFDS, which stores bytes; ValueError names its place if it is not UTF-8."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise ValueError(f"{place} is not UTF-8; convert it.") from None


def _split(task: tasks.Task, known: Collection[str]) -> str:
    """The split that a task names, or else test or validation."""
    wanted = [task.split] if task.split else ["test", "validation"]
    for split in wanted:
        if split in known:
            return split
    raise ValueError(
        f"Task {task.name!r} has no split {' or '.join(wanted)}; it has {', '.join(known)}."
    )


def named_files(data: str, kinds: Collection[str] = (".tsv", ".jsonl", ".txt")) -> list[str]:
    """The file that `data` names, of one of these kinds, or the two parallel ones; see `KINDS`.

    Raises ValueError, without reading, if one is missing or of another kind.
    """
    first, comma, second = data.partition(",")
    known = pathlib.Path(data).suffix in kinds
    parallel = comma and not (known and pathlib.Path(data).is_file())
    if not parallel and not known:
        raise ValueError(f"{data!r} is no known kind of data file; give {KINDS}.")
    files = [first, second] if parallel else [data]
    for file in files:
        if not pathlib.Path(file).is_file():
            raise ValueError(f"There is no file {file!r}; give {KINDS}.")
    return files


def read_pairs(files: str, columns: str | None = None) -> list[tuple[str, str]]:
    """Source and reference of every line of a file, or of two parallel files; see `KINDS`.

    `columns` names both, or only the source: keys of the objects in a .jsonl file, or columns that
    the first line of a .tsv file names. A missing reference is empty. Raises ValueError if a file
    is missing, empty or malformed; the message names the line.
    """
    return [(source, reference) for _, source, reference in _placed(files, columns)]


def _placed(files: str, columns: str | None) -> list[tuple[str, str, str]]:
    """The place, source and reference of every line; see `read_pairs`."""
    first, *parallel = named_files(files)
    if parallel:
        [second] = parallel
        sources, references = _lines(first), _lines(second)
        if len(sources) != len(references):
            shorter = first if len(sources) < len(references) else second
            raise ValueError(
                f"{first} has {len(sources)} lines and {second} has {len(references)}, but they "
                f"must be parallel; {shorter} lacks line {min(len(sources), len(references)) + 1}."
            )
        places = [f"Line {n} of {files}" for n in range(1, len(sources) + 1)]
        return list(zip(places, sources, references, strict=True))
    lines = [(f"Line {n} of {files}", line) for n, line in enumerate(_lines(files), 1)]
    match pathlib.Path(files).suffix:
        case ".txt":
            return [(where, line, "") for where, line in lines]
        case ".jsonl":
            return [(where, *_fields(line, where, columns)) for where, line in lines]
    rows = [(where, line.split("\t")) for where, line in lines]
    if columns is None:
        for where, row in rows:
            if len(row) != 2:
                raise ValueError(
                    f"{where} has {len(row)} column{'s' * (len(row) != 1)}, not 2; put one tab "
                    "between source and reference."
                )
        return [(where, source, reference) for where, (source, reference) in rows]
    (where, names), *rows = rows
    _pair(dict.fromkeys(names, ""), _names(columns), where)
    if not rows:
        raise ValueError(f"{files} names columns, but has no line after them.")
    for where, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{where} has {len(row)} columns, the first line {len(names)}.")
    records = [(dict(zip(names, row, strict=True)), where) for where, row in rows]
    return [(where, *_pair(record, _names(columns), where)) for record, where in records]


def _object(line: str, where: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # JSON can have lone surrogates.
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where} is no JSON ({error}); give one object per line.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object but {line[:40]!r}; give one object per line.")
    return record


def _fields(line: str, where: str, columns: str | None) -> tuple[str, str]:
    record = _object(line, where)
    names = _names(columns) if columns else next((c for c in COLUMNS if set(c) <= set(record)), ())
    if not names:
        raise ValueError(
            f"{where} has the columns {', '.join(record) or 'none'}; it needs {NAMES}, or name "
            "them (--columns)."
        )
    return _pair(record, names, where)


def _names(columns: str) -> list[str]:
    """The names of source and reference, or only of the source."""
    names = [name.strip() for name in columns.split(",")]
    if not all(names) or len(names) > 2:
        raise ValueError(f"Columns are named SOURCE,REFERENCE or SOURCE, not {columns!r}.")
    return names


def _pair(record: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, str]:
    """The named columns of a record; ValueError lists those that exist if one is missing."""
    for name in names:
        if name not in record:
            there = ", ".join(map(str, record)) or "none"
            raise ValueError(f"{where} has no column {name!r}; it has {there}.")
        if not isinstance(record[name], str):
            raise ValueError(f"{where} has {record[name]!r} as {name}; give a text.")
    return record[names[0]], record[names[1]] if names[1:] else ""


def _lines(file: str) -> list[str]:
    """The lines of a text file, without their ends."""
    text = disk.text(file)
    if not text.strip():
        raise ValueError(f"{file} is empty; give one prompt per line.")
    return disk.lines(text)
