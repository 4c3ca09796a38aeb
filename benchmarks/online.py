"""Train with MiniLM online, with the teacher in the loop, as public trainers do: the usual baseline.

Both models use eager attention and whole forward passes that return the attention of every layer. The loss is
`F.kl_div` over distributions, after a logarithm of the student's. Each student has a teacher of its own, as
with one run per student.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.models.load import load_model
from minilm_cache.objectives.batch import StudentBatch


class _LastValues:
    """Forward hook that keeps the values of a BERT model's last layer, split into heads."""

    def __init__(self, model: PreTrainedModel, num_heads: int) -> None:
        self._num_heads = num_heads
        last = model.config.num_hidden_layers - 1
        layer = model.get_submodule(f"encoder.layer.{last}.attention.self.value")
        layer.register_forward_hook(self._keep)
        self.value_BHLD = torch.empty(0)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del module, inputs
        batch, length, _ = output.shape
        self.value_BHLD = output.view(batch, length, self._num_heads, -1).transpose(1, 2)

    def relation(self, mask: Tensor) -> Tensor:
        """Return the value relation, `(batch, heads, length, length)`."""
        size = self.value_BHLD.shape[-1]
        scores: Tensor = self.value_BHLD @ self.value_BHLD.transpose(-1, -2) * size**-0.5
        return scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min).softmax(-1)


@dataclass(frozen=True, slots=True)
class _Model:
    model: PreTrainedModel
    values: _LastValues

    @classmethod
    def of(cls, model: PreTrainedModel, num_heads: int) -> "_Model":
        return cls(model, _LastValues(model, num_heads))

    def relations(self, batch: StudentBatch) -> tuple[Tensor, Tensor]:
        """Return the attention distribution and the value relation of the last layer."""
        mask = batch.inputs.valid
        output = self.model(input_ids=batch.inputs.ids, attention_mask=mask.long(), output_attentions=True)
        return output.attentions[-1], self.values.relation(mask)


class UsualOnlineTrainer:
    """Trains one student, and runs the teacher for each batch."""

    def __init__(
        self, teacher: Path, student: PreTrainedModel, num_heads: int, *, device: torch.device
    ) -> None:
        """Load the teacher with eager attention; the student keeps the attention that it was made with.

        A GPU computes both in bfloat16 by autocast, a CPU in float32.
        """
        self._device = device
        self._teacher = _Model.of(load_model(teacher, attention="eager").eval().to(device), num_heads)
        self._student = _Model.of(student.train().to(device), num_heads)
        self._optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)

    def step(self, batch: StudentBatch) -> None:
        """Take one optimizer step."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            with torch.no_grad():
                targets = self._teacher.relations(batch)
            relations = self._student.relations(batch)
        losses = [
            F.kl_div(relation.float().clamp(min=1e-12).log(), target.float(), reduction="sum")
            / relation.shape[:-1].numel()
            for relation, target in zip(relations, targets, strict=True)
        ]
        self._optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self._optimizer.step()
