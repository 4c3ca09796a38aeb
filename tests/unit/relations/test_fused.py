"""Fused kernels, in Triton's interpreter: their loss and gradients are those of plain torch in float64."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minilm_cache.relations import loss, trust
from minilm_cache.relations.loss import Method, relation_loss
from minilm_cache.relations.scores import (
    DenseRows,
    RowTargets,
    SparseRows,
    Targets,
    VectorRows,
    Vectors,
    mean_row_entropy,
    split_heads,
    to_dense,
)
from minilm_cache.storage_schema.identity import RelationKind
from tests.unit.relations.test_loss import LENGTHS, ROWS, SIZE, gradients, plain_kl, random_vectors

tl = pytest.importorskip("triton.language", reason="Triton is for Linux")
interpreter = pytest.importorskip("triton.runtime.interpreter")
fused: Any = pytest.importorskip("minilm_cache.relations.fused")

pytestmark = pytest.mark.slow

FORMS = [form for form in ROWS if form != "dense"]
CPU = torch.device("cpu")


def pair(sizes: tuple[int, int] = (8, 16), *, causal: bool = False) -> tuple[Vectors, Vectors]:
    """Return vectors of a student and of a teacher, float64, all of whose numbers float32 holds."""
    student, teacher = (scaled(random_vectors(1 + number, size)) for number, size in enumerate(sizes))
    return narrowed(student, torch.float64), narrowed(teacher, torch.float64)._replace(is_causal=causal)


def scaled(vectors: Vectors) -> Vectors:
    """Return two heads, whose products with themselves are as large for all sizes of heads.

    The interpreter takes as long for each head.
    """
    factor = (8 / vectors.query.shape[-1]) ** 0.25
    query, key, value = (factor * part[:, :2] for part in vectors[:3])
    return vectors._replace(query=query, key=key, value=value)


def narrowed(vectors: Vectors, dtype: torch.dtype) -> Vectors:
    """Return vectors rounded to float32, as leaves of a type."""
    query, key, value = (part.detach().float().to(dtype).requires_grad_() for part in vectors[:3])
    return vectors._replace(query=query, key=key, value=value)


def rows_of(form: str, teacher: Vectors, kind: RelationKind) -> RowTargets:
    with torch.no_grad():
        return ROWS[form](teacher, kind)


def with_entropy(rows: RowTargets) -> Targets:
    """Return targets as batches have them: sparse rows with their entropy, vectors without."""
    if isinstance(rows, VectorRows):
        return Targets(rows, None)
    return Targets(rows, mean_row_entropy(to_dense(rows, LENGTHS, SIZE), LENGTHS))


def in_float32(rows: RowTargets) -> RowTargets:
    if isinstance(rows, VectorRows):
        query, key, value = (part.detach().float() for part in rows.vectors[:3])
        return VectorRows(rows.vectors._replace(query=query, key=key, value=value), rows.kind)
    assert isinstance(rows, SparseRows)
    base = None if rows.base is None else rows.base.float()
    return SparseRows(rows.index, rows.weight.float(), base, rows.is_causal)


def assert_same(student: Vectors, teacher: Vectors, form: str, kind: RelationKind) -> None:
    """Compare kernels in float32 with plain torch in float64."""
    rows = rows_of(form, teacher, kind)
    expected = plain_kl(student, kind, rows)
    wanted = gradients(expected, list(student[:3]))
    narrow = narrowed(student, torch.float32)
    targets = with_entropy(in_float32(rows))
    found = relation_loss(narrow, kind, targets=targets, lengths=LENGTHS, method="fused")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(found, list(narrow[:3])), wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert float((one.double() - other).norm() / other.norm()) < 1e-5


KINDS = [
    *((kind, False) for kind in RelationKind),
    (RelationKind.ATTENTION, True),
    (RelationKind.VALUE, True),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_loss_and_gradients_are_those_of_plain_torch(form: str, kind: RelationKind, *, causal: bool) -> None:
    """Padding, a sequence of one token, and rows of more than one tile."""
    student, teacher = pair(causal=causal)
    assert_same(student, teacher, form, kind)


@pytest.mark.parametrize("sizes", [(24, 64), (64, 24), (128, 128)])
def test_heads_of_all_sizes_have_kernels(sizes: tuple[int, int]) -> None:
    student, teacher = pair(sizes)
    for kind in (RelationKind.ATTENTION, RelationKind.VALUE):
        assert_same(student, teacher, "vectors", kind)


def test_relation_heads_may_be_others_than_those_of_attention() -> None:
    student, teacher = pair()
    assert_same(split_heads(student, 4), split_heads(teacher, 4), "vectors", RelationKind.QUERY)


def test_the_teachers_own_mask_hides_columns() -> None:
    window = torch.ones(SIZE, SIZE, dtype=torch.bool).tril(3).triu(-3)[None, None]
    student, teacher = pair()
    assert_same(student, teacher._replace(mask=window), "vectors", RelationKind.ATTENTION)


@pytest.fixture
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen bfloat16 before it is multiplied: the interpreter multiplies its bits as integers."""
    original = interpreter.InterpreterBuilder.create_dot

    def widened(part: Any) -> Any:
        if part.dtype.scalar != tl.bfloat16:
            return part
        return interpreter.TensorHandle((part.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return original(self, widened(left), widened(right), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("products_of_bfloat16")
@pytest.mark.parametrize("form", FORMS)
def test_vectors_of_half_precision_are_multiplied_as_they_are(form: str) -> None:
    """The loss is exact, and gradients are rounded as those of any product of bfloat16."""
    student, teacher = pair()
    narrow = narrowed(student, torch.bfloat16)
    wide = narrowed(narrow, torch.float64)
    rows = rows_of(form, teacher, RelationKind.ATTENTION)
    expected = plain_kl(wide, RelationKind.ATTENTION, rows)
    targets = with_entropy(in_float32(rows))
    found = relation_loss(narrow, RelationKind.ATTENTION, targets=targets, lengths=LENGTHS, method="fused")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    both = zip(gradients(found, list(narrow[:2])), gradients(expected, list(wide[:2])), strict=True)
    for one, other in both:
        assert one is not None
        assert other is not None
        assert one.dtype == torch.bfloat16
        assert 0 < float((one.double() - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize("lengths", [(1, 1), (32, 31), (70, 33)])
@pytest.mark.parametrize("seen", ["all", "past", "near"])
def test_sequences_of_all_lengths_are_tiled(lengths: tuple[int, ...], seen: str) -> None:
    """A tile has 32 rows and columns; form `dense` in float64 is the judge."""
    longest, number = max(lengths), torch.tensor(lengths)
    near = torch.ones(longest, longest, dtype=torch.bool).tril(5).triu(-5)[None, None]
    generator = torch.Generator().manual_seed(longest)
    parts = torch.randn(6, len(lengths), 2, longest, 16, generator=generator)
    student = Vectors(parts[0], parts[1], parts[2], None, 0.25)
    mask = near if seen == "near" else None
    teacher = Vectors(parts[3], parts[4], parts[5], mask, 0.25, is_causal=seen == "past")
    kind = RelationKind.ATTENTION
    methods: tuple[tuple[Method, torch.dtype], ...] = (("fused", torch.float32), ("dense", torch.float64))
    losses = []
    for method, dtype in methods:
        vectors = narrowed(student, dtype)
        query, key, value = (part.to(dtype) for part in teacher[:3])
        rows = VectorRows(teacher._replace(query=query, key=key, value=value), kind)
        found = relation_loss(vectors, kind, targets=Targets(rows, None), lengths=number, method=method)
        losses.append([found, *gradients(found, list(vectors[:2]))])
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


def test_nothing_of_length_by_length_is_kept() -> None:
    student, teacher = pair()
    narrow = narrowed(student, torch.float32)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    rows = in_float32(rows_of("vectors", teacher, RelationKind.VALUE))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        relation_loss(
            narrow, RelationKind.VALUE, targets=Targets(rows, None), lengths=LENGTHS, method="fused"
        )
    assert max(kept) == max(student.value.numel(), teacher.value.numel())


@dataclass
class Tried:
    """Kernels of a CPU that pretends to have some, and what they were asked and have said."""

    kernels: trust.Kernels
    asked: int = 0
    said: list[str] = field(default_factory=list)

    def after(self, student: Vectors, rows: RowTargets, entropy: Tensor | None = None) -> int:
        """Return how often kernels were asked for a loss that may take any form."""
        before = self.asked
        targets = Targets(rows, entropy) if entropy is not None else with_entropy(rows)
        relation_loss(student, RelationKind.ATTENTION, targets=targets, lengths=LENGTHS)
        return self.asked - before


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    monkeypatch.setattr(trust, "has_kernels", lambda _: True)
    monkeypatch.setattr(trust, "_COMPARED", 2**13)  # a sequence or two: the interpreter is slow
    found = Tried(trust.Kernels())
    found.kernels.begin(are_used=True, say=found.said.append)
    monkeypatch.setattr(loss, "KERNELS", found.kernels)
    original = fused.cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.asked += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(fused, "cross_entropy", counted)
    return found


def vectors_of(student: Vectors, teacher: Vectors) -> tuple[Vectors, VectorRows]:
    """Return vectors of a student and rows of a teacher, float32."""
    query, key, value = (part.detach().float() for part in teacher[:3])
    rows = VectorRows(teacher._replace(query=query, key=key, value=value), RelationKind.ATTENTION)
    return narrowed(student, torch.float32), rows


def test_each_form_is_compared_once_and_then_used(tried: Tried) -> None:
    narrow, rows = vectors_of(*pair())
    assert [tried.after(narrow, rows) for _ in range(3)] == [2, 1, 1], tried.said
    sparse = in_float32(rows_of("sparse", pair()[1], RelationKind.ATTENTION))
    assert [tried.after(narrow, sparse) for _ in range(2)] == [2, 1], tried.said
    window = torch.ones(SIZE, SIZE, dtype=torch.bool).tril(3).triu(-3)[None, None]
    near = VectorRows(rows.vectors._replace(mask=window), RelationKind.ATTENTION)
    assert [tried.after(narrow, near) for _ in range(2)] == [2, 1], tried.said
    assert not tried.said


@pytest.mark.usefixtures("products_of_bfloat16")
def test_a_student_that_equals_its_teacher_does_not_mislead(tried: Tried) -> None:
    narrow = narrowed(pair()[0], torch.bfloat16)
    assert tried.after(narrow, vectors_of(narrow, narrow)[1]) == 2, tried.said


def test_rows_of_a_single_column_do_not_mislead(tried: Tried) -> None:
    """Their gradients are next to nothing, and so mostly rounding; those of vectors of zeros are nothing."""
    student, teacher = (
        each._replace(query=4 * each.key.detach(), key=4 * each.key.detach()) for each in pair((128, 128))
    )
    assert tried.after(*vectors_of(student, teacher)) == 2, tried.said
    nothing = student._replace(query=torch.zeros_like(student.query), key=torch.zeros_like(student.key))
    assert tried.after(*vectors_of(nothing, teacher)) > 0, tried.said


def test_what_has_no_kernels_takes_another_form(tried: Tried) -> None:
    """Dense rows, biased scores, large heads, numbers of float64, rows without an entropy."""
    student, teacher = pair()
    narrow, rows = vectors_of(student, teacher)
    bias = torch.zeros(1, 2, SIZE, SIZE)
    biased = VectorRows(rows.vectors._replace(bias=bias), RelationKind.ATTENTION)
    large = narrowed(scaled(random_vectors(1, 136)), torch.float32)
    assert tried.after(narrow, DenseRows(to_dense(rows, LENGTHS, SIZE))) == 0
    assert tried.after(narrow._replace(bias=bias), rows) == 0
    assert tried.after(narrow, biased) == 0
    assert tried.after(large, rows) == 0
    assert tried.after(student, VectorRows(teacher, RelationKind.ATTENTION)) == 0
    sparse = in_float32(rows_of("sparse", teacher, RelationKind.ATTENTION))
    relation_loss(narrow, RelationKind.ATTENTION, targets=Targets(sparse, None), lengths=LENGTHS)
    assert tried.asked == 0
    assert not tried.said
    assert not tried.kernels.read_vectors(biased, CPU, 16)
    assert not tried.kernels.read_vectors(vectors_of(large, large)[1], CPU, 16)
    assert tried.kernels.read_vectors(rows, CPU, 16)


class _Wrong(torch.autograd.Function):
    """The loss as it is; the gradient of one token is lost."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        changed = grads[0].clone()
        changed[0, 0, 5] = 0
        return changed


@pytest.mark.parametrize("wrong", ["loss", "gradient of a token"])
def test_kernels_that_compute_something_else_are_given_up(
    tried: Tried, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, rows = vectors_of(*pair())
    targets = Targets(rows, None)
    plain = relation_loss(narrow, RelationKind.ATTENTION, targets=targets, lengths=LENGTHS, method="dense")
    original = fused.cross_entropy

    def other(vectors: Vectors, kind: RelationKind, **given: Any) -> Any:
        if wrong == "loss":
            return 1.2 * original(vectors, kind, **given)
        query: Tensor = _Wrong.apply(vectors.query)  # type: ignore[no-untyped-call]
        return original(vectors._replace(query=query), kind, **given)

    monkeypatch.setattr(fused, "cross_entropy", other)
    found = relation_loss(narrow, RelationKind.ATTENTION, targets=targets, lengths=LENGTHS)
    torch.testing.assert_close(found, plain)
    (said,) = tried.said
    expected = (
        "some relations are compared without fused kernels (--no-kernels): they differ from plain torch by"
    )
    assert said.startswith(expected)
    assert tried.after(narrow, rows) == 0


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_batch_without_a_finite_loss_tells_nothing(tried: Tried) -> None:
    narrow, rows = vectors_of(*pair())
    query = narrow.query.detach().clone()
    query[0, 0, 0, 0] = torch.nan
    assert tried.after(narrow._replace(query=query), rows) == 1
    assert tried.after(narrow, rows) == 2


def test_kernels_that_cannot_be_compiled_are_given_up(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, rows = vectors_of(*pair())

    def fail(*_: object, **__: object) -> Tensor:
        raise AttributeError("no such target\nsm_12")

    monkeypatch.setattr(fused, "cross_entropy", fail)
    tried.after(narrow, rows)
    assert tried.said == ["some relations are compared without fused kernels (--no-kernels): no such target"]


def test_a_form_that_is_given_up_leaves_the_others(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of other forms may have been recorded with their kernels."""
    narrow, rows = vectors_of(*pair())
    sparse = in_float32(rows_of("sparse", pair()[1], RelationKind.ATTENTION))
    assert [tried.after(narrow, rows) for _ in range(2)] == [2, 1]
    with monkeypatch.context() as patch:
        patch.setattr(trust, "_MOST_ERROR", -1.0)
        tried.after(narrow, sparse)
    assert len(tried.said) == 1
    assert tried.after(narrow, sparse) == 0
    assert tried.after(narrow, rows) == 1


def test_memory_that_is_too_short_for_a_comparison_ends_no_run(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, rows = vectors_of(*pair())

    def short(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(fused, "cross_entropy", short)
        tried.after(narrow, rows)
    assert tried.after(narrow, rows) == 0
    assert not tried.said


def test_kernels_that_are_slower_are_not_used(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, rows = vectors_of(*pair())
    monkeypatch.setattr(trust, "_is_faster", lambda *_, **__: False)
    length = narrow.query.shape[2]
    assert tried.kernels.read_vectors(rows, CPU, length)
    assert [tried.after(narrow, rows) for _ in range(2)] == [1, 0]
    assert not tried.kernels.read_vectors(rows, CPU, length), "their rows are computed once for all students"
    assert tried.kernels.read_vectors(rows, CPU, 4 * length), "other lengths are not tried yet"
    assert not tried.said


def test_a_run_without_kernels_asks_none(tried: Tried) -> None:
    tried.kernels.begin(are_used=False, say=tried.said.append)
    assert tried.after(*vectors_of(*pair())) == 0


def test_a_cpu_has_no_kernels() -> None:
    assert not trust.has_kernels(CPU)
    assert trust.has_kernels(torch.device("cuda"))
