"""Fidelity of what is stored beside relations: the bytes on disk against the teacher, run again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.dump.reading import SequenceReader, sequences_at_once
from minilm_cache.models.padding import pad
from minilm_cache.relations.states import DenseLabels, MaskedSequences, States, expected
from minilm_cache.storage_schema.manifest import StateFidelity
from minilm_cache.storage_schema.states import LABELS_FOLDER, LOGITS_PATH, StateFamily, plain_path


@dataclass(slots=True)
class _Rows:
    """Sums over rows, for a relative error."""

    is_centred: bool
    """True: over variance; else over squares, for rows that hardly differ from sequence to sequence."""
    num_rows: int = 0
    total: Tensor | float = 0.0
    squares: float = 0.0
    errors: float = 0.0

    def add(self, said: Tensor, stored: Tensor) -> None:
        """Add rows, `(rows, width)`."""
        said, stored = said.double().cpu(), stored.double().cpu()
        self.num_rows += len(said)
        self.total = self.total + said.sum(0)
        self.squares += float(said.square().sum())
        self.errors += float((stored - said).square().sum())

    @property
    def relative_error(self) -> float:
        """Root of squared error over variance, or over squares."""
        assert isinstance(self.total, Tensor)
        mean = float(self.total.square().sum()) / self.num_rows if self.is_centred else 0.0
        return math.sqrt(self.errors / max(self.squares - mean, 1e-30))


def audit_states(
    cache: Cache, reader: SequenceReader, *, numbers: Sequence[int], batch_size: int
) -> tuple[StateFidelity, ...]:
    """Run the teacher again on some sequences and compare with what was stored beside relations.

    Args:
        cache: complete but for its seal.
        reader: the teacher.
        numbers: of the sequences.
        batch_size: sequences that the teacher reads at once.

    Raises:
        CacheCorruptError: a shard is damaged.
    """
    codec = cache.states_codec
    if codec is None:
        return ()
    batch_size = sequences_at_once(cache.manifest.identity, batch_size)
    errors: dict[str, _Rows] = {}
    bias: list[Tensor] = []
    for start in range(0, len(numbers), batch_size):
        some = numbers[start : start + batch_size]
        sequences = [cache[number] for number in some]
        ids, lengths = pad([one.input_ids for one in sequences], reader.teacher.tokenizer.pad_token_id)
        device = reader.teacher.device
        for reading in range(codec.parameters.num_readings):
            wanted = codec.everything if reading == 0 else codec.everything.of_masked_reading()
            _, said = reader.read(
                ids.to(device), lengths.to(device), numbers=some, layers=(), wanted=wanted, reading=reading
            )
            for at, sequence in enumerate(sequences):
                _compare(said, sequence.states(reading), at=at, length=int(lengths[at]), errors=errors)
            if said.masked is not None and said.masked.labels is not None:
                stored = [one.states(reading).masked for one in sequences]
                bias.append(_bias(said.masked, [one for one in stored if one is not None]))
    shares = _bytes_per_token(cache, codec.parameters.paths)
    return tuple(
        StateFidelity(
            path=path,
            bytes_per_token=shares[path],
            relative_error=errors[path].relative_error if path in errors else None,
            cross_entropy_bias=float(torch.cat(bias).mean()) if path == LABELS_FOLDER and bias else None,
        )
        for path in codec.parameters.paths
    )


def _compare(said: States, stored: States, *, at: int, length: int, errors: dict[str, _Rows]) -> None:
    """Add one sequence of a batch to the errors of its states."""
    for name, values in said.hidden.items():
        is_first = name.family is StateFamily.FIRST
        own = values[at][None] if is_first else values[at, :length]
        found = stored.hidden[name] if is_first else stored.hidden[name][0]
        errors.setdefault(name.folder, _Rows(is_centred=not is_first)).add(own, found)
    if said.logits is not None and stored.logits is not None:
        errors.setdefault(LOGITS_PATH, _Rows(is_centred=False)).add(said.logits[at][None], stored.logits)


def _bias(said: MaskedSequences, stored: Sequence[MaskedSequences]) -> Tensor:
    """Return sum_j (stored_j - teacher_j) log teacher_j of each token with labels."""
    assert isinstance(said.labels, DenseLabels)
    probs = said.labels.probs.cpu()
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    found, first = [], 0
    for one in stored:
        assert one.labels is not None
        count = int(one.with_labels.sum())
        found.append(expected(one.labels, logs[first : first + count]))
        first += count
    return torch.cat(found) - (probs * logs).sum(-1)


def _bytes_per_token(cache: Cache, paths: Sequence[str]) -> dict[str, float]:
    """Return the bytes of shard files of each array, or group of arrays, per token of the cache."""
    files = [item for record in cache.reader.records.values() for item in record.files.items()]
    return {
        path: sum(file.size for name, file in files if plain_path(name).startswith(f"{path}/"))
        / cache.manifest.num_tokens
        for path in paths
    }
