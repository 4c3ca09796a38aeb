"""Fit codec `vectors` to a teacher and a corpus.

To second order, an error in a layer's vectors costs KL(teacher || stored) = 1/2 Var_P(ds): the variance under
a relation's rows of the error in its scores. With independent errors that is a quadratic form in the error of
each head's query, key and value: for a query the covariance of keys under its attention, for a key the sum
over the rows that see it of p (1 - p) q q^T, for a value both, with v in place of q and k. Principal
components under that metric, with one step for all, spend bits where they reduce the KL most. Two numbers
remain: the weight of the value relation against attention, and the step. They are chosen on sequences that
nothing else was fitted to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.codecs.transform import GAIN_ROWS, fit_code
from minilm_cache.codecs.vectors import VectorsCodec, concatenate
from minilm_cache.errors import InterruptedRunError, InvalidConfigError, TeacherError
from minilm_cache.relations.scores import LayerRelations, key_mask, relation_probs
from minilm_cache.session import ShouldStop, never_stop
from minilm_cache.storage_schema.identity import RelationKind

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
            f"--max-kl {max_kl:g} cannot be reached with this teacher and text: the finest step gives "
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
        self.scaling = vectors.scaling
        self.window = _attention_window(masked)
        rows = torch.cat([_valid_rows(signal) for signal in signals])
        self.mean = rows.mean(0)
        self.sample = rows[:GAIN_ROWS] - self.mean
        centred = rows - self.mean
        self.covariance = (centred.T @ centred / len(rows)).double()
        totals = [_sensitivities(signal) for signal in signals]
        self.query, self.key, self.value = (
            torch.stack([total[part] for total in totals]).sum(0).double() / len(rows) for part in range(3)
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
        inside = mask & valid[:, None, None, :] & valid[:, None, :, None]
        position = torch.arange(mask.shape[-1], device=mask.device)
        distance = (position[:, None] - position).abs()
        both_valid = (valid[:, None, None, :] & valid[:, None, :, None]).expand_as(inside)
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

    Where no step keeps them, it is the code of the finest step that was tried.
    """
    analysis, synthesis = _components(moments, weight)
    # An error of a step in every component costs step**2 / 12 each, to second order.
    guess = math.sqrt(12 * max_kl * MARGIN / len(analysis))
    low, high = guess / 16, guess * 16
    best: FittedCodec | None = None
    for _ in range(_STEP_ROUNDS):
        if should_stop():
            raise InterruptedRunError(INTERRUPTED)
        step = math.sqrt(low * high)
        codec = _codec(moments, analysis / step, synthesis * step)
        kl = measured_kl(codec, check)
        if max(kl.values()) <= max_kl * MARGIN:
            best, low = FittedCodec(codec=codec, kl=kl), step
        else:
            high = step
    if best is None:
        codec = _codec(moments, analysis / low, synthesis * low)
        best = FittedCodec(codec=codec, kl=measured_kl(codec, check))
    return best


def _codec(moments: _Moments, analysis: Tensor, synthesis: Tensor) -> VectorsCodec:
    """Return the codec of matrices that are divided into steps."""
    return VectorsCodec(
        layer=moments.layer,
        num_heads=moments.num_heads,
        head_size=moments.head_size,
        scaling=moments.scaling,
        window=moments.window,
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
