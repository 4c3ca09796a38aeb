"""A sentence encoder with a linear layer that classifies its vectors, or gives them a value on a scale."""

from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.complete import MODULES
from minilm_cache.models.exported import answered
from minilm_cache.models.load import head_config, is_classifier, load_model, read_config
from minilm_cache.models.pooling import DenseLayer, SentenceEncoder, SentencePooler, load_pooler
from minilm_cache.models.student import build_model


def load_pooled_head(folder: Path) -> SentencePooler | None:
    """Return what makes the answers of a folder that `PooledClassifier` saved. None means another model.

    Raises:
        TeacherError: its `modules.json` is damaged, or gives another number of answers than `config.json`.
    """
    config = read_config(folder)
    has_task = getattr(config, "problem_type", None) is not None
    if is_classifier(config) or not has_task or not (folder / MODULES).is_file():
        return None
    pooler = load_pooler(folder, None, config.hidden_size)
    width = pooler.width(config.hidden_size)
    if width != config.num_labels:
        raise TeacherError(
            f"{folder} pools vectors of {width} numbers, and its config.json names {config.num_labels} "
            "classes. Save it again."
        )
    return pooler.eval().requires_grad_(requires_grad=False)


def refuse_padded_ends(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Raise TeacherError for a decoder whose texts end with the token that batches are padded with.

    It answers at the last token that is no padding, which is another one then than for a text by itself.
    """
    end = tokenizer("")["input_ids"][-1:]
    if end == [tokenizer.pad_token_id]:
        raise TeacherError(
            f"the tokenizer in {folder} ends texts with {tokenizer.pad_token}, which it also pads with, and "
            "this decoder answers at the last token that is no padding. Set pad_token to another token in "
            "its tokenizer_config.json."
        )


def refuse_several_labels(problem_type: str | None, num_classes: int | None, who: str) -> None:
    """Raise InvalidConfigError for a classifier that gives several labels to a text.

    Args:
        problem_type: what its config.json says. None means that it says nothing.
        num_classes: numbers of an answer. None means that there are no answers.
        who: the model, for the message.
    """
    if problem_type == "multi_label_classification" and num_classes not in (None, 1):
        raise InvalidConfigError(
            f"{who} gives several labels to a text (problem_type in its config.json), and students learn "
            "which one of several classes is right. Take a teacher whose classes exclude each other."
        )


def refuse_answers(folder: Path, name: str) -> None:
    """Raise InvalidConfigError for a model that gives answers to a task, and no vectors of texts."""
    if is_classifier(read_config(folder)) or load_pooled_head(folder) is not None:
        raise InvalidConfigError(
            f"{name} was fine-tuned to answer a task: it gives classes or values, not a vector. Take a "
            "sentence encoder; evaluate --as-is and rerank score models that answer."
        )


class PooledClassifier(nn.Module):
    """An encoder that answers from the vector that its folder pools, and not from the first token.

    The layer is the last linear map of the pooling, so that sentence-transformers opens what is saved: its
    `encode` returns logits.
    """

    def __init__(self, encoder: SentenceEncoder, max_length: int) -> None:
        """Take an encoder whose last linear map gives logits, and the most tokens of its sequences."""
        super().__init__()
        self.encoder = encoder
        self._max_length = max_length

    @classmethod
    def begin(
        cls, folder: Path, labels: Sequence[str], *, max_length: int, untrained: bool
    ) -> "PooledClassifier":
        """Return the model of a folder with a `modules.json`, with a new layer of random weights.

        The layer of a model that answers a task already goes on where it gives as many answers, and is left
        out where it does not, as heads of other classifiers are. Vectors are not divided by their length, and
        texts of tasks get no prompt, which is for other uses.

        Args:
            folder: folder of the model.
            labels: labels in the order of their numbers. Empty means one number on a scale.
            max_length: most tokens of a sequence, special tokens included.
            untrained: whether all weights are random, so that only the shape is the folder's.

        Raises:
            TeacherError: the folder holds no model, or a pooling that cannot be computed.
        """
        model, known = load_model(folder, attention="sdpa"), load_pooled_head(folder)
        model.config.update(head_config("sequences", labels))
        pooler = load_pooler(folder, None, model.config.hidden_size)
        if untrained:
            model = build_model(model.config, "sdpa")
            for earlier in pooler.dense:
                earlier.linear.reset_parameters()
        answers = max(1, len(labels))
        if known is None or known.width(model.config.hidden_size) != answers:
            dense = pooler.dense if known is None else pooler.dense[:-1]
            pooler = SentencePooler(pooler.mode, dense, normalize=False)
            layer = nn.Linear(pooler.width(model.config.hidden_size), answers)
            nn.init.normal_(layer.weight, std=getattr(model.config, "initializer_range", 0.02))
            nn.init.zeros_(layer.bias)
            dense = [*dense, DenseLayer(layer, nn.Identity())]
        else:
            dense = pooler.dense
        return cls(SentenceEncoder(model, SentencePooler(pooler.mode, dense, normalize=False)), max_length)

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Int[Tensor, "batch length"],
        *,
        token_type_ids: Int[Tensor, "batch length"] | None = None,
        labels: Int[Tensor, " batch"] | Float[Tensor, " batch"] | None = None,
    ) -> SequenceClassifierOutput:
        """Return logits, `(batch, labels)`, and their loss where there are labels, as `answered` has it."""
        logits: Tensor = self.encoder(input_ids, attention_mask, token_type_ids)
        return answered(logits, labels)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model and its pooling to a folder that sentence-transformers opens, without a tokenizer.

        Raises:
            OSError: the file system refused.
        """
        model, pooler = self.encoder.model, self.encoder.pooler
        assert isinstance(model, PreTrainedModel), "an exported model has no weights to save"
        model.save_pretrained(folder)
        pooler.save(folder, hidden_size=model.config.hidden_size, max_length=self._max_length)
