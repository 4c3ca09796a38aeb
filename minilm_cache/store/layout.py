"""Where everything lies below a cache's root, and how sequences fall into shards. Pure: no I/O."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import CacheCorruptError
from minilm_cache.storage_schema.arrays import array_specs
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import CacheManifest, Calibration, Labels, ShardRange

MANIFEST: Final = "manifest.json"
CARD: Final = "README.md"
COMMITS: Final = "commits"
"""Folder of the commit records."""
SEAL_LOCK: Final = "locks/seal.lock"
CREATE_LOCK: Final = "locks/create.lock"
MAX_SHARD_BYTES: Final = 2**32
"""Decoded; readers take whole shards into memory."""
_GOOD_SHARD_BYTES: Final = 2**28
_MAX_WRITTEN_BYTES: Final = 2**31


def cache_name(labels: Labels, identity: CacheIdentity) -> str:
    """Return the name of a cache's folder: words for people, a hash for the rest."""
    words = (label.replace(":", "-").replace("/", "-") for label in (labels.teacher, labels.corpus))
    return "-".join([*words, identity.codec.name, identity.fingerprint()[:12]])


def commit_path(shard: int) -> str:
    """Path of a shard's commit record."""
    return f"{COMMITS}/{shard:05d}.json"


def sequences_path(shard: int) -> str:
    """Path of a shard's sequence table."""
    return f"sequences/part-{shard:05d}.parquet"


def lock_path(shard: int) -> str:
    """Path of the lock that a shard's writer holds."""
    return f"locks/{shard:05d}.lock"


def shard_files(manifest: CacheManifest, shard: int) -> tuple[str, ...]:
    """Return the files of a shard, exactly those that its commit record must list."""
    arrays = tuple(spec.shard_path(shard) for spec in array_specs(manifest.identity, manifest.calibration))
    return (*arrays, sequences_path(shard))


def split_into_shards(lengths: npt.NDArray[np.int64], shard_tokens: int) -> tuple[ShardRange, ...]:
    """Fill shards with whole sequences, in order.

    Args:
        lengths: tokens of each sequence, `(sequences,)`; none longer than `shard_tokens`.
        shard_tokens: rows that a shard has room for.

    Returns:
        Ranges that cover every sequence once.
    """
    ends = np.cumsum(lengths)
    ranges = []
    first, taken = 0, 0
    while first < len(lengths):
        last = int(np.searchsorted(ends, taken + shard_tokens, side="right"))
        num_tokens = int(ends[last - 1]) - taken
        ranges.append(ShardRange(first_sequence=first, num_sequences=last - first, num_tokens=num_tokens))
        first, taken = last, taken + num_tokens
    return tuple(ranges)


def shard_of(shards: Sequence[ShardRange], sequence: int) -> int:
    """Return the number of the shard that holds a sequence."""
    firsts = np.asarray([shard.first_sequence for shard in shards])
    return int(np.searchsorted(firsts, sequence, side="right")) - 1


def shard_bytes(identity: CacheIdentity, calibration: Calibration | None, shard_tokens: int) -> int:
    """Return what a shard takes in memory when it is decoded, bytes."""
    return shard_tokens * sum(spec.row_bytes for spec in array_specs(identity, calibration))


def default_shard_tokens(identity: CacheIdentity, calibration: Calibration | None) -> int:
    """Return rows per shard: 2**18, or fewer where a layer of a shard would decode to more than 256 MiB.

    A student reads one layer, a writer holds all of them: together they stay below 2 GiB.
    """
    tokens = 2**18
    least = 2 * identity.packing.max_length
    most = min(_GOOD_SHARD_BYTES * len(identity.layers), _MAX_WRITTEN_BYTES)
    while tokens >= least and shard_bytes(identity, calibration, tokens) > most:
        tokens //= 2
    return tokens


def below(root: Path, path: str) -> Path:
    """Join a path of the format to the root.

    Raises:
        CacheCorruptError: a part of it is a symbolic link, which may lead out of the cache.
    """
    file = root
    for part in path.split("/"):
        file = file / part
        if file.is_symlink():
            raise CacheCorruptError(
                f"{file} is a symbolic link, which no cache has. Put the file itself there, or fetch the "
                "cache again."
            )
    return file
