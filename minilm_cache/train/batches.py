"""From a cache's shards to batches for students: read ahead in threads, decoded once for all students."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.codecs.states import StatesCodec
from minilm_cache.codecs.transform import refuse_codes
from minilm_cache.codecs.vectors import VectorsCodec
from minilm_cache.errors import CacheCorruptError
from minilm_cache.objectives.batch import UNITS, Counts, StudentBatch, WantedTargets
from minilm_cache.relations.loss import choose_method
from minilm_cache.relations.rows import RowTargets, Targets, VectorRows, densify, to_dense
from minilm_cache.relations.scores import Vectors, mean_row_entropy
from minilm_cache.relations.states import States
from minilm_cache.storage_schema.arrays import not_chosen
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import READ_PATH
from minilm_cache.store.layout import shard_of
from minilm_cache.store.reader import Shard
from minilm_cache.train.sampler import Buffer, StepPlan

_READ_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A batch as it is stored."""

    lengths: npt.NDArray[np.int64]
    counts: Counts
    rows: Mapping[str, npt.NDArray[np.generic]]
    """Array path to `(batch, length, ...)`."""
    entropy: Mapping[RelationKind, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What is taken of each shard beside its token ids."""

    paths: tuple[str, ...]
    entropies: tuple[RelationKind, ...]
    """Relations whose rows the teacher's mean row entropy belongs to."""
    not_chosen: int
    """What stands for a token that is read as it is."""
    readings: tuple[Mapping[str, str], ...] = ({},)
    """For each masked reading where its arrays lie, by the paths that they have in the first one."""

    def place(self, path: str, epoch: int) -> str:
        """Return where an array lies that an epoch reads: epochs take masked readings in turn."""
        return self.readings[epoch % len(self.readings)].get(path, path)


class BatchReader:
    """Makes batches of a cache's sequences."""

    def __init__(
        self,
        cache: Cache,
        wanted: WantedTargets,
        *,
        pad_token: int,
        device: torch.device,
    ) -> None:
        """Read what is wanted, and nothing else.

        Args:
            cache: where from.
            wanted: of each sequence, beside its token ids.
            pad_token: id that stands beyond a sequence's end.
            device: where batches go, and where they are decoded.
        """
        self._cache = cache
        self._wanted = wanted
        self._codecs = [cache.codecs[layer] for layer in wanted.layers or cache.layers[-1:]]
        estimated = cache.manifest.identity.relations if cache.codec.is_unbiased else ()
        paths = {path: None for codec in self._codecs for path in codec.paths(wanted.relations)}
        if wanted.vectors:
            paths |= {codec.codes_path: None for codec in self._codecs if isinstance(codec, VectorsCodec)}
        if cache.states_codec is not None:
            paths |= dict.fromkeys(cache.states_codec.paths(wanted.states))
        self._stored = _Stored(
            readings=_readings(cache.states_codec, paths),
            paths=tuple(paths),
            entropies=tuple(kind for kind in wanted.kinds if kind in estimated),
            not_chosen=not_chosen(cache.manifest.identity.teacher.vocab_size),
        )
        self._num_heads = wanted.relation_heads or cache.manifest.identity.relation_heads
        self._pad_token = pad_token
        self._device = device

    def train_batches(self, plan: StepPlan, first_step: int) -> Generator[StudentBatch]:
        """Yield parts of steps for ever, from one step on; shards and the next step are read ahead."""
        with ExitStack() as stack:
            streams: dict[int, Iterator[list[_Piece]]] = {}
            for number in {part % len(plan.streams) for part in plan.own_parts}:
                position = first_step * plan.batch_size // len(plan.streams)
                loaded = stack.enter_context(closing(self._loaded(plan.streams[number].stream(position))))
                streams[number] = _pieces(loaded, plan.part_size)
            ahead = stack.enter_context(ThreadPoolExecutor(max_workers=1))
            pending = ahead.submit(_gather_step, streams, plan, self._stored)
            while True:
                step = pending.result()
                pending = ahead.submit(_gather_step, streams, plan, self._stored)
                total: Counts = {unit: sum(own.counts[unit] for own in step.values()) for unit in UNITS}
                for part, gathered in step.items():
                    ends_step = part == plan.own_parts[-1]
                    yield self._decode(gathered, part=part, step_counts=total, ends_step=ends_step)

    def held_out_batches(self, batch_size: int, max_sequences: int) -> Iterator[StudentBatch]:
        """Yield the first held-out sequences, in order."""
        manifest = self._cache.manifest
        last = min(manifest.num_train + max_sequences, manifest.num_sequences)
        return self.batches_of(range(manifest.num_train, last), batch_size)

    def batches_of(self, sequences: range, batch_size: int) -> Iterator[StudentBatch]:
        """Yield sequences in order, as the first epoch reads them."""
        manifest = self._cache.manifest
        shards: dict[int, Shard] = {}
        for first in range(sequences.start, sequences.stop, batch_size):
            numbers = np.arange(first, min(first + batch_size, sequences.stop))
            wanted = {shard_of(manifest.shards, number) for number in numbers.tolist()}
            shards = {n: shards.get(n) or self._read(n) for n in wanted}
            gathered = _gather([(shards, numbers, 0)], self._stored)
            yield self._decode(gathered, part=0, step_counts=gathered.counts, ends_step=True)

    def _loaded(self, buffers: Iterator[Buffer]) -> Generator[tuple[Mapping[int, Shard], Buffer]]:
        """Yield each buffer with its shards; those of the next one are read meanwhile."""
        with ThreadPoolExecutor(_READ_THREADS) as threads:

            def read(buffer: Buffer, known: _Reads) -> _Reads:
                wanted = [(n, buffer.epoch % len(self._stored.readings)) for n in buffer.shards]
                return {one: known.get(one) or threads.submit(self._read, *one) for one in wanted}

            current = next(buffers)
            reads = read(current, {})
            while True:
                upcoming = next(buffers)
                upcoming_reads = read(upcoming, reads)
                yield {n: future.result() for (n, _), future in reads.items()}, current
                current, reads = upcoming, upcoming_reads

    def _read(self, number: int, reading: int = 0) -> Shard:
        places = [self._stored.place(path, reading) for path in self._stored.paths]
        return self._cache.reader.shard(number, places)

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        found = torch.from_numpy(values)
        if self._device.type == "cuda":
            found = found.pin_memory()  # else the copy would wait for what the GPU is doing
        return found.to(self._device, non_blocking=True)

    def _decode(
        self, gathered: _Gathered, *, part: int, step_counts: Counts, ends_step: bool
    ) -> StudentBatch:
        lengths = self._to_device(gathered.lengths)
        ids = torch.from_numpy(gathered.rows["tokens"].astype(np.int64))
        beyond = torch.arange(ids.shape[1]) >= torch.from_numpy(gathered.lengths)[:, None]
        # As stored, in small integers; they become relations where they are needed.
        rows = {path: self._to_device(values) for path, values in gathered.rows.items()}
        states, codec_of_states = States(), self._cache.states_codec
        try:
            decoded = [codec.decode(rows, self._wanted.relations, lengths=lengths) for codec in self._codecs]
            vectors = self._vectors(rows) if self._wanted.vectors else ()
            if codec_of_states is not None and self._wanted.states:
                states = codec_of_states.decode(rows, self._wanted.states, lengths=lengths)
        except CacheCorruptError as error:
            raise CacheCorruptError(f"{self._cache.reader.root}: {error}") from error
        targets = tuple(
            {
                kind: self._targets(kind, found, gathered=gathered, lengths=lengths)
                for kind, found in layer.items()
            }
            for layer in decoded
        )
        return StudentBatch(
            ids=ids.masked_fill(beyond, self._pad_token).to(self._device),
            lengths=lengths,
            counts=gathered.counts,
            part=part,
            step_counts=step_counts,
            ends_step=ends_step,
            targets=targets,
            vectors=vectors,
            states=states,
        )

    def _vectors(self, rows: Mapping[str, Tensor]) -> tuple[Vectors, ...]:
        codecs = [codec for codec in self._codecs if isinstance(codec, VectorsCodec)]
        for codec in codecs:
            refuse_codes(rows[codec.codes_path])
        return tuple(codec.vectors(rows[codec.codes_path]) for codec in codecs)

    def _targets(
        self, kind: RelationKind, rows: RowTargets, *, gathered: _Gathered, lengths: Int[Tensor, " batch"]
    ) -> Targets:
        if kind in gathered.entropy:
            return Targets(rows, self._to_device(gathered.entropy[kind]))
        batch, length = gathered.rows["tokens"].shape
        if choose_method(batch, self._num_heads, length) == "sdpa":
            return Targets(rows, None)
        if isinstance(rows, VectorRows):
            return Targets(*densify(rows, lengths))  # once for all students
        # Rows that are no estimate of the teacher's are targets of their own: so is their entropy.
        return Targets(rows, mean_row_entropy(to_dense(rows, lengths, length), lengths))


_Piece = tuple[Mapping[int, Shard], npt.NDArray[np.int64], int]
"""The shards that hold some sequences, their numbers, and the epoch that they are taken in."""


_Reads = dict[tuple[int, int], Future[Shard]]
"""Shards on their way, by their number and that of the masked reading."""


def _readings(codec: StatesCodec | None, paths: Iterable[str]) -> tuple[Mapping[str, str], ...]:
    """Return for each masked reading of a cache where its arrays lie."""
    if codec is None:
        return ({},)
    return tuple(
        {path: codec.stored_path(path, number) for path in paths}
        for number in range(codec.parameters.num_readings)
    )


def _pieces(loaded: Iterator[tuple[Mapping[int, Shard], Buffer]], batch_size: int) -> Iterator[list[_Piece]]:
    """Cut the stream into batches; one at the end of a buffer may go on in the next."""
    batch: list[_Piece] = []
    room = batch_size
    for shards, buffer in loaded:
        sequences = buffer.sequences
        while len(sequences):
            taken, sequences = sequences[:room], sequences[room:]
            batch.append((shards, taken, buffer.epoch))
            room -= len(taken)
            if room == 0:
                yield batch
                batch, room = [], batch_size


def _gather_step(
    streams: Mapping[int, Iterator[list[_Piece]]], plan: StepPlan, wanted: _Stored
) -> dict[int, _Gathered]:
    """Return this process's parts of the next step; those of others are passed over."""
    found = {}
    for part in range(plan.num_parts):
        stream = streams.get(part % len(plan.streams))
        if stream is not None:
            pieces = next(stream)
            if part in plan.own_parts:
                found[part] = _gather(pieces, wanted)
    return found


def _gather(pieces: Sequence[_Piece], wanted: _Stored) -> _Gathered:
    """Copy sequences out of their shards into padded arrays."""
    found = [
        (next(shard for shard in shards.values() if number in shard), number, epoch)
        for shards, numbers, epoch in pieces
        for number in numbers.tolist()
    ]
    lengths = np.asarray([shard.length(number) for shard, number, _ in found])
    rows = {}
    for path in ("tokens", *wanted.paths):
        like = found[0][0].rows[wanted.place(path, found[0][2])]
        padded = np.zeros((len(found), lengths.max(), *like.shape[1:]), dtype=like.dtype)
        for at, (shard, number, epoch) in enumerate(found):
            # torch turns rows over that lie component by component several times as fast as numpy.
            own = shard.rows_of(wanted.place(path, epoch), number).copy(order="K")
            torch.from_numpy(padded[at, : lengths[at]]).copy_(torch.from_numpy(own))
        rows[path] = padded
    entropy = {
        kind: np.asarray([shard.entropy(kind, number) for shard, number, _ in found], dtype=np.float32)
        for kind in wanted.entropies
    }
    counts: Counts = {
        "tokens": int(lengths.sum()),
        "chosen": _num_chosen(found, wanted),
        "sequences": len(found),
        "pairs": int((lengths**2).sum()),
    }
    return _Gathered(lengths=lengths, counts=counts, rows=rows, entropy=entropy)


def _num_chosen(found: Sequence[tuple[Shard, int, int]], wanted: _Stored) -> int:
    """Return the tokens that were chosen to be masked; 0 where nobody asks."""
    if READ_PATH not in wanted.paths:
        return 0
    return sum(
        int((shard.rows_of(wanted.place(READ_PATH, epoch), number) != wanted.not_chosen).sum())
        for shard, number, epoch in found
    )
