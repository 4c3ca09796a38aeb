"""A cache as users see it: sequences with their token ids and relations. See `open_cache`."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from operator import index
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS, RelationCodec
from minilm_cache.codecs.build import layer_codec
from minilm_cache.codecs.transform import TransformCode
from minilm_cache.errors import CacheCorruptError, InvalidConfigError
from minilm_cache.relations.scores import RowTargets, WantedRelations, to_dense
from minilm_cache.relations.signals import Signals
from minilm_cache.settings import DEFAULT_LOCAL_BYTES, cache_home, looks_like_url
from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.storage_schema.arrays import all_small_arrays
from minilm_cache.storage_schema.identity import PairTemplate, RelationKind, codec_words
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.layout import refuse_no_cache
from minilm_cache.store.mirror import MirrorReader
from minilm_cache.store.reader import CacheReader, Segment, small_array
from minilm_cache.store.urls import is_url
from minilm_cache.wording import Described, Place

_SEGMENTS_KEPT = 2


class Cache(Described):
    """Sequences of one cache, by number. The last `manifest.num_held_out` are never trained on."""

    def __init__(self, reader: CacheReader) -> None:
        """Wrap the reader of a cache."""
        self.reader = reader
        self._segments: OrderedDict[int, Segment] = OrderedDict()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as what opens the cache anew, so that workers of a DataLoader can have it."""
        return Cache, (self.reader,)

    def __fspath__(self) -> str:
        return self.reader.place

    def describe(self) -> dict[str, object]:
        """Return the properties of the cache, by their labels for people."""
        manifest, measured = self.manifest, self.manifest.measured
        return {
            "cache": self.reader.root,
            "teacher": manifest.labels.teacher,
            "corpus": manifest.labels.corpus,
            "codec": codec_words(manifest.identity.codec),
            "layers": ", ".join(map(str, self.layers)) or "none",
            "tokens": f"{manifest.num_tokens:,}",
            "sequences": f"{manifest.num_sequences:,}, {manifest.num_held_out:,} of them held out",
            "bytes per token": "unknown" if measured is None else f"{measured.bytes_per_token:.1f}",
            "states": "none" if manifest.identity.states is None else manifest.identity.states.in_words,
        }

    @cached_property
    def _codes(self) -> dict[str, TransformCode]:
        with naming(self.reader):
            return read_codes(self.manifest, self.reader.attachment)

    @cached_property
    def codecs(self) -> dict[int, RelationCodec]:
        """Codecs of the relations, by layer of the teacher.

        Raises:
            CacheCorruptError: their arrays are damaged.
        """
        identity, calibration = self.manifest.identity, self.manifest.calibration
        return {
            layer: layer_codec(identity, calibration, layer=layer, codes=self._codes)
            for layer in identity.layers
        }

    @cached_property
    def signals_codec(self) -> SignalsCodec | None:
        """Codec of the states. None means that only relations are stored.

        Raises:
            CacheCorruptError: their arrays are damaged.
        """
        identity = self.manifest.identity
        if identity.states is None:
            return None
        coded = {name: self._codes[name.folder] for name in identity.states.coded}
        return SignalsCodec.of(identity, coded)

    @property
    def manifest(self) -> CacheManifest:
        """The manifest of the cache."""
        return self.reader.manifest

    @property
    def layers(self) -> tuple[int, ...]:
        """The teacher's layers that are stored, counted from 0, ascending."""
        return self.manifest.identity.layers

    @property
    def codec(self) -> RelationCodec | None:
        """Codec of the last stored layer. None means that no relations are stored."""
        return self.codecs[self.layers[-1]] if self.layers else None

    @property
    def is_unbiased(self) -> bool:
        """Whether relations are estimates of the teacher's, and so losses estimates of the true KL."""
        return self.codec is not None and self.codec.is_unbiased

    def __len__(self) -> int:
        """Return the number of sequences, held-out ones included."""
        return self.manifest.num_sequences

    def __iter__(self) -> Iterator["CachedSequence"]:
        """Yield every sequence, in order."""
        return (self[number] for number in range(len(self)))

    @overload
    def __getitem__(self, number: int) -> "CachedSequence": ...

    @overload
    def __getitem__(self, number: slice) -> list["CachedSequence"]: ...

    def __getitem__(self, number: int | slice) -> "CachedSequence | list[CachedSequence]":
        """Return a sequence, or those of a slice; reads whole segments of shards, and keeps the last two.

        Raises:
            TypeError: neither a whole number nor a slice.
            IndexError: the cache has fewer sequences.
            CacheCorruptError: its shard is damaged.
        """
        if isinstance(number, slice):
            return [self[position] for position in range(len(self))[number]]
        number = index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no sequence {number}: the cache has {len(self)}, counted from 0")
        number %= len(self)
        rows = self._segment(self.reader.segments.segment_of(number)).sequence(number)
        return CachedSequence(self, number, rows)

    def _segment(self, number: int) -> Segment:
        if number not in self._segments:
            segment = self.reader.segment(number)
            with naming(self.reader):
                _check_rows(self, segment)
            self._segments[number] = segment
            if len(self._segments) > _SEGMENTS_KEPT:
                self._segments.popitem(last=False)
        self._segments.move_to_end(number)
        return self._segments[number]


