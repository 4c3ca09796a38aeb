"""A model and its pooling as one: from token ids or texts to vectors, without sentence-transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import load_model, load_tokenizer
from minilm_cache.models.pooling import SentencePooler, load_pooler


class SentenceEncoder(nn.Module):
    """A model that makes vectors of token ids."""

    def __init__(self, model: PreTrainedModel, pooler: SentencePooler) -> None:
        """Join a model without a head and its pooling."""
        super().__init__()
        self.model, self.pooler = model, pooler

    @classmethod
    def load(cls, folder: Path) -> "SentenceEncoder":
        """Load a folder with a `modules.json`, in evaluation mode on the CPU.

        Raises:
            TeacherError: the folder holds no model, or a pooling that cannot be computed.
            InvalidConfigError: the folder does not say how it pools.
        """
        model = load_model(folder, attention="sdpa")
        return cls(model, load_pooler(folder, None, model.config.hidden_size)).eval()

    @property
    def num_parameters(self) -> int:
        """Number of weights of the model and its linear maps."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Int[Tensor, "batch length"],
        token_type_ids: Int[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch width"]:
        """Return the vector of each sequence.

        Args:
            input_ids: token ids, padded at the end.
            attention_mask: 1 at tokens, 0 at padding.
            token_type_ids: the side of a pair that a token belongs to, for families that tell them apart.
                None means one side.
        """
        sides = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **sides)
        vectors: Tensor = self.pooler(output.last_hidden_state, attention_mask.sum(1))
        return vectors


class SentenceModel:
    """A model that makes vectors of texts, in evaluation mode on the CPU."""

    def __init__(self, folder: Path, max_length: int) -> None:
        """Load a folder with a `modules.json`.

        Args:
            folder: folder of the model.
            max_length: most tokens of a text, special tokens included.

        Raises:
            TeacherError: the folder holds no model, or a pooling that cannot be computed.
            InvalidConfigError: the folder does not say how it pools.
        """
        self._encoder = SentenceEncoder.load(folder)
        self._tokenizer = load_tokenizer(folder, has_ends=False)
        self._max_length = max_length

    @property
    def num_parameters(self) -> int:
        """Number of weights of the model and its linear maps."""
        return self._encoder.num_parameters

    @torch.no_grad()
    def encode(self, texts: Sequence[str], batch_size: int = 64) -> Float[Tensor, "texts width"]:
        """Return the vectors of texts, in their order; texts of about the same length share a batch."""
        ids = self._tokenizer(list(texts), truncation=True, max_length=self._max_length)["input_ids"]
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        vectors: list[Tensor] = []
        for first in range(0, len(order), batch_size):
            rows = [torch.tensor(ids[number]) for number in order[first : first + batch_size]]
            inputs = Inputs.of(rows, self._tokenizer.pad_token_id)
            vectors += self._encoder(inputs.ids, inputs.valid.to(torch.int64)).unbind()
        places = torch.tensor(order).argsort()
        return torch.stack(vectors)[places]
