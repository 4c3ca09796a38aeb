"""Makes batches for students: segments are read and checked in threads, and decoded for all students."""

from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.cache import Cache, naming, refuse_no_pairs
from minilm_cache.codecs.vectors import VectorsCodec
from minilm_cache.models.inputs import Inputs, query_numbers
from minilm_cache.models.student_tokens import StudentTokens
from minilm_cache.objectives.batch import UNITS, Counts, StudentBatch, WantedTargets
from minilm_cache.relations.loss import KERNELS, choose_method
from minilm_cache.relations.scores import (
    RowTargets,
    Targets,
    VectorRows,
    Vectors,
    densify,
    key_mask,
    mean_row_entropy,
    to_dense,
)
from minilm_cache.relations.signals import MaskedSequences, Signals
from minilm_cache.relations.transfer import pin, send
from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.storage_schema.arrays import not_chosen
from minilm_cache.storage_schema.identity import PairTemplate, RelationKind
from minilm_cache.storage_schema.states import INDEX_PATH, LABELS, READ_PATH, WEIGHT_PATH
from minilm_cache.store.reader import Segment
from minilm_cache.train.config import Batches
from minilm_cache.train.graph import Graphs, Replayed, rounded_length, tensors_of
from minilm_cache.train.sampler import Buffer, StepPlan

_LEAST_BUFFERS = 2
"""Buffers that are in memory: the one in use, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredBatch:
    """A batch with its arrays as they are stored, padded but not decoded, on the CPU."""

    inputs: Inputs
    queries: Tensor | None
    """Number of the query of each pair, `(batch,)`. None means not wanted."""
    counts: Counts
    rows: Mapping[str, Tensor]
    """Array path to `(batch, length, ...)`, or `(batch, 1, ...)` where a sequence has one row."""
    masked: MaskedSequences | None
    """The masked sequences, decoded. None means not wanted."""
    entropy: Mapping[RelationKind, Tensor]
    """The teacher's mean row entropy of each sequence, nats."""
    beside: tuple[Tensor, ...]
    """What each of `WantedTargets.beside` has of the sequences."""

    def to(self, device: torch.device) -> "_StoredBatch":
        """Return the same batch on a device, without waiting for it."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            queries=None if self.queries is None else send(self.queries, device),
            # Rows stay small integers, as stored, until a codec decodes them into relations.
            rows={path: send(values, device) for path, values in self.rows.items()},
            masked=None if self.masked is None else self.masked.to(device),
            entropy={kind: send(values, device) for kind, values in self.entropy.items()},
            beside=tuple(send(each, device) for each in self.beside),
        )


class _Place(NamedTuple):
    """A place on the device for batches of one form, which are decoded by a graph."""

    number: int
    stored: _StoredBatch
    decode: Replayed[StudentBatch]

    def put(self, stored: _StoredBatch) -> _StoredBatch:
        """Copy a batch of this form here, without waiting for the device, and return it."""
        for place, values in zip(tensors_of(self.stored), tensors_of(stored), strict=True):
            place.copy_(values, non_blocking=True)
        return replace(self.stored, counts=stored.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadPlan:
    """What is read of each segment in addition to its token ids."""

    paths: tuple[str, ...]
    """Arrays to read, by the paths that they have in the first masked reading."""
    entropies: tuple[RelationKind, ...]
    """Relations for which the teacher's mean row entropy is read."""
    not_chosen: int
    """Value that marks a token that was not chosen to be masked."""
    is_causal: bool
    """Whether rows of attention see the tokens up to their own alone."""
    readings: tuple[Mapping[str, str], ...] = ({},)
    """For each masked reading, the paths of its arrays by the paths that they have in the first reading."""

    def path_in(self, epoch: int, path: str) -> str:
        """Return the path of the array that an epoch reads: epochs use the masked readings in turn."""
        return self.readings[epoch % len(self.readings)].get(path, path)


_Piece = tuple[Mapping[int, Segment], npt.NDArray[np.int64], int]
"""Segments by number, the numbers of the sequences to take from them, and the epoch of these sequences."""


