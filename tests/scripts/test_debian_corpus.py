"""The corpus functions on small texts, and the whole build from a mirror made in a folder."""

import bz2
import hashlib
import importlib.util
import json
import lzma
import pathlib
import random
import sys

import pytest

from scripts import debian_corpus as corpus
from scripts.debian_corpus import Description, Example

TRANSLATIONS = """Package: audacity
Description-md5: 0a
Description-de: Schneller Audio-Editor
 Audacity ist ein Mehrspur-Editor
 für Linux.
 .
 Merkmale:
  * Digitaleffekte
  * Werkzeuge zur
    Spektralanalyse

Package: broken
Description-de: ohne Prüfsumme
 Text.
"""


def test_release_lists_only_sha256() -> None:
    text = "Suite: x\nMD5Sum:\n aa 1 main/a\nSHA256:\n bb 1 main/a\n cc 22 main/b.xz\n"
    assert corpus.parse_release(text) == {"main/a": "bb", "main/b.xz": "cc"}
    assert corpus.parse_release("Suite: x\n") == {}


def test_translations_are_parsed_and_segmented() -> None:
    found = corpus.parse_translations(TRANSLATIONS, "de")
    assert list(found) == ["0a"]
    assert found["0a"].package == "audacity"
    assert found["0a"].synopsis == "Schneller Audio-Editor"
    assert [corpus.segments(p) for p in found["0a"].paragraphs] == [
        ["Audacity ist ein Mehrspur-Editor für Linux."],
        ["Merkmale:", "Digitaleffekte", "Werkzeuge zur Spektralanalyse"],
    ]


def test_alignment_wants_equal_structure() -> None:
    english = Description("p", "s", (" One line.", " List:\n  * first\n  * second"))
    german = Description("p", "s", (" Eine Zeile.", " Liste:\n  - erstens\n  - zweitens"))
    assert corpus.align(english, german) == [
        ("One line.", "Eine Zeile."),
        ("List:", "Liste:"),
        ("first", "erstens"),
        ("second", "zweitens"),
    ]
    shorter = german._replace(paragraphs=german.paragraphs[:1])
    assert corpus.align(english, shorter) == []
    joined = german._replace(paragraphs=(" Eine Zeile.", " Liste: erstens, zweitens"))
    assert corpus.align(english, joined) == [("One line.", "Eine Zeile.")]


def test_sentences_pair_only_in_equal_number() -> None:
    english = "It is fast, e.g. on ARM. It has 3 modes. Try it!"
    german = "Es ist schnell, z.B. auf ARM. Es hat 3 Modi. Probieren Sie es!"
    assert corpus.sentence_pairs(english, german) == [
        ("It is fast, e.g. on ARM.", "Es ist schnell, z.B. auf ARM."),
        ("It has 3 modes.", "Es hat 3 Modi."),
        ("Try it!", "Probieren Sie es!"),
    ]
    assert corpus.sentence_pairs(english, "Es ist schnell. Es hat 3 Modi.") == []
    assert corpus.sentence_pairs("One only.", "Nur einer.") == []


@pytest.mark.parametrize(
    ("english", "german", "fault"),
    [
        ("This package contains the tools.", "Dieses Paket enthält die Werkzeuge.", None),
        ("Main features:", "Hauptmerkmale:", "length"),
        ("This package contains the tools.", "This package contains the tools.", "untranslated"),
        ("This package contains the tools.", "<trans>", "untranslated"),
        ("See https://example.org/a/long/path there", "Siehe dort", "not_prose"),
        ("cat $1 | tr -d '{}' > /tmp/$$", "cat $1 | tr -d '{}' > /tmp/$$", "not_prose"),
        ("This package contains all the tools that you need to build it.", "Kurz.", "length_ratio"),
    ],
)
def test_faults_are_named(english: str, german: str, fault: str | None) -> None:
    assert corpus.fault(english, german) == fault


def test_shingles_ignore_case_punctuation_and_version() -> None:
    assert corpus.shingles("Fast editor, version 1.2!") == corpus.shingles(
        "fast Editor version 3.4"
    )
    assert corpus.shingles("a b c d e f") == {"a b c d e", "b c d e f"}
    assert corpus.shingles("a b") == {"a b"}


@pytest.mark.parametrize(
    "package", ["foo", "libfoo-dev", "libfoo2", "python3-foo", "foo-common", "foo-1.2", "foo-doc"]
)
def test_stem_unites_siblings(package: str) -> None:
    assert corpus.stem(package) == "foo"


def random_text(generator: random.Random, length: int) -> str:
    return " ".join(f"w{generator.randrange(10**6):x}".translate(LETTERS) for _ in range(length))


LETTERS = str.maketrans("0123456789", "ghijklmnop")


