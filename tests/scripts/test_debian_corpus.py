"""The corpus functions on small texts, and the whole build from a mirror made in a folder."""

import bz2
import hashlib
import io
import json
import lzma
import pathlib
import random
import sys
import tarfile

import pytest

from scripts import build_debian_corpus as corpus
from scripts.build_debian_corpus import Description, Example

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
    pairs = [("One line.", "Eine Zeile."), ("List:", "Liste:"), ("first", "erstens")]
    assert corpus.align(english, german) == [*pairs, ("second", "zweitens")]
    assert corpus.align(english, german._replace(paragraphs=german.paragraphs[:1])) == []
    joined = german._replace(paragraphs=(" Eine Zeile.", " Liste: erstens, zweitens"))
    assert corpus.align(english, joined) == pairs[:1]


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
    ("english", "german", "fit"),
    [
        ("This package contains the tools.", "Dieses Paket enthält die Werkzeuge.", True),
        ("Main features:", "Hauptmerkmale:", False),
        ("This package contains the tools.", "This package contains the tools.", False),
        ("This package contains the tools.", "<trans>", False),
        ("See https://example.org/a/long/path there", "Siehe dort", False),
        ("cat $1 | tr -d '{}' > /tmp/$$", "lies $1 | tr -d '{}' nach /tmp/$$", False),
        ("This package contains all the tools that you need to build it.", "Kurz.", False),
    ],
)
def test_unfit_pairs(english: str, german: str, fit: bool) -> None:
    assert corpus.is_translation(english, german) == fit


def test_names_ignore_what_does_not_tell_texts_and_packages_apart() -> None:
    assert corpus.shingles("Fast editor, v 1.2!") == corpus.shingles("fast Editor v 3.4")
    assert corpus.shingles("a b c d e f") == {"a b c d e", "b c d e f"}
    assert corpus.shingles("a b") == {"a b"}
    siblings = ["foo", "libfoo-dev", "libfoo2", "python3-foo", "foo-common", "foo-1.2", "foo-doc"]
    assert {corpus.stem(package) for package in siblings} == {"foo"}


LETTERS = str.maketrans("0123456789", "ghijklmnop")


def random_text(generator: random.Random, length: int) -> str:
    return " ".join(f"w{generator.randrange(10**6):x}".translate(LETTERS) for _ in range(length))


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
    found = corpus.families([Description(name, "", p) for name, p in (texts | many).items()])
    assert found["alpha"] == found["beta"] == found["libbeta-dev"] == "alpha"
    assert found["gamma"] == "gamma"
    assert len({found[name] for name in many}) == 60


def test_a_family_too_large_to_hold_out_trains() -> None:
    size = corpus.LARGEST_HELD_OUT_FAMILY + 1
    found = corpus.families([Description("libfoo-dev", "", ())] * size)
    assert found == {"libfoo-dev": "*libfoo-dev"}
    assert corpus.split_of("*libfoo-dev") == "train"


def test_split_shares() -> None:
    splits = [corpus.split_of(f"family{i}") for i in range(10_000)]
    for name in corpus.HELD_OUT:
        assert splits.count(name) / 10_000 == pytest.approx(corpus.HELD_OUT_SHARE, abs=0.006)


def example(text: str) -> Example:
    return Example(text, "", "package")


def test_novel_drops_what_was_seen() -> None:
    text, fresh = (random_text(random.Random(seed), 30) for seed in (1, 2))
    variant = f"{text} and a little more"
    kept = {e.inputs for e in corpus.novel(map(example, [text, variant, fresh, text]), 0.3)}
    assert len(kept) == 2 and fresh in kept


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
        ("cannot open %s", ""),
        ("set $HOME first", ""),
        ("<bookmark_value>tables; rows</bookmark_value>", ""),
        ("calls foo_bar twice", ""),
    ],
)
def test_plain_text(markup: str, plain: str) -> None:
    assert corpus.plain_text(markup) == plain


SOURCES = """Package: apt
Directory: pool/main/a/apt
Checksums-Sha256:
 aa 10 apt_3.0.tar.xz

Package: libreoffice
Directory: pool
Checksums-Sha256:
 bb 10 libreoffice_25.dsc
 cc 10 libreoffice_25.orig.tar.xz
"""
PO = r"""
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\n"

msgctxt "menu"
msgid ""
"Choose the \"name\"\n"
"of *this* file."
msgstr "Wählen Sie den »Namen« B<dieser> Datei."

#, fuzzy, c-format
msgid "It cannot be opened now."
msgstr "Es kann nicht geöffnet werden."

#~ msgid "There are no such folders."
#~ msgstr "Es gibt keine solchen Ordner."

msgid "One more message was found"
msgid_plural "Many more messages were found"
msgstr[0] "Eine weitere Nachricht"
msgstr[1] "Viele weitere Nachrichten"

msgid "Not translated until today"
msgstr ""
"""