_Reads = dict[tuple[int, int], Future[Segment]]
"""Segments that are being read, by the number of the segment and of the masked reading."""


class BatchReader:
    """Makes batches of a cache's sequences."""

    def __init__(
        self,
        cache: Cache,
        wanted: WantedTargets,
        *,
        pad_token: int,
        device: torch.device,
        tokens: StudentTokens | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Prepare to read what students need, and nothing else.

        Args:
            cache: cache to read.
            wanted: what is read of each sequence in addition to its token ids.
            pad_token: token id that fills positions beyond a sequence's end.
            device: device on which batches are decoded and returned.
            tokens: how students read the sequences of the cache. None means that they read its token ids.
            graphs: graphs that decode batches of steps. None means that a device is given kernel by kernel.
        """
        self._cache = cache
        self._graphs = graphs
        self._places: dict[Hashable, _Place] = {}
        self._wanted = wanted
        self._codecs = [cache.codecs[layer].to(device) for layer in wanted.layers or cache.layers[-1:]]
        signals_codec = cache.signals_codec
        self._signals_codec = None if signals_codec is None else signals_codec.to(device)
        estimated = cache.manifest.identity.relations if cache.is_unbiased else ()
        paths = {path: None for codec in self._codecs for path in codec.paths(wanted.relations)}
        if wanted.vectors:
            paths |= {codec.codes_path: None for codec in self._codecs if isinstance(codec, VectorsCodec)}
        if signals_codec is not None:
            paths |= dict.fromkeys(signals_codec.paths(wanted.signals))
        self._read_plan = _ReadPlan(
            readings=_paths_by_reading(signals_codec, paths),
            paths=tuple(paths),
            entropies=tuple(kind for kind in wanted.kinds if kind in estimated),
            not_chosen=not_chosen(cache.manifest.identity.teacher.vocab_size),
            is_causal=cache.manifest.identity.is_causal,
        )
        self._pair = cache.manifest.identity.packing.pair
        self._num_heads = wanted.relation_heads or cache.manifest.identity.relation_heads
        self._pad_token = pad_token
        self._device = device
        self._tokens = tokens
        of_texts = () if signals_codec is None else signals_codec.paths_of_texts(wanted.signals)
        learns_tokens = bool(paths.keys() - {*of_texts}) or bool(wanted.kinds)
        # Texts may get other numbers of tokens where nothing that is learned belongs to a token.
        self._most = None if learns_tokens else cache.manifest.identity.packing.max_length
        if tokens is not None and learns_tokens:
            tokens.check_places(reads_texts=bool(of_texts))

    def train_batches(self, plan: StepPlan, first_step: int) -> Generator[StudentBatch]:
        """Yield this process's parts of steps without end; segments and the next step are read ahead.

        Args:
            plan: parts of a step, and which of them this process takes.
            first_step: step to begin with, counted from 0.
        """
        with ExitStack() as stack:
            streams: dict[int, Iterator[list[_Piece]]] = {}
            for number in {part % len(plan.streams) for part in plan.own_parts}:
                position = first_step * plan.batch_size // len(plan.streams)
                buffers = stack.enter_context(
                    closing(self.segments_of(plan.streams[number].stream(position)))
                )
                streams[number] = _pieces(buffers, plan.part_size, batches=plan.batches, pair=self._pair)
            ahead = stack.enter_context(ThreadPoolExecutor(max_workers=1))
            pending = ahead.submit(self._gather_step, streams, plan)
            while True:
                step = pending.result()
                pending = ahead.submit(self._gather_step, streams, plan)
                total: Counts = {unit: sum(batch.counts[unit] for batch in step.values()) for unit in UNITS}
                for part, stored in step.items():
                    ends_step = part == plan.own_parts[-1]
                    batch = (
                        self._decode(stored) if self._graphs is None else self._replayed(stored, self._graphs)
                    )
                    yield replace(
                        batch, part=part, step_counts=total, counts=stored.counts, ends_step=ends_step
                    )

    def held_out_batches(self, batch_size: int, max_sequences: int) -> Iterator[StudentBatch]:
        """Yield the first `max_sequences` held-out sequences, in order.

        Where pairs of a query are compared, a query's pairs are in one batch, however many they are, so that
        losses do not depend on the size of batches. A last query that has further pairs is left out.
        """
        manifest = self._cache.manifest
        last = min(manifest.num_train + max_sequences, manifest.num_sequences)
        held_out = range(manifest.num_train, last)
        if self._pair is None or not self._wanted.groups:
            return self.batches_of(held_out, batch_size)
        return self._batches(self._whole_queries(held_out, self._pair, batch_size))

    def batches_of(self, sequences: range, batch_size: int) -> Iterator[StudentBatch]:
        """Yield sequences in order, as the first epoch reads them."""
        firsts = range(sequences.start, sequences.stop, batch_size)
        return self._batches(np.arange(n, min(n + batch_size, sequences.stop)) for n in firsts)

    def _batches(self, batches: Iterable[npt.NDArray[np.int64]]) -> Iterator[StudentBatch]:
        segments: dict[int, Segment] = {}
        for numbers in batches:
            segments = {n: segments.get(n) or self._read(n) for n in self._segments_of(numbers)}
            yield self._decode(self._gather([(segments, numbers, 0)]))

    def _segments_of(self, numbers: npt.NDArray[np.int64]) -> set[int]:
        """Return the numbers of the segments that hold sequences."""
        return {self._cache.reader.segments.segment_of(number) for number in numbers.tolist()}

    def _whole_queries(
        self, sequences: range, pair: PairTemplate, batch_size: int
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Yield pairs in batches of whole queries: as many as `batch_size` has room for, but at least one."""
        reader, num_all = self._cache.reader, self._cache.manifest.num_sequences
        numbers = np.arange(sequences.start, min(sequences.stop + 1, num_all))
        segments = {n: reader.segment(n, []) for n in self._segments_of(numbers)}  # their tokens alone
        with naming(reader):
            for segment in segments.values():
                refuse_no_pairs(segment, pair)
        queries = _queries(segments, numbers, pair)
        groups = [numbers[queries == query] for query in range(queries.max() + 1)]
        if len(numbers) > len(sequences):  # the pair behind them says whether the last query goes on
            groups = groups[:-1] or [numbers[:-1]]
        batch: list[npt.NDArray[np.int64]] = []
        for group in groups:
            if batch and sum(map(len, batch)) + len(group) > batch_size:
                yield np.concatenate(batch)
                batch = []
            batch.append(group)
        yield np.concatenate(batch)

    def segments_of(self, buffers: Iterator[Buffer]) -> Generator[tuple[Mapping[int, Segment], Buffer]]:
        """Yield each buffer with its segments, while the segments of the buffers after it are read."""
        reader, ahead = self._cache.reader, deque[tuple[Buffer, _Reads, int]]()
        # More than an epoch of a small cache would only be read again.
        enough = min(reader.bytes_ahead, self._row_bytes * self._cache.manifest.num_tokens)
        with ThreadPoolExecutor(reader.reads_at_once) as threads:
            reads: _Reads = {}
            ahead_bytes = 0
            while True:
                while len(ahead) < _LEAST_BUFFERS or ahead_bytes - ahead[0][2] < enough:
                    buffer = next(buffers)
                    keys = [(n, buffer.epoch % len(self._read_plan.readings)) for n in buffer.segments]
                    reads = {key: reads.get(key) or threads.submit(self._read, *key) for key in keys}
                    size = self._row_bytes * sum(map(reader.segments.mean_tokens, buffer.segments))
                    ahead.append((buffer, reads, size))
                    ahead_bytes += size
                current, current_reads, size = ahead.popleft()
                ahead_bytes -= size
                yield {n: future.result() for (n, _), future in current_reads.items()}, current

    @property
    def _row_bytes(self) -> int:
        """Decoded bytes of a token."""
        paths = {"tokens", *self._read_plan.paths}
        return sum(spec.row_bytes for spec in self._cache.reader.specs if spec.path in paths)

    def _read(self, number: int, reading: int = 0) -> Segment:
        """Return a segment whose rows have been checked.

        Raises:
            CacheCorruptError: it is damaged, or holds rows that no codec writes.
        """
        paths = {path: self._read_plan.path_in(reading, path) for path in self._read_plan.paths}
        reader = self._cache.reader
        segment = reader.segment(number, list(paths.values()))
        rows = {path: torch.from_numpy(segment.rows[stored]) for path, stored in paths.items()}
        lengths = torch.from_numpy(np.repeat(segment.lengths, segment.lengths))
        with naming(reader):
            refuse_no_pairs(segment, self._cache.manifest.identity.packing.pair)
            for codec in self._codecs:
                codec.check(rows, lengths)
            if self._signals_codec is not None:
                self._signals_codec.check(rows, lengths)
        return segment

    def _gather_step(
        self, streams: Mapping[int, Iterator[list[_Piece]]], plan: StepPlan
    ) -> dict[int, _StoredBatch]:
        """Return this process's parts of the next step, by number; parts of other processes are skipped."""
        parts = {}
        for part in range(plan.num_parts):
            stream = streams.get(part % len(plan.streams))
            if stream is not None:
                pieces = next(stream)
                if part in plan.own_parts:
                    parts[part] = self._gather(pieces)
        return parts

    def _gather(self, pieces: Sequence[_Piece]) -> _StoredBatch:
        """Copy sequences out of their segments into a batch that can be sent to the device."""
        is_rounded = self._graphs is not None and self._graphs.are_used
        most = self._cache.manifest.identity.packing.max_length
        gathered = _gathered_rows(pieces, self._read_plan, most if is_rounded else None)
        numbers = np.concatenate([numbers for _, numbers, _ in pieces])
        rows = {path: torch.from_numpy(values) for path, values in gathered.rows.items()}
        lengths = torch.from_numpy(gathered.lengths)
        tokens = rows["tokens"].to(torch.int64)
        ids = tokens.masked_fill_(~key_mask(lengths, tokens.shape[1]), self._pad_token)
        masked, codec = None, self._signals_codec
        if codec is not None and LABELS in self._wanted.signals:
            masked = codec.masked(rows, lengths).pinned_for(self._device)
        is_full = gathered.counts["tokens"] == ids.numel()
        inputs, pair, pad_token = Inputs(ids, lengths, is_full=is_full), self._pair, self._pad_token
        if self._tokens is not None:
            # Texts that are read alone are cut alone: a pair of two whole ones fits into twice the length.
            longest = 2 * most if self._wanted.apart else self._most
            inputs, pair = self._tokens.read(inputs, longest), self._tokens.pair
            pad_token = self._tokens.pad_token
            if is_rounded:  # reading may have changed the lengths
                inputs = inputs.filled_up(rounded_length(inputs.ids.shape[1], most), pad_token)
        inputs, queries = inputs.paired(pair), None
        if self._pair is not None and self._wanted.queries:
            queries = query_numbers(ids.numpy(), self._pair)
            if self._wanted.apart:
                assert pair is not None
                inputs = inputs.apart(pair, queries, pad_token, most=most)
        on_device = rows.keys() - {"tokens", READ_PATH, INDEX_PATH, WEIGHT_PATH}
        return _StoredBatch(
            inputs=inputs.pinned_for(self._device),
            queries=None if queries is None else pin(queries, self._device),
            counts=gathered.counts,
            rows={path: pin(rows[path], self._device) for path in on_device},
            masked=masked,
            entropy={
                kind: pin(torch.from_numpy(values), self._device) for kind, values in gathered.entropy.items()
            },
            beside=tuple(pin(each.of(numbers), self._device) for each in self._wanted.beside),
        )

    def _decode(self, stored: _StoredBatch) -> StudentBatch:
        """Return a batch that is a step of its own."""
        return self._decoded(stored.to(self._device))

    def _replayed(self, stored: _StoredBatch, graphs: Graphs) -> StudentBatch:
        """Return a batch whose tensors are where those of all batches of its form are, if there is room."""
        if stored.masked is not None or stored.queries is not None:  # as many numbers as chance has it
            return graphs.with_memory(lambda: self._decode(stored))
        form = (stored.inputs.is_full, *((part.shape, part.dtype) for part in tensors_of(stored)))
        place = self._places.get(form)
        if place is None:
            number = graphs.new_place()
            if number is None:
                return graphs.with_memory(lambda: self._decode(stored))
            on_device = graphs.with_memory(lambda: stored.to(self._device))
            place = self._places[form] = _Place(number, on_device, Replayed(graphs))
        here, stays = place.put(stored), place.decode.is_next_replayed
        return replace(place.decode(lambda: self._decoded(here)), place=place.number if stays else None)

    def _decoded(self, stored: _StoredBatch) -> StudentBatch:
        """Return a batch of the device, decoded there."""
        lengths, rows = stored.inputs.lengths, stored.rows
        decoded = [codec.decode(rows, self._wanted.relations, lengths=lengths) for codec in self._codecs]
        signals = Signals()
        if self._signals_codec is not None:
            unmasked = [name for name in self._wanted.signals if name != LABELS]
            signals = replace(
                self._signals_codec.decode(rows, unmasked, lengths=lengths), masked=stored.masked
            )
        for source, held in zip(self._wanted.beside, stored.beside, strict=True):
            joined = source.joined(signals[source.signal], held)
            signals = replace(signals, values={**signals.values, source.signal: joined})
        targets = tuple(
            {
                kind: self._targets(kind, relation_rows, stored=stored, lengths=lengths)
                for kind, relation_rows in layer.items()
            }
            for layer in decoded
        )
        return StudentBatch(
            inputs=stored.inputs,
            queries=stored.queries,
            counts=stored.counts,
            part=0,
            step_counts=stored.counts,
            ends_step=True,
            targets=targets,
            vectors=self._vectors(rows) if self._wanted.vectors else (),
            signals=signals,
        )

    def _vectors(self, rows: Mapping[str, Tensor]) -> tuple[Vectors, ...]:
        codecs = [codec for codec in self._codecs if isinstance(codec, VectorsCodec)]
        return tuple(codec.vectors(rows[codec.codes_path]) for codec in codecs)

    def _targets(
        self, kind: RelationKind, rows: RowTargets, *, stored: _StoredBatch, lengths: Int[Tensor, " batch"]
    ) -> Targets:
        if kind in stored.entropy:
            return Targets(rows, stored.entropy[kind])
        batch, length = stored.inputs.ids.shape
        if choose_method(batch, self._num_heads, length, device=self._device) == "sdpa":
            return Targets(rows, None)
        if isinstance(rows, VectorRows):
            if KERNELS.read_vectors(rows, self._device, length):
                return Targets(rows, None)
            return Targets(*densify(rows, lengths))  # once for all students
        # Biased rows do not estimate the teacher's: they are the target, and so their own entropy is used.
        return Targets(rows, mean_row_entropy(to_dense(rows, lengths, length), lengths))


def _paths_by_reading(codec: SignalsCodec | None, paths: Iterable[str]) -> tuple[Mapping[str, str], ...]:
    """Return the paths of a cache's arrays for each masked reading, by their paths in the first reading."""
    if codec is None:
        return ({},)
    return tuple(
        {path: codec.stored_path(path, number) for path in paths}
        for number in range(codec.parameters.num_readings)
    )


def _pieces(
    buffers: Iterator[tuple[Mapping[int, Segment], Buffer]],
    batch_size: int,
    *,
    batches: Batches = "shuffled",
    pair: PairTemplate | None = None,
) -> Iterator[list[_Piece]]:
    """Cut a stream into batches; a batch at the end of a buffer may continue in the next buffer."""
    batch: list[_Piece] = []
    room = batch_size
    for segments, buffer in buffers:
        if batches == "by-query" and pair is not None:
            buffer = buffer.by_query(_queries(segments, buffer.sequences, pair))
        if batches == "by-length":
            # A stream begins at a whole batch, so what was skipped ends one, too.
            head = buffer.skipped % batch_size if buffer.skipped else room % batch_size
            buffer = buffer.in_order(_lengths(segments, buffer), batch_size, head=head)
        sequences = buffer.sequences[buffer.skipped :]
        while len(sequences):
            taken, sequences = sequences[:room], sequences[room:]
            batch.append((segments, taken, buffer.epoch))
            room -= len(taken)
            if room == 0:
                yield batch
                batch, room = [], batch_size


def _queries(
    segments: Mapping[int, Segment], sequences: npt.NDArray[np.int64], pair: PairTemplate
) -> npt.NDArray[np.int64]:
    """Return the number of the query of each of some pairs, from 0 on in the order in which they come."""
    tokens = (
        next(segment for segment in segments.values() if number in segment).rows_of("tokens", number)
        for number in sequences.tolist()
    )
    return query_numbers(tokens, pair).numpy()


def _lengths(segments: Mapping[int, Segment], buffer: Buffer) -> npt.NDArray[np.int64]:
    """Return the tokens of each sequence of a buffer."""
    lengths = np.empty(len(buffer.sequences), np.int64)
    for segment in segments.values():
        places = buffer.sequences - segment.first_sequence
        inside = (places >= 0) & (places < len(segment.lengths))
        lengths[inside] = segment.lengths[places[inside]]
    return lengths


class _GatheredRows(NamedTuple):
    """Rows of a batch, padded."""

    lengths: npt.NDArray[np.int64]
    counts: Counts
    rows: Mapping[str, npt.NDArray[np.generic]]
    entropy: Mapping[RelationKind, npt.NDArray[np.float32]]


def _gathered_rows(pieces: Sequence[_Piece], read_plan: _ReadPlan, most: int | None) -> _GatheredRows:
    """Copy sequences out of their segments into padded arrays.

    Args:
        pieces: sequences, and the segments that hold them.
        read_plan: what is copied.
        most: greatest number of tokens of any sequence; lengths are rounded up. None means that they are not.
    """
    sequences = [
        (next(segment for segment in segments.values() if number in segment), number, epoch)
        for segments, numbers, epoch in pieces
        for number in numbers.tolist()
    ]
    lengths = np.asarray([segment.length(number) for segment, number, _ in sequences])
    longest = int(lengths.max()) if most is None else rounded_length(int(lengths.max()), most)
    is_full = longest == lengths.min()
    rows = {}
    for path in ("tokens", *read_plan.paths):
        first_segment, _, first_epoch = sequences[0]
        like = first_segment.rows[read_plan.path_in(first_epoch, path)]
        if path in first_segment.by_sequence:
            parts = [
                segment.rows_of(read_plan.path_in(epoch, path), number)
                for segment, number, epoch in sequences
            ]
            rows[path] = np.stack(parts)
            continue
        shape = (len(sequences), longest, *like.shape[1:])
        padded = np.empty(shape, like.dtype) if is_full else np.zeros(shape, like.dtype)
        for at, (segment, number, epoch) in enumerate(sequences):
            padded[at, : lengths[at]] = segment.rows_of(read_plan.path_in(epoch, path), number)
        rows[path] = padded
    entropy = {
        kind: np.asarray(
            [segment.entropy(kind, number) for segment, number, _ in sequences], dtype=np.float32
        )
        for kind in read_plan.entropies
    }
    counts: Counts = {
        "tokens": int(lengths.sum()),
        "chosen": _num_chosen(sequences, read_plan),
        "sequences": len(sequences),
        "pairs": int((lengths * (lengths + 1) // 2 if read_plan.is_causal else lengths**2).sum()),
    }
    return _GatheredRows(lengths, counts, rows, entropy)


def _num_chosen(sequences: Sequence[tuple[Segment, int, int]], read_plan: _ReadPlan) -> int:
    """Return the number of tokens that were chosen to be masked; 0 where no masked sequences are read."""
    if READ_PATH not in read_plan.paths:
        return 0
    return sum(
        int((segment.rows_of(read_plan.path_in(epoch, READ_PATH), number) != read_plan.not_chosen).sum())
        for segment, number, epoch in sequences
    )
