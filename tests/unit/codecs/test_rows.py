"""Codecs: what they promise, on rows of every shape."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from minilm_cache.codecs.build import build_codec
from minilm_cache.codecs.rows import DenseCodec, RowsCodec, byte_sums, has_zero_byte
from minilm_cache.codecs.sampling import LAST_CODE, PPS_RATIO, LogScale
from minilm_cache.codecs.topk import LARGEST_RATIO, TopKCodec
from minilm_cache.errors import CacheCorruptError, UnsupportedFormatError
from minilm_cache.relations.scores import SparseRows, key_mask, to_dense
from minilm_cache.storage_schema.identity import DenseParameters, RelationKind, TopKParameters

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "golden" / "codecs"
KIND = RelationKind.ATTENTION


def round_trip(codec: RowsCodec, probs: Tensor, lengths: Tensor) -> Tensor:
    rows = codec.encode_relation(probs, KIND, sequences=range(len(probs)), lengths=lengths)
    return to_dense(codec.decode_relation(rows, lengths), lengths, probs.shape[-1])


@st.composite
def relations(draw: st.DrawFn, max_size: int = 24) -> tuple[Tensor, Tensor]:
    """Rows of two heads with padding: peaked, flat, tied, one-hot, with zeros and subnormals."""
    size = draw(st.integers(1, max_size))
    lengths = torch.tensor([*draw(st.lists(st.integers(1, size), min_size=1, max_size=3)), size])
    seed = draw(st.integers(0, 2**31))
    sharpness = draw(st.sampled_from([0.0, 0.5, 2.0, 8.0, 60.0, 1e4]))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(lengths), 2, size, size, generator=generator) * sharpness
    if draw(st.booleans()):
        scores = scores.round()
    hidden = ~key_mask(lengths, size)[:, None, None, :]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1), lengths


TOPK = [
    TopKCodec(max_length=24, k=5),
    TopKCodec(max_length=24, k=1),
    TopKCodec(max_length=24, k=24),
    TopKCodec(max_length=24, k=5, select="largest", tail="uniform"),
    TopKCodec(max_length=24, k=5, select="largest", tail="renormalise"),
]
CODECS: list[RowsCodec] = [*TOPK, DenseCodec(max_length=24)]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=60, deadline=None)
@given(relations())
def test_rows_are_distributions_over_valid_columns(codec: RowsCodec, relation: tuple[Tensor, Tensor]) -> None:
    probs, lengths = relation
    stored = round_trip(codec, probs, lengths)
    valid = key_mask(lengths, probs.shape[-1])

    assert bool((stored >= -1e-6).all())
    sums = stored.sum(-1).transpose(1, 2)[valid]
    torch.testing.assert_close(
        sums, torch.ones_like(sums), atol=2e-3 if codec is CODECS[-1] else 1e-5, rtol=0
    )


@pytest.mark.parametrize("codec", TOPK, ids=repr)
@settings(max_examples=60, deadline=None)
@given(relations())
def test_every_row_has_exactly_k_entries(codec: TopKCodec, relation: tuple[Tensor, Tensor]) -> None:
    probs, lengths = relation
    rows = codec.encode_relation(probs, KIND, sequences=range(len(probs)), lengths=lengths)
    decoded = codec.decode_relation(rows, lengths)

    assert isinstance(decoded, SparseRows)
    assert {name: values.shape[-1] for name, values in rows.items()} == {"gap": codec.k, "weight": codec.k}
    assert bool((decoded.index.diff(dim=-1) >= 0).all())
    assert int(rows["weight"].max()) <= LAST_CODE


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_parameters_rebuild_a_codec(codec: RowsCodec) -> None:
    model = type(codec.parameters)
    parameters = model.model_validate_json(json.dumps(codec.parameters.model_dump(mode="json")))
    assert build_codec(parameters, 24) == codec


@settings(max_examples=60, deadline=None)
@given(relations())
def test_dense_is_off_by_float16_rounding_at_most(relation: tuple[Tensor, Tensor]) -> None:
    probs, lengths = relation
    stored = round_trip(DenseCodec(max_length=24), probs, lengths)
    expected = probs * key_mask(lengths, probs.shape[-1])[:, None, :, None]

    assert bool(((stored - expected).abs() <= torch.maximum(expected * 2**-11, torch.tensor(2**-25))).all())


@settings(max_examples=80, deadline=None)
@given(relations(), st.integers(1, 24))
def test_largest_stores_exactly_the_top_k(relation: tuple[Tensor, Tensor], k: int) -> None:
    probs, lengths = relation
    codec = TopKCodec(max_length=24, k=k, select="largest", tail="renormalise")
    rows = codec.encode_relation(probs, KIND, sequences=range(len(probs)), lengths=lengths)
    decoded = codec.decode_relation(rows, lengths)
    assert isinstance(decoded, SparseRows)
    code = rows["weight"].transpose(1, 2)
    oracle = np.sort(probs.numpy(), axis=-1)[..., ::-1]
    scale = LogScale(ratio=LARGEST_RATIO)
    for at, length in enumerate(lengths.tolist()):
        for head in range(2):
            for row in range(length):
                kept = code[at, head, row] > 0
                columns = decoded.index[at, head, row][kept]
                largest = oracle[at, head, row][:k].tolist()
                expected = largest[: len(columns)]
                found = probs[at, head, row][columns].sort(descending=True).values

                assert len(set(columns.tolist())) == len(columns)
                assert all(p < scale.smallest * 1.001 for p in largest[len(columns) :])
                assert found.tolist() == pytest.approx(expected, rel=1e-6)
                weights = scale.value(code[at, head, row][kept].long()).sort(descending=True).values
                assert weights.tolist() == pytest.approx(expected, rel=0.031)


@given(st.floats(1.02, 1.1), st.floats(2**-24, 1.0))
def test_log_scale_keeps_its_bounds(ratio: float, weight: float) -> None:
    scale = LogScale(ratio=ratio)
    value = torch.tensor(weight, dtype=torch.float32)
    down, near = scale.round_down(value[None]), scale.round(value[None])

    if weight >= scale.smallest * 1.001:
        assert float(scale.value(down)) <= weight * (1 + 1e-5)
        assert float(scale.value(down)) >= weight / ratio * (1 - 1e-5)
        assert abs(np.log(float(scale.value(near)) / weight)) <= np.log(ratio) / 2 + 1e-5
    elif weight <= scale.smallest * 0.99 / ratio:
        assert int(down) == 0


ROWS = {
    "peaked": torch.cat([torch.tensor([0.9, 0.05]), torch.full((30,), 0.05 / 30)]),
    "flat": torch.full((32,), 1 / 32),
    "one above tau": torch.cat([torch.tensor([0.3]), torch.full((31,), 0.7 / 31)]),
    "random": (torch.randn(32, generator=torch.Generator().manual_seed(0)) * 2).softmax(-1),
    "with padding": torch.cat(
        [(torch.randn(20, generator=torch.Generator().manual_seed(1)) * 2).softmax(-1), torch.zeros(12)]
    ),
    "one column": torch.cat([torch.ones(1), torch.zeros(31)]),
    "fewer columns than k": torch.cat([torch.tensor([0.5, 0.3, 0.2]), torch.zeros(29)]),
    "k columns, all the same": torch.cat([torch.full((16,), 1 / 16), torch.zeros(16)]),
    "k columns, one a little more": torch.cat([torch.full((1,), 1.2), torch.ones(15), torch.zeros(16)]),
    "one column and dust": torch.cat([torch.ones(1), torch.full((31,), 1e-3)]),
}


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("name", ROWS)
def test_pps_is_unbiased(name: str, k: int) -> None:
    """The mean over many draws is the row, within 4 standard errors, as decoded from stored bytes."""
    row = ROWS[name].double() / ROWS[name].double().sum()
    num_sequences = 400
    probs = row.float().expand(num_sequences, 2, 32, 32).contiguous()
    lengths = torch.full((num_sequences,), 32)
    stored = round_trip(TopKCodec(max_length=32, k=k, seed=7), probs, lengths).double()
    draws = stored.reshape(-1, 32)
    error = draws.std(0) / len(draws) ** 0.5

    assert bool(((draws.mean(0) - row).abs() <= 4 * error + 1e-6).all())
    assert bool((draws[:, row == 0] == 0).all())


def test_pps_varies_less_than_sampling_with_replacement() -> None:
    row = (torch.randn(128, generator=torch.Generator().manual_seed(0)) * 1.5).softmax(-1)
    probs = row.expand(40, 2, 128, 128).contiguous()
    stored = round_trip(TopKCodec(max_length=128), probs, torch.full((40,), 128))
    variance = stored.reshape(-1, 128).var(0).sum()
    with_replacement = (row * (1 - row) / 16).sum()

    assert float(variance / with_replacement) < 0.75


def test_a_draw_depends_on_seed_relation_and_sequence_and_not_on_the_batch() -> None:
    probs = torch.randn(4, 2, 24, 24, generator=torch.Generator().manual_seed(2)).softmax(-1)
    lengths = torch.full((4,), 24)
    codec = TopKCodec(max_length=24, k=5, seed=1)
    whole = codec.encode_relation(probs, KIND, sequences=[10, 11, 12, 13], lengths=lengths)
    alone = codec.encode_relation(probs[2:3], KIND, sequences=[12], lengths=lengths[2:3])
    others = [
        codec.encode_relation(probs[2:3], KIND, sequences=[13], lengths=lengths[2:3]),
        codec.encode_relation(probs[2:3], RelationKind.VALUE, sequences=[12], lengths=lengths[2:3]),
        TopKCodec(max_length=24, k=5, seed=2).encode_relation(
            probs[2:3], KIND, sequences=[12], lengths=lengths[2:3]
        ),
    ]

    assert torch.equal(whole["gap"][2:3], alone["gap"])
    assert torch.equal(whole["weight"][2:3], alone["weight"])
    assert not any(torch.equal(alone["gap"], other["gap"]) for other in others)


@pytest.mark.parametrize("damage", ["column", "weight"])
def test_values_that_are_never_written_are_an_error(damage: str) -> None:
    probs = torch.randn(1, 2, 24, 24).softmax(-1)
    codec = TopKCodec(max_length=24, k=5)
    rows = dict(codec.encode_relation(probs, KIND, sequences=[0], lengths=torch.tensor([24])))
    if damage == "column":
        rows["gap"][0, 3, 1, 4] = 200
    else:
        rows["weight"][0, 3, 1, 4] = 255

    with pytest.raises(CacheCorruptError, match="an invalid weight, or a column that it does not see"):
        codec.check_relation({name: values[0] for name, values in rows.items()}, torch.full((24,), 24))


@pytest.mark.parametrize(
    ("select", "codes", "says"),
    [
        ("pps", [0, 1, 1, 200, 200], "sum to more than 1"),
        ("pps", [0, 20, 25, 25, 200], "sum to more than 1"),
        ("pps", [1, 200, 200, 200, 200], "no slot"),
        ("largest", [1, 20, 0, 0, 0], "sum to more than 1"),
        ("largest", [0, 0, 0, 0, 0], "no weight"),
    ],
)
def test_stored_rows_that_are_no_distributions_are_an_error(
    select: Literal["pps", "largest"], codes: list[int], says: str
) -> None:
    probs = torch.randn(1, 2, 24, 24).softmax(-1)
    codec = TopKCodec(max_length=24, k=5, select=select, tail="uniform" if select == "largest" else None)
    rows = codec.encode_relation(probs, KIND, sequences=[0], lengths=torch.tensor([24]))
    flat = {name: values[0].clone() for name, values in rows.items()}
    codec.check_relation(flat, torch.full((24,), 24))
    flat["weight"][7, 1] = torch.tensor(codes)

    with pytest.raises(CacheCorruptError, match=says):
        codec.check_relation(flat, torch.full((24,), 24))


@pytest.mark.parametrize("select", ["pps", "largest"])
def test_columns_of_long_rows_take_two_bytes(select: Literal["pps", "largest"]) -> None:
    scores = torch.randn(1, 2, 600, 600, generator=torch.Generator().manual_seed(4))
    scores[..., :590] -= 12.0
    codec = TopKCodec(max_length=600, k=4, select=select, tail="uniform" if select == "largest" else None)
    rows = codec.encode_relation(scores.softmax(-1), KIND, sequences=[0], lengths=torch.tensor([600]))
    decoded = codec.decode_relation(rows, torch.tensor([600]))

    assert isinstance(decoded, SparseRows)
    assert {name: values.dtype for name, values in rows.items()} == dict.fromkeys(
        ("gap", "gap_high", "weight"), torch.uint8
    )
    assert int(decoded.index.min()) >= 590 if select == "largest" else int(decoded.index.max()) >= 590


def test_a_weight_scale_of_another_release_is_refused() -> None:
    parameters = TopKParameters(k=4, select="pps", tail=None, weight_ratio=1.5, seed=0)

    with pytest.raises(UnsupportedFormatError, match=r"weight ratio 1\.5"):
        build_codec(parameters, 24)


@pytest.mark.parametrize("name", ["topk-pps", "topk-largest", "dense"])
def test_golden_bytes_decode_to_the_rows_they_were_released_with(name: str) -> None:
    """Format 1 for ever: stored bytes mean what they meant. See tests/golden/regenerate.py."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as golden:
        arrays = {key: golden[key] for key in golden.files}
    expected = torch.from_numpy(arrays.pop("expected"))
    lengths = torch.from_numpy(arrays.pop("lengths"))
    parameters = json.loads((GOLDEN / f"{name}.json").read_text())
    model: type[TopKParameters | DenseParameters] = (
        TopKParameters if parameters["name"] == "topk" else DenseParameters
    )
    codec = build_codec(model.model_validate_json(json.dumps(parameters)), expected.shape[-1])
    decoded = codec.decode_relation(
        {key: torch.from_numpy(values) for key, values in arrays.items()}, lengths
    )

    torch.testing.assert_close(to_dense(decoded, lengths, expected.shape[-1]), expected, atol=0, rtol=1e-6)


def test_scale_ratios_are_those_of_format_1() -> None:
    assert (PPS_RATIO, LARGEST_RATIO) == (1.03, 1.06)


@given(st.data())
def test_bytes_in_words_are_those_one_by_one(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40)))
    rows = data.draw(arrays(np.uint8, shape, elements=st.sampled_from([0, 1, 127, 128, 254, 255])))

    assert byte_sums(rows).tolist() == rows.sum(-1, dtype=np.int64).tolist()
    assert has_zero_byte(rows).tolist() == (rows == 0).any(-1).tolist()
    scale = LogScale(ratio=PPS_RATIO)
    codes = rows.clip(max=LAST_CODE)
    weights = scale.value(torch.from_numpy(codes.astype(np.int64)))
    np.testing.assert_allclose(scale.sums(codes), weights.sum(-1), rtol=1e-5)
