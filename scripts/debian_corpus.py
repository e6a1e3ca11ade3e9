"""Pure text functions behind the Debian corpora: parse, align, clean, group, split, de-duplicate.

Debian's archive holds every package description twice under one MD5 sum: as its maintainer
wrote it, and as volunteers translated it. `scripts/build_debian_corpus.py` downloads both and
applies the functions of this module. Nothing here reads a file or a clock, so equal inputs give
equal corpora.
"""

import collections
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

SHINGLE = 5
HELD_OUT_SHARE = 0.04  # of all families, once for validation and once for test
RESEMBLANCE = 0.6
# A text that resembles many others is boilerplate ("This package contains the development
# files."), which says nothing about kinship and would measure nothing in a test set.
BOILERPLATE_PARAGRAPH = 40
BOILERPLATE_EXAMPLE = 10
LARGEST_HELD_OUT_FAMILY = 100

# A source package's German messages lie in its main tar file, unless listed here.
_COMPONENT = {"libreoffice": "orig-translations"}

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
# What is left of gettext entries after this is prose: tags of DocBook and of LibreOffice's help,
# POD's B<...> and E<lt>, AsciiDoc's paired marks, keyboard mnemonics.
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": " ", "&amp;": "&"}
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
# LibreOffice's help words a passage once for each system; the default wording remains.
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


class Example(NamedTuple):
    """One training or test example; `family` decides its split."""

    inputs: str
    targets: str
    package: str
    family: str


def parse_release(text: str) -> dict[str, str]:
    """Maps each path below a release's folder to its SHA256, from that release's `Release`."""
    section = re.search(r"^SHA256:\n((?: .*\n?)+)", text, re.MULTILINE)
    lines = section.group(1).splitlines() if section else []
    return {path: checksum for checksum, _, path in (line.split() for line in lines)}


def parse_translations(text: str, language: str) -> dict[str, Description]:
    """Reads a `Translation-<language>` file into descriptions by `Description-md5`."""
    found = {}
    for stanza in text.split("\n\n"):
        fields = dict(
            re.findall(r"^([\w-]+): ?(.*(?:\n .*)*)", unicodedata.normalize("NFC", stanza), re.M)
        )
        body = fields.get(f"Description-{language}")
        if body is None or "Description-md5" not in fields:
            continue
        synopsis, _, long = body.partition("\n")
        paragraphs = re.split(r"^ \.\s*$", long, flags=re.MULTILINE)
        found[fields["Description-md5"]] = Description(
            fields["Package"],
            " ".join(synopsis.split()),
            tuple(stripped for p in paragraphs if (stripped := p.strip("\n").rstrip())),
        )
    return found


def segments(paragraph: str) -> list[str]:
    """Splits a paragraph before each bullet and joins the lines of every piece by one space."""
    pieces: list[list[str]] = [[]]
    for line in paragraph.splitlines():
        if _BULLET.match(line):
            pieces.append([])
            line = _BULLET.sub("", line)
        pieces[-1].append(line)
    return [text for piece in pieces if (text := " ".join(" ".join(piece).split()))]


def align(english: Description, german: Description) -> list[tuple[str, str]]:
    """Pairs the segments of two descriptions where their structure agrees, else nothing."""
    if len(english.paragraphs) != len(german.paragraphs):
        return []
    pairs: list[tuple[str, str]] = []
    for source, translation in zip(english.paragraphs, german.paragraphs, strict=True):
        left, right = segments(source), segments(translation)
        if len(left) == len(right):
            pairs.extend(zip(left, right, strict=True))
    return pairs


def sentence_pairs(english: str, german: str) -> list[tuple[str, str]]:
    """Splits a pair into sentence pairs; empty unless both sides have the same number above one."""
    left, right = _SENTENCE_END.split(english), _SENTENCE_END.split(german)
    if len(left) != len(right) or len(left) < 2:
        return []
    return list(zip(left, right, strict=True))


def fault(english: str, german: str, min_words: int = 3, max_words: int = 120) -> str | None:
    """Names the reason why a pair is unfit for a translation corpus, None for a good pair."""
    left, right = words(english), words(german)
    if "<trans>" in german:
        return "untranslated"
    if not min_words <= len(left) <= max_words or not right:
        return "length"
    letters = sum(c.isalpha() or c.isspace() for c in _URL.sub("", english))
    if letters < 0.75 * len(english):
        return "not_prose"
    # Names and loan words are shared by any good pair; two thirds of all words are not.
    known = set(left)
    if sum(word in known for word in right) > 0.66 * len(right):
        return "untranslated"
    # German runs about 1.15 times as long; the constant spares short texts.
    if not 0.6 * len(english) - 10 <= len(german) <= 1.9 * len(english) + 15:
        return "length_ratio"
    return None


