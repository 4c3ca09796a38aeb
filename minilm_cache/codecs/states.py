"""How states are stored: transform-coded, first tokens' hidden states as float16, labels as sampled entries.

Error bounds: a hidden state of every token and a pooled vector have no bound for a single row, and the error
over all rows is in the manifest; a hidden state of first tokens has 2**-11 for each number; labels are an
unbiased sample (`topk.py`), each kept weight within a factor `weight_ratio`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from minilm_cache.codecs.base import NOT_OURS, PART_ENTRIES, Rows
from minilm_cache.codecs.quantize import LAST_CODE, LogScale
from minilm_cache.codecs.topk import PPS_RATIO, sample_pps, share_remainder
from minilm_cache.codecs.transform import TransformCode, refuse_codes
from minilm_cache.errors import CacheCorruptError, UnsupportedFormatError
from minilm_cache.relations.scores import key_mask
from minilm_cache.relations.states import DenseLabels, MaskedSequences, SparseLabels, States, WantedStates
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
        rows: dict[str, np.ndarray] = {}
        for name, values in states.hidden.items():
            if name.family is StateFamily.FIRST:
                rows[_array(name)] = _at_first(values.half(), length)
            else:
                codes = self.codes[name].codes(values).cpu().numpy()
                rows[_array(name)] = codes[:, None] if name == POOLED else codes
        if states.logits is not None:
            rows[LOGITS_PATH] = _at_first(states.logits.float(), length)
        if states.masked is not None:
            rows |= self._encode_masked(states.masked, sequences, reading)
        return {self.stored_path(path, reading): values for path, values in rows.items()}

    def _encode_masked(
        self, masked: MaskedSequences, sequences: Sequence[int], reading: int
    ) -> dict[str, np.ndarray]:
        read = masked.ids.masked_fill(~masked.chosen, not_chosen(self.vocab_size))
        rows = {READ_PATH: read.cpu().numpy()}
        if self.parameters.labels is None or masked.labels is None:  # the caller requested none
            return rows
        assert isinstance(masked.labels, DenseLabels)
        probs, k = masked.labels.probs, self.parameters.labels.k
        labelled = masked.with_labels
        draws = self._draws(labelled, sequences, reading).to(probs.device)
        part = max(1, PART_ENTRIES // probs.shape[-1])
        scale = LogScale(ratio=self.parameters.labels.weight_ratio)
        drawn = [
            sample_pps(part_probs, k, draws=part_draws, scale=scale)
            for part_probs, part_draws in zip(probs.split(part), draws.split(part), strict=True)
        ]
        index = torch.zeros((*masked.ids.shape, k), dtype=torch.int64, device=probs.device)
        weight = torch.zeros_like(index)
        index[labelled] = torch.cat([entries.column for entries in drawn]).long()
        weight[labelled] = torch.cat([entries.code for entries in drawn]).long()
        rows[INDEX_PATH] = index.cpu().numpy()
        rows[WEIGHT_PATH] = weight.cpu().numpy()
        return rows

    def _draws(self, labelled: Tensor, sequences: Sequence[int], reading: int) -> Tensor:
        """Return a uniform number for each labelled token, `(labelled, 1)`.

        They are a pure function of seed, sequence and reading.
        """
        assert self.parameters.masking is not None
        seed, numbers = self.parameters.masking.seed, []
        for sequence, count in zip(sequences, labelled.sum(-1).tolist(), strict=True):
            counter = [0, reading, _LABEL_STREAM, sequence]
            generator = np.random.Generator(np.random.Philox(key=seed, counter=counter))
            numbers.append(generator.random(count, dtype=np.float32))
        return torch.from_numpy(np.concatenate(numbers))[:, None]

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " tokens"]) -> None:
        """Raise CacheCorruptError for values that `encode` never writes."""
        del lengths
        for name in self.parameters.coded:
            refuse_codes(rows[_array(name)])
        numbers = [rows[_array(name)] for name in self.everything.hidden if name.family is StateFamily.FIRST]
        if self.parameters.num_classes is not None:
            numbers.append(rows[LOGITS_PATH])
        if not all(bool(values.isfinite().all()) for values in numbers):
            raise CacheCorruptError(f"a stored state is NaN or infinite. {NOT_OURS}")
        if self.parameters.masking is not None:
            chosen = self._chosen(rows[READ_PATH])
            if self.parameters.labels is not None:
                self._entries(rows, torch.ones_like(chosen) if self._labels_all else chosen)

    def decode(
        self, rows: Mapping[str, Tensor], wanted: WantedStates, *, lengths: Int[Tensor, " batch"]
    ) -> States:
        """Decode states, on the device of `rows`.

        Args:
            rows: path of an array to `(batch, length, ...)`, and `tokens`; positions beyond a sequence's
                length are ignored.
            wanted: which states to decode.
            lengths: valid positions of each sequence, `(batch,)`.

        Raises:
            CacheCorruptError: values that `encode` never writes.
        """
        hidden = {name: self._hidden(rows[_array(name)], name) for name in wanted.hidden}
        masked = None
        if wanted.masked:
            valid = key_mask(lengths, rows[READ_PATH].shape[1])
            chosen = self._chosen(rows[READ_PATH]) & valid
            tokens = rows["tokens"].to(torch.int64)
            masked = MaskedSequences(
                ids=torch.where(chosen, rows[READ_PATH].to(torch.int64), tokens),
                chosen=chosen,
                labelled=valid if self._labels_all else None,
                labels=(
                    None
                    if self.parameters.labels is None
                    else self._entries(rows, valid if self._labels_all else chosen)
                ),
                temperature=1.0 if self.parameters.labels is None else self.parameters.labels.temperature,
            )
        logits = rows[LOGITS_PATH][:, 0].float() if wanted.logits else None
        if logits is not None and not bool(logits.isfinite().all()):
            raise CacheCorruptError(f"a stored state is NaN or infinite. {NOT_OURS}")
        return States(hidden=hidden, masked=masked, logits=logits)

    @property
    def _labels_all(self) -> bool:
        """Whether every token has labels, and not only the chosen ones."""
        return self.parameters.labels is not None and self.parameters.labels.tokens == "all"

    def _hidden(self, rows: Tensor, name: StateName) -> Tensor:
        if name.family is not StateFamily.FIRST:
            refuse_codes(rows)
            decoded = self.codes[name].rows(rows.flatten(0, 1))
            return decoded if name == POOLED else decoded.view(*rows.shape[:2], -1)
        first = rows[:, 0].float()
        if not bool(first.isfinite().all()):
            raise CacheCorruptError(f"a stored state is NaN or infinite. {NOT_OURS}")
        return first

    def _chosen(self, read: Tensor) -> Tensor:
        """Return True at the tokens that were chosen, from the ids that were read in their place."""
        read = read.to(torch.int64)
        chosen = read.ne(not_chosen(self.vocab_size))
        if bool((chosen & (read >= self.vocab_size)).any()):
            raise CacheCorruptError(f"a masked reading holds a token id outside the vocabulary. {NOT_OURS}")
        return chosen

    def _entries(self, rows: Mapping[str, Tensor], labelled: Tensor) -> SparseLabels:
        assert self.parameters.labels is not None
        index = rows[INDEX_PATH][labelled].to(torch.int64)
        code = rows[WEIGHT_PATH][labelled].to(torch.int64)
        if index.numel() and (int(index.amax()) >= self.vocab_size or int(code.amax()) > LAST_CODE):
            raise CacheCorruptError(
                f"a label holds a token id outside the vocabulary, or an invalid weight. {NOT_OURS}"
            )
        weight = LogScale(ratio=self.parameters.labels.weight_ratio).value(code)
        return SparseLabels(index, share_remainder(code, weight))


def _array(name: StateName) -> str:
    return name.folder if name.family is StateFamily.FIRST else state_codes_path(name)


def _at_first(values: Tensor, length: int) -> np.ndarray:
    """Return values of sequences as rows of their first tokens: `(batch, n)` to `(batch, length, n)`."""
    rows = torch.zeros((len(values), length, values.shape[-1]), dtype=values.dtype)
    rows[:, 0] = values.cpu()
    return rows.numpy()
