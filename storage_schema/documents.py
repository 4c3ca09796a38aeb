"""Documents of a cache that are stored in files of their own, and what they consist of.

They are read from disk and may be hostile, so every field is typed strictly and unknown fields are refused.
"""

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from minilm_cache.storage_schema.base import Sha256, StoredModel
from minilm_cache.storage_schema.identity import MAX_TOKENS, canonical_sha256
from minilm_cache.storage_schema.versions import FORMAT_VERSION

MAX_SHARDS: Final = 2**24
"""Most shards of a cache of format 2; one of format 1 had at most 2**20."""
MAX_FILE_BYTES: Final = 2**40
"""Most bytes of a file of a cache."""
MAX_TOTAL_BYTES: Final = 2**60
"""Most bytes of all files of a cache."""
MAX_RECORD_BYTES: Final = 64 * 2**10
"""Longest commit record."""

Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
RelativePath = Annotated[
    str, Field(max_length=128, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$")
]
"""A path below the cache's root: no `..`, no leading slash, no hidden names, no backslash."""


class StoredDocument(StoredModel):
    """A document that is stored in its own file, with a checksum of its content."""

    checksum: Sha256 | None = None
    """SHA-256 over the canonical JSON of all other fields; set by `to_json`. Shows damage, not tampering."""

    def to_json(self) -> bytes:
        """Return the document as it is stored, with its checksum."""
        return self.model_copy(update={"checksum": self._checksum()}).model_dump_json(indent=1).encode()

    def _checksum(self) -> str:
        return canonical_sha256(self.model_dump(mode="json", exclude={"checksum"}))

    @model_validator(mode="after")
    def _is_as_written(self) -> "StoredDocument":
        if self.checksum not in (None, self._checksum()):
            raise ValueError("its content is not what `checksum` says was written")
        return self


class FileDigest(StoredModel):
    """Size and hashes of one file."""

    size: int = Field(ge=0, le=MAX_FILE_BYTES)
    """Size in bytes."""
    sha256: Sha256
    xxh3_128: Xxh3


class ShardRange(StoredModel):
    """Which sequences a shard holds."""

    first_sequence: int = Field(ge=0, le=MAX_TOKENS)
    num_sequences: int = Field(ge=1, le=MAX_TOKENS)
    num_tokens: int = Field(ge=1, le=MAX_TOKENS)


class CommitRecord(StoredDocument):
    """Record of a committed shard. Before a cache is complete, a shard without one does not exist."""

    format_version: Literal[1, 2] = FORMAT_VERSION
    fingerprint: Sha256
    shard: int = Field(ge=0, lt=MAX_SHARDS)
    attempt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Identifies the attempt that wrote every file of this record, hexadecimal."""
    rank: int = Field(ge=0, lt=2**20)
    """Rank of the process that wrote the shard."""
    range: ShardRange
    tokens_xxh3: Xxh3
    """XXH3-128 of the shard's token ids as the `tokens` array's dtype, little-endian, without slack."""
    files: dict[RelativePath, FileDigest]
