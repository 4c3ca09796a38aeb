"""How far a cache or a run is, in words that chains and studies share."""

from pathlib import Path

from minilm_cache.errors import CacheCorruptError
from minilm_cache.store.index import committed_shards
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.ranges_table import read_ranges
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.folder import is_run
from minilm_cache.train.record import load_record

COMPLETE = "complete"
TO_DO = "to do"


def cache_state(path: Path) -> str:
    """Return `to do`, `unfinished` with the number of shards written, or `complete`.

    Raises:
        MiniLMCacheError: the cache is damaged.
    """
    if not (path / MANIFEST).is_file():
        return TO_DO
    manifest = read_manifest(path)
    if manifest.complete:
        return COMPLETE
    try:
        num_shards = len(read_ranges(path, manifest))
    except CacheCorruptError:  # the dump was killed before it wrote them, and writes them when it resumes
        return "unfinished"
    return f"unfinished: {len(committed_shards(path, num_shards))} of {num_shards} shards"


def run_state(path: Path) -> str:
    """Return `to do`, `unfinished` or `complete`.

    Raises:
        MiniLMCacheError: the run is damaged.
    """
    if not is_run(path):
        return TO_DO
    return COMPLETE if load_record(path).complete else "unfinished"
