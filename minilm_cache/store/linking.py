"""Take files of another cache over into a new one, by hard links where the file system has them."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.storage_schema.manifest import INDEX, RANGES, CacheManifest
from minilm_cache.store.checked import checked_file, read_checked
from minilm_cache.store.durable import link_file, write_file
from minilm_cache.store.fingerprint import xxh3
from minilm_cache.store.layout import below
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.store.reader import CacheReader

_OF_ONE_CACHE = {"zarr.json", RANGES, INDEX}
"""Files that two caches of the same shards need not share."""


def tokens_hash(tokens: npt.NDArray[np.generic]) -> str:
    """Return the hash of a shard's token ids, `(tokens,)`, as its commit record holds it."""
    return xxh3(np.ascontiguousarray(tokens).data.cast("B"))


def refuse_incompatible(parts: CacheReader, manifest: CacheManifest, ranges: ShardRanges) -> None:
    """Raise IdentityMismatchError if a new cache cannot use files of `parts`: other codes or shards."""
    theirs, ours = parts.manifest.files, manifest.files
    differing = [path for path in theirs.keys() & ours.keys() - _OF_ONE_CACHE if theirs[path] != ours[path]]
    if parts.ranges != ranges or differing:
        what = min(differing) if differing else "its shards"
        raise IdentityMismatchError(
            f"{parts.root} cannot be added to here: {what} differs, so the two were begun separately. "
            "Choose another --out, or leave out --add."
        )


def has_layout_of(donor: CacheReader, manifest: CacheManifest, ranges: ShardRanges) -> bool:
    """Return whether another cache stores its tokens in the same layout as a new one."""
    metadata = "tokens/zarr.json"
    return donor.manifest.files.get(metadata) == manifest.files.get(metadata) and donor.ranges == ranges


def refuse_other_tokens(parts: CacheReader, shard: int, tokens: npt.NDArray[np.generic]) -> None:
    """Raise IdentityMismatchError if a shard of `parts` holds other token ids."""
    if parts.records[shard].tokens_xxh3 != tokens_hash(tokens):
        raise IdentityMismatchError(
            f"shard {shard} of {parts.root} holds other tokens than the corpus gives now. Dump without --add."
        )


def take_over(parts: CacheReader, root: Path, *, path: str, shard: int) -> FileDigest:
    """Link or copy a file of a shard of `parts` into the cache at `root`, and return what it is.

    Raises:
        CacheCorruptError: the file is damaged in `parts`.
    """
    expected = parts.records[shard].files[path]
    try:
        link_file(checked_file(parts.root, path, expected), below(root, path))
    except OSError:  # on another file system, or on one without hard links
        write_file(below(root, path), read_checked(parts.root, path, expected))
    return expected


def link_tokens(
    donor: CacheReader, root: Path, *, path: str, shard: int, tokens: npt.NDArray[np.generic]
) -> FileDigest | None:
    """Link the file of another cache if it holds the same tokens, and return what it is.

    Files of a cache are replaced, never changed in place, so neither cache can damage the other.

    Returns:
        Size and hashes of the file. None means that it was not linked.
    """
    if shard not in donor.records or donor.records[shard].tokens_xxh3 != tokens_hash(tokens):
        return None
    expected = donor.records[shard].files[path]
    try:
        link_file(checked_file(donor.root, path, expected), below(root, path))
    except (CacheCorruptError, OSError):  # damaged, on another file system, or no hard links
        return None
    return expected
