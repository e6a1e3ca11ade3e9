import pathlib

import pytest

from tests import saved


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The folders of a tiny random target and draft."""
    folder = tmp_path_factory.mktemp("pair")
    saved.save(folder / "target", saved.TARGET, 0)
    saved.save(folder / "draft", saved.DRAFT, 1)
    return folder / "target", folder / "draft"
