"""The relation loss: every form has the gradient of the dense KL, to float64's last digits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from minilm_cache.relations.loss import CPU_LIMITS, Method, choose_method, relation_loss
from minilm_cache.relations.scores import (
    DenseRows,
    RowTargets,
    SparseRows,
    Targets,
    VectorRows,
    Vectors,
    densify,
    mean_row_entropy,
    split_heads,
    to_dense,
)
from minilm_cache.storage_schema.identity import RelationKind

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

LENGTHS = torch.tensor([40, 23, 1])
SIZE = 40
METHODS: tuple[Method, ...] = ("dense", "sdpa")


def random_vectors(
    seed: int, size: int, mask: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Vectors:
    """Return vectors of 3 sequences and 4 heads."""
    generator = torch.Generator().manual_seed(seed)
    parts = 1.5 * torch.randn(3, 3, 4, SIZE, size, generator=generator, dtype=dtype)
    return Vectors(parts[0], parts[1], parts[2], mask, size**-0.5)


def dense(vectors: Vectors, kind: RelationKind) -> RowTargets:
    return DenseRows(to_dense(VectorRows(vectors, kind), LENGTHS, SIZE), vectors.is_causal)


def sparse(vectors: Vectors, kind: RelationKind) -> RowTargets:
    """Half of each row spread evenly, the other half as three entries, two of them on one column."""
    heads = vectors.query.shape[1]
    index = torch.randint(0, SIZE, (3, heads, SIZE, 2), generator=torch.Generator().manual_seed(7))
    seen = LENGTHS[:, None].expand(3, SIZE)
    if vectors.is_causal:
        seen = torch.minimum(seen, torch.arange(1, SIZE + 1))
    index = torch.minimum(index, (seen - 1)[:, None, :, None])
    index = torch.cat([index, index[..., :1]], -1)
    weight = torch.tensor([0.25, 0.125, 0.125], dtype=vectors.query.dtype).expand(index.shape)
    base = (0.5 / seen.double())[:, None].expand(3, heads, SIZE).to(vectors.query.dtype)
    return SparseRows(index, weight.contiguous(), base, vectors.is_causal)


def without_base(vectors: Vectors, kind: RelationKind) -> RowTargets:
    found = sparse(vectors, kind)
    assert isinstance(found, SparseRows)
    return SparseRows(found.index, 2 * found.weight, None, found.is_causal)


ROWS: dict[str, Callable[[Vectors, RelationKind], RowTargets]] = {
    "dense": dense,
    "sparse": sparse,
    "sparse without base": without_base,
    "vectors": VectorRows,
}


def plain_kl(student: Vectors, kind: RelationKind, rows: RowTargets) -> Tensor:
    """Mean over heads and valid rows of F.kl_div of matrices of plain torch."""
    sides = {
        RelationKind.ATTENTION: (student.query, student.key, student.scaling),
        RelationKind.VALUE: (student.value, student.value, student.value.shape[-1] ** -0.5),
        RelationKind.QUERY: (student.query, student.query, student.query.shape[-1] ** -0.5),
        RelationKind.KEY: (student.key, student.key, student.key.shape[-1] ** -0.5),
    }
    left, right, scaling = sides[kind]
    teacher = to_dense(rows, LENGTHS, SIZE)
    total = torch.zeros((), dtype=left.dtype)
    for at, length in enumerate(LENGTHS.tolist()):
        scores = left[at, :, :length] @ right[at, :, :length].transpose(-1, -2) * scaling
        for row in range(length):
            seen = row + 1 if rows.is_causal else length
            log_student = scores[:, row, :seen].log_softmax(-1)
            total = total + functional.kl_div(log_student, teacher[at, :, row, :seen], reduction="sum")
    return total / (LENGTHS.sum() * left.shape[1])


def shortened(vectors: Vectors, length: int) -> Vectors:
    query, key, value = (part[:, :, :length] for part in (vectors.query, vectors.key, vectors.value))
    return Vectors(query, key, value, None, vectors.scaling)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


def assert_equal(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """A vector that a relation does not depend on gets no gradient from it."""
    for left, right in zip(found, expected, strict=True):
        assert (left is None) == (right is None)
        torch.testing.assert_close(
            torch.zeros(()) if left is None else left,
            torch.zeros(()) if right is None else right,
            rtol=1e-9,
            atol=1e-15,
        )


CASES = [
    *((form, kind, None) for form in ROWS for kind in RelationKind),
    # Attention distributions are those of the model's own heads, and the sparse rows here are drawn for them.
    *((form, kind, 8) for form in ("dense", "vectors") for kind in list(RelationKind)[1:]),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("form", "kind", "heads"), CASES)
def test_every_form_has_the_gradient_of_the_dense_kl(
    method: Method, form: str, kind: RelationKind, *, heads: int | None, causal: bool
) -> None:
    """Padding, sequences of one token, relation heads that are not the attention's, unlike head sizes."""
    student, teacher = random_vectors(1, 8), random_vectors(2, 16)._replace(is_causal=causal)
    leaves = [part.requires_grad_() for part in (student.query, student.key, student.value)]
    if heads is not None:
        student, teacher = split_heads(student, heads), split_heads(teacher, heads)
    rows = ROWS[form](teacher, kind)
    entropy = None if form == "vectors" else mean_row_entropy(to_dense(rows, LENGTHS, SIZE), LENGTHS)
    found = relation_loss(student, kind, targets=Targets(rows, entropy), lengths=LENGTHS, method=method)
    expected = plain_kl(student, kind, rows)
    assert_equal(gradients(found, leaves), gradients(expected, leaves))
    if method == "dense":
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ROWS)
def test_the_value_of_the_form_without_matrices_is_the_kl_of_some_rows(form: str) -> None:
    """The sampled KL is the KL itself where sequences are no longer than the rows that it samples."""
    student, teacher = random_vectors(1, 8), random_vectors(2, 16)
    lengths = torch.tensor([30, 23, 1])
    short = shortened(student, 30)
    rows = VectorRows(shortened(teacher, 30), RelationKind.VALUE)
    found = relation_loss(
        short, RelationKind.VALUE, targets=Targets(rows, None), lengths=lengths, method="sdpa"
    )
    exact = relation_loss(
        short, RelationKind.VALUE, targets=Targets(rows, None), lengths=lengths, method="dense"
    )
    torch.testing.assert_close(found, exact)

    longer = ROWS[form](teacher, RelationKind.VALUE)
    entropy = None if form == "vectors" else mean_row_entropy(to_dense(longer, LENGTHS, SIZE), LENGTHS)
    estimate = relation_loss(
        student, RelationKind.VALUE, targets=Targets(longer, entropy), lengths=LENGTHS, method="sdpa"
    )
    torch.testing.assert_close(estimate, plain_kl(student, RelationKind.VALUE, longer), rtol=0.2, atol=0.0)


