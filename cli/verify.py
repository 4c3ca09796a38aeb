"""`minilm-cache verify`: is a cache what was committed?"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs, print_table
from minilm_cache.cli.options import CacheArgument, DeviceOption, JsonOption, chosen_cache, quiet_libraries
from minilm_cache.errors import InvalidConfigError, VerificationError

if TYPE_CHECKING:
    from minilm_cache.dump.recheck import Recheck
    from minilm_cache.store.verify import Verdict

_STATES = {True: "complete", False: "unfinished: committed shards only", None: "unknown"}
_LISTED = 10
"""Shards named in a message, at most."""


def verify(  # noqa: PLR0913 - one parameter for each option
    cache: CacheArgument = None,
    full: Annotated[
        bool, typer.Option("--full", help="Read and hash every byte, decode every array")
    ] = False,
    teacher: Annotated[
        str | None, typer.Option(help="Run this teacher again on a sample, and compare, as well")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="With --teacher: the text that the cache should be of")
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column with the text, in records [default: text]")
    ] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Compare a cache with what was committed; exit code 3 where it differs.

    Example: minilm-cache verify --full notes.cache
    """
    from minilm_cache.cache import row_checker  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.store.verify import default_threads  # noqa: PLC0415 - likewise
    from minilm_cache.store.verify import verify as run_verify  # noqa: PLC0415 - likewise

    if teacher is None and (corpus is not None or text_column is not None or device is not None):
        raise InvalidConfigError("--corpus, --text-column and --device go with --teacher, and only with it.")
    with TerminalProgress().shown() as progress:
        path = chosen_cache(cache, progress)
        verdict = run_verify(
            path, full=full, num_threads=default_threads(), progress=progress, check_rows=row_checker
        )
        again = None
        if teacher is not None and not verdict.damage:
            again = _run_again(path, teacher, corpus, text_column, device, progress)
    if json:
        print_json(
            {
                "cache": str(path),
                "full": full,
                **asdict(verdict),
                "shards_to_redo": _shards_to_redo(verdict, again),
                "teacher": None if again is None else asdict(again),
            }
        )
    else:
        print_pairs(
            {
                "cache": path,
                "state": _STATES[verdict.complete],
                "looked at": f"{verdict.num_files:,} files, {verdict.num_bytes:,} bytes"
                + ("" if full else " (sizes only; --full reads every byte)"),
                "damaged": f"{len(verdict.damage)} files",
            }
        )
    if again is not None:
        _judge(path, again, table=not json)
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
            f"{path} is damaged in {len(verdict.damage)} of its files, the first is {first.path}{where}: "
            f"{first.reason.rstrip('.')}. {_remedy(verdict, _shards_to_redo(verdict, again))}"
        )


def _shards_to_redo(verdict: "Verdict", again: "Recheck | None") -> list[int]:
    damaged = {damage.shard for damage in verdict.damage if damage.shard is not None}
    return sorted(damaged.union(again.damaged_shards if again is not None else ()))


def _remedy(verdict: "Verdict", shards: list[int]) -> str:
    if verdict.complete is None:
        return "Fetch the cache again, or dump it anew into another folder: what it is cannot be guessed."
    listed = ", ".join(map(str, shards[:_LISTED])) + (", ..." if len(shards) > _LISTED else "")
    redo = f", which writes shard {listed} again" if shards else ""
    return f"Repeat the `minilm-cache dump` command of this cache{redo}, or fetch the cache again."


def _run_again(
    path: Path,
    teacher: str,
    corpus: str | None,
    text_column: str | None,
    device: str | None,
    progress: TerminalProgress,
) -> "Recheck":
    from minilm_cache.cache import open_cache  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.dump.corpus import load_corpus  # noqa: PLC0415 - likewise
    from minilm_cache.dump.recheck import recheck  # noqa: PLC0415 - likewise

    quiet_libraries()
    text = None if corpus is None else load_corpus(corpus, text_column)
    return recheck(open_cache(path), teacher, text, device, progress)


def _judge(path: Path, again: "Recheck", *, table: bool) -> None:
    """Print how far the teacher is from the cache, and raise VerificationError where that is too far."""
    if table:
        rows = [
            [
                str(one.shard),
                str(one.layer),
                str(one.relation),
                f"{one.kl:.4f}",
                f"{one.floor:.4f}",
                f"{one.measured:.4f}",
            ]
            for one in again.differences
        ]
        columns = ["shard", "layer", "relation", "KL(stored, teacher)", "noise floor", "as dumped"]
        print_table("The teacher, run again on a sample (nats)", columns, rows)
        if again.states:
            print_table(
                "Beside relations",
                ["state", "relative error, or bias of labels", "allowed"],
                [[one.path, f"{one.found:.4f}", f"{one.allowed:.4f}"] for one in again.states],
            )
    if again.identity:
        raise VerificationError(
            f"{path} was not made with this: {', '.join(again.identity)} differ. Give the teacher and the "
            "corpus that `minilm-cache info` shows, or do not trust this cache."
        )
    if again.wrong_states:
        raise VerificationError(
            f"{path} holds other states than this teacher says: {', '.join(again.wrong_states)}. Do not "
            "trust this cache: dump it anew, or fetch it from who made it."
        )
    if again.damaged_shards:
        shards = ", ".join(map(str, again.damaged_shards))
        raise VerificationError(
            f"{path} holds other relations or tokens than this teacher and corpus give, in shard {shards} of "
            "the sample. Do not trust this cache: dump it anew, or fetch it from who made it."
        )
