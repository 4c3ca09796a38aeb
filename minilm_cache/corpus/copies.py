"""Which documents are copies of one text, so that copies are held out together."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

_BLOCK: Final = 2**20
"""Documents that are looked at together."""

Ids = npt.NDArray[np.int64]
Keys = npt.NDArray[np.integer]


def with_copies(keys: Sequence[Keys], numbers: Ids) -> tuple[Ids, Ids]:
    """Return some documents with all documents that are their copies, and the number of each one's group.

    Documents that share a key, directly or through others, are in one group. All documents are looked at, but
    only what is returned is held in memory.

    Args:
        keys: hashes of all documents, `(corpus documents,)` for each kind.
        numbers: numbers of the documents, `(documents,)`.

    Returns:
        Numbers of documents, ascending, and of their groups, both `(members,)`.
    """
    members = np.unique(numbers)
    while True:
        shared = [np.unique(key[members]) for key in keys]
        more = np.unique(np.concatenate([members, *map(_holders, keys, shared)]))
        # What was added shares a key; only with two kinds of keys can it share another with others.
        if len(more) == len(members) or len(keys) == 1:
            return more, groups([key[more] for key in keys])
        members = more


def _holders(key: Keys, values: Keys) -> Ids:
    """Return the numbers of all documents whose key is one of some values, which are sorted."""
    holders = []
    for first in range(0, len(key), _BLOCK):
        block = key[first : first + _BLOCK]
        places = np.minimum(np.searchsorted(values, block), len(values) - 1)
        holders.append(first + np.flatnonzero(values[places] == block))
    return np.concatenate(holders)


def groups(keys: Sequence[Keys]) -> Ids:
    """Return group numbers, `(documents,)`: documents that share a key, directly or through others, have one.

    Args:
        keys: hashes of the documents, `(documents,)` for each kind.
    """
    numbered = [np.unique(key, return_inverse=True)[1] for key in keys]
    numbers = numbered[0].astype(np.int64)
    while True:
        before = numbers
        for key_numbers in numbered:
            least = np.full(int(key_numbers.max()) + 1, len(numbers), dtype=np.int64)
            np.minimum.at(least, key_numbers, numbers)
            numbers = least[key_numbers]
        if np.array_equal(numbers, before):
            return numbers
