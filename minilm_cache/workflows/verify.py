"""Verifies a cache: its files are what was committed, and its teacher still gives the same relations."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minilm_cache.dump.config import VerifyConfig
from minilm_cache.errors import InvalidConfigError, MiniLMCacheError, VerificationError
from minilm_cache.session import ALONE, Session
from minilm_cache.store.reader import CacheReader, Segment, read_manifest
from minilm_cache.store.urls import is_url
from minilm_cache.store.verify import Verdict, default_threads, verify, verify_url

if TYPE_CHECKING:
    from minilm_cache.dump.recheck import Recheck
    from minilm_cache.models.locate import TeacherSource

_LISTED = 10
"""Most shards that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of the verification of a cache."""

    path: Path | str
    """Folder of the cache, or its URL."""
    verdict: Verdict
    again: "Recheck | None"
    """Differences of the teacher, run again, from the cache. None means that no teacher was run."""

    @property
    def shards_to_redo(self) -> list[int]:
        """Numbers of the shards to dump again, ascending."""
        damaged = {damage.shard for damage in self.verdict.damage if damage.shard is not None}
        return sorted(damaged.union(self.again.damaged_shards if self.again is not None else ()))

    def raise_if_wrong(self) -> None:
        """Raise an error for the first difference or damage, if there is one.

        Raises:
            VerificationError: the cache is damaged, or is not what its teacher and corpus give.
        """
        if self.again is not None:
            _raise_if_different(self.path, self.again)
        if not self.verdict.damage:
            return
        first = self.verdict.damage[0]
        where = "" if first.shard is None else f" of shard {first.shard}"
        raise VerificationError(
            f"{self.path} is damaged in {len(self.verdict.damage)} of its files, the first is "
            f"{first.path}{where}: {first.reason.rstrip('.')}. {self._remedy}".rstrip()
        )

    @property
    def _remedy(self) -> str:
        if isinstance(self.path, str):
            return "Ask its publisher to run `minilm-cache push --full`."
        if self.verdict.complete is None:
            return ""  # the reason says what to do about a manifest
        shards = self.shards_to_redo
        listed = ", ".join(map(str, shards[:_LISTED])) + (", ..." if len(shards) > _LISTED else "")
        redo = f", which writes shard {listed} again" if shards else ""
        return (
            "If it was pulled, the same `minilm-cache pull` mends it. Otherwise repeat its `minilm-cache "
            f"dump` command with `--check full`{redo}."
        )


def verify_cache(
    path: Path | str, config: VerifyConfig | None = None, *, session: Session = ALONE
) -> Verification:
    """Compare a cache with what was committed, and also with its teacher if one is given.

    Args:
        path: folder of the cache, or its URL.
        config: what to compare. None means only the sizes of files.
        session: its home is the folder of what is kept of caches at URLs. Its progress shows the bytes and
            the sequences done.

    Raises:
        InvalidConfigError: a cache at a URL is to be compared with a teacher.
        MiniLMCacheError: the folder holds no cache, or the teacher cannot be run. Damage is not raised: it is
            part of the result.
    """
    config = config or VerifyConfig()
    if is_url(str(path)):
        if config.teacher is not None:
            raise InvalidConfigError(
                "--teacher: a teacher is compared with a cache on this machine. Fetch it first: "
                f"`minilm-cache pull {path}`."
            )
        remote = verify_url(str(path), session.home, full=config.full, session=session)
        return Verification(path=str(path), verdict=remote, again=None)
    path = Path(path)
    teacher = _teacher(path, config)
    verdict = verify(
        path, full=config.full, num_threads=default_threads(), check_rows=_row_checker, session=session
    )
    if teacher is None or verdict.damage:
        return Verification(path=path, verdict=verdict, again=None)
    return Verification(
        path=path, verdict=verdict, again=_again(path, config, teacher=teacher, session=session)
    )


def _row_checker(reader: CacheReader) -> Callable[[Segment], None]:
    from minilm_cache.cache import row_checker  # noqa: PLC0415 - torch takes seconds

    return row_checker(reader)


def _teacher(path: Path, config: VerifyConfig) -> "TeacherSource | None":
    """Find the teacher to run again, of the revision that the cache records. None means no teacher."""
    if config.teacher is None:
        return None
    from minilm_cache.models.locate import MINI, locate_teacher  # noqa: PLC0415 - torch takes seconds

    recorded = None
    with suppress(MiniLMCacheError):  # damage is reported by the checks
        labels = read_manifest(path).labels
        is_of_hub = config.teacher != MINI and not Path(config.teacher).is_dir()
        recorded = labels.revision if is_of_hub and Path(config.teacher).name == labels.teacher else None
    return locate_teacher(config.teacher, config.revision or recorded)


def _again(path: Path, config: VerifyConfig, *, teacher: "TeacherSource", session: Session) -> "Recheck":
    """Return what the teacher of a cache gives, run again, on the text if one is given."""
    from minilm_cache.cache import open_cache  # noqa: PLC0415 - torch takes seconds
    from minilm_cache.corpus.load import load_corpus  # noqa: PLC0415 - with it
    from minilm_cache.corpus.records import Roles  # noqa: PLC0415 - with it
    from minilm_cache.dump.recheck import recheck  # noqa: PLC0415 - with it
    from minilm_cache.train.card import student_prompts  # noqa: PLC0415 - with it

    cache, text = open_cache(path), None
    if cache.manifest.labels.imported:
        raise InvalidConfigError(
            f"--teacher: {path} was imported, so what it holds was given in a file, and no teacher ran. "
            "Leave --teacher out."
        )
    labels = cache.manifest.labels
    if labels.pair_columns is not None and config.text_column is not None:
        raise InvalidConfigError(f"--text-column: {path} holds pairs of {labels.pair_columns}. Leave it out.")
    if config.corpus is not None:
        documents, roles = labels.documents or config.documents, None
        is_recorded = Path(config.corpus).resolve().name == labels.corpus  # else its columns may be others
        if labels.role_column is not None:
            roles = Roles(labels.role_column, student_prompts(cache.reader).by_name)
        text = load_corpus(
            config.corpus,
            config.text_column or (labels.text_column if is_recorded else None),
            documents,
            home=session.home,
            roles=roles,
            pair_columns=labels.pair_columns,
        )
        text = text.with_prompt(cache.manifest.identity.packing.prompt)
    return recheck(cache, teacher, corpus=text, device=config.device, session=session)


def _raise_if_different(path: Path | str, again: "Recheck") -> None:
    """Raise VerificationError if teacher or corpus are others, or give other relations, states or tokens."""
    if again.identity:
        raise VerificationError(
            f"{path} was not made from this teacher and text: they differ in {', '.join(again.identity)}. "
            "Give the ones that `minilm-cache info` shows, or do not trust this cache."
        )
    if again.wrong_states:
        raise VerificationError(
            f"{path} holds other states than this teacher gives: {', '.join(again.wrong_states)}. Do not "
            "trust this cache: dump it again, or fetch it from its author."
        )
    if again.damaged_shards:
        shards = ", ".join(map(str, again.damaged_shards))
        raise VerificationError(
            f"{path} holds other relations or tokens than this teacher and corpus give, in shard {shards} of "
            "the sample. Do not trust this cache: dump it again, or fetch it from its author."
        )
