"""What an installed package holds, and what an archive of its source does."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.gin")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The checkout without its weights, so that nothing is built in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("configs", "speculative"):
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, copy)
    return copy


def built(checkout: pathlib.Path, *command: str) -> None:
    setup = [sys.executable, "-W", "ignore", "setup.py", "-q", *command]
    subprocess.run(setup, cwd=checkout, check=True, capture_output=True)


def test_the_package_holds_the_configurations_and_finds_them(
    checkout: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Each file of configs/ once and as it is, found from a folder that has none."""
    built(checkout, "build_py", "--build-lib", str(tmp_path))
    package = tmp_path / "speculative"
    assert {path.relative_to(package) for path in package.rglob("*.gin")} == CONFIGS
    for file in CONFIGS:
        assert (package / file).read_bytes() == (ROOT / file).read_bytes()
    for file in (ROOT / "speculative" / "backends" / "cpu").glob("*.[ch]*"):
        assert (package / file.relative_to(ROOT / "speculative")).is_file()
    assert (package / "assets" / "debian.model").is_file()
    assert (package / "reporting" / "page.html").is_file()
    code = "from speculative import gin_files as g; print(*g.listed('configs/runs', '*.gin'))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=package / "assets",
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    names = [f"table{name}.gin" for name in ("2", "2_v1_0", "2_v1_0_3b", "3", "5", "modern")]
    folder = package / "configs" / "runs"
    assert found == [str(folder / name) for name in ["base.gin", *names]]


def test_an_archive_of_the_source_holds_them_too(
    checkout: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    built(checkout, "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.iterdir()
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert {path.relative_to(source) for path in (source / "configs").rglob("*.gin")} == CONFIGS


def test_the_repository_stays_small() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout, or no git")
    listed = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in names.split("\0")[:-1]]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 60 * 2**20
