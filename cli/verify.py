"""`minilm-cache verify`: compares a cache with what was committed."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from minilm_cache.cli.console import print_json, print_pairs, print_table
from minilm_cache.cli.early import refuse_missing
from minilm_cache.cli.environment import chosen_place, quiet_libraries
from minilm_cache.cli.interrupt import shown_session, stoppable_session
from minilm_cache.cli.options import CacheOrUrlArgument, Given, JsonOption, options
from minilm_cache.dump.config import VerifyConfig
from minilm_cache.settings import validated
from minilm_cache.store.urls import is_url
from minilm_cache.train.folder import is_run
from minilm_cache.wording import counted

if TYPE_CHECKING:
    from minilm_cache.dump.recheck import Recheck
    from minilm_cache.workflows.verify import Verification

_STATES = {True: "complete", False: "unfinished: committed shards only", None: "unknown"}


@options(VerifyConfig)
def verify(given: Given, *, cache: CacheOrUrlArgument = None, json: JsonOption = False) -> None:
    """Check a cache against the sizes and hashes that were recorded; exit code 3 for damage.

    Without --full, only the sizes of files are compared, so that changed bytes do not show.

    Example: minilm-cache verify --full notes.cache
    """
    config = validated(VerifyConfig, given)
    place = Path(cache or "")
    is_there = place.exists() and not is_run(place)  # a cache without its manifest is damaged
    refuse_missing(cache=None if is_there else cache)

    from minilm_cache.workflows.verify import verify_cache  # noqa: PLC0415 - importing it takes seconds

    if config.teacher is not None:
        quiet_libraries()
    # What reads a store may wait for it, so that a stop is asked for; a folder is left at once.
    with stoppable_session() if cache is not None and is_url(cache) else shown_session() as session:
        path = chosen_place(cache, session)
        verification = verify_cache(path, config, session=session)
    if json:
        print_json(
            {
                "cache": path,
                "full": config.full,
                **asdict(verification.verdict),
                "shards_to_redo": verification.shards_to_redo,
                "teacher": verification.again,
            }
        )
    else:
        _print(verification, full=config.full)
    verification.raise_if_wrong()


def _print(verification: "Verification", *, full: bool) -> None:
    verdict = verification.verdict
    print_pairs(
        {
            "cache": verification.path,
            "state": _STATES[verdict.complete],
            "checked": f"{verdict.num_files:,} files, {verdict.num_bytes:,} bytes"
            + ("" if full else " (sizes only; --full reads every byte)"),
            "damaged": counted(len(verdict.damage), "file") + ("" if full else ", by their sizes"),
        }
    )
    if verification.again is not None:
        _print_recheck(verification.again)
    if verdict.damage:
        rows = [
            [damage.path, "-" if damage.shard is None else str(damage.shard), damage.reason]
            for damage in verdict.damage
        ]
        print_table("Damage", ["file", "shard", "reason"], rows)


def _print_recheck(again: "Recheck") -> None:
    """Print the differences of the teacher, run again, from the cache."""
    rows = [
        [
            str(difference.shard),
            str(difference.layer),
            str(difference.relation),
            *(f"{kl:.4f}" for kl in (difference.kl, difference.floor, difference.measured)),
        ]
        for difference in again.differences
    ]
    columns = ["shard", "layer", "relation", "KL(stored, teacher)", "noise floor", "as dumped"]
    print_table("The teacher, run again on a sample (nats)", columns, rows)
    if again.states:
        print_table(
            "Signals",
            ["state", "relative error, or bias of labels", "allowed"],
            [[state.path, f"{state.found:.4f}", f"{state.allowed:.4f}"] for state in again.states],
        )
