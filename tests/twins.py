"""Objectives of hidden states and labels, written plainly on whole models: what ours are judged by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from minilm_cache.objectives.batch import StudentBatch
from minilm_cache.train.trainer import StudentTrainer

MAPPED = {"tinybert": [(1, 0), (2, 1)], "bert-pkd": [(1, 0)], "mobilebert": [(0, 0), (1, 1), (2, 2)]}
"""Teacher's and student's layers, written out for a teacher of three and these students."""


class Whole:
    """A whole model, its outputs taken plainly."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.size = model.config.hidden_size // 4

    def __call__(self, ids: Tensor) -> dict[str, Tensor]:
        """Return hidden states, queries, keys and values of all layers, and logits where there are some."""
        found: dict[str, list[Tensor]] = {"query": [], "key": [], "value": []}
        hooks = [
            module.register_forward_hook(lambda _m, _i, output, name=name: found[name].append(output[0]))
            for path, module in self.model.named_modules()
            for name in found
            if path.endswith(f"attention.self.{name}")
        ]
        output = self.model(input_ids=ids[None], output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        told = {name: torch.stack(layers) for name, layers in found.items()}
        told["hidden"] = torch.stack([state[0] for state in output.hidden_states])
        if "logits" in output:
            told["logits"] = output.logits[0]
        return told

    def attention(self, told: dict[str, Tensor], layer: int) -> Tensor:
        """Return attention scores of a layer, `(heads, length, length)`."""
        query, key = (told[name][layer].unflatten(-1, (4, -1)).transpose(0, 1) for name in ("query", "key"))
        scores: Tensor = query @ key.mT / query.shape[-1] ** 0.5
        return scores


@dataclass(frozen=True)
class Sequence:
    """What teacher and student say of one sequence, and what it is."""

    teacher: Whole
    student: Whole
    t: dict[str, Tensor]
    s: dict[str, Tensor]
    weights: Mapping[str, Tensor]
    """Weights of the objective that are learned, by name."""
    ids: Tensor
    chosen: Tensor | None
    is_authors: bool
    """Whether the loss is that of the authors' code, and not the paper's equation."""

    def kl(self, t_layer: int, s_layer: int) -> Tensor:
        """Return KL(teacher || student) of attention rows, `(heads, length)`."""
        told = self.teacher.attention(self.t, t_layer).log_softmax(-1)
        own = self.student.attention(self.s, s_layer).log_softmax(-1)
        return (told.exp() * (told - own)).sum(-1)

    def prediction(self, temperature: float = 1.0) -> Tensor:
        """Return the cross-entropy under the teacher's answer."""
        soft = (self.t["logits"] / temperature).softmax(-1)[None]
        return F.cross_entropy(self.s["logits"][None] / temperature, soft, reduction="none")


def of_values(one: Sequence) -> dict[str, Tensor]:
    own = one.s["value"][-1] @ one.weights["projection.weight"].T
    return {"attention": one.kl(2, 1), "value_mse": (own - one.t["value"][-1]) ** 2}


def of_hidden(one: Sequence) -> dict[str, Tensor]:
    own = one.s["hidden"][-1] @ one.weights["projection.weight"].T
    return {"attention": one.kl(2, 1), "hidden_mse": (own - one.t["hidden"][-1]) ** 2}


def of_tinybert(one: Sequence) -> dict[str, Tensor]:
    bias = one.weights.get("hidden_projection.bias", torch.zeros(()))
    wide = one.s["hidden"] @ one.weights["hidden_projection.weight"].T + bias
    own = one.weights.get("embedding_projection.weight")
    embedding = wide[0] if own is None else one.s["hidden"][0] @ own.T
    pairs = MAPPED["tinybert"]
    scores = [one.student.attention(one.s, s) - one.teacher.attention(one.t, t) for t, s in pairs]
    return {
        "embedding_mse": (embedding - one.t["hidden"][0]) ** 2,
        "hidden_mse": torch.stack([(wide[s + 1] - one.t["hidden"][t + 1]) ** 2 for t, s in pairs]),
        "attention_mse": torch.stack(scores) ** 2,
    }


def of_labels(one: Sequence) -> dict[str, Tensor]:
    soft = (one.t["logits"][one.chosen] / 2).softmax(-1)
    return {"soft_labels": F.cross_entropy(one.s["logits"][one.chosen] / 2, soft, reduction="none")}


def of_all_labels(one: Sequence) -> dict[str, Tensor]:
    soft = (one.t["logits"] / 2).softmax(-1)
    return {"soft_labels": F.cross_entropy(one.s["logits"] / 2, soft, reduction="none")}


def of_distilbert(one: Sequence) -> dict[str, Tensor]:
    own = one.s["logits"][one.chosen]
    return {
        **(of_all_labels(one) if one.is_authors else of_labels(one)),
        "masked_lm": F.cross_entropy(own, one.ids[one.chosen], reduction="none"),
        "cosine": 1 - F.cosine_similarity(one.s["hidden"][-1], one.t["hidden"][-1], dim=-1),
    }


def of_patience(one: Sequence) -> dict[str, Tensor]:
    pairs = [(one.s["hidden"][s + 1][0], one.t["hidden"][t + 1][0]) for t, s in MAPPED["bert-pkd"]]
    squares = torch.stack([(a / a.norm() - b / b.norm()) ** 2 for a, b in pairs])
    parts = {"patient": squares if one.is_authors else squares.sum(-1)}
    if one.t.get("logits", torch.zeros(1, 1)).ndim != 1:
        return parts
    if not one.is_authors:
        return {**parts, "prediction": one.prediction()}
    answer = (one.t["logits"] / 10).softmax(-1)
    return {**parts, "prediction": one.prediction(10) + (answer * answer.log()).sum()}


def of_mobilebert(one: Sequence) -> dict[str, Tensor]:
    s, t = one.s["hidden"][1:], one.t["hidden"][1:]
    parts = {"attention": torch.stack([one.kl(layer, layer) for layer in range(3)])}
    if not one.is_authors:
        return {**parts, "feature_map_mse": (s - t) ** 2}
    (s_mean, s_var), (t_mean, t_var) = ((x.mean(-1), x.var(-1, correction=0)) for x in (s, t))
    normed = [
        (x - mean[..., None]) / var.sqrt()[..., None]
        for x, mean, var in ((s, s_mean, s_var), (t, t_mean, t_var))
    ]
    return {
        **parts,
        "feature_map_mse": (normed[0] - normed[1]) ** 2,
        "mean_mse": (s_mean - t_mean) ** 2,
        "variance_l1": (s_var - t_var).abs(),
    }


TWINS: dict[str, Callable[[Sequence], dict[str, Tensor]]] = {
    "value-mse": of_values,
    "hidden-mse": of_hidden,
    "tinybert": of_tinybert,
    "tinybert-prediction": lambda one: {"prediction": one.prediction()},
    "mlm-kd": of_labels,
    "distilbert": of_distilbert,
    "bert-pkd": of_patience,
    "mobilebert": of_mobilebert,
}


def twin(
    objective: str, teacher: Whole, trainer: StudentTrainer, batch: StudentBatch, form: str | None = "authors"
) -> dict[str, Tensor]:
    """Return the parts of an objective on a batch, means over all that they are of, from whole models."""
    student = Whole(trainer.model.model)
    weights = dict(trainer.learner.objective.named_parameters())
    found: list[dict[str, Tensor]] = []
    for at, length in enumerate(batch.inputs.lengths.tolist()):
        ids, masked = batch.inputs.ids[at, :length], batch.signals.masked
        read = ids if masked is None else masked.ids[at, :length]
        chosen = None if masked is None else masked.chosen[at, :length]
        said = teacher(read), student(read)
        one = Sequence(teacher, student, *said, weights, ids, chosen, form == "authors")
        found.append(TWINS[objective](one))
    return {name: torch.cat([parts[name].flatten() for parts in found]).mean() for name in found[0]}


TOTALS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "distilbert": lambda p: 5 * 4 * p["soft_labels"] + 2 * p["masked_lm"] + p["cosine"],
    "mlm-kd": lambda p: 4 * p["soft_labels"],
    "bert-pkd": lambda p: 500 * p["patient"] + 0.7 * 100 / 3 * p.get("prediction", torch.tensor(0.0)),
    "bert-pkd paper": lambda p: 100 * p["patient"] + p.get("prediction", torch.tensor(0.0)),
    "tinybert-prediction": lambda p: p["prediction"] / 3,
    "tinybert-prediction paper": lambda p: p["prediction"],
    "mobilebert": lambda p: (
        100 * p["feature_map_mse"] + 5000 * p["mean_mse"] + 5 * p["variance_l1"] + p["attention"]
    ),
    "mobilebert paper": lambda p: p["feature_map_mse"] + p["attention"],
}
"""Where the loss is not the plain sum of its parts, in the authors' form and, by another name, the
paper's."""


def plain_sum(parts: dict[str, Tensor]) -> Tensor:
    """Return the sum of parts: the usual loss."""
    return torch.stack(list(parts.values())).sum()


SUMMED = {"hidden_mse": 2, "attention_mse": 2}
"""Parts of TinyBERT that are sums over pairs of layers, not means."""
