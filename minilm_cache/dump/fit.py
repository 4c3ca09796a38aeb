"""The codec of a dump: taken from the cache that is being resumed, or fitted to the first sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minilm_cache.cache import vectors_codec
from minilm_cache.codecs.base import SignalCodec
from minilm_cache.codecs.calibrate import calibrate, split_sample
from minilm_cache.codecs.chain import store_relations
from minilm_cache.dump.audit import pad
from minilm_cache.dump.sequences import SequenceTable
from minilm_cache.dump.teacher import Teacher
from minilm_cache.errors import CacheCorruptError, CorpusError
from minilm_cache.progress import Progress
from minilm_cache.relations import TeacherSignal
from minilm_cache.storage_schema.arrays import small_arrays
from minilm_cache.storage_schema.manifest import CacheIdentity, Calibration, VectorsParameters
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.reader import read_checked, read_manifest

MIN_SEQUENCES = 4
"""Training sequences below which nothing could be checked that nothing was fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCodec:
    """A codec and what the cache must hold for it."""

    codec: SignalCodec
    calibration: Calibration | None = None
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the codec's own arrays: path below the cache's root to bytes."""


def fit_codec(
    path: Path,
    identity: CacheIdentity,
    teacher: Teacher,
    sequences: SequenceTable,
    batch_size: int,
    progress: Progress,
) -> FittedCodec:
    """Return the codec of the cache at `path`, existing or not.

    Raises:
        CorpusError: the corpus is too small to fit codec `vectors` to.
    """
    if not isinstance(identity.codec, VectorsParameters):
        return FittedCodec(
            codec=store_relations(identity.codec, identity.packing.max_length, identity.relations)
        )
    kept = _kept_codec(path, identity)
    if kept is not None:
        return kept
    num_train = len(sequences.lengths) - sequences.num_held_out
    if num_train < MIN_SEQUENCES:
        raise CorpusError(
            f"codec vectors is fitted to the corpus, and {num_train} training sequences are too few: it "
            f"needs {MIN_SEQUENCES}. Give more text, or --codec topk or dense."
        )
    ends = np.cumsum(sequences.lengths[:num_train])
    wanted = int(np.searchsorted(ends, identity.codec.calibration_tokens)) + 1
    fit, check = split_sample(num_train, wanted)
    progress.start("calibrate", len(fit) + len(check), "sequences")
    found = calibrate(
        _signals(teacher, sequences, fit, batch_size, progress),
        _signals(teacher, sequences, check, batch_size, progress),
        identity.codec.max_kl,
        _longest(teacher, identity.packing.max_length),
    )
    codec = found.codec
    calibration = Calibration(
        num_fitted=len(fit),
        num_checked=len(check),
        components=len(codec.basis),
        head_size=codec.head_size,
        scaling=codec.scaling,
        window=codec.window,
        kl=found.kl,
    )
    progress.note(
        f"calibrated: {calibration.components} components, KL "
        + ", ".join(f"{kind} {value:.4f}" for kind, value in found.kl.items())
    )
    attachments = {
        small.chunk_path: _little_endian(getattr(codec, small.path.rsplit("/", 1)[-1]))
        for small in small_arrays(identity, calibration)
    }
    return FittedCodec(codec=codec, calibration=calibration, attachments=attachments)


def _kept_codec(path: Path, identity: CacheIdentity) -> FittedCodec | None:
    """Return the codec that a dump into this folder began with; none where it did not get so far."""
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_manifest(path)
    if manifest.identity != identity:  # the writer will refuse this folder, and say why
        return None
    calibration = manifest.calibration
    try:
        codec = vectors_codec(path, manifest)
        attachments = {
            small.chunk_path: read_checked(path, small.chunk_path, manifest.files.get(small.chunk_path))
            for small in small_arrays(identity, calibration)
        }
    except CacheCorruptError:  # killed before the codec was written: fitted again, it is the same
        return None
    return FittedCodec(codec=codec, calibration=calibration, attachments=attachments)


def _longest(teacher: Teacher, max_length: int) -> TeacherSignal:
    """Return what the teacher says of a sequence of full length: its attention may have a window."""
    ids = torch.full((1, max_length), teacher.tokenizer.cls_token_id, device=teacher.device)
    return teacher.signal(ids, torch.full((1,), max_length, device=teacher.device))


def _signals(
    teacher: Teacher, sequences: SequenceTable, numbers: range, batch_size: int, progress: Progress
) -> list[TeacherSignal]:
    signals = []
    for first in range(numbers.start, numbers.stop, batch_size):
        last = min(first + batch_size, numbers.stop)
        tokens = sequences.read(first, last)
        ids, lengths = pad([torch.from_numpy(row) for row in tokens.ids], teacher.tokenizer.pad_token_id)
        signals.append(teacher.signal(ids.to(teacher.device), lengths.to(teacher.device)))
        progress.advance(last - first)
    return signals


def _little_endian(values: Tensor) -> bytes:
    array = values.numpy()
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
