"""Builds the Debian corpora: package descriptions, English to German and long to one line.

    python scripts/build_debian_corpus.py --mirror=MIRROR --output_dir=data --extra_po

MIRROR is the address of a Debian mirror's `debian` folder (https://www.debian.org/mirror/list).
Fetches 24 MB, with `--extra_po` 330 MB more, and takes a minute after that. Equal downloads give
equal corpora; the downloads are kept and used again while their checksums hold.

Writes `debian_ende/` and `debian_synopsis/`, each with `train.jsonl`, `validation.jsonl` and
`test.jsonl` (one object a line: inputs, targets, package), and `corpus.json` with the checksum of
every file used and the count after every step. `--extra_po` adds `debian_ende/extra.jsonl`:
German translations of manuals and programs, for training only.
"""

import argparse
import bz2
import collections
import functools
import hashlib
import http.client
import json
import lzma
import pathlib
import re
import tarfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import debian_corpus as corpus
from absl import logging
from debian_corpus import Description, Example

RELEASES = "bullseye,bookworm,trixie"
SOURCES = (
    "libreoffice,util-linux,shadow,dpkg,apt,installation-guide,git,man-db,adduser,devscripts,"
    "sssd,evolution,gedit,evince,coreutils,gnucash"
)
HELD_OUT_SIZE = 1000
HELD_OUT_WORDS = range(5, 51)  # of an English paragraph; longer ones would mostly test truncation
HELD_OUT = ("validation", "test")
UNLABELLED_SIZE = 40_000  # a task
_GERMAN_PO = re.compile(r"(?:^|[/._-])de(?:/.*)?\.po$")


class Mirror:
    """Files of a Debian mirror, each checked against a checksum and kept in a folder."""

    def __init__(self, url: str, cache_dir: pathlib.Path):
        self.url = url.rstrip("/")
        self.cache_dir = cache_dir
        self.checksums: dict[str, str] = {}
        self._release = functools.cache(self._fetch_release)

    def _read(self, path: str) -> bytes:
        logging.info("fetching %s", path)
        request = f"{self.url}/{urllib.parse.quote(path)}"
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise OSError(
                f"{self.url}/{path} could not be read ({error}); choose another --mirror, "
                "or other --releases or --po_packages"
            ) from error

    def _fetch_release(self, release: str) -> dict[str, str]:
        return corpus.parse_release(self._read(f"dists/{release}/Release").decode())

    def fetch(self, path: str, sha256: str) -> pathlib.Path:
        """Returns the local copy of a file, downloaded unless one with this checksum exists.

        Raises:
            ValueError: if the mirror's file has another checksum.
        """
        local = self.cache_dir / path
        if not (local.exists() and hashlib.sha256(local.read_bytes()).hexdigest() == sha256):
            content = self._read(path)
            actual = hashlib.sha256(content).hexdigest()
            if actual != sha256:
                raise ValueError(
                    f"{self.url}/{path} has SHA256 {actual}, but its index lists {sha256}: "
                    "the mirror may be mid-update, so run again later or choose another --mirror"
                )
            local.parent.mkdir(parents=True, exist_ok=True)
            partial = local.with_name(f"{local.name}.partial")
            partial.write_bytes(content)
            partial.replace(local)
        self.checksums[path] = sha256
        return local

    def index(self, release: str, name: str) -> str:
        """Reads an index of a release (`main/i18n/Translation-de`), whichever way compressed."""
        listed = self._release(release)
        for suffix, decompress in ((".xz", lzma.decompress), (".bz2", bz2.decompress)):
            if checksum := listed.get(f"{name}{suffix}"):
                local = self.fetch(f"dists/{release}/{name}{suffix}", checksum)
                return decompress(local.read_bytes()).decode()
        raise ValueError(f"release {release} of {self.url} lists no {name}.xz or .bz2")


def read_descriptions(mirror: Mirror, releases: Iterable[str], language: str):
    """The descriptions of all releases by MD5; where they differ, the last release's counts."""
    found: dict[str, Description] = {}
    for release in releases:
        text = mirror.index(release, f"main/i18n/Translation-{language}")
        found |= corpus.parse_translations(text, language)
    return found


def translation_examples(
    english: dict[str, Description],
    german: dict[str, Description],
    families: dict[str, str],
    counts: collections.Counter[str],
) -> list[Example]:
    """Aligned and cleaned segments of every description that has a translation."""
    examples = []
    for md5 in sorted(english.keys() & german.keys()):
        counts["descriptions_in_both_languages"] += 1
        pairs = corpus.align(english[md5], german[md5])
        counts["descriptions_not_aligned"] += not pairs
        for source, translation in pairs:
            counts["segments"] += 1
            if fault := corpus.fault(source, translation):
                counts[f"dropped_{fault}"] += 1
            else:
                package = english[md5].package
                examples.append(Example(source, translation, package, families[md5]))
    return examples