def test_families_follow_stems_and_long_paragraphs_but_not_boilerplate() -> None:
    generator = random.Random(0)
    shared, boilerplate = random_text(generator, 12), random_text(generator, 12)
    texts = {
        "alpha": (random_text(generator, 9), shared),
        "beta": (shared.upper() + "!",),
        "libbeta-dev": (random_text(generator, 9),),
        "gamma": (random_text(generator, 9),),
    }
    many = {f"zeta{chr(97 + i // 26)}{chr(97 + i % 26)}x": (boilerplate,) for i in range(60)}
    found = corpus.families(
        {name: Description(name, "", paragraphs) for name, paragraphs in (texts | many).items()}
    )
    assert found["alpha"] == found["beta"] == found["libbeta-dev"] == "alpha"
    assert found["gamma"] == "gamma"
    assert len({found[name] for name in many}) == 60


def test_a_family_too_large_to_hold_out_trains() -> None:
    size = corpus.LARGEST_HELD_OUT_FAMILY + 1
    found = corpus.families({str(i): Description("libfoo-dev", "", ()) for i in range(size)})
    assert set(found.values()) == {"*libfoo-dev"}
    assert corpus.split_of("*libfoo-dev") == "train"


def test_split_shares() -> None:
    splits = [corpus.split_of(f"family{i}") for i in range(10_000)]
    for name in ("validation", "test"):
        assert splits.count(name) / 10_000 == pytest.approx(corpus.HELD_OUT_SHARE, abs=0.006)


def example(text: str) -> Example:
    return Example(text, "", "package", "family")


def test_novel_drops_what_was_seen() -> None:
    text = random_text(random.Random(1), 30)
    variant = f"{text} and a little more"
    fresh = random_text(random.Random(2), 30)
    kept = [e.inputs for e in corpus.novel(map(example, [text, variant, fresh, text]), 0.3)]
    assert kept == [text, fresh]


def resembles(left: str, right: str) -> bool:
    """The definition, by lists of words and without an index."""
    grams = []
    for text in (left, right):
        tokens = text.split()
        spans = range(max(1, len(tokens) - 4))
        grams.append({tuple(tokens[i : i + 5]) for i in spans})
    shared = len(grams[0] & grams[1])
    return shared > 0.6 * min(len(grams[0]), len(grams[1]))


def test_separation_leaves_no_resemblance() -> None:
    generator = random.Random(3)
    # A small pool of clauses, so that many texts share some of their parts.
    clauses = [random_text(generator, generator.randrange(2, 9)) for _ in range(60)]

    def texts(count: int) -> list[Example]:
        pick = (generator.choices(clauses, k=generator.randrange(1, 6)) for _ in range(count))
        return [example(" ".join(chosen)) for chosen in pick]

    train, held_out = texts(300), texts(40)
    before = sum(resembles(t.inputs, h.inputs) for t in train for h in held_out)
    kept_train, kept_held_out = corpus.separate(train, held_out)
    after = sum(resembles(t.inputs, h.inputs) for t in kept_train for h in kept_held_out)
    assert before > 50 and after == 0
    assert len(kept_train) > 100 and len(kept_held_out) > 10
    # Boilerplate leaves the held-out side, so that it need not leave training.
    for h in held_out:
        count = sum(resembles(t.inputs, h.inputs) for t in train)
        assert (h in kept_held_out) == (count <= corpus.BOILERPLATE_EXAMPLE)


def test_po_entries() -> None:
    text = r"""
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\n"

#. comment
msgctxt "menu"
msgid ""
"Say \"hello\"\n"
"to all"
msgstr "Sagen Sie allen »hallo«"

#, fuzzy, c-format
msgid "old"
msgstr "alt"

#~ msgid "gone"
#~ msgstr "weg"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"

msgid "untranslated"
msgstr ""
"""
    assert list(corpus.parse_po(text)) == [('Say "hello"\nto all', "Sagen Sie allen »hallo«")]


@pytest.mark.parametrize(
    ("markup", "plain"),
    [
        ("B<dpkg> reads I<B<the> file> E<lt>xE<gt>", "dpkg reads the file <x>"),
        ("Use *lsblk* with `-f` or _fstab_.", "Use lsblk with -f or fstab."),
        ('<ahelp hid=".">Opens</ahelp> <emph>%PRODUCTNAME</emph>.', "Opens LibreOffice."),
        ("Insert T~able &amp; _Row", "Insert Table & Row"),
        (
            '<switchinline select="sys"><caseinline select="MAC">Command</caseinline>'
            "<defaultinline>Ctrl</defaultinline></switchinline> key",
            "Ctrl key",
        ),
        ("cannot open %s", None),
        ("set $HOME first", None),
        ("<bookmark_value>tables; rows</bookmark_value>", None),
        pytest.param(
            "see &apt-get; for more",
            None,
            marks=pytest.mark.xfail(
                reason="an entity of the document's own loses its ampersand and stays; about 600 "
                "extra pairs are so, and a fix changes the corpus that the shipped pair learned"
            ),
        ),
        ("calls foo_bar twice", None),
    ],
)
def test_plain_text(markup: str, plain: str | None) -> None:
    assert corpus.plain_text(markup) == plain


