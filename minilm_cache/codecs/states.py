"""How states are stored: transform-coded, first tokens' hidden states as float16, labels as sampled entries.

Error bounds: a hidden state of every token and a pooled vector have no bound for a single row, and the error
over all rows is in the manifest; a hidden state of first tokens has 2**-11 for each number; labels are an
unbiased sample (`sampling.py`), each kept weight within a factor `weight_ratio`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS, Rows
from minilm_cache.codecs.draws import SeededDraws
from minilm_cache.codecs.quantize import LAST_CODE, LogScale
from minilm_cache.codecs.sampling import PPS_RATIO, sample_pps, share_remainder
from minilm_cache.codecs.transform import TransformCode, refuse_codes
from minilm_cache.errors import CacheCorruptError, UnsupportedFormatError
from minilm_cache.relations.scores import key_mask
from minilm_cache.relations.states import DenseLabels, MaskedSequences, SparseLabels, States, WantedStates
from minilm_cache.relations.transfer import send
from minilm_cache.storage_schema.arrays import masked_paths, not_chosen, state_codes_path
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.states import (
    INDEX_PATH,
    LOGITS_PATH,
    POOLED,
    READ_PATH,
    WEIGHT_PATH,
    StateFamily,
    StateName,
    StatesIdentity,
    reading_path,
)

_LABEL_STREAM = 16
"""Random stream that labels are drawn from; relations use the streams below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesCodec:
    """Everything that a cache stores in addition to relations; arrays are named by their paths."""

    parameters: StatesIdentity
    vocab_size: int
    codes: Mapping[StateName, TransformCode]
    """Fitted code of each hidden state of every token, and of pooled vectors."""

    @classmethod
    def of(cls, identity: CacheIdentity, codes: Mapping[StateName, TransformCode]) -> "StatesCodec":
        """Return the codec of a cache that has states.

        Raises:
            UnsupportedFormatError: its weight scale is not this release's.
        """
        states = identity.states
        assert states is not None
        if states.labels is not None and states.labels.weight_ratio != PPS_RATIO:
            raise UnsupportedFormatError(
                f"labels of weight ratio {states.labels.weight_ratio} are unknown; this release knows "
                f"{PPS_RATIO}. Install a newer minilm-cache."
            )
        return cls(parameters=states, vocab_size=identity.teacher.vocab_size, codes=codes)

    @property
    def everything(self) -> WantedStates:
        """A request for everything that is stored."""
        first = tuple(StateName(StateFamily.FIRST, number) for number in self.parameters.first)
        return WantedStates(
            hidden=(*self.parameters.coded, *first),
            masked=self.parameters.masking is not None,
            logits=self.parameters.num_classes is not None,
        )

    def paths(self, wanted: WantedStates) -> tuple[str, ...]:
        """Return the paths of the arrays that these states are decoded from, in the first masked reading."""
        labels = (INDEX_PATH, WEIGHT_PATH) if self.parameters.labels is not None else ()
        return (
            *(_array(name) for name in wanted.hidden),
            *((READ_PATH, *labels) if wanted.masked else ()),
            *((LOGITS_PATH,) if wanted.logits else ()),
        )

    def stored_path(self, path: str, reading: int) -> str:
        """Return the path of an array in a masked reading; arrays that masks do not change have only one."""
        return reading_path(path, reading) if path in masked_paths(self.parameters) else path

    def encode(self, content: States, sequences: Sequence[int], *, lengths: Int[Tensor, " batch"]) -> Rows:
        """Encode a padded batch; integers may be int64 where their arrays store a smaller type."""
        states, reading = content, content.reading
        length = int(lengths.max())
        rows: dict[str, Tensor] = {}
        for name, values in states.hidden.items():
            if name.family is StateFamily.FIRST:
                rows[_array(name)] = _at_first(values.half(), length)
            else:
                codes = self.codes[name].codes(values)
                rows[_array(name)] = codes[:, None] if name == POOLED else codes
        if states.logits is not None:
            rows[LOGITS_PATH] = _at_first(states.logits.float(), length)
        if states.masked is not None:
            rows |= self._encode_masked(states.masked, sequences, reading)
        return {self.stored_path(path, reading): values for path, values in rows.items()}

    def _encode_masked(
        self, masked: MaskedSequences, sequences: Sequence[int], reading: int
    ) -> dict[str, Tensor]:
        rows = {READ_PATH: masked.ids.masked_fill(~masked.chosen, not_chosen(self.vocab_size))}
        if self.parameters.labels is None or masked.labels is None:  # the caller requested none
            return rows
        assert isinstance(masked.labels, DenseLabels)
        probs, k = masked.labels.probs, self.parameters.labels.k
        draws = send(self._draws(masked.label_counts, sequences, reading), probs.device)
        scale = LogScale(ratio=self.parameters.labels.weight_ratio)
        entries = sample_pps(probs, k, draws=draws, scale=scale)
        for path, drawn in ((INDEX_PATH, entries.column), (WEIGHT_PATH, entries.code)):
            values = torch.zeros((masked.ids.numel(), k), dtype=torch.int32, device=probs.device)
            values.index_copy_(0, masked.with_labels, drawn.int())
            rows[path] = values.view(*masked.ids.shape, k)
        return rows

    def _draws(self, counts: Sequence[int], sequences: Sequence[int], reading: int) -> Tensor:
        """Return a uniform number for each labelled token, `(labelled, 1)`.

        They are a pure function of seed, sequence and reading.
        """
        assert self.parameters.masking is not None
        draws, numbers = SeededDraws(self.parameters.masking.seed), np.empty(sum(counts), np.float32)
        for end, sequence, count in zip(accumulate(counts), sequences, counts, strict=True):
            draws.fill(numbers[end - count : end], [0, reading, _LABEL_STREAM, sequence])
        return torch.from_numpy(numbers)[:, None]

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for values that `encode` never writes."""
        del lengths
        first = [_array(name) for name in self.everything.hidden if name.family is StateFamily.FIRST]
        for path in {_array(name) for name in self.parameters.coded} & rows.keys():
            refuse_codes(rows[path])
        for path in {*first, LOGITS_PATH} & rows.keys():
            if not bool(rows[path].isfinite().all()):
                raise CacheCorruptError(f"a stored state is NaN or infinite. {NOT_OURS}")
        if READ_PATH in rows:
            self._check_masked(rows)

    def _check_masked(self, rows: Mapping[str, Tensor]) -> None:
        """Raise CacheCorruptError for a masked reading, or labels, that `encode` never writes."""
        read = rows[READ_PATH].to(torch.int64)
        chosen = read.ne(not_chosen(self.vocab_size))
        if bool((chosen & (read >= self.vocab_size)).any()):
            raise CacheCorruptError(f"a masked reading holds a token id outside the vocabulary. {NOT_OURS}")
        if self.parameters.labels is None:
            return
        labelled = torch.ones_like(chosen) if self._labels_all else chosen
        index, code = (rows[path][labelled].to(torch.int64) for path in (INDEX_PATH, WEIGHT_PATH))
        if index.numel() and (int(index.amax()) >= self.vocab_size or int(code.amax()) > LAST_CODE):
            raise CacheCorruptError(
                f"a label holds a token id outside the vocabulary, or an invalid weight. {NOT_OURS}"
            )
        if not bool(code.eq(0).any(-1).all()):
            raise CacheCorruptError(f"a stored row has no slot. {NOT_OURS}")

    def decode(
        self, rows: Mapping[str, Tensor], wanted: WantedStates, *, lengths: Int[Tensor, " batch"]
    ) -> States:
        """Decode states, on the device of `rows`. Masked sequences must be on the CPU (see `masked`).

        Args:
            rows: path of an array to `(batch, length, ...)`, and `tokens`; positions beyond a sequence's
                length are ignored.
            wanted: which states to decode.
            lengths: valid positions of each sequence, `(batch,)`.
        """
        return States(
            hidden={name: self._hidden(rows[_array(name)], name) for name in wanted.hidden},
            masked=self.masked(rows, lengths) if wanted.masked else None,
            logits=rows[LOGITS_PATH][:, 0].float() if wanted.logits else None,
        )

    def masked(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " batch"]) -> MaskedSequences:
        """Decode the masked sequences and their labels, on the CPU, which alone knows how many there are.

        Args:
            rows: path of an array to `(batch, length, ...)`, and `tokens`.
            lengths: valid positions of each sequence.
        """
        read, tokens = rows[READ_PATH].to(torch.int64), rows["tokens"].to(torch.int64)
        valid = key_mask(lengths, read.shape[1])
        chosen = read.ne(not_chosen(self.vocab_size)) & valid
        labels = self.parameters.labels
        masked = MaskedSequences.of(
            torch.where(chosen, read, tokens), chosen, labelled=valid if self._labels_all else None
        )
        if labels is None:
            return masked
        index, code = (
            rows[path].flatten(0, 1)[masked.with_labels].to(torch.int64) for path in (INDEX_PATH, WEIGHT_PATH)
        )
        weight = LogScale(ratio=labels.weight_ratio).value(code)
        entries = SparseLabels(index, share_remainder(code, weight))
        return replace(masked, labels=entries, temperature=labels.temperature)

    def to(self, device: torch.device) -> "StatesCodec":
        """Return the same codec with its codes on a device."""
        return replace(self, codes={name: code.to(device) for name, code in self.codes.items()})

    @property
    def _labels_all(self) -> bool:
        """Whether every token has labels, and not only the chosen ones."""
        return self.parameters.labels is not None and self.parameters.labels.tokens == "all"

    def _hidden(self, rows: Tensor, name: StateName) -> Tensor:
        if name.family is not StateFamily.FIRST:
            decoded = self.codes[name].rows(rows.flatten(0, 1))
            return decoded if name == POOLED else decoded.view(*rows.shape[:2], -1)
        return rows[:, 0].float()


def _array(name: StateName) -> str:
    return name.folder if name.family is StateFamily.FIRST else state_codes_path(name)


def _at_first(values: Tensor, length: int) -> Tensor:
    """Return values of sequences as rows of their first tokens: `(batch, n)` to `(batch, length, n)`."""
    return torch.nn.functional.pad(values[:, None], (0, 0, 0, length - 1))
