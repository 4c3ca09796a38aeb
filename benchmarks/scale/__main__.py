"""Measure what grows with the number of shards: sealing, opening, `info`, the first batch, a sequence.

    python -m benchmarks.scale --shards 1000 --shards 10000 --shards 100000
    python -m benchmarks.scale --part remote
    python -m benchmarks.scale --part ranks
    python -m benchmarks.scale --part text --text enwiki/train.txt

Each cache is a small dump of `mini` whose first shard is listed again and again, with a commit record for
each shard, and then sealed. Files exist only for the shards that are read: opening a cache looks at none.
Part `remote` reads a cache from a folder that answers each request after 0.2 seconds; a slow disk under
`--home` shows in it, so take a folder in memory. Part `ranks` dumps with eight ranks, which are threads
here that wait before each shard: one is stopped, one slow, one late. Part `text` tokenises a gigabyte, and
starts a dump of it twice. Part `planning` plans the shards of a simulated corpus of a hundred billion
tokens. Part `study` runs a study on Ray clusters of one worker and of two. Part `large` writes and reads
shards of up to eight million tokens, and says how large shards are by default.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.report import add_to_result, read_result
from benchmarks.scale.caches import make_cache
from benchmarks.scale.large_shards import measure_large_shards, written_and_read
from benchmarks.scale.ranks import measure_ranks
from benchmarks.scale.remote import measure_remote, read_epoch
from benchmarks.scale.shards import measure_shards, opened
from benchmarks.scale.study import measure_study, studied
from benchmarks.scale.text import measure_planning, measure_text, measured_child
from minilm_cache import DumpConfig, dump_cache
from minilm_cache.session import Session
from minilm_cache.store.reader import CacheReader

SHARD_TOKENS = 512
_PARTS = {
    "remote": measure_remote,
    "ranks": measure_ranks,
    "planning": measure_planning,
    "study": measure_study,
    "large": measure_large_shards,
}


def main() -> None:
    """Measure caches of several sizes, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path("scale"))
    parser.add_argument("--shards", type=int, action="append", default=[])
    parser.add_argument("--part", choices=["shards", "text", *_PARTS], default="shards")
    parser.add_argument("--text", type=Path, help="text file that part `text` repeats")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(_measured_child(given)))
    elif given.part == "shards":
        _measure_shards(given.home, given.shards)
    elif given.part == "text":
        add_to_result("scale", text=measure_text(given.home, given.text))
    else:
        add_to_result("scale", **{given.part: _PARTS[given.part](given.home)})


def _measured_child(given: argparse.Namespace) -> dict[str, Any]:
    """Return what this process, which another one has started, measures."""
    if given.part == "shards":
        return opened(given.child)
    if given.part == "large":
        return written_and_read(given.child, given.home, given.length)
    if given.part == "study":
        return studied(given.child, given.length)
    if given.part == "remote":
        return read_epoch(given.child, given.home)
    return measured_child(given.measure, given.child, home=given.home, length=given.length)


def _measure_shards(home: Path, counts: list[int]) -> None:
    """Make and measure caches of so many shards each, and write the results."""
    config = DumpConfig(teacher="mini", codec="topk", max_tokens=20_000, shard_tokens=SHARD_TOKENS)
    source = CacheReader(dump_cache(config, out=home / "dump", session=Session(home)).path)
    rows: list[Any] = read_result("scale").get("shards", [])
    for num_shards in counts:
        path = home / f"{num_shards}"
        row = {"shards": num_shards, **make_cache(source, path, num_shards), **measure_shards(path)}
        shutil.rmtree(path)
        rows = sorted([*(old for old in rows if old["shards"] != num_shards), row], key=lambda r: r["shards"])
        add_to_result("scale", shards=rows)


if __name__ == "__main__":
    main()
