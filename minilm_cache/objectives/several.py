"""Vectors of several teachers: other caches over the same texts, whose vectors students learn together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float16
from rich.filesize import decimal
from torch import Tensor

from minilm_cache.cache import Cache, naming, open_cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.device import CPU, free_bytes
from minilm_cache.settings import DEFAULT_LOCAL_BYTES
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.storage_schema.states import POOLED, SignalName

_BYTES = 2
"""Bytes of a number of the vectors that are kept in memory, float16."""
_NUM_COMPARED = 2048
"""Texts whose cosines with each other say how far a teacher's cosines are spread."""
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherTeacher:
    """A cache of another teacher over the same texts."""

    cache: Cache
    sequences: npt.NDArray[np.int64]
    """Number of its sequence of the same text, for each sequence of the first cache."""

    @property
    def width(self) -> int:
        """Dimensions of its vectors."""
        return pooled_width(self.cache.manifest)

    @property
    def vectors(self) -> Float16[Tensor, "sequences width"]:
        """Its vectors of the first cache's sequences, of length 1."""
        found = torch.empty((len(self.cache), self.width), dtype=torch.float16)
        first = 0
        for rows in stored_vectors(self.cache):
            found[first : first + len(rows)] = F.normalize(rows, dim=-1)
            first += len(rows)
        return found[torch.from_numpy(self.sequences)]


@dataclass(frozen=True, kw_only=True)
class OtherTeachers:
    """Caches of other teachers over the same texts as a first cache."""

    signal: ClassVar[SignalName] = POOLED
    """What is joined."""
    first: Cache
    teachers: tuple[_OtherTeacher, ...]

    @property
    def width(self) -> int:
        """Dimensions of the vectors of all of them, side by side."""
        return sum(teacher.width for teacher in self.teachers)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the caches."""
        return tuple(teacher.cache.manifest.fingerprint for teacher in self.teachers)

    @cached_property
    def _vectors(self) -> Float16[Tensor, "sequences width"]:
        return torch.cat([teacher.vectors for teacher in self.teachers], -1)

    @cached_property
    def shares(self) -> Float[Tensor, " teachers"]:
        """The share of each teacher's cosines in those of the joined vectors; the first cache's comes first.

        A teacher whose vectors crowd together has cosines that differ little, and would count for little, so
        shares are inverse to the standard deviations of cosines. Their sum is 1.
        """
        parts = [first_vectors(self.first, _NUM_COMPARED)]
        others = self._vectors[: len(parts[0])].float()
        parts += others.split([each.width for each in self.teachers], -1)
        inverse = 1 / torch.tensor([cosine_spread(part) for part in parts]).clamp(min=_LEAST_SPREAD)
        return inverse / inverse.sum()

    def of(self, sequences: npt.NDArray[np.int64]) -> Float16[Tensor, "batch width"]:
        """Return the vectors of some sequences of the first cache, each of length 1, side by side."""
        return self._vectors[torch.from_numpy(sequences)]

    def joined(
        self, own: Float[Tensor, "batch own_width"], others: Float16[Tensor, "batch width"]
    ) -> Float[Tensor, "batch joined_width"]:
        """Return vectors of length 1 whose cosines are the weighted means of all teachers' (`shares`).

        Args:
            own: vectors of the first cache's teacher.
            others: vectors of the others, as `of` returns them.
        """
        parts = [F.normalize(own.float(), dim=-1)]
        parts += others.float().split([teacher.width for teacher in self.teachers], -1)
        roots = self.shares.sqrt().tolist()
        return torch.cat([part * root for part, root in zip(parts, roots, strict=True)], -1)


def pooled_width(manifest: CacheManifest) -> int:
    """Return the dimensions of the vectors of a cache that holds some."""
    pooled = manifest.identity.pooled
    assert pooled is not None
    return pooled.width


def stored_vectors(cache: Cache) -> Iterator[Float[Tensor, "sequences width"]]:
    """Yield the teacher's vectors of all sequences of a cache, in order, segment by segment.

    Raises:
        CacheCorruptError: a shard is damaged.
    """
    codec = cache.signals_codec
    assert codec is not None
    paths, first = codec.paths((POOLED,)), 0
    while first < len(cache):
        segment, _ = next(cache.reader.sequences(range(first, first + 1), paths))
        rows = {path: torch.from_numpy(segment.rows[path]) for path in paths}
        lengths = torch.from_numpy(segment.lengths)
        with naming(cache.reader):
            codec.check(rows, lengths)
        by_sequence = {path: values[:, None] for path, values in rows.items()}
        yield codec.decode(by_sequence, (POOLED,), lengths=lengths).values[POOLED]
        first += len(segment.lengths)


def first_vectors(cache: Cache, most: int) -> Float[Tensor, "texts width"]:
    """Return the teacher's vectors of the first training sequences of a cache, `most` or all.

    Raises:
        CacheCorruptError: its first shards are damaged.
    """
    wanted, found = min(most, cache.manifest.num_train), list[Tensor]()
    for rows in stored_vectors(cache):
        found.append(rows)
        if sum(map(len, found)) >= wanted:
            break
    return torch.cat(found)[:wanted]


def cosine_spread(vectors: Float[Tensor, "texts width"]) -> float:
    """Return the standard deviation of the cosines of different vectors; 0 for fewer than three vectors."""
    unit = F.normalize(vectors.float(), dim=-1)
    cosines = (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)]
    return float(cosines.std()) if len(cosines) > 2 else 0.0  # noqa: PLR2004 - each pair is there twice


def check_also(places: Sequence[str], *, home: Path | None) -> None:
    """Check caches of other teachers by themselves, before anything is dumped or trained.

    Args:
        places: their folders or URLs.
        home: folder for local copies of caches at URLs. None means MINILM_CACHE_HOME.

    Raises:
        InvalidConfigError: one has no vectors of whole texts.
        MiniLMCacheError: one cannot be opened.
    """
    for place in places:
        _refuse_no_vectors(open_cache(place, home=home), place)


def other_teachers(
    cache: Cache, places: Sequence[str], *, home: Path | None = None, local_bytes: int = DEFAULT_LOCAL_BYTES
) -> OtherTeachers | None:
    """Open the caches of other teachers. None means that there are none.

    Args:
        cache: the first cache, which gives the sequences.
        places: folders or URLs of the others.
        home: folder for local copies of caches at URLs. None means MINILM_CACHE_HOME.
        local_bytes: greatest total size of the shard files that are kept of a URL, bytes.

    Raises:
        InvalidConfigError: one holds other texts, lacks some of them, has no vectors of whole texts, is the
            first cache or comes twice; or all of their vectors are too large for memory.
        MiniLMCacheError: one cannot be opened.
    """
    if not places:
        return None
    _refuse_no_vectors(cache, str(cache.reader.root))
    documents, seen = documents_of(cache), {cache.manifest.fingerprint}
    teachers = []
    for place in places:
        other = open_cache(place, home=home, local_bytes=local_bytes)
        fingerprint = other.manifest.fingerprint
        if fingerprint in seen:
            raise InvalidConfigError(f"--also {place}: this cache is given twice. Leave it out.")
        seen.add(fingerprint)
        _refuse_other_text(cache, other, place)
        teachers.append(_OtherTeacher(cache=other, sequences=_places(documents, other, place)))
    found = OtherTeachers(first=cache, teachers=tuple(teachers))
    size = _BYTES * found.width * (len(cache) + max(len(teacher.cache) for teacher in teachers))
    free = free_bytes(CPU)
    if free is not None and size > free:
        raise InvalidConfigError(
            f"--also: the vectors of {len(cache):,} texts take {decimal(size)} of memory, and "
            f"{decimal(free)} are free. Train on a machine with more, or from caches of fewer texts."
        )
    return found


def documents_of(cache: Cache) -> npt.NDArray[np.int64]:
    """Return the number in the corpus of each sequence's text, `(sequences,)`; each sequence is a text."""
    tables = [cache.reader.table(shard)["document"].to_numpy() for shard in range(len(cache.reader.ranges))]
    return np.concatenate(tables).astype(np.int64)


