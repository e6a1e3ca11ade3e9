"""Builds the Debian corpora and the vocabulary of the bundled models.

    python scripts/build_debian_corpus.py --mirror=MIRROR --output_dir=data

MIRROR is the address of a Debian mirror's `debian` folder (https://www.debian.org/mirror/list).
The script fetches 350 MB into `downloads`, where a file is reused while its checksum holds, and
takes a few minutes after that. Equal downloads give equal files.

Debian's archive holds every package description twice under one MD5 sum: as its maintainer wrote
it, and as volunteers translated it. The outputs are `debian_ende` (English to German) and
`debian_synopsis` (long to one line), each with `train.jsonl`, `validation.jsonl`, `test.jsonl` and,
for distillation, `unlabelled.jsonl`; `debian_ende/extra.jsonl`, German translations of manuals and
programs, for training only; and `debian.model`, the vocabulary. A line is an object: inputs,
targets, package.
"""

import argparse
import bz2
import collections
import hashlib
import http.client
import json
import lzma
import pathlib
import re
import tarfile
import unicodedata
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import sentencepiece

RELEASES = ("bullseye", "bookworm", "trixie")  # If descriptions differ, the last release's counts.
SOURCES = (
    "libreoffice,util-linux,shadow,dpkg,apt,installation-guide,git,man-db,adduser,devscripts,"
    "sssd,evolution,gedit,evince,coreutils,gnucash"
).split(",")

SHINGLE = 5
RESEMBLANCE = 0.6
HELD_OUT = ("validation", "test")
HELD_OUT_SHARE = 0.04  # share of all families, once for validation and once for test
HELD_OUT_SIZE = 1000
HELD_OUT_WORDS = range(5, 51)  # in a text to translate; longer ones mostly test truncation
UNLABELLED_SIZE = 40_000  # per task
VOCABULARY_SIZE = 8192
# A text that resembles many others is boilerplate ("This package contains the development
# files."), which says nothing about kinship and would measure nothing in a test set.
BOILERPLATE_PARAGRAPH = 40
BOILERPLATE_EXAMPLE = 10
LARGEST_HELD_OUT_FAMILY = 100

_BULLET = re.compile(r"^\s*(?:[-*+•·]|o(?=\s)|\d+[.)])\s+")
_URL = re.compile(r"\b(?:https?|ftp)://\S+|www\.\S+")
_SENTENCE_END = re.compile(
    r"(?<![ (]e\.g\.)(?<![ (]i\.e\.)(?<![ (]z\.B\.)(?<!\bz\. B\.)(?<!\betc\.)(?<!\bbzw\.)"
    r"(?<=[.!?])\s+(?=[A-ZÄÖÜ0-9(»„\"])"
)
_STEM_NOISE = re.compile(
    r"^(?:lib|python3?-|ruby-|r-cran-|r-bioc-|fonts-|node-|php-)+|"
    r"(?:-(?:dev|doc|docs|common|data|bin|utils|tools|dbg|plugins?|examples|java|perl|tests?|"
    r"headers|runtime|gtk\d?|qt\d?|all|base|core|full|extra|server|client))+$|[-.\d]+$"
)
_GERMAN_PO = re.compile(r"(?:^|[/._-])de(?:/.*)?\.po$")
# These reduce gettext entries to prose: they match tags of DocBook and of LibreOffice's help, POD's
# B<...> and E<lt>, AsciiDoc's paired marks, keyboard mnemonics.
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": " ", "&amp;": "&"}
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
# LibreOffice's help has wordings for each system; only the default remains.
_CASE = re.compile(r"<case(inline)?\b.*?</case(inline)?>", re.DOTALL)
_POD = re.compile(r"\b[A-Z]<([^<>]*)>")
_ASCIIDOC = re.compile(r"(?<!\w)(\*{1,2}|_{1,2}|`{1,2})(\S(?:.*?\S)?)\1(?!\w)")
_NOT_PROSE = re.compile(
    r"%[-+#0-9.$*]*[a-zA-Z]|%\d|\$[\w({\[]|\{\d*\}|\\[a-zA-Z]|&[\w.-]+;|[{}|]{2}|[a-z]_[a-z]"
)