SOURCES = """Package: apt
Directory: pool/main/a/apt
Checksums-Sha256:
 aa 10 apt_3.0.dsc
 bb 20 apt_3.0.tar.xz

Package: libreoffice
Directory: pool/main/libr/libreoffice
Checksums-Sha256:
 cc 10 libreoffice_25.orig-translations.tar.xz
 dd 20 libreoffice_25.orig.tar.xz

Package: odd
Directory: pool/main/o/odd
Checksums-Sha256:
 ee 10 odd_1.dsc

"""


def test_source_archive() -> None:
    assert corpus.source_archive(SOURCES, "apt") == ("pool/main/a/apt/apt_3.0.tar.xz", "bb")
    assert corpus.source_archive(SOURCES, "libreoffice")[1] == "cc"
    with pytest.raises(ValueError, match="'nope' is no source package"):
        corpus.source_archive(SOURCES, "nope")
    with pytest.raises(ValueError, match="'odd' has no tar file"):
        corpus.source_archive(SOURCES, "odd")


SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "build_debian_corpus.py"


def make_mirror(root: pathlib.Path, descriptions: int) -> str:
    """Writes a release with descriptions of random words; returns its address."""
    generator = random.Random(4)
    texts: dict[str, list[str]] = {"en": [], "de": []}
    for i in range(descriptions):
        name = random_text(generator, 1)
        for language, stanzas in texts.items():
            lines = [random_text(generator, 14), ".", random_text(generator, 9)]
            body = "\n ".join([random_text(generator, 3), *lines])
            stanzas.append(f"Package: {name}\nDescription-md5: {i}\nDescription-{language}: {body}")
    folder = root / "dists" / "tiny"
    (folder / "main" / "i18n").mkdir(parents=True)
    listed = []
    for name, compress in (
        ("Translation-en.xz", lzma.compress),
        ("Translation-de.bz2", bz2.compress),
    ):
        path = folder / "main" / "i18n" / name
        path.write_bytes(compress("\n\n".join(texts[path.stem[-2:]]).encode()))
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
        listed.append(f" {checksum} {path.stat().st_size} main/i18n/{name}")
    (folder / "Release").write_text("\n".join(["SHA256:", *listed, ""]))
    return root.as_uri()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch):
    """Calls the script's main with arguments."""
    monkeypatch.syspath_prepend(SCRIPT.parent)  # As when it is run.
    spec = importlib.util.spec_from_file_location("build_debian_corpus", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["build_debian_corpus", *arguments])
        script.main()

    return call


def test_build_is_complete_separate_and_repeatable(tmp_path: pathlib.Path, build) -> None:
    mirror = make_mirror(tmp_path / "mirror", 300)
    written = []
    for name in ("one", "two"):
        build(f"--mirror={mirror}", "--releases=tiny", f"--output_dir={tmp_path / name}")
        files = sorted((tmp_path / name).rglob("*.json*"))
        written.append({str(f.relative_to(tmp_path / name)): f.read_bytes() for f in files})
    assert written[0] == written[1]

    packages: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    summary = json.loads(written[0]["corpus.json"])
    for task, examples in (("debian_ende", 900), ("debian_synopsis", 300)):
        total = 0
        for split, found in packages.items():
            lines = written[0][f"{task}/{split}.jsonl"].decode().splitlines()
            records = [json.loads(line) for line in lines]
            assert len(records) == summary["splits"][task][split]["examples"] > 0
            found |= {record["package"] for record in records}
            total += len(records)
        # Two paragraphs and a synopsis a package; held-out packages give no synopsis pair.
        assert total == examples - (
            len(packages["validation"] | packages["test"]) if task == "debian_ende" else 0
        )
        assert summary["splits"][task]["train"]["resembling_held_out"] == 0
    assert not packages["train"] & packages["test"]
    assert not packages["train"] & packages["validation"]
    assert not packages["validation"] & packages["test"]


def test_build_refuses_an_altered_file(
    tmp_path: pathlib.Path, build, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = make_mirror(tmp_path / "mirror", 3)
    altered = tmp_path / "mirror/dists/tiny/main/i18n/Translation-de.bz2"
    altered.write_bytes(altered.read_bytes()[:-1])
    with pytest.raises(SystemExit) as stopped:
        build(f"--mirror={mirror}", "--releases=tiny", f"--output_dir={tmp_path / 'out'}")
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "Translation-de.bz2 has SHA256" in message and "run again later" in message
    assert not list((tmp_path / "out").rglob("Translation-de*"))


def test_build_names_a_missing_release(
    tmp_path: pathlib.Path, build, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = make_mirror(tmp_path / "mirror", 3)
    with pytest.raises(SystemExit):
        build(f"--mirror={mirror}", "--releases=nope", f"--output_dir={tmp_path / 'out'}")
    assert "dists/nope/Release could not be read" in capsys.readouterr().err