def _refuse_no_vectors(cache: Cache, place: str) -> None:
    """Raise InvalidConfigError for a cache without a vector of each text."""
    identity = cache.manifest.identity
    if identity.pooled is None or identity.packing.mode != "records":
        raise InvalidConfigError(
            f"--also needs caches with a vector of each single text, and {place} is none. Dump it with --for "
            "embedding, without --pair-columns."
        )


def _refuse_other_text(cache: Cache, other: Cache, place: str) -> None:
    """Raise InvalidConfigError for a cache over other texts."""
    names = [each.manifest.labels.corpus for each in (cache, other)]
    texts = [each.manifest.texts_sha256 for each in (cache, other)]
    if texts[0] != texts[1]:
        remedy = f"Dump it with --corpus {names[0]}"
        if names[0] == names[1]:
            remedy = "Dump it again from the same file, with the same --documents and --text-column"
        raise InvalidConfigError(
            f"--also {place} is over other texts: {names[1]} (sha256 {texts[1][:12]}) and not {names[0]} "
            f"(sha256 {texts[0][:12]}). {remedy}."
        )


def _places(documents: npt.NDArray[np.int64], other: Cache, place: str) -> npt.NDArray[np.int64]:
    """Return the number of the other cache's sequence for each text.

    Raises:
        InvalidConfigError: it lacks some of them.
    """
    _refuse_no_vectors(other, place)
    theirs = documents_of(other)
    order = np.argsort(theirs)
    found = np.searchsorted(theirs, documents, sorter=order).clip(max=len(theirs) - 1)
    places: npt.NDArray[np.int64] = order[found]
    missing = int((theirs[places] != documents).sum())
    if missing:
        raise InvalidConfigError(
            f"--also {place} lacks {missing:,} of the {len(documents):,} texts. Dump it with a larger "
            "--max-tokens, or without."
        )
    return places
