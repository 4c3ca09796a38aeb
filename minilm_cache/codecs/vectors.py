"""Codec `vectors`: queries, keys and values in a few dozen bytes per token; relations are computed from them.

The queries, keys and values of a layer are affine in its input, so side by side they lie in a subspace of its
width (rotary positions widen it). Principal components project them to that subspace, weighted by what
an error costs in KL, rounded with one step, and entropy-coded component by component
(`transform.py`). Decoding is one matrix product: vectors = mean + (codes * step) @ basis. Error bound: none
for a row; the mean KLs of attention and value relation are in the manifest (`calibration`,
`measured.fidelity`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor

from minilm_cache.codecs.base import Rows
from minilm_cache.codecs.transform import GAIN_ROWS, TransformCode, fit_code, refuse_codes
from minilm_cache.errors import InterruptedRunError, InvalidConfigError, TeacherError
from minilm_cache.relations.scores import (
    LayerRelations,
    RowTargets,
    VectorRows,
    Vectors,
    WantedRelations,
    column_mask,
    key_mask,
    relation_probs,
    split_heads,
)
from minilm_cache.session import ShouldStop, never_stop
from minilm_cache.storage_schema.arrays import codes_path
from minilm_cache.storage_schema.identity import RelationKind


def concatenate(vectors: Vectors) -> Float[Tensor, "batch length width"]:
    """Return queries, keys and values of each token side by side, head by head, float32."""
    parts = [part.transpose(1, 2).flatten(2) for part in (vectors.query, vectors.key, vectors.value)]
    return torch.cat(parts, -1).float()


def window_mask(
    window: int | None, length: int, device: torch.device
) -> Bool[Tensor, "1 1 query key"] | None:
    """Return the mask of attention that sees `window` positions to each side. None means that it sees all."""
    if window is None:
        return None
    position = torch.arange(length, device=device)
    return ((position[:, None] - position).abs() <= window)[None, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VectorsCodec:
    """One tapped layer's vectors; see the module's docstring."""

    layer: int
    """Layer of the teacher, counted from 0."""
    num_heads: int
    head_size: int
    scaling: float
    """Factor on query-key products."""
    window: int | None
    """Positions to each side that the teacher's attention sees. None means that it sees all."""
    code: TransformCode
    is_causal: bool = False
    """Whether a token sees itself and those before it alone."""

    @property
    def codes_path(self) -> str:
        """Path of the one array that everything is decoded from."""
        return codes_path(self.layer)

    @property
    def is_unbiased(self) -> bool:
        """False: the decoded rows are close to the teacher's, but their expectation differs."""
        return False

    @property
    def everything(self) -> WantedRelations:
        """A request for every relation."""
        return WantedRelations(tuple(RelationKind))

    def paths(self, wanted: WantedRelations) -> tuple[str, ...]:
        """Return `codes_path`, or nothing if no relation is requested."""
        return (self.codes_path,) if wanted.kinds else ()

    def encode(
        self, content: LayerRelations, sequences: Sequence[int], *, lengths: Int[Tensor, " batch"]
    ) -> Rows:
        """Return the codes, `(batch, length, components)` int16; nothing is drawn."""
        del sequences, lengths
        return {self.codes_path: self.code.codes(concatenate(content.vectors))}

    def vectors(self, codes: Int16[Tensor, "batch length components"]) -> Vectors:
        """Return queries, keys and values, float32, on the device of the codes."""
        flat = self.code.rows(codes.flatten(0, 1))
        heads = flat.view(*codes.shape[:2], 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        mask = window_mask(self.window, codes.shape[1], codes.device)
        return Vectors(heads[0], heads[1], heads[2], mask, self.scaling, is_causal=self.is_causal)

    def check(self, rows: Mapping[str, Tensor], lengths: Int[Tensor, " _"]) -> None:
        """Raise CacheCorruptError for codes that `encode` never writes."""
        del lengths
        if self.codes_path in rows:
            refuse_codes(rows[self.codes_path])

    def decode(
        self, rows: Mapping[str, Tensor], wanted: WantedRelations, *, lengths: Int[Tensor, " batch"]
    ) -> dict[RelationKind, RowTargets]:
        """Return relations as the vectors that they are computed from."""
        del lengths
        if not wanted.kinds:
            return {}
        vectors = self.vectors(rows[self.codes_path])
        if wanted.heads is not None:
            vectors = split_heads(vectors, wanted.heads)
        return {kind: VectorRows(vectors, kind) for kind in wanted.kinds}

    def to(self, device: torch.device) -> "VectorsCodec":
        """Return the same codec with its code on a device."""
        return replace(self, code=self.code.to(device))


KINDS = (RelationKind.ATTENTION, RelationKind.VALUE)
MARGIN = 0.97
"""Share of the allowed KL that a fit aims at: on other sequences the KL differs by a few per cent."""
INTERRUPTED = "interrupted while fitting the codec: nothing was written. Run the same command to begin again."
_WEIGHT_ROUNDS = 3
_STEP_ROUNDS = 9
_LEAST_SENSITIVITY = 1e-6
"""Least sensitivity of a direction over the greatest of its head: errors that cost no KL stay bounded."""
_LEAST_VARIANCE = 1e-9
"""Least variance of a component over the greatest: less is rounding error of the teacher's arithmetic."""

_Metric = Float[Tensor, "heads size size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCodec:
    """A codec, and its KL on the sequences that it was checked with."""

    codec: VectorsCodec
    kl: dict[RelationKind, float]
    """Mean KL(teacher || stored) over heads and valid rows, nats."""


def calibrate(
    fit: Sequence[LayerRelations],
    check: Sequence[LayerRelations],
    max_kl: float,
    *,
    layer: int,
    longest: LayerRelations | None = None,
    should_stop: ShouldStop = never_stop,
) -> FittedCodec:
    """Return the coarsest code whose mean KLs on `check` are at most `max_kl`, nats.

    Args:
        fit: batches that the statistics are computed from.
        check: batches that the weight and the step are chosen on.
        max_kl: greatest mean KL, nats, for attention and for the value relation.
        layer: layer of the teacher, counted from 0.
        longest: a sequence of full length, whose mask shows how far the teacher's attention sees. None means
            that the masks of `fit` and `check` are used.
        should_stop: called before each step that is tried; True stops.

    Raises:
        InterruptedRunError: a stop was requested.
        TeacherError: the teacher's attention mask is not a sliding window.
        InvalidConfigError: no step reaches `max_kl`.
    """
    moments = _Moments(layer, fit, [*fit, *check] if longest is None else [longest, *fit, *check])
    weight = 1.0
    best = _coarsest_step(moments, check, weight=weight, max_kl=max_kl, should_stop=should_stop)
    for _ in range(_WEIGHT_ROUNDS):
        ratio = best.kl[RelationKind.VALUE] / max(best.kl[RelationKind.ATTENTION], 1e-9)
        weight *= min(max(ratio, 0.1), 10.0)
        candidate = _coarsest_step(moments, check, weight=weight, max_kl=max_kl, should_stop=should_stop)
        if _bits(candidate.codec, check) >= _bits(best.codec, check):
            break
        best = candidate
    if max(best.kl.values()) > max_kl:
        raise InvalidConfigError(
            f"--max-kl {max_kl:g} cannot be reached with this teacher and text: the best code gives "
            f"{max(best.kl.values()):.2g} nats. Give a greater --max-kl, or --codec dense."
        )
    return best


class _Moments:
    """Statistics of the sequences that a codec is fitted to."""

    def __init__(
        self, layer: int, signals: Sequence[LayerRelations], masked: Sequence[LayerRelations]
    ) -> None:
        self.layer = layer
        vectors = signals[0].vectors
        self.num_heads, self.head_size = vectors.query.shape[1], vectors.query.shape[3]
        self.scaling, self.is_causal = vectors.scaling, vectors.is_causal
        self.window = _attention_window(masked)
        rows = torch.cat([_valid_rows(signal) for signal in signals])
        if rows.device.type == "mps":  # which has no float64
            rows = rows.cpu()
        self.mean = rows.mean(0)
        self.sample = rows[:GAIN_ROWS] - self.mean
        centred = rows - self.mean
        self.covariance = (centred.T @ centred / len(rows)).double()
        totals = [_sensitivities(signal) for signal in signals]
        self.query, self.key, self.value = (
            torch.stack([total[part] for total in totals]).sum(0).to(rows.device).double() / len(rows)
            for part in range(3)
        )


def _valid_rows(signal: LayerRelations) -> Float[Tensor, "rows width"]:
    flat = concatenate(signal.vectors)
    return flat[key_mask(signal.lengths, flat.shape[1])]


def _sensitivities(signal: LayerRelations) -> tuple[_Metric, _Metric, _Metric]:
    """Return what errors of queries, keys and values cost, summed over tokens (module docstring)."""
    vectors = signal.vectors
    query, key, value = (part.float() for part in (vectors.query, vectors.key, vectors.value))
    valid = key_mask(signal.lengths, query.shape[2])[:, None, :, None]
    # Not through `signal.probs`, which would keep them in memory for every batch.
    attention = relation_probs(vectors, RelationKind.ATTENTION, signal.lengths) * valid
    relation = relation_probs(vectors, RelationKind.VALUE, signal.lengths) * valid
    half = vectors.scaling**2 / 2
    value_half = 1 / (2 * value.shape[-1])
    return (
        half * _cost_of_left(attention, key),
        half * _cost_of_right(attention, query),
        value_half * (_cost_of_left(relation, value) + _cost_of_right(relation, value)),
    )


def _cost_of_left(probs: Tensor, right: Tensor) -> _Metric:
    """Return the sum over rows of the covariance of `right` under the row."""
    expected = probs @ right
    weighted = probs.sum(-2)[..., None] * right
    second = torch.einsum("bhjd,bhje->hde", weighted, right)
    return second - torch.einsum("bhid,bhie->hde", expected, expected)


def _cost_of_right(probs: Tensor, left: Tensor) -> _Metric:
    """Return the sum over rows i and columns j of p (1 - p) times the outer product of `left` at i."""
    weight = (probs * (1 - probs)).sum(-1)[..., None]
    return torch.einsum("bhid,bhie->hde", weight * left, left)


def _attention_window(signals: Sequence[LayerRelations]) -> int | None:
    """Return how many positions the teacher's attention sees to each side. None means that it sees all."""
    window = None
    for signal in signals:
        mask = signal.vectors.mask
        if mask is None:
            continue
        valid = key_mask(signal.lengths, mask.shape[-1])
        columns = column_mask(signal.lengths, mask.shape[-1], is_causal=signal.vectors.is_causal)
        inside = mask & columns & valid[:, None, :, None]
        position = torch.arange(mask.shape[-1], device=mask.device)
        distance = (position[:, None] - position).abs()
        both_valid = (columns & valid[:, None, :, None]).expand_as(inside)
        if bool((inside == both_valid).all()):
            continue
        reach = int((distance * inside).max())
        if not bool((inside == (both_valid & (distance <= reach))).all()):
            raise TeacherError(
                "the teacher's attention mask is not a sliding window; codec vectors stores no other mask."
            )
        window = reach if window is None else max(window, reach)
    return window


def _roots(metric: _Metric) -> tuple[Tensor, Tensor]:
    """Return the square root of each head's metric, and its inverse."""
    values, basis = torch.linalg.eigh(metric)
    floor = values.amax(-1, keepdim=True).clamp(min=1e-30) * _LEAST_SENSITIVITY
    scale = values.clamp(min=floor).sqrt()[..., None, :]
    return (basis * scale) @ basis.mT, (basis / scale) @ basis.mT


def _components(moments: _Moments, weight: float) -> tuple[Tensor, Tensor]:
    """Return matrices to and from principal components under the metric, not yet divided into steps."""
    heads = [*moments.query, *moments.key, *(weight * moments.value)]
    roots, inverses = _roots(torch.stack(heads))
    to_metric, from_metric = torch.block_diag(*roots), torch.block_diag(*inverses)
    variances, basis = torch.linalg.eigh(to_metric @ moments.covariance @ to_metric)
    matters = variances > variances.max().clamp(min=1e-30) * _LEAST_VARIANCE
    matters[-1] = True  # vectors that are all the same still take one component
    kept = basis[:, matters].flip(-1)
    return kept.T @ to_metric, kept.T @ from_metric


def _coarsest_step(
    moments: _Moments,
    check: Sequence[LayerRelations],
    *,
    weight: float,
    max_kl: float,
    should_stop: ShouldStop,
) -> FittedCodec:
    """Return the code of the greatest step that keeps both KLs, by bisection of its logarithm.

    Where no step keeps them, it is the code with the least KL of those that were tried: the finest steps of
    all make codes that are too large to be kept, and are worse again.
    """
    analysis, synthesis = _components(moments, weight)
    # An error of a step in every component costs step**2 / 12 each, to second order.
    guess = math.sqrt(12 * max_kl * MARGIN / len(analysis))
    low, high = guess / 16, guess * 16
    tried: list[FittedCodec] = []

    def fitted(step: float) -> float:
        """Note the code of a step, and return its greater KL."""
        codec = _codec(moments, analysis / step, synthesis * step)
        tried.append(FittedCodec(codec=codec, kl=measured_kl(codec, check)))
        return max(tried[-1].kl.values())

    best: FittedCodec | None = None
    for _ in range(_STEP_ROUNDS):
        if should_stop():
            raise InterruptedRunError(INTERRUPTED)
        step = math.sqrt(low * high)
        if fitted(step) <= max_kl * MARGIN:
            best, low = tried[-1], step
        else:
            high = step
    if best is None:
        fitted(low)
    return best or min(tried, key=lambda each: max(each.kl.values()))


def _codec(moments: _Moments, analysis: Tensor, synthesis: Tensor) -> VectorsCodec:
    """Return the codec of matrices that are divided into steps."""
    return VectorsCodec(
        layer=moments.layer,
        num_heads=moments.num_heads,
        head_size=moments.head_size,
        scaling=moments.scaling,
        window=moments.window,
        is_causal=moments.is_causal,
        code=fit_code(moments.sample, moments.mean, analysis=analysis, synthesis=synthesis),
    )


def measured_kl(codec: VectorsCodec, signals: Sequence[LayerRelations]) -> dict[RelationKind, float]:
    """Return the mean KL(teacher || stored) over heads and valid rows, nats."""
    sums = dict.fromkeys(KINDS, 0.0)
    codec = codec.to(signals[0].lengths.device)
    rows = 0
    for signal in signals:
        valid = key_mask(signal.lengths, signal.vectors.query.shape[2])[:, None, :]
        (codes,) = codec.encode(signal, (), lengths=signal.lengths).values()
        stored = codec.vectors(codes)
        rows += int(signal.lengths.sum()) * codec.num_heads
        for kind in KINDS:
            teacher, decoded = signal.probs(kind), relation_probs(stored, kind, signal.lengths)
            tiny = torch.finfo(torch.float32).tiny
            kl = (teacher * (teacher.clamp(min=tiny).log() - decoded.clamp(min=tiny).log())).sum(-1)
            sums[kind] += float((kl * valid).sum())
    return {kind: max(total / rows, 0.0) for kind, total in sums.items()}


def _bits(codec: VectorsCodec, signals: Sequence[LayerRelations]) -> float:
    """Return the entropy of a token's codes, bits, summed over components."""
    codec = codec.to(signals[0].lengths.device)
    encoded = [codec.encode(signal, (), lengths=signal.lengths)[codec.codes_path] for signal in signals]
    codes = torch.cat(
        [
            part[key_mask(signal.lengths, part.shape[1])].cpu()
            for part, signal in zip(encoded, signals, strict=True)
        ]
    )
    total = 0.0
    for component in codes.T:
        counts = component.unique(return_counts=True)[1].double()
        total += float(torch.special.entr(counts / counts.sum()).sum()) / math.log(2)
    return total


def split_sample(num_sequences: int, num_fitted: int) -> tuple[range, range]:
    """Return the numbers of the training sequences to fit to, and of those to check on (a fifth of all)."""
    num_fitted = min(num_fitted, num_sequences - max(1, num_sequences // 5))
    return range(num_fitted), range(num_fitted, min(num_sequences, num_fitted + max(1, num_fitted // 4)))
