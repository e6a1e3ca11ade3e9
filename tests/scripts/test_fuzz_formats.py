"""A few of the variants that scripts/fuzz_formats.py reads; the rest is a command of its own."""

import pathlib

from scripts import fuzz_formats


def test_damaged_files_are_refused_by_name_or_read(tmp_path: pathlib.Path) -> None:
    fuzz_formats.make(tmp_path)
    folders = sorted(tmp_path.iterdir())
    found = [fuzz_formats.outcome(folders[i % len(folders)], 1, i) for i in range(180)]
    assert [each for each in found if each[1] in fuzz_formats.FAULTS] == []
    refused = {name for name, kind, _ in found if kind == "refused"}
    assert refused == {folder.name for folder in folders}
