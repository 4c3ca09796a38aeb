"""`minilm-cache verify`: is a cache what was committed?"""

import os
from dataclasses import asdict
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs, print_table
from minilm_cache.cli.options import CacheArgument, JsonOption, chosen_cache
from minilm_cache.errors import VerificationError


def verify(
    cache: CacheArgument = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read and hash every byte, decode every array")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare a cache with what was committed; exit code 3 where it differs.

    Example: minilm-cache verify --full notes.cache
    """
    from minilm_cache.cache import row_checker  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.store.verify import verify as run_verify  # noqa: PLC0415 - likewise

    with TerminalProgress().shown() as progress:
        path = chosen_cache(cache, progress)
        verdict = run_verify(
            path, full=full, num_threads=os.cpu_count() or 1, progress=progress, check_rows=row_checker
        )
    if json:
        print_json({"cache": str(path), "full": full, **asdict(verdict)})
    else:
        print_pairs(
            {
                "cache": path,
                "looked at": f"{verdict.num_files:,} files, {verdict.num_bytes:,} bytes"
                + ("" if full else " (sizes only; --full reads every byte)"),
                "damaged": f"{len(verdict.damage)} files",
            }
        )
    if verdict.damage:
        if not json:
            rows = [
                [damage.path, "-" if damage.shard is None else str(damage.shard), damage.reason]
                for damage in verdict.damage
            ]
            print_table("Damage", ["file", "shard", "reason"], rows)
        first = verdict.damage[0]
        where = "" if first.shard is None else f" of shard {first.shard}"
        raise VerificationError(
            f"{path} is damaged in {len(verdict.damage)} files, the first is {first.path}{where}: "
            f"{first.reason}. Repeat the `minilm-cache dump` command of this cache, which writes damaged "
            "shards again, or fetch the cache again."
        )
