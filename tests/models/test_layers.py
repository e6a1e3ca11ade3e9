"""The parts of a model that have a definition of their own."""

import numpy as np
import pytest

from speculative.models import SIZES
from speculative.models.layers import relative_buckets
from tests import numpy_models

DISTANCES = np.arange(-300, 301)
PLAIN = SIZES["t5_1_1_base"]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 64), (64, 256)])
def test_relative_buckets_are_the_definition(
    bidirectional: bool, buckets: int, furthest: int
) -> None:
    config = PLAIN.replace(num_buckets=buckets, max_distance=furthest)
    got = relative_buckets(DISTANCES, bidirectional, config)
    want = [numpy_models.bucket(int(d), bidirectional, buckets, furthest) for d in DISTANCES]
    np.testing.assert_array_equal(got, want)


def test_relative_buckets_of_t5_by_hand() -> None:
    """32 buckets up to distance 128, as T5 has them: the first distance of each bucket."""
    first = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    behind = relative_buckets(-np.array(first), True, PLAIN)
    np.testing.assert_array_equal(behind, np.arange(16))
    np.testing.assert_array_equal(
        relative_buckets(np.array(first[1:]), True, PLAIN), np.arange(17, 32)
    )
    np.testing.assert_array_equal(
        relative_buckets(-np.array(first[1:]) + 1, True, PLAIN), np.arange(15)
    )
    first = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    np.testing.assert_array_equal(relative_buckets(-np.array(first), False, PLAIN), np.arange(32))
    np.testing.assert_array_equal(
        relative_buckets(-np.array(first[1:]) + 1, False, PLAIN), np.arange(31)
    )
    assert (relative_buckets(np.arange(300), False, PLAIN) == 0).all()