def synopsis_examples(
    english: dict[str, Description], families: dict[str, str], counts: collections.Counter[str]
) -> list[Example]:
    """Long description to synopsis, for every description with at least ten words."""
    examples = []
    for md5 in sorted(english):
        package, synopsis, paragraphs = english[md5]
        text = " ".join(" ".join(corpus.segments(p)) for p in paragraphs)
        counts["descriptions"] += 1
        if len(corpus.words(text)) < 10 or len(corpus.words(synopsis)) < 2:
            counts["dropped_short"] += 1
        else:
            examples.append(Example(text, synopsis, package, families[md5]))
    return examples


def split(
    examples: list[Example],
    novelty: float,
    fit: Callable[[Example], bool],
    counts: collections.Counter[str],
) -> dict[str, list[Example]]:
    """Removes near-duplicates and splits by family.

    Args:
        examples: All examples of a task.
        novelty: The share of shingles that a kept example must not repeat.
        fit: Which examples are worth holding out.
        counts: Receives the number after each step.
    """
    examples = list(corpus.novel(corpus.shuffled(examples), novelty))
    counts["after_near_duplicates"] = len(examples)
    splits: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    for example in examples:
        name = corpus.split_of(example.family)
        if name == "train" or fit(example):
            splits[name].append(example)
    for name in splits:
        counts[f"{name}_by_family"] = len(splits[name])
    return splits


def separate_all(tasks: list[dict[str, list[Example]]]) -> None:
    """Separates the splits of all tasks from each other, in place, and cuts them to size.

    Across tasks too, for one model learns both: it must not have met a test text in the other.
    """
    for task in tasks:
        task["validation"], task["test"] = corpus.separate(task["validation"], task["test"])
        for name in HELD_OUT:
            for other in tasks:
                other["train"], task[name] = corpus.separate(other["train"], task[name])
            task[name] = task[name][:HELD_OUT_SIZE]


def finer_pairs(
    train: list[Example], english: dict[str, Description], german: dict[str, Description]
) -> Iterator[Example]:
    """Sentence pairs of the training paragraphs, and pairs of synopses of training families."""
    for example in train:
        for source, translation in corpus.sentence_pairs(example.inputs, example.targets):
            if not corpus.fault(source, translation):
                yield example._replace(inputs=source, targets=translation)
    in_training = {example.package: example.family for example in train}
    for md5 in sorted(english.keys() & german.keys()):
        package, source, _ = english[md5]
        translation = german[md5].synopsis
        if package in in_training and not corpus.fault(source, translation):
            yield Example(source, translation, package, in_training[package])