class CachedSequence(Described):
    """One sequence: its token ids, and the teacher's output for them."""

    def __init__(self, cache: Cache, number: int, rows: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Wrap the rows of a sequence: path of an array to `(length, ...)`."""
        self.number = number
        self._cache = cache
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of tokens, special tokens included."""
        return len(self._rows["tokens"])

    def describe(self) -> dict[str, object]:
        """Return the properties of the sequence, by their labels for people."""
        codec, is_held_out = self._cache.codec, self.number >= self._cache.manifest.num_train
        return {
            "sequence": self.number,
            "tokens": len(self),
            "relations": ", ".join(codec.everything.kinds) if codec is not None else "none",
            "layers": ", ".join(map(str, self._cache.layers)) or "none",
            "used for": "evaluation, held out" if is_held_out else "training",
        }

    @property
    def input_ids(self) -> Int[Tensor, " length"]:
        """Token ids, int64, special tokens included."""
        return torch.from_numpy(self._rows["tokens"].astype(np.int64))

    def relation(
        self, kind: str | RelationKind, layer: int | None = None
    ) -> Float[Tensor, "heads query key"]:
        """Return the stored estimate of a relation, float32, dense.

        Args:
            kind: `attention` or `value`; with codec `vectors` also `query` or `key`.
            layer: layer of the teacher, counted from 0. None means the last stored layer.

        Raises:
            InvalidConfigError: the cache does not hold this relation or layer.
        """
        rows = self.target_rows(kind, layer)
        lengths = torch.tensor([len(self._rows["tokens"])])
        return to_dense(rows, lengths, int(lengths))[0]

    def target_rows(self, kind: str | RelationKind, layer: int | None = None) -> RowTargets:
        """Return a relation as the codec decodes it, a batch of 1; arguments and errors: see `relation`."""
        if kind not in [*RelationKind]:
            raise InvalidConfigError(
                f"there is no relation {kind!r}; the relations are {', '.join(RelationKind)}"
            )
        chosen, layers = RelationKind(kind), self._cache.layers
        if not layers:
            raise InvalidConfigError("this cache holds no relations, but other signals: see `states()`")
        if layer is not None and layer not in layers:
            raise InvalidConfigError(
                f"this cache holds no layer {layer!r}, but {', '.join(map(str, layers))}"
            )
        codec = self._cache.codecs[layers[-1] if layer is None else layer]
        if chosen not in codec.everything.kinds:
            held = ", ".join(kind for kind in RelationKind if kind in codec.everything.kinds)
            raise InvalidConfigError(f"this cache holds no {chosen} relation, but {held}")
        lengths, wanted = torch.tensor([len(self._rows["tokens"])]), WantedRelations((chosen,))
        rows = {path: torch.from_numpy(self._rows[path][None]) for path in codec.paths(wanted)}
        return codec.decode(rows, wanted, lengths=lengths)[chosen]

    def states(self, reading: int = 0) -> Signals:
        """Return the stored states, a batch of 1: hidden states, labels, logits and pooled vectors.

        Args:
            reading: number of the masked reading, counted from 0.

        Raises:
            InvalidConfigError: only relations are stored, or the cache has fewer readings.
        """
        codec = self._cache.signals_codec
        if codec is None:
            raise InvalidConfigError("this cache stores only relations: no hidden states, labels or logits")
        if not 0 <= reading < codec.parameters.num_readings:
            raise InvalidConfigError(
                f"no reading {reading}: this cache holds {codec.parameters.num_readings}"
            )
        paths = ("tokens", *codec.paths(codec.everything))
        rows = {path: torch.from_numpy(self._rows[codec.stored_path(path, reading)][None]) for path in paths}
        return codec.decode(rows, codec.everything, lengths=torch.tensor([len(self._rows["tokens"])]))


@contextmanager
def naming(reader: CacheReader) -> Iterator[None]:
    """Name the cache in errors about its content, since a command may read several caches."""
    try:
        yield
    except CacheCorruptError as error:
        if str(reader.root) in str(error):
            raise
        raise CacheCorruptError(f"{reader.root}: {error}") from error


def row_checker(reader: CacheReader) -> Callable[[Segment], None]:
    """Return a function that checks a segment, and raises CacheCorruptError for rows that no codec writes.

    Raises:
        CacheCorruptError: the codecs' own arrays are damaged.
    """
    cache = Cache(reader)
    return lambda segment: _check_rows(cache, segment)


def refuse_no_pairs(segment: Segment, pair: PairTemplate | None) -> None:
    """Raise CacheCorruptError for sequences that are not pairs of texts, where a cache says that they are."""
    if pair is None:
        return
    tokens, wide = segment.rows["tokens"], len(pair.between)
    ends = segment.starts + segment.lengths
    matches = np.ones(max(0, len(tokens) - wide + 1), dtype=np.int64)
    for place, token in enumerate(pair.between):
        matches &= tokens[place : place + len(matches)] == token
    so_far = np.concatenate([[0], np.cumsum(matches)])
    first = np.minimum(segment.starts + len(pair.before), len(matches))
    last = np.clip(ends - len(pair.after) - wide + 1, first, len(matches))
    least = len(pair.before) + wide + len(pair.after) + 2
    if (segment.lengths < least).any() or (so_far[last] - so_far[first] < 1).any():
        raise CacheCorruptError(
            f"segment {segment.number} holds a sequence that is no pair of texts. {NOT_OURS}"
        )


def _check_rows(cache: Cache, segment: Segment) -> None:
    refuse_no_pairs(segment, cache.manifest.identity.packing.pair)
    lengths = torch.from_numpy(np.repeat(segment.lengths, segment.lengths))
    for codec in cache.codecs.values():
        codec.check(
            {path: torch.from_numpy(segment.rows[path]) for path in codec.paths(codec.everything)}, lengths
        )
    states = cache.signals_codec
    if states is not None:
        paths = states.paths(states.everything)
        for reading in range(states.parameters.num_readings):
            states.check(
                {path: torch.from_numpy(segment.rows[states.stored_path(path, reading)]) for path in paths},
                lengths,
            )


def read_codes(manifest: CacheManifest, attachment: Callable[[str], bytes]) -> dict[str, TransformCode]:
    """Return the fitted codes of a cache, by the folder of their arrays; no shard is read.

    Args:
        manifest: manifest of the cache.
        attachment: returns the checked content of a file outside the shards, given its path.

    Raises:
        CacheCorruptError: their arrays are damaged.
    """
    arrays: dict[str, dict[str, Tensor]] = {}
    for small in all_small_arrays(manifest.identity, manifest.calibration):
        values = torch.from_numpy(small_array(attachment(small.chunk_path), small).copy())
        arrays.setdefault(small.folder, {})[small.name] = values
    codes = {folder: TransformCode(**parts) for folder, parts in arrays.items()}
    for folder, code in codes.items():
        if not code.is_sound:
            raise CacheCorruptError(f"the arrays of {folder} are no code of finite numbers. {NOT_OURS}")
    return codes


def open_cache(place: Place, *, home: Path | None = None, local_bytes: int = DEFAULT_LOCAL_BYTES) -> Cache:
    """Open a finished cache.

    Args:
        place: its folder, the result of its dump, or its URL (`s3://`, `gs://`, `az://`, `hf://`): shards
            are then downloaded when they are first read.
        home: folder below which shards from a URL are kept. None means MINILM_CACHE_HOME.
        local_bytes: greatest total size of the shard files that are kept from a URL, bytes.

    Raises:
        StorageError: the store cannot be reached.
        CacheNotFoundError: there is no cache at this place.
        CacheIncompleteError: its dump has not finished.
        CacheCorruptError: it is damaged.
        UnsupportedFormatError: a newer release wrote it.
    """
    place = os.fspath(place)
    if not place:
        raise InvalidConfigError("give the folder or the URL of a cache; this is an empty text.")
    if is_url(place):
        return Cache(MirrorReader(place, Path(home or cache_home()), local_bytes))
    if looks_like_url(place):  # it was made into a path, which its absolute one would not show
        refuse_no_cache(Path(place))
    return Cache(CacheReader(Path(place).absolute()))  # a notebook may change its folder