def words(text: str) -> list[str]:
    """Lower-case words, punctuation dropped, digits all alike (so versions do not tell apart)."""
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


def families(descriptions: Mapping[str, Description]) -> dict[str, str]:
    """Groups descriptions that share a name stem or a long paragraph, transitively.

    Args:
        descriptions: English descriptions by MD5.

    Returns:
        The family of each MD5; a family is named by the smallest package name in it. Families too
        large to hold out fairly are named with a leading `*` and belong to training.
    """
    keys: dict[str, list[str]] = collections.defaultdict(list)
    for md5, description in descriptions.items():
        keys[f"stem {stem(description.package)}"].append(md5)
        for paragraph in description.paragraphs:
            tokens = words(paragraph)
            if len(tokens) >= 8:
                keys[" ".join(tokens)].append(md5)

    parent = {md5: md5 for md5 in descriptions}

    def find(md5: str) -> str:
        while parent[md5] != md5:
            parent[md5] = md5 = parent[parent[md5]]
        return md5

    for key, members in keys.items():
        if len(members) <= BOILERPLATE_PARAGRAPH or key.startswith("stem "):
            for other in members[1:]:
                parent[find(other)] = find(members[0])

    groups: dict[str, list[str]] = collections.defaultdict(list)
    for md5 in descriptions:
        groups[find(md5)].append(md5)
    names = {}
    for members in groups.values():
        name = min(descriptions[md5].package for md5 in members)
        if len(members) > LARGEST_HELD_OUT_FAMILY:
            name = f"*{name}"
        names.update(dict.fromkeys(members, name))
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
    """An order that depends on the texts alone, so that any prefix is a fair sample."""
    return sorted(
        examples,
        key=lambda e: (hashlib.sha256(f"{e.inputs}\0{e.targets}".encode()).digest(), e.package),
    )


def novel(examples: Iterable[Example], share: float) -> Iterator[Example]:
    """Drops an example unless at least `share` of its input's shingles were not seen before."""
    seen: set[str] = set()
    for example in examples:
        grams = shingles(example.inputs)
        if len(grams - seen) >= share * len(grams):
            yield example
        seen |= grams


def resembling(held_out: Sequence[Example]) -> Callable[[str], list[int]]:
    """Builds the leak detector of a held-out set.

    Args:
        held_out: Examples that no training text may resemble.

    Returns:
        A function from a training text to the indices of the held-out examples of which it shares
        more than `RESEMBLANCE` of the shingles of the shorter of the two (so a single sentence of
        a held-out paragraph counts, and so does a long text that contains one).
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
    """Removes whatever resembles across the split: boilerplate from the held-out side, else train.

    Returns:
        The training and the held-out examples that remain; no kept pair resembles.
    """
    detect = resembling(held_out)
    matches = [detect(example.inputs) for example in train]
    counts = collections.Counter(i for found in matches for i in found)
    boilerplate = {i for i, n in counts.items() if n > BOILERPLATE_EXAMPLE}
    return (
        [e for e, found in zip(train, matches, strict=True) if boilerplate.issuperset(found)],
        [e for i, e in enumerate(held_out) if i not in boilerplate],
    )


def source_archive(sources: str, package: str) -> tuple[str, str]:
    """Finds the path and SHA256 of a source package's tar file in a `Sources` index.

    Raises:
        ValueError: if the index has no such package, or the package no such file.
    """
    stanza = re.search(rf"^Package: {re.escape(package)}\n(?:.+\n)*", sources, re.MULTILINE)
    if stanza is None:
        raise ValueError(f"{package!r} is no source package of this release")
    directory = re.search(r"^Directory: (.+)$", stanza[0], re.MULTILINE)
    files = re.search(r"^Checksums-Sha256:\n((?: .*\n)+)", stanza[0], re.MULTILINE)
    component = _COMPONENT.get(package)
    pattern = rf"\.{component}\.tar\.\w+$" if component else r"(?:\.orig|_[^-]*)\.tar\.\w+$"
    for line in files[1].splitlines() if files else ():
        checksum, _, name = line.split()
        if directory and re.search(pattern, name):
            return f"{directory[1]}/{name}", checksum
    raise ValueError(f"source package {package!r} has no tar file that matches {pattern}")


def parse_po(text: str) -> Iterator[tuple[str, str]]:
    """Yields (msgid, msgstr) of a gettext file, but for fuzzy, plural and obsolete entries."""
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
            yield _unescape(fields["msgid"]), _unescape(fields["msgstr"])


def _unescape(text: str) -> str:
    escapes = {"n": "\n", "t": " ", '"': '"', "\\": "\\"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match.group(1), " "), text)


def plain_text(markup: str) -> str | None:
    """Turns a gettext message into plain prose, or None where placeholders or code remain."""
    if "bookmark_value" in markup:  # index entries run into each other
        return None
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
    return None if _NOT_PROSE.search(text) else text