class Description(NamedTuple):
    """One package description in one language; paragraphs keep their line breaks."""

    package: str
    synopsis: str
    paragraphs: tuple[str, ...]


Descriptions = dict[str, Description]  # by MD5


class Example(NamedTuple):
    """One training or test example; unlabelled ones have empty targets."""

    inputs: str
    targets: str
    package: str

    @property
    def key(self) -> str:
        """A key shared by inputs that differ only in punctuation, case or numbers."""
        return " ".join(words(self.inputs))


class Mirror:
    """Files of a Debian mirror, checked against checksums and kept in a folder."""

    def __init__(self, url: str, downloads: pathlib.Path):
        self.url = url.rstrip("/")
        self.downloads = downloads

    def _read(self, path: str) -> bytes:
        address = f"{self.url}/{urllib.parse.quote(path)}"
        print(f"fetching {address}", flush=True)
        try:
            with urllib.request.urlopen(address, timeout=120) as response:
                return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(
                f"{address} cannot be fetched ({error}); choose another --mirror, or take a source "
                "package that it lacks out of SOURCES"
            ) from error

    def fetch(self, path: str, sha256: str) -> pathlib.Path:
        """Downloads a file unless a valid copy exists; ValueError if the checksum is wrong."""
        local = self.downloads / path
        if not (local.exists() and hashlib.sha256(local.read_bytes()).hexdigest() == sha256):
            content = self._read(path)
            if hashlib.sha256(content).hexdigest() != sha256:
                raise ValueError(
                    f"{self.url}/{path} does not have the SHA256 {sha256} of its index: the mirror "
                    "may be mid-update, so run again later or choose another --mirror"
                )
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(content)
        return local

    def index(self, release: str, name: str) -> str:
        """Reads an index of a release (`main/i18n/Translation-de`), compressed as .xz or .bz2."""
        folder = f"dists/{release}"
        listed = self._read(f"{folder}/Release").decode()
        entry = rf"^ (\w{{64}}) +\d+ ({re.escape(name)}\.(?:xz|bz2))$"
        match = re.search(entry, listed, re.MULTILINE)
        if match is None:
            raise ValueError(f"release {release} of {self.url} lists no {name}.xz or .bz2")
        content = self.fetch(f"{folder}/{match[2]}", match[1]).read_bytes()
        return (lzma if match[2].endswith(".xz") else bz2).decompress(content).decode()


def fields(stanza: str) -> dict[str, str]:
    """The fields of a stanza of an index; their values keep their line breaks."""
    return dict(re.findall(r"^([\w-]+): ?(.*(?:\n .*)*)", stanza, re.MULTILINE))


def parse_translations(index: str, language: str) -> dict[str, Description]:
    """Reads a `Translation-<language>` index into descriptions by `Description-md5`."""
    descriptions = {}
    for stanza in map(fields, unicodedata.normalize("NFC", index).split("\n\n")):
        body = stanza.get(f"Description-{language}")
        if body is None or "Description-md5" not in stanza:
            continue
        synopsis, _, long = body.partition("\n")
        paragraphs = re.split(r"^ \.\s*$", long, flags=re.MULTILINE)
        descriptions[stanza["Description-md5"]] = Description(
            stanza["Package"],
            " ".join(synopsis.split()),
            tuple(stripped for p in paragraphs if (stripped := p.strip("\n").rstrip())),
        )
    return descriptions


def source_archive(sources: str, package: str) -> tuple[str, str]:
    """The path and SHA256 of the tar file with a package's messages, from a `Sources` index."""
    stanza = re.search(rf"^Package: {re.escape(package)}\n(?:.+\n)*", sources, re.MULTILINE)
    values = fields(stanza[0] if stanza else "")
    kind = r"\.orig-translations" if package == "libreoffice" else r"(?:\.orig|_[^-]*)"
    for line in values.get("Checksums-Sha256", "").splitlines()[1:]:
        checksum, _, name = line.split()
        if re.search(rf"{kind}\.tar\.\w+$", name):
            return f"{values['Directory']}/{name}", checksum
    raise ValueError(f"the newest release lists no tar file of a source package {package!r}")


