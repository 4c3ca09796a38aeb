"""Random numbers that depend on a seed, a sequence and what they are for, and on nothing else."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class SeededDraws:
    """Uniform numbers in [0, 1), float32.

    Philox is counter-based, so a sequence's numbers do not depend on the batch that it is encoded in. They
    are those of `numpy.random.Generator(numpy.random.Philox(key=seed, counter=counter)).random`; setting the
    counter of one generator takes half the time of making one for each sequence.
    """

    def __init__(self, seed: int) -> None:
        """Prepare to draw from a seed."""
        self._bits = np.random.Philox(key=seed)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def fill(self, numbers: npt.NDArray[np.float32], counter: Sequence[int]) -> None:
        """Fill a contiguous array with the numbers of a counter: four whole numbers, each at most 2**44."""
        self._state["state"]["counter"][:] = counter
        self._bits.state = self._state
        self._generator.random(dtype=np.float32, out=numbers)
