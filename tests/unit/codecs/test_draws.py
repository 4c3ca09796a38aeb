"""Seeded draws are numpy's own, whatever was drawn before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minilm_cache.codecs.sampling import SeededDraws

COUNTERS = st.lists(st.integers(0, 2**44), min_size=4, max_size=4)


@given(seed=st.integers(0, 2**63 - 1), counters=st.lists(COUNTERS, max_size=4), size=st.integers(0, 40))
def test_numbers_of_a_counter_are_those_of_a_new_generator(
    seed: int, counters: list[list[int]], size: int
) -> None:
    draws = SeededDraws(seed)
    for counter in counters:
        numbers = np.empty((size, 3), np.float32)
        draws.fill(numbers, counter)
        plain = np.random.Generator(np.random.Philox(key=seed, counter=counter))

        np.testing.assert_array_equal(numbers, plain.random((size, 3), dtype=np.float32))
