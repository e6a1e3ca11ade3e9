"""Layouts of parameters, under all of which a model must compute the same."""

import pytest

from tests.layouts import LAYOUTS, Layout


@pytest.fixture(params=LAYOUTS)
def laid_out(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(params=["as stored", "prepacked"])
def prepacked_or_not(request: pytest.FixtureRequest) -> Layout:
    """For whole texts, which nothing fills up: a TPU's layouts are XLA's there."""
    return LAYOUTS[request.param]