def segments(paragraph: str) -> list[str]:
    """Splits a paragraph before each bullet and joins the lines of each piece with spaces."""
    pieces: list[list[str]] = [[]]
    for line in paragraph.splitlines():
        if _BULLET.match(line):
            pieces.append([])
            line = _BULLET.sub("", line)
        pieces[-1].append(line)
    return [text for piece in pieces if (text := " ".join(" ".join(piece).split()))]


def align(english: Description, german: Description) -> list[tuple[str, str]]:
    """Pairs the segments of two descriptions if their structure agrees, else none."""
    if len(english.paragraphs) != len(german.paragraphs):
        return []
    pairs: list[tuple[str, str]] = []
    for source, translation in zip(english.paragraphs, german.paragraphs, strict=True):
        left, right = segments(source), segments(translation)
        if len(left) == len(right):
            pairs.extend(zip(left, right, strict=True))
    return pairs


def sentence_pairs(english: str, german: str) -> list[tuple[str, str]]:
    """Splits a pair into sentence pairs; empty unless both sides have equally many, two or more."""
    left, right = _SENTENCE_END.split(english), _SENTENCE_END.split(german)
    if len(left) != len(right) or len(left) < 2:
        return []
    return list(zip(left, right, strict=True))


def is_prose(text: str, min_words: int) -> bool:
    """Whether a text has a suitable length and is mostly letters."""
    letters = sum(c.isalpha() or c.isspace() for c in _URL.sub("", text))
    return min_words <= len(words(text)) <= 120 and letters >= 0.75 * len(text)


def is_translation(english: str, german: str) -> bool:
    """Whether a pair is fit for a translation corpus."""
    known, right = set(words(english)), words(german)
    return (
        is_prose(english, min_words=3)
        and "<trans>" not in german  # This marks text that is not translated yet.
        # Names and loan words are shared by any good pair; two thirds of all words are not.
        and len(right) > 0
        and sum(word in known for word in right) <= 0.66 * len(right)
        # German runs about 1.15 times as long; the constant spares short texts.
        and 0.6 * len(english) - 10 <= len(german) <= 1.9 * len(english) + 15
    )


def parse_po(text: str) -> Iterator[tuple[str, str]]:
    """Yields (msgid, msgstr) of a gettext file, except fuzzy, plural and obsolete entries."""
    for block in re.split(r"\n\s*\n", text.replace("\r", "")):
        if re.search(r"^#,.*\bfuzzy\b", block, re.MULTILINE):
            continue
        fields: dict[str, str] = {}
        field = ""
        for line in block.splitlines():
            match = re.match(r'(msg\w+(?:\[\d\])?)?\s*"(.*)"\s*$', line)
            if match:
                field = match.group(1) or field
                fields[field] = fields.get(field, "") + match.group(2)
        if fields.get("msgid") and fields.get("msgstr"):
            yield unescape(fields["msgid"]), unescape(fields["msgstr"])


def unescape(text: str) -> str:
    """Resolves the backslashes of a gettext file."""
    escapes = {"n": "\n", "t": " ", '"': '"', "\\": "\\"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], " "), text)


def plain_text(markup: str) -> str:
    """Turns a gettext message into plain prose; empty if placeholders or code remain."""
    if "bookmark_value" in markup:  # index entries run into each other
        return ""
    text = markup.replace("%PRODUCTNAME", "LibreOffice").replace("\N{SOFT HYPHEN}", "")
    text = _CASE.sub("", text).replace("E<lt>", "‹").replace("E<gt>", "›")
    while (inner := _POD.sub(r"\1", text)) != text:
        text = inner
    text = _TAG.sub("", text)
    for entity, character in _ENTITIES.items():
        text = text.replace(entity, character)
    text = _ASCIIDOC.sub(r"\2", _ASCIIDOC.sub(r"\2", text))
    text = re.sub(r"~(?=\w)|(?<!\w)[_&](?=\w)", "", text).replace("‹", "<").replace("›", ">")
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return "" if _NOT_PROSE.search(text) else text


