"""The parts that codecs are made of: log scales, transform codes, sums of packed bytes, fitted states."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.codecs.build import build_codec, layer_codec
from minilm_cache.codecs.rows import byte_sums, has_zero_byte
from minilm_cache.codecs.sampling import FIRST_CODE, LAST_CODE, PPS_RATIO, LogScale
from minilm_cache.codecs.topk import LARGEST_RATIO
from minilm_cache.codecs.transform import (
    MAX_CODE,
    ROUNDING,
    fit_code,
    fit_state,
    quantise,
    refuse_codes,
    relative_bound,
    relative_error,
)
from minilm_cache.codecs.vectors import calibrate, concatenate, measured_kl, split_sample
from minilm_cache.errors import (
    CacheCorruptError,
    InterruptedRunError,
    InvalidConfigError,
    TeacherError,
    UnsupportedFormatError,
)
from minilm_cache.relations.scores import LayerRelations, Vectors
from minilm_cache.storage_schema.identity import DenseParameters, RelationKind, TopKParameters
from tests.unit.codecs.test_contract import signal_of

RATIOS = st.sampled_from([PPS_RATIO, LARGEST_RATIO, 1.2])


# Log scales


@given(RATIOS, st.integers(FIRST_CODE, LAST_CODE))
def test_every_code_of_a_scale_is_read_back_as_itself(ratio: float, code: int) -> None:
    scale = LogScale(ratio=ratio)
    weight = scale.value(torch.tensor([code]))

    assert math.isclose(float(weight), ratio ** -(code - 1), rel_tol=1e-5)
    assert int(scale.round(weight)) == code


@given(RATIOS, st.floats(2**-60, 1.0))
def test_rounding_is_within_the_bounds_that_are_stated(ratio: float, weight: float) -> None:
    scale, given_weight = LogScale(ratio=ratio), torch.tensor([weight])
    down, nearest = scale.round_down(given_weight), scale.round(given_weight)
    if int(down):
        stored = float(scale.value(down))
        assert stored <= weight * (1 + 1e-5)
        assert weight <= stored * ratio * (1 + 1e-5)
    else:
        assert weight <= scale.smallest * (1 + 1e-4)
    if int(nearest):
        assert abs(math.log(float(scale.value(nearest)) / weight)) <= math.log(ratio) / 2 + 1e-4


def test_zero_has_code_zero_and_weight_zero() -> None:
    scale = LogScale(ratio=PPS_RATIO)

    assert int(scale.round(torch.zeros(1))) == int(scale.round_down(torch.zeros(1))) == 0
    assert float(scale.value(torch.zeros(1, dtype=torch.int64))) == 0


def test_a_scale_reaches_from_one_down_to_its_smallest_weight() -> None:
    scale = LogScale(ratio=PPS_RATIO)
    weights = scale.value(torch.arange(FIRST_CODE, LAST_CODE + 1))

    assert float(weights[0]) == 1
    assert math.isclose(float(weights[-1]), scale.smallest, rel_tol=1e-5)
    assert bool((weights[1:] < weights[:-1]).all())


# Packed bytes


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_sums_and_zeros_of_bytes_are_those_of_numpy(width: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (6, 3, width), dtype=np.uint8)
    rows[0] = 255
    rows[1] = np.maximum(rows[1], 1)

    np.testing.assert_array_equal(byte_sums(rows), rows.astype(np.int64).sum(-1))
    np.testing.assert_array_equal(has_zero_byte(rows), (rows == 0).any(-1))


# Transform codes


def test_quantising_rounds_towards_zero_more_than_to_the_nearest() -> None:
    components = torch.tensor([0.0, 0.5, 1 - ROUNDING - 0.01, 1 - ROUNDING + 0.01, -1.9, 1e9])

    assert quantise(components).tolist() == [0, 0, 0, 1, -2, MAX_CODE]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**31))
def test_a_finer_step_brings_rows_back_more_closely(width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(200, width, generator=generator) * torch.linspace(0.5, 3, width) + 4
    mean = rows.mean(0)
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    errors = []
    for step in (0.5, 0.05):
        code = fit_code(rows - mean, mean, analysis=basis / step, synthesis=basis * step)
        codes = code.codes(rows)
        assert codes.dtype == torch.int16
        errors.append(float((code.rows(codes) - rows).abs().mean()))

    assert errors[1] < errors[0]
    assert errors[1] < 0.05


def _tf32(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values as a GPU reads them for TF32: rounded to 11 significant bits."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def test_rows_that_a_gpu_decodes_in_tf32_are_as_far_from_the_teacher() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 64, generator=generator) * torch.linspace(0.02, 8, 64) + 1
    basis = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))[0]
    mean = rows.mean(0)
    code = fit_code(rows - mean, mean, analysis=basis / 0.05, synthesis=basis * 0.05)
    codes = code.codes(rows)
    exact = code.rows(codes)
    rounded = code.mean + _tf32(codes.float()) @ _tf32(code.basis.float() * code.step[:, None])
    errors = [float((decoded - rows).norm() / rows.norm()) for decoded in (exact, rounded)]

    assert codes.abs().max() > 128  # bfloat16 would not hold them
    assert torch.equal(_tf32(codes.float()), codes.float())
    assert float((rounded - exact).norm() / exact.norm()) < 2**-12
    assert errors[1] == pytest.approx(errors[0], rel=5e-3)


def test_constant_rows_still_have_one_component() -> None:
    rows = torch.full((20, 3), 2.0)
    basis = torch.eye(3, dtype=torch.float64)
    code = fit_code(rows - rows.mean(0), rows.mean(0), analysis=basis, synthesis=basis)

    assert code.codes(rows).shape == (20, 1)
    torch.testing.assert_close(code.rows(code.codes(rows)), rows)


def test_the_code_that_no_writer_writes_is_refused() -> None:
    refuse_codes(torch.tensor([-MAX_CODE, MAX_CODE], dtype=torch.int16))
    refuse_codes(torch.empty(0, dtype=torch.int16))
    with pytest.raises(CacheCorruptError):
        refuse_codes(torch.tensor([0, -MAX_CODE - 1], dtype=torch.int16))


# Fitted states


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([0.3, 0.1, 0.02]), st.integers(0, 2**31))
def test_a_fitted_state_keeps_the_error_that_was_allowed(max_error: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(8, 8, generator=generator)
    rows = torch.randn(500, 8, generator=generator) @ mixing + 3
    code, error = fit_state(rows[:400], rows[400:], relative_bound(max_error))
    stored = code.rows(code.codes(rows[400:]))
    away = (stored - rows[400:]).square().sum() / (rows[400:] - rows[:400].mean(0)).square().sum()

    assert error <= max_error
    assert math.isclose(error, float(away.sqrt()), rel_tol=1e-3)
    assert error > max_error / 2, "a coarser step would have done"


def test_an_error_that_no_step_reaches_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(InvalidConfigError):
        fit_state(
            torch.randn(40, 4, generator=generator) * 1e-6,
            1e6 * torch.randn(9, 4, generator=generator),
            relative_bound(0.01),
        )


def test_relative_error_is_one_for_the_mean_itself() -> None:
    rows = torch.randn(50, 3)
    mean = rows.mean(0)

    assert math.isclose(relative_error(rows, mean.expand(50, 3), mean), 1, rel_tol=1e-5)
    assert relative_error(rows, rows, mean) == 0


# Fitted vectors


@pytest.mark.parametrize("max_kl", [0.05, 0.005])
def test_a_fitted_codec_keeps_the_kl_that_was_allowed(max_kl: float) -> None:
    signals = [signal_of([12, 10, 7, 12], seed) for seed in range(6)]
    fitted = calibrate(signals[:4], signals[4:], max_kl, layer=0)

    assert max(fitted.kl.values()) <= max_kl
    assert fitted.kl == measured_kl(fitted.codec, signals[4:])
    assert set(fitted.kl) == {RelationKind.ATTENTION, RelationKind.VALUE}


def test_fitting_stops_on_request() -> None:
    signals = [signal_of([8, 8])]
    with pytest.raises(InterruptedRunError):
        calibrate(signals, signals, 0.01, layer=0, should_stop=lambda: True)


def test_a_mask_that_is_not_a_window_cannot_be_kept() -> None:
    vectors = signal_of([6]).vectors
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    causal = LayerRelations(vectors._replace(mask=mask), torch.tensor([6]))
    with pytest.raises(TeacherError):
        calibrate([causal], [causal], 0.01, layer=0)


@given(st.integers(2, 4000), st.integers(1, 4000))
def test_sequences_that_are_checked_were_not_fitted_to(num_sequences: int, num_fitted: int) -> None:
    fit, check = split_sample(num_sequences, num_fitted)

    assert fit.start == 0
    assert check.start == fit.stop
    assert len(check) >= 1
    assert check.stop <= num_sequences
    assert len(fit) <= num_fitted


def test_vectors_of_a_token_lie_side_by_side() -> None:
    vectors = signal_of([3, 2]).vectors
    rows = concatenate(vectors)
    parts = [part[1, :, 0].flatten() for part in (vectors.query, vectors.key, vectors.value)]

    assert rows.shape == (2, 3, 3 * 2 * 4)
    torch.testing.assert_close(rows[1, 0], torch.cat(parts))


# From the manifest to the codec


def test_dense_parameters_make_a_dense_codec() -> None:
    codec = build_codec(DenseParameters(), 16)

    assert codec.parameters == DenseParameters()
    assert codec.is_unbiased


def test_a_weight_scale_of_another_release_is_refused() -> None:
    parameters = TopKParameters(k=4, select="pps", tail=None, weight_ratio=1.25, seed=0)
    with pytest.raises(UnsupportedFormatError):
        build_codec(parameters, 16)


def test_relations_of_other_layers_are_stored_by_the_same_codec() -> None:
    kinds = (RelationKind.VALUE,)
    parameters = TopKParameters(k=4, select="pps", tail=None, weight_ratio=PPS_RATIO, seed=9)
    codec = build_codec(parameters, 16, kinds)

    assert codec.everything.kinds == kinds
    assert codec.parameters == parameters
    assert callable(layer_codec)


def test_a_row_of_vectors_has_no_mask_beyond_its_window() -> None:
    """A teacher whose attention sees two positions to each side keeps that window."""
    position = torch.arange(12)
    window = ((position[:, None] - position).abs() <= 2)[None, None]
    signals = []
    for seed in range(4):
        plain = signal_of([12, 12], seed)
        signals.append(
            LayerRelations(plain.vectors._replace(mask=window.expand(2, 1, -1, -1)), plain.lengths)
        )
    codec = calibrate(signals[:3], signals[3:], 0.02, layer=0).codec
    rows = codec.encode(signals[0], (), lengths=signals[0].lengths)
    vectors = codec.vectors(rows[codec.codes_path])

    assert codec.window == 2
    assert isinstance(vectors, Vectors)
    assert vectors.mask is not None
    assert torch.equal(vectors.mask[0, 0], window[0, 0])
