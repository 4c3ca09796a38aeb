"""The codecs of a dump: taken from the cache that is being resumed, or fitted to the first sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minilm_cache.cache import vectors_codec
from minilm_cache.codecs.base import SignalCodec
from minilm_cache.codecs.calibrate import INTERRUPTED, Fitted, calibrate, split_sample
from minilm_cache.codecs.chain import store_relations
from minilm_cache.dump.audit import pad
from minilm_cache.dump.sequences import SequenceTable
from minilm_cache.dump.teacher import Teacher
from minilm_cache.errors import CacheCorruptError, CorpusError, InterruptedRunError
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.relations import TeacherSignal
from minilm_cache.storage_schema.arrays import small_arrays
from minilm_cache.storage_schema.identity import CacheIdentity, VectorsParameters
from minilm_cache.storage_schema.manifest import Calibration, LayerCalibration
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.reader import read_checked, read_manifest

MIN_SEQUENCES = 4
"""Training sequences below which nothing could be checked that nothing was fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCodec:
    """Codecs and what the cache must hold for them."""

    codecs: tuple[SignalCodec, ...]
    """One for each tapped layer."""
    calibration: Calibration | None = None
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the codecs' own arrays: path below the cache's root to bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecFitter:
    """What it takes to fit codecs."""

    identity: CacheIdentity
    teacher: Teacher
    sequences: SequenceTable
    batch_size: int
    progress: Progress
    should_stop: ShouldStop

    def codecs(self, path: Path) -> FittedCodec:
        """Return the codecs of the cache at `path`, existing or not.

        Raises:
            CorpusError: the corpus is too small to fit codec `vectors` to.
            InterruptedRunError: it was asked to stop.
        """
        identity = self.identity
        if not isinstance(identity.codec, VectorsParameters):
            stored = store_relations(identity.codec, identity.packing.max_length, identity.relations)
            return FittedCodec(codecs=(stored,))
        return _kept_codecs(path, identity) or self._fit(identity.codec)

    def _fit(self, parameters: VectorsParameters) -> FittedCodec:
        num_train = len(self.sequences.lengths) - self.sequences.num_held_out
        if num_train < MIN_SEQUENCES:
            raise CorpusError(
                f"codec vectors is fitted to the corpus, and {num_train} training sequences are too few: it "
                f"needs {MIN_SEQUENCES}. Give more text, or --codec topk or dense."
            )
        ends = np.cumsum(self.sequences.lengths[:num_train])
        wanted = int(np.searchsorted(ends, parameters.calibration_tokens)) + 1
        fit, check = split_sample(num_train, wanted)
        layers = self.teacher.layers
        self.progress.start("calibrate", len(layers) * (len(fit) + len(check)), "sequences")
        found = [self._fit_layer(at, fit, check, parameters.max_kl) for at in range(len(layers))]
        calibration = Calibration(
            num_fitted=len(fit),
            num_checked=len(check),
            layers=tuple(_described(layer) for layer in found),
        )
        attachments = {
            small.chunk_path: _little_endian(getattr(fitted.codec, small.path.rsplit("/", 1)[-1]))
            for fitted, described in zip(found, calibration.layers, strict=True)
            for small in small_arrays(self.identity, described)
        }
        return FittedCodec(
            codecs=tuple(fitted.codec for fitted in found), calibration=calibration, attachments=attachments
        )

    def _fit_layer(self, at: int, fit: range, check: range, max_kl: float) -> Fitted:
        """Fit the code of one tapped layer; the sample's vectors of all layers would not fit into memory."""
        found = calibrate(
            self._signals(at, fit),
            self._signals(at, check),
            max_kl,
            layer=self.teacher.layers[at],
            longest=self._longest(at),
            should_stop=self.should_stop,
        )
        kls = ", ".join(f"{kind} {value:.4f}" for kind, value in found.kl.items())
        self.progress.note(
            f"calibrated layer {found.codec.layer}: {len(found.codec.basis)} components, KL {kls}"
        )
        return found

    def _longest(self, at: int) -> TeacherSignal:
        """Return what a layer says of a sequence of full length: its attention may have a window."""
        length, device = self.identity.packing.max_length, self.teacher.device
        ids = torch.full((1, length), self.teacher.tokenizer.cls_token_id, device=device)
        return self.teacher.signals(ids, torch.full((1,), length, device=device))[at]

    def _signals(self, at: int, numbers: range) -> list[TeacherSignal]:
        signals = []
        for first in range(numbers.start, numbers.stop, self.batch_size):
            if self.should_stop():
                raise InterruptedRunError(INTERRUPTED)
            last = min(first + self.batch_size, numbers.stop)
            tokens = [torch.from_numpy(row) for row in self.sequences.read(first, last).ids]
            ids, lengths = pad(tokens, self.teacher.tokenizer.pad_token_id)
            device = self.teacher.device
            signals.append(self.teacher.signals(ids.to(device), lengths.to(device))[at])
            self.progress.advance(last - first)
        return signals


def _kept_codecs(path: Path, identity: CacheIdentity) -> FittedCodec | None:
    """Return the codecs that a dump into this folder began with; none where it did not get so far."""
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_manifest(path)
    if manifest.identity != identity:  # the writer will refuse this folder, and say why
        return None
    calibration = manifest.calibration
    assert calibration is not None
    try:
        codecs = tuple(vectors_codec(path, manifest, layer) for layer in identity.layers)
        attachments = {
            small.chunk_path: read_checked(path, small.chunk_path, manifest.files.get(small.chunk_path))
            for described in calibration.layers
            for small in small_arrays(identity, described)
        }
    except CacheCorruptError:  # killed before the codec was written: fitted again, it is the same
        return None
    return FittedCodec(codecs=codecs, calibration=calibration, attachments=attachments)


def _described(found: Fitted) -> LayerCalibration:
    codec = found.codec
    return LayerCalibration(
        layer=codec.layer,
        components=len(codec.basis),
        head_size=codec.head_size,
        scaling=codec.scaling,
        window=codec.window,
        kl=found.kl,
    )


def _little_endian(values: Tensor) -> bytes:
    array = values.numpy()
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
