"""The codecs of a dump: taken from the cache that is being resumed or added to, or fitted to the text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minilm_cache.cache import read_codes
from minilm_cache.codecs.base import RelationCodec
from minilm_cache.codecs.build import layer_codec
from minilm_cache.codecs.transform import Bound, TransformCode, fit_state
from minilm_cache.codecs.vectors import INTERRUPTED, calibrate, split_sample
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.reading import SequenceReader
from minilm_cache.errors import CacheCorruptError, CorpusError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.tokenizer import some_token
from minilm_cache.relations.scores import LayerRelations
from minilm_cache.session import Session
from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.signals.table import value_signal
from minilm_cache.storage_schema.arrays import all_small_arrays
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import (
    CacheManifest,
    Calibration,
    LayerCalibration,
    StateCalibration,
    layer_folder,
)
from minilm_cache.storage_schema.states import POOLED, SignalName, StateFamily, StatesIdentity
from minilm_cache.store.checked import read_checked
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.reader import CacheReader, read_manifest

MIN_SEQUENCES = 4
"""Fewest training sequences that codes are fitted to, so that others are left to check the codes with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCodec:
    """Codecs and what the cache must hold for them."""

    codecs: tuple[RelationCodec, ...]
    """Codecs of the tapped layers, in their order."""
    states: SignalsCodec | None
    """Codec of the states. None means that the cache holds relations only."""
    calibration: Calibration | None = None
    """How the codes were fitted. None means that nothing is fitted."""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the codecs' own arrays: path below the cache's root to bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownCodes:
    """Codes that exist already."""

    manifest: CacheManifest | None = None
    codes: Mapping[str, TransformCode] = field(default_factory=dict)
    """Codes by the folder of their arrays."""

    @classmethod
    def in_cache(cls, root: Path, manifest: CacheManifest) -> "_KnownCodes":
        """Read all codes of a cache.

        Raises:
            CacheCorruptError: a code is damaged.
        """
        return cls(
            manifest=manifest,
            codes=read_codes(manifest, lambda path: read_checked(root, path, manifest.files.get(path))),
        )

    def layer(self, layer: int) -> LayerCalibration | None:
        """Return how a layer was fitted. None means that it was not."""
        known = layer_folder(layer) in self.codes
        return self._calibration.of_layer(layer) if known else None

    def state(self, name: SignalName) -> StateCalibration | None:
        """Return how a state was fitted. None means that it was not."""
        if name.folder not in self.codes:
            return None
        return next(state for state in self._calibration.states if state.name == name)

    @property
    def _calibration(self) -> Calibration:
        assert self.manifest is not None
        assert self.manifest.calibration is not None
        return self.manifest.calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecFitter:
    """Fits the codecs of a dump."""

    identity: CacheIdentity
    reader: SequenceReader
    sequences: SequenceTable
    batch_size: int
    session: Session

    def codecs(self, path: Path, donor: CacheReader | None = None) -> FittedCodec:
        """Return the codecs of the cache at `path`, existing or not.

        Args:
            path: folder of the cache.
            donor: another cache whose codes are reused. None means that there is no such cache.

        Raises:
            CorpusError: the corpus is too small to fit codes to.
            InterruptedRunError: a stop was requested.
        """
        identity = self.identity
        coded = identity.states.coded if identity.states is not None else ()
        if identity.vectors is None and not coded:
            return self._complete(None, {})
        known = _known_at(path, identity)
        if known is None:
            known = _KnownCodes() if donor is None else _KnownCodes.in_cache(donor.root, donor.manifest)
        return self._fit(coded, known)

    def _fit(self, coded: Sequence[SignalName], known: _KnownCodes) -> FittedCodec:
        num_train = self.sequences.num_train
        if num_train < MIN_SEQUENCES:
            what = "codec vectors is" if self.identity.vectors is not None else "codes of states are"
            raise CorpusError(
                f"{what} fitted to the corpus, and {num_train} training sequences are too few: it needs "
                f"{MIN_SEQUENCES}. Give more text{'' if coded else ', or take --codec topk or dense'}."
            )
        layers = self._all_layers(known)
        states = self._all_states(coded, known)
        fit, check = self._calibration_sample()
        calibration = Calibration(
            num_fitted=len(fit),
            num_checked=len(check),
            layers=tuple(described for described, _ in layers),
            states=tuple(described for described, _ in states),
        )
        codes = {layer_folder(described.layer): code for described, code in layers}
        codes |= {described.name.folder: code for described, code in states}
        return self._complete(calibration, codes)

    def _calibration_sample(self) -> tuple[range, range]:
        """Return the largest sample that any code is fitted to, and checked with."""
        states, vectors = self.identity.states, self.identity.vectors
        samples = [self._sample(vectors.calibration_tokens)] if vectors is not None else []
        if states is not None:
            samples += [self._state_sample(names, states) for names in _passes(states.coded)]
        return max(samples, key=lambda sample: sample[1].stop)

    def _all_layers(self, known: _KnownCodes) -> list[tuple[LayerCalibration, TransformCode]]:
        """Return the codes of all layers; those that are known are not fitted again."""
        codec = self.identity.vectors
        if codec is None:
            return []
        fit, check = self._sample(codec.calibration_tokens)
        missing = sum(known.layer(layer) is None for layer in self.identity.layers)
        self.session.progress.start("calibrate", missing * (len(fit) + len(check)), "sequences")
        layers = []
        for layer in self.identity.layers:
            described = known.layer(layer)
            if described is None:
                layers.append(self._fit_layer(layer, fit, check=check, max_kl=codec.max_kl))
            else:
                layers.append((described, known.codes[layer_folder(layer)]))
        return layers

    def _all_states(
        self, coded: Sequence[SignalName], known: _KnownCodes
    ) -> list[tuple[StateCalibration, TransformCode]]:
        """Return the codes of all coded states; those that are known are not fitted again."""
        new = self._fit_states([name for name in coded if known.state(name) is None])
        states = []
        for name in coded:
            described = known.state(name)
            states.append(new[name] if described is None else (described, known.codes[name.folder]))
        return states

    def _complete(self, calibration: Calibration | None, codes: Mapping[str, TransformCode]) -> FittedCodec:
        identity = self.identity
        states = None
        if identity.states is not None:
            states = SignalsCodec.of(identity, {name: codes[name.folder] for name in identity.states.coded})
        attachments = {
            small.chunk_path: _little_endian(getattr(codes[small.folder], small.name))
            for small in all_small_arrays(identity, calibration)
        }
        return FittedCodec(
            codecs=tuple(
                layer_codec(identity, calibration, layer=layer, codes=codes) for layer in identity.layers
            ),
            states=states,
            calibration=calibration,
            attachments=attachments,
        )

    def _sample(self, num_tokens: int) -> tuple[range, range]:
        """Return the sequences to fit codes to, about so many tokens, and those to check them with."""
        num_train = self.sequences.num_train
        before = min(num_train, self.sequences.sequences_within(num_tokens - 1))
        return split_sample(num_train, before + 1)

    def _fit_layer(
        self, layer: int, fit: range, *, check: range, max_kl: float
    ) -> tuple[LayerCalibration, TransformCode]:
        """Fit the code of a single layer: the vectors of all layers would not fit into memory."""
        fitted = calibrate(
            self._signals(layer, fit),
            self._signals(layer, check),
            max_kl,
            layer=layer,
            longest=self._longest(layer),
            should_stop=self.session.should_stop,
        )
        codec = fitted.codec
        kls = ", ".join(f"{kind} {value:.4f}" for kind, value in fitted.kl.items())
        self.session.progress.note(f"calibrated layer {layer}: {len(codec.code.basis)} components, KL {kls}")
        described = LayerCalibration(
            layer=layer,
            components=len(codec.code.basis),
            head_size=codec.head_size,
            scaling=codec.scaling,
            window=codec.window,
            kl=fitted.kl,
        )
        return described, codec.code

    def _longest(self, layer: int) -> LayerRelations:
        """Return a layer's signal of a sequence of full length, since its attention may have a window."""
        length, teacher = self.identity.packing.max_length, self.reader.teacher
        ids = torch.full((length,), some_token(teacher.tokenizer))
        return teacher.relations(Inputs.of([ids], 0), (layer,))[0]

    def _signals(self, layer: int, numbers: range) -> list[LayerRelations]:
        """Return a layer's signals of some sequences, batch by batch."""
        signals = []
        for inputs, batch in self._batches(numbers):
            signals += self.reader.read(inputs, numbers=batch, layers=(layer,), wanted=(), waits=True)[0]
            self.session.progress.advance(len(batch))
        return signals

    def _batches(self, numbers: range) -> Iterator[tuple[Inputs, list[int]]]:
        """Yield padded batches of sequences, on the CPU, and their numbers.

        Sequences of a batch have about the same length, which saves padding. Batches come in a mixed order,
        because gains are computed from the first rows.
        """
        teacher, all_numbers = self.reader.teacher, np.arange(numbers.start, numbers.stop)
        order = all_numbers[np.argsort(self.sequences.lengths(numbers.start, numbers.stop), kind="stable")]
        size = teacher.at_once(self.batch_size)
        starts = range(0, len(order), size)
        for first in np.random.default_rng(0).permutation(starts).tolist():
            self.session.stop_if_asked(INTERRUPTED)
            batch = order[first : first + size].tolist()
            rows = [self.sequences.read(number, number + 1).ids[0] for number in batch]
            inputs = Inputs.of([torch.from_numpy(row) for row in rows], teacher.tokenizer.pad_token_id)
            yield inputs.paired(self.identity.packing.pair), batch

    def _fit_states(
        self, names: Sequence[SignalName]
    ) -> dict[SignalName, tuple[StateCalibration, TransformCode]]:
        """Fit the codes of hidden states, all from one pass over their sample, and that of pooled vectors."""
        states = self.identity.states
        fitted: dict[SignalName, tuple[StateCalibration, TransformCode]] = {}
        if states is not None:
            for names_of_pass in _passes(names):
                fitted |= self._fit_pass(names_of_pass, states)
        return fitted

    def _fit_pass(
        self, names: Sequence[SignalName], states: StatesIdentity
    ) -> dict[SignalName, tuple[StateCalibration, TransformCode]]:
        fit, check = self._state_sample(names, states)
        self.session.progress.start("calibrate states", len(fit) + len(check), "sequences")
        fit_rows, check_rows = self._state_rows(names, fit), self._state_rows(names, check)
        fitted = {}
        for name in names:
            code, error = fit_state(fit_rows[name], check_rows[name], _bound_of(name, states))
            words = f"mean cosine {1 - error:.5f}" if name == POOLED else f"relative error {error:.3f}"
            self.session.progress.note(f"calibrated {name.folder}: {len(code.basis)} components, {words}")
            described = StateCalibration(
                family=StateFamily(name.signal), number=name.number, components=len(code.basis), error=error
            )
            fitted[name] = (described, code)
        return fitted

    def _state_sample(self, names: Sequence[SignalName], states: StatesIdentity) -> tuple[range, range]:
        """Return the sequences to fit the codes of a pass to, and those to check them with."""
        if POOLED not in names or states.pooled is None:
            assert states.calibration_tokens is not None
            return self._sample(states.calibration_tokens)
        num_train = self.sequences.num_train
        return split_sample(num_train, states.pooled.calibration_sequences)

    def _state_rows(self, names: Sequence[SignalName], numbers: range) -> dict[SignalName, Tensor]:
        """Return states of some sequences, `(tokens, hidden)` for each name; one row each of pooled ones."""
        rows: dict[SignalName, list[Tensor]] = {name: [] for name in names}
        for inputs, batch in self._batches(numbers):
            _, signals = self.reader.read(inputs, numbers=batch, layers=(), wanted=names, waits=True)
            valid = inputs.valid.to(self.reader.teacher.device)
            for name in names:
                values = signals[name]
                rows[name].append((values if name == POOLED else values[valid]).cpu())
            self.session.progress.advance(len(batch))
        return {name: torch.cat(parts) for name, parts in rows.items()}


def _passes(names: Sequence[SignalName]) -> list[list[SignalName]]:
    """Return names in groups that are fitted to the same sample: pooled vectors need more sequences."""
    hidden, pooled = [name for name in names if name != POOLED], [name for name in names if name == POOLED]
    return [group for group in (hidden, pooled) if group]


def _bound_of(name: SignalName, states: StatesIdentity) -> Bound:
    bound = value_signal(name).bound(states)
    assert bound is not None
    return bound


def _known_at(path: Path, identity: CacheIdentity) -> _KnownCodes | None:
    """Return the codes that a dump into this folder began with. None means that it has written none yet."""
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_manifest(path)
    if manifest.identity != identity:  # the writer will refuse this folder, and say why
        return None
    try:
        return _KnownCodes.in_cache(path, manifest)
    except CacheCorruptError:  # killed before the codes were written: fitted again, they are the same
        return None


def _little_endian(values: Tensor) -> bytes:
    array = values.numpy()
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