def german_messages(archive: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the translated messages of every German .po file in a tar file, read in memory."""
    with tarfile.open(archive, "r|*") as tar:
        for member in tar:
            file = tar.extractfile(member) if _GERMAN_PO.search(member.name) else None
            if file is not None:
                yield from corpus.parse_po(file.read().decode(errors="replace"))


def extra_examples(
    archives: dict[str, pathlib.Path], counts: collections.Counter[str]
) -> Iterator[Example]:
    """Translated messages of source packages as plain prose."""
    for package, archive in archives.items():
        logging.info("reading the German messages of %s", package)
        for message, translation in german_messages(archive):
            counts[f"messages_{package}"] += 1
            source, target = corpus.plain_text(message), corpus.plain_text(translation)
            if source and target and not corpus.fault(source, target):
                yield Example(source, target, package, f"*{package}")


def unlabelled_examples(
    english: dict[str, Description], families: dict[str, str], labelled: dict[str, list[Example]]
) -> dict[str, list[Example]]:
    """Inputs without targets, on which a draft is distilled from what the target writes.

    Paragraphs that nobody has translated, and descriptions cut to their first or last
    paragraphs, of training families alone: the target was not trained on these inputs, so it
    treats them as it will treat a user's.
    """
    known = {
        task: {" ".join(corpus.words(e.inputs)) for e in examples}
        for task, examples in labelled.items()
    }
    found: dict[str, list[Example]] = {"debian_ende": [], "debian_synopsis": []}
    for md5 in sorted(english):
        package, _, paragraphs = english[md5]
        if corpus.split_of(families[md5]) != "train":
            continue
        pieces = [corpus.segments(p) for p in paragraphs]
        for text in (text for piece in pieces for text in piece):
            if corpus.fault(text, text.swapcase(), min_words=5) in (None, "untranslated"):
                found["debian_ende"].append(Example(text, "", package, families[md5]))
        texts = [" ".join(piece) for piece in pieces]
        for cut in (texts[:-1], texts[1:]) if len(texts) > 1 else ():
            if len(corpus.words(" ".join(cut))) >= 10:
                found["debian_synopsis"].append(Example(" ".join(cut), "", package, families[md5]))
    return {
        task: [
            e
            for e in corpus.novel(corpus.shuffled(examples), 0.5)
            if " ".join(corpus.words(e.inputs)) not in known[task]
        ][:UNLABELLED_SIZE]
        for task, examples in found.items()
    }


def write_jsonl(path: pathlib.Path, examples: Iterable[Example]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            record = {key: getattr(example, key) for key in ("inputs", "targets", "package")}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def report(
    splits: dict[str, list[Example]], resembling: Callable[[str], list[int]]
) -> dict[str, dict[str, int]]:
    """Examples and words of each split, and how many training texts resemble a held-out one."""
    found: dict[str, dict[str, int]] = {}
    for name, examples in splits.items():
        found[name] = {
            "examples": len(examples),
            "input_words": sum(len(e.inputs.split()) for e in examples),
            "target_words": sum(len(e.targets.split()) for e in examples),
        }
        if name in ("train", "extra", "unlabelled"):
            found[name]["resembling_held_out"] = sum(bool(resembling(e.inputs)) for e in examples)
    return found


def build(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds both corpora and returns what `corpus.json` records."""
    mirror = Mirror(arguments.mirror, arguments.cache_dir)
    releases = arguments.releases.split(",")
    english = read_descriptions(mirror, releases, "en")
    german = read_descriptions(mirror, releases, "de")
    archives: dict[str, pathlib.Path] = {}
    if arguments.extra_po:
        sources = mirror.index(releases[-1], "main/source/Sources")
        for package in arguments.po_packages.split(","):
            archives[package] = mirror.fetch(*corpus.source_archive(sources, package))
    families = corpus.families(english)
    logging.info("%d descriptions in %d families", len(english), len(set(families.values())))

    counts = {task: collections.Counter[str]() for task in ("debian_ende", "debian_synopsis")}
    ende, synopsis = counts["debian_ende"], counts["debian_synopsis"]
    translation = split(
        translation_examples(english, german, families, ende),
        novelty=0.3,
        fit=lambda e: len(e.inputs.split()) in HELD_OUT_WORDS,
        counts=ende,
    )
    summaries = split(
        synopsis_examples(english, families, synopsis),
        novelty=0.1,
        fit=lambda _: True,
        counts=synopsis,
    )

    tasks = {"debian_ende": translation, "debian_synopsis": summaries}
    separate_all(list(tasks.values()))

    # Every text that joins the training side later passes the same gate as those before it.
    resembling = corpus.resembling(
        [e for t in tasks.values() for name in HELD_OUT for e in t[name]]
    )

    def admitted(candidates: Iterable[Example]) -> list[Example]:
        return [e for e in candidates if not resembling(e.inputs)]

    translation["train"] = unique(
        translation["train"] + admitted(finer_pairs(translation["train"], english, german))
    )
    if archives:
        extra = unique(extra_examples(archives, ende))
        ende["extra_unique"] = len(extra)
        extra = admitted(corpus.novel(corpus.shuffled(extra), 0.3))
        translation["extra"] = extra
        for package, count in collections.Counter(e.package for e in extra).items():
            ende[f"extra_{package}"] = count

    labelled = {
        task: [e for examples in splits.values() for e in examples]
        for task, splits in tasks.items()
    }
    for task, examples in unlabelled_examples(english, families, labelled).items():
        tasks[task]["unlabelled"] = admitted(examples)

    for task, splits in tasks.items():
        for name, examples in splits.items():
            write_jsonl(arguments.output_dir / task / f"{name}.jsonl", corpus.shuffled(examples))
    return {
        "releases": releases,
        "sha256": dict(sorted(mirror.checksums.items())),
        "families": len(set(families.values())),
        "counts": {task: dict(found) for task, found in counts.items()},
        "splits": {task: report(splits, resembling) for task, splits in tasks.items()},
    }


def unique(examples: Iterable[Example]) -> list[Example]:
    """Keeps the first example of each input, compared by its words."""
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(" ".join(corpus.words(example.inputs)), example)
    return list(first.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the Debian corpora.")
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--cache_dir", type=pathlib.Path, help="default: OUTPUT_DIR/downloads")
    parser.add_argument("--mirror", required=True, help="see https://www.debian.org/mirror/list")
    parser.add_argument("--releases", default=RELEASES, help=f"oldest first; default: {RELEASES}")
    parser.add_argument("--extra_po", action="store_true", help="also read gettext translations")
    parser.add_argument("--po_packages", default=SOURCES, help=f"default: {SOURCES}")
    arguments = parser.parse_args()
    arguments.cache_dir = arguments.cache_dir or arguments.output_dir / "downloads"
    logging.set_verbosity(logging.INFO)
    start = time.monotonic()
    try:
        summary = build(arguments)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    text = json.dumps(summary, indent=2)
    (arguments.output_dir / "corpus.json").write_text(text + "\n")
    print(text)
    logging.info("done in %.0f s", time.monotonic() - start)


if __name__ == "__main__":
    main()
