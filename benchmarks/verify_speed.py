"""Measure bytes per second of `verify --full` over those of `sha256sum` on the same files, in turns.

python -m benchmarks.verify_speed
"""

import subprocess
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.report import write_result
from minilm_cache.cache import row_checker
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.session import ALONE, Session
from minilm_cache.store.verify import default_threads, verify

CODECS = {
    "topk": DumpConfig(teacher="mini", codec="topk", shard_tokens=2**16),
    "vectors": DumpConfig(teacher="mini", codec="vectors", max_kl=0.015, shard_tokens=2**16),
    "dense": DumpConfig(teacher="mini", codec="dense", max_tokens=2**16, shard_tokens=2**13),
}
TURNS = 5


def turns(path: Path) -> dict[str, float]:
    """Return the median seconds of each way to read every byte of a cache."""
    files = [str(file) for file in path.rglob("*") if file.is_file()]
    times: dict[str, list[float]] = {"sha256sum": [], "verify --full": []}
    for _ in range(TURNS + 1):
        started = time.perf_counter()
        subprocess.run(["sha256sum", *files], check=True, stdout=subprocess.DEVNULL)  # noqa: S607
        times["sha256sum"].append(time.perf_counter() - started)
        started = time.perf_counter()
        threads = default_threads()
        verdict = verify(path, full=True, num_threads=threads, check_rows=row_checker, session=ALONE)
        times["verify --full"].append(time.perf_counter() - started)
        assert not verdict.damage
    return {name: median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Dump with every codec, time both, and write the result."""
    results = {}
    for name, config in CODECS.items():
        with TemporaryDirectory() as folder:
            path = dump_cache(config, out=Path(folder) / "cache", session=Session(Path(folder))).path
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            seconds = turns(path)
            results[name] = {
                "bytes": size,
                "megabytes_per_s": {way: round(size / value / 1e6) for way, value in seconds.items()},
                "over_sha256sum": round(seconds["sha256sum"] / seconds["verify --full"], 2),
            }
    write_result("verify_speed", {"codecs": results})


if __name__ == "__main__":
    main()