def test_the_teachers_own_mask_hides_columns_in_both_forms() -> None:
    window = torch.ones(SIZE, SIZE, dtype=torch.bool).tril(3).triu(-3)[None, None]
    student, teacher = random_vectors(1, 8), random_vectors(2, 16, mask=window)
    leaves = [part.requires_grad_() for part in (student.query, student.key)]
    rows = VectorRows(teacher, RelationKind.ATTENTION)
    expected = gradients(plain_kl(student, RelationKind.ATTENTION, rows), leaves)
    for method in METHODS:
        loss = relation_loss(
            student, RelationKind.ATTENTION, targets=Targets(rows, None), lengths=LENGTHS, method=method
        )
        assert_equal(gradients(loss, leaves), expected)


def test_losses_are_float32_under_autocast() -> None:
    student, teacher = (random_vectors(seed, 8, dtype=torch.bfloat16) for seed in (1, 2))
    query, key, value = (part.float() for part in (student.query, student.key, student.value))
    wide = Vectors(query, key, value, None, student.scaling)
    rows = VectorRows(teacher, RelationKind.ATTENTION)
    for method in METHODS:
        with torch.autocast("cpu", torch.bfloat16):
            found = relation_loss(
                student, RelationKind.ATTENTION, targets=Targets(rows, None), lengths=LENGTHS, method=method
            )
        expected = relation_loss(
            wide, RelationKind.ATTENTION, targets=Targets(rows, None), lengths=LENGTHS, method=method
        )
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected)


def test_nothing_of_length_by_length_is_made_where_it_would_be_large() -> None:
    """512 MiB of scores: neither kept for the backward pass nor made on the way."""
    batch, heads, length, size = 1, 32, 2048, 8
    assert choose_method(batch, heads, length, device=CPU) == "sdpa"
    assert choose_method(16, 12, 128, device=CPU) == "dense"
    assert choose_method(1, 12, 512, device=CPU) == choose_method(4096, 12, 128, device=CPU) == "sdpa"
    assert choose_method(1024, 12, 128, device=torch.device("cuda")) == "dense"
    assert choose_method(1, 12, 512, device=torch.device("cuda")) == "sdpa"
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(batch, heads, length, size, generator=generator).requires_grad_() for _ in range(3)]
    student = Vectors(parts[0], parts[1], parts[2], None, size**-0.5)
    others = [torch.randn(batch, heads, length, 2 * size, generator=generator) for _ in range(3)]
    teacher = Vectors(others[0], others[1], others[2], None, (2 * size) ** -0.5)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rows = VectorRows(teacher, RelationKind.VALUE)
        relation_loss(
            student, RelationKind.VALUE, targets=Targets(rows, None), lengths=torch.tensor([length])
        ).backward()
    assert 4 * batch * heads * length**2 > CPU_LIMITS.scores_bytes > 5 * sum(kept)
    assert parts[2].grad is not None
    assert bool(parts[2].grad.isfinite().all())


WINDOW = 4