def words(text: str) -> list[str]:
    """Lower-case words without punctuation; digits become 0, so versions do not matter."""
    return re.findall(r"\w+", re.sub(r"\d", "0", text.lower()))


def shingles(text: str) -> set[str]:
    """The word 5-grams of a text; a shorter text is its own single shingle."""
    tokens = words(text)
    count = max(1, len(tokens) - SHINGLE + 1)
    return {" ".join(tokens[i : i + SHINGLE]) for i in range(count)}


def stem(package: str) -> str:
    """A package's name without version numbers and the affixes that mark its siblings."""
    name = package
    while (shorter := _STEM_NOISE.sub("", name)) != name and len(shorter) > 2:
        name = shorter
    return name


def families(descriptions: Collection[Description]) -> dict[str, str]:
    """Groups packages whose descriptions share a name stem or a long paragraph, transitively.

    The family of each package is named by the smallest name in it. Families too large to hold out
    fairly are named with a leading `*` and belong to training.
    """
    keys: dict[str, list[str]] = collections.defaultdict(list)
    for package, _, paragraphs in descriptions:
        keys[f"stem {stem(package)}"].append(package)
        for tokens in map(words, paragraphs):
            if len(tokens) >= 8:
                keys[" ".join(tokens)].append(package)

    parent = {d.package: d.package for d in descriptions}

    def find(package: str) -> str:
        while parent[package] != package:
            parent[package] = package = parent[parent[package]]
        return package

    for key, members in keys.items():
        if len(members) <= BOILERPLATE_PARAGRAPH or key.startswith("stem "):
            for other in members[1:]:
                parent[find(other)] = find(members[0])

    groups: dict[str, list[str]] = collections.defaultdict(list)
    for d in descriptions:
        groups[find(d.package)].append(d.package)
    names = {}
    for members in groups.values():
        name = min(members)
        if len(members) > LARGEST_HELD_OUT_FAMILY:
            name = f"*{name}"
        names |= dict.fromkeys(members, name)
    return names


def split_of(family: str) -> str:
    """The split of a family, the same in every task: a pure function of its name."""
    if family.startswith("*"):
        return "train"
    share = int(hashlib.sha256(family.encode()).hexdigest()[:8], 16) / 2**32
    if share < HELD_OUT_SHARE:
        return "test"
    return "validation" if share < 2 * HELD_OUT_SHARE else "train"


def shuffled(examples: Iterable[Example]) -> list[Example]:
    """Orders examples by a hash of their texts only, so that any prefix is a fair sample."""
    return sorted(
        examples,
        key=lambda e: (hashlib.sha256(f"{e.inputs}\0{e.targets}".encode()).digest(), e.package),
    )


def novel(examples: Iterable[Example], share: float) -> list[Example]:
    """Shuffles, and drops near-duplicates of earlier examples.

    At least `share` of the shingles of a kept example's input were not seen before.
    """
    kept: list[Example] = []
    seen: set[str] = set()
    for example in shuffled(examples):
        grams = shingles(example.inputs)
        if len(grams - seen) >= share * len(grams):
            kept.append(example)
        seen |= grams
    return kept


def unique(examples: Iterable[Example]) -> list[Example]:
    """The first example of each input, compared by its words; in another order."""
    return [*{example.key: example for example in reversed([*examples])}.values()]