@pytest.fixture
def mirror(tmp_path: pathlib.Path) -> pathlib.Path:
    """A release with descriptions of random words, and a source package."""
    generator = random.Random(4)
    texts = {"en": "", "de": ""}
    for i in range(300):
        name = random_text(generator, 1)
        for language in texts:
            lines = [random_text(generator, 14), ".", random_text(generator, 9)]
            body = "\n ".join([random_text(generator, 3), *lines])
            texts[language] += f"Package: {name}\nDescription-md5: {i}\n"
            texts[language] += f"Description-{language}: {body}\n\n"

    def put(name: str, content: bytes) -> str:
        path = tmp_path / "mirror" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return f" {hashlib.sha256(content).hexdigest()} {len(content)} "

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        for language in ("de", "fr"):
            content = (PO if language == "de" else PO.replace("Choose", "Take")).encode()
            member = tarfile.TarInfo(f"po/{language}.po")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    name = "libreoffice_25.orig-translations.tar.xz"
    sources = f"{SOURCES}{put(f'pool/{name}', archive.getvalue())}{name}\n"
    listed = "SHA256:\n"
    for name, content in {
        "main/i18n/Translation-en.xz": lzma.compress(texts["en"].encode()),
        "main/i18n/Translation-de.bz2": bz2.compress(texts["de"].encode()),
        "main/source/Sources.xz": lzma.compress(sources.encode()),
    }.items():
        listed += f"{put(f'dists/tiny/{name}', content)}{name}\n"
    put("dists/tiny/Release", listed.encode())
    return tmp_path / "mirror"


def build(mirror: pathlib.Path, output: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "RELEASES", ["tiny"])
    monkeypatch.setattr(corpus, "SOURCES", ["libreoffice"])
    monkeypatch.setattr(corpus, "VOCABULARY_SIZE", 400)
    options = [f"--mirror={mirror.as_uri()}", f"--output_dir={output}"]
    monkeypatch.setattr(sys, "argv", ["build_debian_corpus", *options])
    corpus.main()


def test_build_is_complete_separate_and_repeatable(mirror, tmp_path, monkeypatch) -> None:
    written = []
    for name in ("one", "two"):
        build(mirror, tmp_path / name, monkeypatch)
        files = [*(tmp_path / name).glob("debian*/*.jsonl"), tmp_path / name / "debian.model"]
        written.append({str(f.relative_to(tmp_path / name)): f.read_bytes() for f in files})
    assert written[0] == written[1] and len(written[0]) == 10

    def read(file: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in written[0][f"{file}.jsonl"].decode().splitlines()]

    packages: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    counts = {}
    for task in ("debian_ende", "debian_synopsis"):
        records = {split: read(f"{task}/{split}") for split in packages}
        counts[task] = sum(map(len, records.values()))
        for split, found in packages.items():
            found |= {record["package"] for record in records[split]}
        cut = read(f"{task}/unlabelled")
        assert {(record["package"] in packages["train"], record["targets"]) for record in cut} <= {
            (True, "")
        }
    assert not packages["train"] & (packages["validation"] | packages["test"])
    assert not packages["validation"] & packages["test"]
    # Two paragraphs and a synopsis a package; held-out packages give no pair of synopses.
    held_out = len(packages["validation"] | packages["test"])
    assert held_out and counts == {"debian_ende": 900 - held_out, "debian_synopsis": 300}
    [extra] = read("debian_ende/extra")
    assert extra == {
        "inputs": 'Choose the "name" of this file.',
        "targets": "Wählen Sie den »Namen« dieser Datei.",
        "package": "libreoffice",
    }


def test_build_refuses_an_altered_file(mirror, tmp_path, monkeypatch, capsys) -> None:
    altered = mirror / "dists/tiny/main/i18n/Translation-de.bz2"
    altered.write_bytes(altered.read_bytes()[:-1])
    with pytest.raises(SystemExit) as stopped:
        build(mirror, tmp_path / "out", monkeypatch)
    assert stopped.value.code == 2
    assert "Translation-de.bz2 does not have the SHA256" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("Translation-de*"))
