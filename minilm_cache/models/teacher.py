"""A teacher: named by content, and asked what its layers say."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.files import weights_sha256
from minilm_cache.models.load import TeacherSource, check_positions, load_model, load_tokenizer
from minilm_cache.models.tap import Head, TappedModel
from minilm_cache.relations.scores import TeacherSignal, key_mask
from minilm_cache.storage_schema.identity import MAX_LAYERS, TeacherIdentity, canonical_sha256
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, TEACHER_FOLDER, TOKENIZER_FILES

_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Configuration keys that say nothing about what the model computes."""


class Teacher:
    """A frozen encoder, its tokenizer, and what identifies them."""

    def __init__(
        self,
        source: TeacherSource,
        device: torch.device,
        *,
        layers: str | Sequence[int] = "last",
        head: Head | None = None,
    ) -> None:
        """Load a teacher.

        Args:
            source: where it lies.
            device: where it runs.
            layers: to tap: `last`, `all`, or numbers counted from 0, ascending.
            head: that it must have, too; none: an encoder will do.

        Raises:
            InvalidConfigError: it has no such layer.
            TeacherError: no safetensors weights, no tokenizer, no such head, or a family that cannot be
                tapped.
        """
        self.name = source.name
        self.folder = source.folder
        self.tokenizer = load_tokenizer(source.folder)
        model = load_model(source.folder, head)
        if len(self.tokenizer) > model.config.vocab_size:
            raise TeacherError(
                f"the tokenizer in {source.folder} has {len(self.tokenizer)} tokens, the model only "
                f"{model.config.vocab_size}. Put the tokenizer that belongs to the model there."
            )
        self.device = device
        tapped = TappedModel(model).eval().requires_grad_(requires_grad=False).to(device)
        self._tapped = tapped.tap(self._layer_numbers(layers, tapped.num_layers))

    @property
    def model(self) -> PreTrainedModel:
        """The model as transformers made it."""
        return self._tapped.model

    def _layer_numbers(self, layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
        if layers == "all" and num_layers > MAX_LAYERS:
            raise InvalidConfigError(
                f"--layers all: teacher {self.name} has {num_layers}, and a cache holds {MAX_LAYERS} at most."
            )
        if isinstance(layers, str):
            return tuple(range(num_layers)) if layers == "all" else (num_layers - 1,)
        if max(layers) >= num_layers:
            raise InvalidConfigError(
                f"--layers {max(layers)}: teacher {self.name} has layers 0 to {num_layers - 1}. "
                "Choose among them."
            )
        return tuple(layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """The tapped layers, counted from 0, ascending."""
        return self._tapped.layers

    @property
    def num_layers(self) -> int:
        """All that it has."""
        return self._tapped.num_layers

    def tap(self, layers: Sequence[int]) -> None:
        """Tap these layers from now on, counted from 0, ascending."""
        self._tapped.tap(layers)

    @cached_property
    def identity(self) -> TeacherIdentity:
        """The teacher, by content."""
        config = self.model.config
        return TeacherIdentity(
            model_type=config.model_type,
            weights_sha256=weights_sha256(self.folder),
            config_sha256=canonical_sha256(self._config()),
            num_layers=self._tapped.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            vocab_size=config.vocab_size,
        )

    def _config(self) -> dict[str, Any]:
        content = self.model.config.to_dict()
        return {key: value for key, value in content.items() if key not in _VOLATILE}

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Hash of the whole tokenizer and of the special tokens that sequences are made with."""
        backend = json.loads(self.tokenizer.backend_tokenizer.to_str())
        backend["truncation"] = backend["padding"] = None
        special = [self.tokenizer.cls_token_id, self.tokenizer.sep_token_id, self.tokenizer.pad_token_id]
        return canonical_sha256([backend, special])

    def attachments(self) -> dict[str, bytes]:
        """Return what a student is built from, without weights: path in the cache to content."""
        files = {TEACHER_CONFIG: json.dumps(self._config(), indent=1, sort_keys=True).encode()}
        with TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            for name in TOKENIZER_FILES:
                file = Path(folder, name)
                if file.is_file():
                    files[f"{TEACHER_FOLDER}/{name}"] = file.read_bytes()
        return files

    def check_length(self, max_length: int) -> None:
        """Raise InvalidConfigError if the teacher has fewer positions than a sequence."""
        check_length(self._tapped, self.name, token=self.tokenizer.cls_token_id, max_length=max_length)

    @torch.no_grad()
    def signals(
        self, ids: Int[Tensor, "batch length"], lengths: Int[Tensor, " batch"]
    ) -> list[TeacherSignal]:
        """Return what each tapped layer says of a padded batch, on the teacher's device."""
        return self.read(ids, lengths).signals

    @torch.no_grad()
    def read(
        self,
        ids: Int[Tensor, "batch length"],
        lengths: Int[Tensor, " batch"],
        *,
        hidden: Sequence[int] = (),
        head: Head | None = None,
        chosen: Bool[Tensor, "batch length"] | None = None,
        layers: Sequence[int] | None = None,
    ) -> "TeacherReading":
        """Return what the teacher says of a padded batch, on its device.

        Args:
            ids: token ids.
            lengths: tokens of each sequence.
            hidden: hidden states wanted, 0 for the output of the embeddings.
            head: what logits are wanted of, where it was loaded with that head; none: no logits.
            chosen: tokens that logits are of, for head `tokens`.
            layers: whose vectors are wanted; none: those that it is tapped at.
        """
        mask = key_mask(lengths, ids.shape[1]).to(torch.int64)
        own = self.layers
        self._tapped.tap(own if layers is None else layers, hidden, head)
        found = self._tapped(ids, mask, chosen)
        self._tapped.tap(own)
        signals = [TeacherSignal(vectors, lengths) for vectors in found.vectors]
        return TeacherReading(signals, found.hidden, found.logits)


class TeacherReading(NamedTuple):
    """What a teacher says of a padded batch."""

    signals: list[TeacherSignal]
    """One for each layer."""
    hidden: dict[int, Float[Tensor, "batch length hidden"]]
    logits: Float[Tensor, "rows classes"] | None


@torch.no_grad()
def check_length(model: TappedModel, name: str, *, token: int, max_length: int) -> None:
    """Raise InvalidConfigError if a model has fewer positions than a sequence.

    Args:
        model: that reads.
        name: of it, for people.
        token: any of its vocabulary.
        max_length: of sequences, tokens.
    """

    def read(ids: Tensor) -> None:
        model(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool))

    longest = torch.full((1, max_length), token, device=next(model.parameters()).device)
    check_positions(read, model.model.config, name=f"teacher {name}", ids=longest)