def resembling(held_out: Sequence[Example]) -> Callable[[str], list[int]]:
    """Builds the leak detector of a held-out set.

    The function maps a training text to the indices of the held-out examples with which it shares
    more than `RESEMBLANCE` of the shingles of the shorter of the two (so a single sentence of a
    held-out paragraph counts, and so does a long text that contains one).
    """
    index: dict[str, list[int]] = collections.defaultdict(list)
    sizes = []
    for i, example in enumerate(held_out):
        grams = shingles(example.inputs)
        sizes.append(len(grams))
        for gram in grams:
            index[gram].append(i)

    def matches(text: str) -> list[int]:
        grams = shingles(text)
        shared = collections.Counter(i for gram in grams for i in index.get(gram, ()))
        return [i for i, n in shared.items() if n > RESEMBLANCE * min(len(grams), sizes[i])]

    return matches


def separate(
    train: Sequence[Example], held_out: Sequence[Example]
) -> tuple[list[Example], list[Example]]:
    """Removes resembling examples from the training side, boilerplate from the held-out side."""
    matches_of = resembling(held_out)
    matches = [matches_of(example.inputs) for example in train]
    counts = collections.Counter(i for matched in matches for i in matched)
    boilerplate = {i for i, n in counts.items() if n > BOILERPLATE_EXAMPLE}
    return (
        [e for e, matched in zip(train, matches, strict=True) if boilerplate.issuperset(matched)],
        [e for i, e in enumerate(held_out) if i not in boilerplate],
    )


def translation_examples(english: Descriptions, german: Descriptions) -> Iterator[Example]:
    """Aligned and cleaned segments of every description that has a translation."""
    for md5 in sorted(english.keys() & german.keys()):
        for source, translation in align(english[md5], german[md5]):
            if is_translation(source, translation):
                yield Example(source, translation, english[md5].package)


def synopsis_examples(english: Descriptions) -> Iterator[Example]:
    """Long description to synopsis, for every description with at least ten words."""
    for _, (package, synopsis, paragraphs) in sorted(english.items()):
        text = " ".join(" ".join(segments(p)) for p in paragraphs)
        if len(words(text)) >= 10 and len(words(synopsis)) >= 2:
            yield Example(text, synopsis, package)


def finer_pairs(
    train: list[Example], english: Descriptions, german: Descriptions
) -> Iterator[Example]:
    """Sentence pairs of the training paragraphs, and pairs of synopses of training packages."""
    for example in train:
        for source, translation in sentence_pairs(example.inputs, example.targets):
            yield Example(source, translation, example.package)
    in_training = {example.package for example in train}
    for md5 in sorted(english.keys() & german.keys()):
        if english[md5].package in in_training:
            yield Example(english[md5].synopsis, german[md5].synopsis, english[md5].package)


def extra_examples(package: str, archive: pathlib.Path) -> Iterator[Example]:
    """The messages of every German .po file in a source package's tar file, as plain prose."""
    with tarfile.open(archive, "r|*") as tar:
        for member in tar:
            file = tar.extractfile(member) if _GERMAN_PO.search(member.name) else None
            for message in parse_po(file.read().decode(errors="replace")) if file else ():
                source, translation = map(plain_text, message)
                yield Example(source, translation, package)


def unlabelled_examples(
    english: Descriptions, family: dict[str, str]
) -> tuple[list[Example], list[Example]]:
    """Inputs without targets, on which a draft is distilled from the target's outputs.

    They are paragraphs that nobody has translated, and descriptions without their last or first
    paragraph, only from training families: the target was not trained on these inputs, so it treats
    them like a user's.
    """
    to_translate, to_summarize = [], []
    for _, (package, _, paragraphs) in sorted(english.items()):
        if split_of(family[package]) != "train":
            continue
        pieces = [segments(p) for p in paragraphs]
        texts = [text for piece in pieces for text in piece if is_prose(text, min_words=5)]
        to_translate += [Example(text, "", package) for text in texts]
        joined = [" ".join(piece) for piece in pieces]
        for cut in (" ".join(joined[:-1]), " ".join(joined[1:])):
            if len(words(cut)) >= 10:
                to_summarize.append(Example(cut, "", package))
    return to_translate, to_summarize


