"""The form `authors` of four objectives is the loss of their published code, written here plainly.

Values and gradients agree to 1e-5 on a batch without padding: the published losses are means that count it.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minilm_cache.models.inputs import Inputs
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import LayerPair, StudentFacts, StudentObjective
from minilm_cache.objectives.batch import Counts, StudentBatch, WantedTargets
from minilm_cache.objectives.bert_pkd import Patience, PatientObjective
from minilm_cache.objectives.distilbert import DistilBertObjective
from minilm_cache.objectives.mlm_kd import MaskedObjective
from minilm_cache.objectives.mobilebert import MobileBertObjective
from minilm_cache.objectives.tinybert import PredictionObjective, TinyBertObjective, score_mse
from minilm_cache.relations.scores import DenseRows, Targets, Vectors, mean_row_entropy
from minilm_cache.relations.signals import DenseLabels, MaskedSequences, Signals
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import LOGITS, SignalName, StateFamily
from minilm_cache.train.config import TrainConfig

BATCH, LENGTH, WIDTH, HEADS, WORDS, CLASSES = 3, 7, 16, 4, 23, 3
FACTS = StudentFacts(num_layers=2, hidden_size=WIDTH, vector_width=WIDTH)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(
    signals: Signals,
    targets: tuple[Mapping[RelationKind, Targets], ...] = (),
    vectors: tuple[Vectors, ...] = (),
) -> StudentBatch:
    """Return full sequences and what a teacher says of them."""
    counts: Counts = {"tokens": BATCH * LENGTH, "chosen": 5, "sequences": BATCH, "pairs": BATCH * LENGTH**2}
    return StudentBatch(
        inputs=Inputs.full(torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % WORDS),
        counts=counts,
        part=0,
        step_counts=counts,
        ends_step=True,
        targets=targets,
        vectors=vectors,
        signals=signals,
    )


def agree(
    objective: StudentObjective, reading: Reading, batch: StudentBatch, expected: Tensor, leaves: list[Tensor]
) -> None:
    """Compare the loss and its gradients in what the student says."""
    found = objective.losses(objective(reading, batch)).total
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for own, other in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def hidden_of(numbers: range, seed: int) -> dict[int, Tensor]:
    return {number: drawn(BATCH, LENGTH, WIDTH, seed=seed + number).requires_grad_() for number in numbers}


@pytest.mark.parametrize(("beta", "temperature"), [(None, None), (100.0, 5.0)])
def test_patient_kd(beta: float | None, temperature: float | None) -> None:
    """Alpha T^2 KLDiv(mean) + beta mse(normalize(student), normalize(teacher)); 0.7, T = 10, beta = 500.

    The cross-entropy of the task's labels, 0.3 of the rest, is no part of a cache.
    """
    config = TrainConfig(
        arch=("3x16",), objective="bert-pkd", patience=beta, temperature=temperature, layer_map="all"
    )
    pairs = [LayerPair(1, 0), LayerPair(3, 1)]
    hidden, teachers = hidden_of(range(1, 3), 1), drawn(BATCH, 2, WIDTH, seed=9)
    own, told = drawn(BATCH, CLASSES, seed=5).requires_grad_(), drawn(BATCH, CLASSES, seed=6)
    names = [SignalName(StateFamily.FIRST, pair.teacher + 1) for pair in pairs]
    states = Signals(values={**{name: teachers[:, at] for at, name in enumerate(names)}, LOGITS: told})
    objective = PatientObjective(pairs, Patience.of(config), CLASSES)
    patience = torch.stack([hidden[1][:, 0], hidden[2][:, 0]], 1)
    t, b = temperature or 10.0, 500.0 if beta is None else beta
    # Their reduction is "mean", over sequences and classes; torch warns of the word, so it is written out.
    soft = F.kl_div(F.log_softmax(own / t, 1), F.softmax(told / t, 1), reduction="none").mean() * t * t
    away = F.mse_loss(F.normalize(teachers, p=2, dim=2), F.normalize(patience, p=2, dim=2))

    agree(
        objective,
        Reading([], hidden, own),
        batch_of(states),
        0.7 * soft + b * away,
        [own, hidden[1], hidden[2]],
    )


def test_distilbert() -> None:
    """5 T^2 KLDiv(batchmean) over every token but padding, 2 of masked tokens, 1 of CosineEmbeddingLoss."""
    t = 2.0
    chosen = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    chosen[0, 2] = chosen[1, 4] = chosen[1, 5] = chosen[2, 1] = chosen[2, 6] = True
    told, teacher = drawn(BATCH, LENGTH, WORDS, seed=1), drawn(BATCH, LENGTH, WIDTH, seed=2)
    own = drawn(BATCH, LENGTH, WORDS, seed=3).requires_grad_()
    hidden = {2: drawn(BATCH, LENGTH, WIDTH, seed=4).requires_grad_()}
    everywhere = torch.ones_like(chosen)
    soft = (told / t).softmax(-1).flatten(0, 1)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    masked = replace(
        MaskedSequences.of(ids, chosen, labelled=everywhere), labels=DenseLabels(soft), temperature=t
    )
    name = SignalName(StateFamily.MASKED, 6)
    batch = batch_of(Signals(values={name: teacher}, masked=masked))
    objective = DistilBertObjective(FACTS, name, t, everywhere=True)
    labels = batch.inputs.ids.masked_fill(~chosen, -100)
    ce = F.kl_div((own / t).log_softmax(-1).flatten(0, 1), soft, reduction="batchmean") * t**2
    mlm = F.cross_entropy(own.view(-1, WORDS), labels.view(-1), ignore_index=-100)
    cosine = torch.nn.CosineEmbeddingLoss(reduction="mean")(
        hidden[2].flatten(0, 1), teacher.flatten(0, 1), torch.ones(BATCH * LENGTH)
    )
    entropy = -(soft * soft.log()).sum(-1).mean()  # ours is the cross-entropy: the same but for a constant

    assert objective.needs.all_labels
    agree(
        objective,
        Reading([], hidden, own.flatten(0, 1)),
        batch,
        5.0 * (ce + t**2 * entropy) + 2.0 * mlm + 1.0 * cosine,
        [own, hidden[2]],
    )


def attention_of(seed: int, *, grad: bool) -> Vectors:
    parts = drawn(3, BATCH, HEADS, LENGTH, WIDTH // HEADS, seed=seed)
    query, key, value = (part.clone().requires_grad_(grad) for part in parts)
    return Vectors(query, key, value, None, (WIDTH // HEADS) ** -0.5)


def scores_of(vectors: Vectors) -> Tensor:
    scores: Tensor = vectors.query @ vectors.key.mT * vectors.scaling
    return scores


def test_mobilebert() -> None:
    """The sum over layers, over their number, of 100 feature maps, 1 attention, 5000 means, 5 variances."""
    layers = 2
    hidden, teachers = hidden_of(range(1, 3), 1), hidden_of(range(1, 3), 11)
    own = [attention_of(seed, grad=True) for seed in range(layers)]
    told = [scores_of(attention_of(seed, grad=False)).softmax(-1) for seed in (7, 8)]
    lengths = torch.full((BATCH,), LENGTH)
    targets = tuple(
        {RelationKind.ATTENTION: Targets(DenseRows(rows), mean_row_entropy(rows, lengths))} for rows in told
    )
    states = Signals(values={SignalName(StateFamily.HIDDEN, n): teachers[n].detach() for n in (1, 2)})
    total = torch.zeros(())
    for layer in range(layers):
        s, t = hidden[layer + 1], teachers[layer + 1].detach()
        normed = [F.layer_norm(one, (WIDTH,), eps=1e-12) for one in (s, t)]
        maps = F.mse_loss(normed[0], normed[1])
        cross = -(told[layer] * scores_of(own[layer]).log_softmax(-1)).sum(-1).mean()
        entropy = -(told[layer] * told[layer].log()).sum(-1).mean()
        means = F.mse_loss(s.mean(-1, keepdim=True), t.mean(-1, keepdim=True))
        variances = [((one - one.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True) for one in (s, t)]
        gamma = (variances[1] - variances[0]).abs().mean()
        # Theirs is the cross-entropy of attention, ours the KL: the same but for a constant.
        total = total + 100 * maps + 1 * (cross - entropy) + 5000 * means + 5 * gamma
    leaves = [hidden[1], hidden[2], own[0].query, own[1].key]

    objective = MobileBertObjective(layers, is_authors=True)
    agree(objective, Reading(own, hidden, None), batch_of(states, targets), total / layers, leaves)


def test_tinybert() -> None:
    """One learned map with a bias for layers and embeddings alike; sums over layers, no weights."""
    pairs = [LayerPair(1, 0), LayerPair(3, 1)]
    hidden, teachers = hidden_of(range(3), 1), [drawn(BATCH, LENGTH, 24, seed=20 + n) for n in range(3)]
    own = [attention_of(seed, grad=True) for seed in (1, 2)]
    told = [attention_of(seed, grad=False) for seed in (3, 4)]
    names = [SignalName(StateFamily.HIDDEN, number) for number in (0, 2, 4)]
    wanted = WantedTargets(kinds=(), layers=(1, 3), vectors=True, signals=tuple(names))
    objective = TinyBertObjective(wanted, pairs, student=FACTS, teacher_width=24, shared=True)
    (fit_dense,) = [module for module in objective.modules() if isinstance(module, torch.nn.Linear)]
    rep = sum(
        (F.mse_loss(fit_dense(hidden[number]), teachers[number]) for number in range(3)), torch.zeros(())
    )
    att = sum(
        (F.mse_loss(scores_of(a), scores_of(b)) for a, b in zip(own, told, strict=True)), torch.zeros(())
    )
    leaves = [*hidden.values(), own[0].query, own[1].key, fit_dense.weight]
    batch = batch_of(Signals(values=dict(zip(names, teachers, strict=True))), vectors=tuple(told))

    assert fit_dense.bias is not None
    agree(objective, Reading(own, hidden, None), batch, rep + att, leaves)


def test_scores_that_no_window_shows_are_not_compared() -> None:
    """One change of a key beyond both windows changes nothing; a score within either does."""
    torch.manual_seed(0)
    places = torch.arange(8)
    near = ((places[:, None] - places).abs() <= 1)[None, None]
    wider = ((places[:, None] - places).abs() <= 2)[None, None]
    parts = [torch.randn(1, 2, 8, 4) for _ in range(4)]
    lengths = torch.tensor([8])

    def loss(student_mask: Tensor, teacher_mask: Tensor) -> Tensor:
        student = Vectors(parts[0], parts[1], parts[1], student_mask, 0.5, is_windowed=True)
        teacher = Vectors(parts[2], parts[3], parts[3], teacher_mask, 0.5, is_windowed=True)
        return score_mse(student, teacher, lengths)

    scores = [0.5 * query @ key.mT for query, key in (parts[:2], parts[2:])]
    squares = (scores[0] - scores[1]).square()
    for one, other in ((near, near), (near, wider), (wider, near)):
        expected = (squares * (one | other)).sum() / squares.numel()
        torch.testing.assert_close(loss(one, other), expected)


def test_tinyberts_prediction_is_a_mean_over_classes() -> None:
    own, told = drawn(BATCH, CLASSES, seed=5).requires_grad_(), drawn(BATCH, CLASSES, seed=6)
    expected = -(told.softmax(-1) * own.log_softmax(-1)).mean()

    agree(
        PredictionObjective(1.0, CLASSES),
        Reading([], {}, own),
        batch_of(Signals(values={LOGITS: told})),
        expected,
        [own],
    )


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_ground_truth_is_mixed_into_the_targets_of_mlm_kd(share: float) -> None:
    """MobileBERT's second stage: target = (1 - r) softmax(teacher) + r one-hot, at masked tokens."""
    chosen = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    chosen[0, 2] = chosen[2, 6] = True
    soft, own = drawn(2, WORDS, seed=1).softmax(-1), drawn(2, WORDS, seed=3).requires_grad_()
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    masked = replace(MaskedSequences.of(ids, chosen), labels=DenseLabels(soft))
    batch = batch_of(Signals(masked=masked))
    target = (1 - share) * soft + share * F.one_hot(batch.inputs.ids[chosen], WORDS)
    expected = -(target * own.log_softmax(-1)).sum(-1).mean()

    agree(MaskedObjective(1.0, share), Reading([], {}, own), batch, expected, [own])


def test_a_squared_error_has_no_temperature() -> None:
    """T squared undoes what dividing logits by T takes from a cross-entropy, and from nothing else."""
    pairs = [LayerPair(0, 0)]
    for form, of_number, of_classes in (("authors", 0.7, 0.7 * 100 / CLASSES), ("paper", 1, 1)):
        patience = Patience.of(TrainConfig(arch=("2x16",), objective="bert-pkd", form=form))
        assert PatientObjective(pairs, patience, 1).weights["prediction"] == pytest.approx(of_number)
        assert PatientObjective(pairs, patience, CLASSES).weights["prediction"] == pytest.approx(of_classes)