def windowed(length: int, seed: int) -> tuple[Vectors, Tensor]:
    """Return vectors of two sequences, the second a third as long, whose attention has a window, float32."""
    generator = torch.Generator().manual_seed(seed)
    parts = 1.5 * torch.randn(3, 2, 1, length, 8, generator=generator)
    lengths = torch.tensor([length, max(1, length // 3)])
    position = torch.arange(length)
    near = (position[:, None] - position).abs() <= WINDOW
    mask = near & (position < lengths[:, None, None, None])
    return Vectors(parts[0], parts[1], parts[2], mask, 8**-0.5), lengths


def windowed_kl(student: Vectors, teacher: Vectors, lengths: Tensor, shown: Tensor) -> Tensor:
    """Mean over heads and shown valid rows of F.kl_div in float64, sequence by sequence, without padding."""
    total, rows = torch.zeros((), dtype=torch.float64), 0
    for at, length in enumerate(lengths.tolist()):
        own, told = (
            (one.query[at, :, :length].double() @ one.key[at, :, :length].double().mT) * one.scaling
            for one in (student, teacher)
        )
        position = torch.arange(length)
        told = told.masked_fill((position[:, None] - position).abs() > WINDOW, -torch.inf)
        taken = shown[shown < length]
        kl = functional.kl_div(
            own.log_softmax(-1)[:, taken], told.softmax(-1)[:, taken], reduction="none"
        ).sum()
        total, rows = total + kl, rows + len(taken)
    return total / (rows * student.query.shape[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", range(4, 513, 64))
def test_a_teacher_with_a_window_has_a_finite_loss_at_every_length(method: Method, first: int) -> None:
    """A padding row beyond every window sees no column; its scores once made the entropy infinite."""
    for length in range(first, min(first + 64, 513)):
        teacher, lengths = windowed(length, 0)
        plain, _ = windowed(length, 1)
        student = plain._replace(
            query=plain.query.clone().requires_grad_(), key=plain.key.clone().requires_grad_(), mask=None
        )
        rows: Targets = Targets(VectorRows(teacher, RelationKind.ATTENTION), None)
        if method == "dense":
            rows = Targets(*densify(VectorRows(teacher, RelationKind.ATTENTION), lengths))
        found = relation_loss(student, RelationKind.ATTENTION, targets=rows, lengths=lengths, method=method)
        gradients = torch.autograd.grad(found, [student.query, student.key])
        every = torch.arange(length)
        shown = every if method == "dense" else every[:: -(-length // 32)]
        expected = windowed_kl(student, teacher, lengths, shown)
        whole = windowed_kl(student, teacher, lengths, every)
        expected_gradients = torch.autograd.grad(whole, [student.query, student.key])

        assert bool(found.isfinite()), length
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        for own, other in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5)


def window(reach: int) -> Tensor:
    position = torch.arange(SIZE)
    return ((position[:, None] - position).abs() <= reach)[None, None]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [lambda vectors, kind: VectorRows(vectors, kind), dense, without_base])
@pytest.mark.parametrize(("own", "theirs"), [(4, 4), (9, 4), (2, 4)], ids=["same", "wider", "narrower"])
def test_attention_of_a_window_is_compared_on_that_window(
    own: int, theirs: int, rows: Callable[[Vectors, RelationKind], RowTargets], method: Method
) -> None:
    """The oracle is torch's own softmax behind the student's mask, and `F.kl_div`'s gradient."""
    kind = RelationKind.ATTENTION
    teacher = random_vectors(0, 16, window(theirs))
    student = random_vectors(1, 8, window(own))._replace(is_windowed=True)
    query = student.query.clone().requires_grad_()
    student = student._replace(query=query)
    targets = rows(teacher, kind)
    valid = torch.arange(SIZE) < LENGTHS[:, None]
    target = to_dense(targets, LENGTHS, SIZE)
    shown = (window(own) | (target > 0)) & valid[:, None, None, :]
    scores = (query @ student.key.transpose(-1, -2)) * student.scaling
    log_student = scores.masked_fill(~shown, -1e300).log_softmax(-1)
    each = functional.kl_div(log_student, target, reduction="none").masked_fill(~shown, 0).sum(-1)
    expected = (each.masked_fill(~valid[:, None], 0).sum((0, 2)) / LENGTHS.sum()).mean()
    (wanted,) = torch.autograd.grad(expected, query)
    entropy = mean_row_entropy(target, LENGTHS)
    found = relation_loss(student, kind, targets=Targets(targets, entropy), lengths=LENGTHS, method=method)
    (gradient,) = torch.autograd.grad(found, query)
    assert torch.allclose(gradient, wanted, atol=1e-9)
    if method == "dense":
        assert found.item() == pytest.approx(expected.item(), abs=1e-9)


def test_a_student_that_is_its_teacher_has_no_loss_behind_a_window() -> None:
    teacher = random_vectors(0, 16, window(4))._replace(is_windowed=True)
    rows = dense(teacher, RelationKind.ATTENTION)
    targets = Targets(rows, mean_row_entropy(to_dense(rows, LENGTHS, SIZE), LENGTHS))
    loss = relation_loss(teacher, RelationKind.ATTENTION, targets=targets, lengths=LENGTHS, method="dense")
    assert float(loss) == pytest.approx(0, abs=1e-9)
