"""A model and its pooling as one: from texts to vectors, without sentence-transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from minilm_cache.models.load import load_model, load_tokenizer
from minilm_cache.models.padding import pad
from minilm_cache.models.pooling import load_pooler


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
        self._model = load_model(folder, attention="sdpa").eval()
        self._tokenizer = load_tokenizer(folder)
        self._pooler = load_pooler(folder, None, self._model.config.hidden_size).eval()
        self._max_length = max_length

    @property
    def num_parameters(self) -> int:
        """Number of weights of the model and its linear maps."""
        return sum(weight.numel() for part in (self._model, self._pooler) for weight in part.parameters())

    @torch.no_grad()
    def encode(self, texts: Sequence[str], batch_size: int = 64) -> Float[Tensor, "texts width"]:
        """Return the vectors of texts, in their order; texts of about the same length share a batch."""
        ids = self._tokenizer(list(texts), truncation=True, max_length=self._max_length)["input_ids"]
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        vectors: list[Tensor] = []
        for first in range(0, len(order), batch_size):
            rows = [torch.tensor(ids[number]) for number in order[first : first + batch_size]]
            batch, lengths = pad(rows, self._tokenizer.pad_token_id)
            mask = (torch.arange(batch.shape[1]) < lengths[:, None]).to(torch.int64)
            hidden = self._model(input_ids=batch, attention_mask=mask).last_hidden_state
            vectors += self._pooler(hidden, lengths).unbind()
        places = torch.tensor(order).argsort()
        return torch.stack(vectors)[places]
