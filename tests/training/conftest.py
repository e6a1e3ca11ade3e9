"""A run that is resumed compiles again what it had compiled; here that is most of the time."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    jax.config.update(names[0], str(tmp_path_factory.mktemp("compiled")))
    jax.config.update(names[1], 0.1)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
