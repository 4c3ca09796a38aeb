"""The base of every document of a cache, and what is wrong with a document that is none."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer

from minilm_cache.errors import CacheCorruptError, UnsupportedFormatError
from minilm_cache.storage_schema.versions import READABLE_VERSIONS

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_EMPTY_VALUES: tuple[object, ...] = (None, (), [], {})
"""Values that count as empty; 0 does not."""


class StoredModel(BaseModel):
    """Base of everything read from a cache: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sections: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out of the JSON when they are empty. A cache that does not use them keeps the
    document, and so the fingerprint, that it had before the format had these fields."""

    @model_serializer(mode="wrap")
    def _without_empty_sections(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        content = handler(self)
        return {
            name: value
            for name, value in content.items()
            if name not in self.sections or value not in _EMPTY_VALUES
        }


Document = TypeVar("Document", bound=BaseModel)

REMEDY: Final = "Fetch the cache again, or remove it and dump it again."
"""What helps where a document of a cache is damaged."""
_SHARD_BYTES = 52
"""Least bytes of a shard's range in JSON without spaces."""
_FILE_BYTES = 128
"""Least bytes of a file's digest and its name in JSON."""
_FREE_OBJECTS = 4096
_FREE_VALUES = 2**14
"""Most objects and values that a document may have in addition to its shards and files."""
_SHOWN = 3
"""Problems quoted in an error line; further ones are only counted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a document: its place (`loc`), its kind (`kind`), and a description (`message`)."""

    loc: str
    kind: str
    message: str

    def __str__(self) -> str:
        """Render as `loc: message`."""
        return f"{self.loc}: {self.message}"


def problems_of(error: ValidationError) -> Sequence[Problem]:
    """Return everything that keeps a document from being valid."""
    return [
        Problem(".".join(map(str, item["loc"])) or "document", item["type"], item["msg"])
        for item in error.errors(include_url=False, include_input=False)
    ]


def refuse_costly(document: bytes, where: str) -> None:
    """Raise CacheCorruptError for JSON that would take far more memory to parse than its bytes.

    A parsed object takes more than a kilobyte, however short it was, and an invalid one as much again. A long
    document of a cache consists almost entirely of shard ranges and file digests, which can be counted and
    have a least length. Everything else in it is short.
    """
    shards, files = document.count(b'"first_sequence"'), document.count(b'"xxh3_128"')
    objects = document.count(b"{") + document.count(b"[")
    values = document.count(b",")
    most = min(shards, len(document) // _SHARD_BYTES) + min(files, len(document) // _FILE_BYTES)
    if objects > _FREE_OBJECTS + most:
        problem = f"{objects} objects and lists"
    elif values > _FREE_VALUES + 3 * most:
        problem = f"{values} values"
    else:
        return
    raise CacheCorruptError(
        f"{where} is damaged: {problem} in {len(document)} bytes, which minilm-cache does not write. {REMEDY}"
    )


def parse(model: type[Document], document: bytes, where: str) -> Document:
    """Read `document` as a `model`.

    Args:
        model: the pydantic model expected.
        document: JSON text as read from disk, untrusted.
        where: path shown in errors.

    Raises:
        UnsupportedFormatError: the document names a format version that this release cannot read.
        CacheCorruptError: the document is not JSON, or is not a `model`.
    """
    refuse_costly(document, where)
    version = _format_version(document)
    if version is not None and version not in READABLE_VERSIONS:
        raise UnsupportedFormatError(
            f"{where} has format version {version!r}; this release reads "
            f"{sorted(READABLE_VERSIONS)}. Install a newer minilm-cache."
        )
    try:
        return model.model_validate_json(document)
    except ValidationError as error:
        problems = problems_of(error)
        shown = "; ".join(map(str, problems[:_SHOWN]))
        shown = "".join(char if char.isprintable() else " " for char in shown)
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise CacheCorruptError(f"{where} is damaged: {shown}{more}. {REMEDY}") from error


def _format_version(document: bytes) -> int | None:
    """Return the format version, or None where there is none.

    The rest is not parsed: a newer format may differ in every other field.
    """
    match = re.search(rb'"format_version"\s*:\s*(\d{1,9})\s*[,}]', document)
    return None if match is None else int(match[1])