def split(
    examples: Iterable[Example], novelty: float, family: dict[str, str]
) -> dict[str, list[Example]]:
    """Removes near-duplicates and splits by family."""
    splits: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    for example in novel(examples, novelty):
        splits[split_of(family[example.package])].append(example)
    return splits


def build(mirror: Mirror) -> dict[str, dict[str, list[Example]]]:
    """Both tasks' examples by split."""
    english, german = Descriptions(), Descriptions()
    for release in RELEASES:
        english |= parse_translations(mirror.index(release, "main/i18n/Translation-en"), "en")
        german |= parse_translations(mirror.index(release, "main/i18n/Translation-de"), "de")
    sources = mirror.index(RELEASES[-1], "main/source/Sources")
    archives = {package: mirror.fetch(*source_archive(sources, package)) for package in SOURCES}
    family = families(english.values())

    ende = split(translation_examples(english, german), 0.3, family)
    synopsis = split(synopsis_examples(english), 0.1, family)
    tasks = {"debian_ende": ende, "debian_synopsis": synopsis}
    for name in HELD_OUT:
        ende[name] = [e for e in ende[name] if len(e.inputs.split()) in HELD_OUT_WORDS]

    # Separate across tasks too, because one model learns both: it must not have met a test text in
    # the other task.
    for task in tasks.values():
        task["validation"], task["test"] = separate(task["validation"], task["test"])
        for name in HELD_OUT:
            for other in tasks.values():
                other["train"], task[name] = separate(other["train"], task[name])
            task[name] = task[name][:HELD_OUT_SIZE]

    # Every text that joins the training side later must pass the same check.
    matches = resembling([e for task in tasks.values() for name in HELD_OUT for e in task[name]])

    def admitted(candidates: Iterable[Example]) -> list[Example]:
        return [e for e in candidates if not matches(e.inputs)]

    def translations(candidates: Iterable[Example]) -> Iterator[Example]:
        return (e for e in candidates if is_translation(e.inputs, e.targets))

    finer = admitted(translations(finer_pairs(ende["train"], english, german)))
    ende["train"] = unique(ende["train"] + finer)
    extra = (e for package, tar in archives.items() for e in extra_examples(package, tar))
    ende["extra"] = admitted(novel(unique(translations(extra)), 0.3))

    for task, examples in zip(tasks.values(), unlabelled_examples(english, family), strict=True):
        known = {e.key for examples in task.values() for e in examples}
        fresh = [e for e in novel(examples, 0.5) if e.key not in known]
        task["unlabelled"] = admitted(fresh[:UNLABELLED_SIZE])
    return tasks


def train_vocabulary(texts: Collection[str], path: pathlib.Path) -> None:
    """Writes a unigram model with T5's ids (pad 0, eos 1, unk 2) that can encode any text."""
    # Sorting by hash makes a sample independent of the alphabet and of the order of the corpora.
    sample = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())[:200_000]
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=file,
            vocab_size=VOCABULARY_SIZE,
            model_type="unigram",
            byte_fallback=True,
            character_coverage=0.99995,
            normalization_rule_name="nmt_nfkc",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,  # The pieces' scores are sums, whose order must not vary.
            max_sentence_length=16384,
            minloglevel=1,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the Debian corpora and their vocabulary.")
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--mirror", required=True, help="see https://www.debian.org/mirror/list")
    arguments = parser.parse_args()
    try:
        tasks = build(Mirror(arguments.mirror, arguments.output_dir / "downloads"))
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    learned = set[str]()
    for task, splits in tasks.items():
        for name, examples in splits.items():
            path = arguments.output_dir / task / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(e._asdict(), ensure_ascii=False) for e in shuffled(examples))
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            print(f"{path}: {len(examples)} examples", flush=True)
            if name in ("train", "extra"):
                learned |= {text for e in examples for text in (e.inputs, e.targets)}
    vocabulary = arguments.output_dir / "debian.model"
    train_vocabulary(learned, vocabulary)
    print(f"{vocabulary}: SHA-256 {hashlib.sha256(vocabulary.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
