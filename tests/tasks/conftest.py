import pathlib
import warnings
from typing import Any

import pytest

from speculative import checkpoints, tasks

# Two examples of each dataset of TFDS, with all the columns it has; all splits hold the same.
ROWS: dict[str, Any] = {
    "wmt_t2t_ende_v003": {"en": ["That is good.", "Go"], "de": ["Das ist gut.", "Los, Übung"]},
    "cnn_dailymail_v002": {
        "article": ["A man – bit\na dog . Twice.", "Rain"],
        "highlights": ["Man bites dog .\nTwice .", "It rains ."],
        "id": ["7", "8"],
        "publisher": ["cnn", "dm"],
    },
    "lm1b": {"text": ["The boat sank .", "Prices rose ."]},
}


@pytest.fixture(scope="session")
def seqio():
    """The package; imported here, as it takes seconds, and not by all who collect the tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow and its companions have their own affairs.
        return pytest.importorskip("seqio", exc_type=ImportError)


@pytest.fixture
def stored(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Has TFDS hold `ROWS`, and a vocabulary stand in for T5's."""
    tfds = pytest.importorskip("tensorflow_datasets", exc_type=ImportError)
    import tensorflow as tf

    monkeypatch.setenv("SPECULATIVE_T5_VOCABULARY", str(checkpoints.ASSETS / "debian.model"))
    loaders = []
    for task, rows in ROWS.items():
        loader = tasks.get_task(task).source.tfds_dataset  # type: ignore[attr-defined]
        name, version = loader.name.split(":")
        name, _, config = name.partition("/")
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            config=config or None,
            version=version,
            data_dir=tmp_path,
            split_datasets={
                split: tf.data.Dataset.from_tensor_slices(rows)
                for split in tasks.get_task(task).splits
            },
            features=tfds.features.FeaturesDict({key: tfds.features.Text() for key in rows}),
        )
        loader.override_data_dir(str(tmp_path))
        loaders.append(loader)
    yield
    for loader in loaders:
        loader.override_data_dir(None)
