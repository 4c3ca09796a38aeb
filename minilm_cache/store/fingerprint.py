"""Hashes of files and texts. They identify what a cache is made of; paths never do."""

import hashlib
from collections.abc import Iterable
from io import BufferedIOBase
from pathlib import Path
from typing import Final

import xxhash

from minilm_cache.storage_schema.documents import FileDigest

_PART_BYTES: Final = 2**22
"""Bytes of a file that are read at once."""


def sha256_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths: Iterable[Path]) -> str:
    """Return a single SHA-256 (hex) for a set of files.

    For one file it is the digest of that file, which can be compared with published digests. For several it
    is the digest over their names and digests, sorted by name.
    """
    ordered = sorted(paths)
    if len(ordered) == 1:
        return sha256_file(ordered[0])
    lines = "".join(f"{sha256_file(path)}  {path.name}\n" for path in ordered)
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256_texts(texts: Iterable[str]) -> str:
    """Return the SHA-256 (hex) over UTF-8 texts, each preceded by its length (8 bytes, little-endian)."""
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def xxh3(content: bytes | memoryview) -> str:
    """Return the XXH3-128 (hex) of bytes: fast enough to check every read, but not safe against tampering."""
    return xxhash.xxh3_128_hexdigest(content)


def xxh3_file(file: BufferedIOBase) -> str:
    """Return the XXH3-128 (hex) of a file on disk from where it stands; it need not fit into memory."""
    return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_file(path: Path) -> FileDigest:
    """Return size and both hashes of a file, which need not fit into memory."""
    hasher = Hasher()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            hasher.update(part)
    return hasher.digest()


class Hasher:
    """Computes size and both hashes of a file from its parts."""

    def __init__(self) -> None:
        """Begin with an empty file."""
        self._size = 0
        self._sha256 = hashlib.sha256()
        self._xxh3 = xxhash.xxh3_128()

    def update(self, part: bytes) -> None:
        """Add the next part."""
        self._size += len(part)
        self._sha256.update(part)
        self._xxh3.update(part)

    def digest(self) -> FileDigest:
        """Return size and hashes of all parts."""
        return FileDigest(size=self._size, sha256=self._sha256.hexdigest(), xxh3_128=self._xxh3.hexdigest())


def digest_bytes(content: bytes) -> FileDigest:
    """Return size and both hashes of a file's content."""
    return FileDigest(size=len(content), sha256=hashlib.sha256(content).hexdigest(), xxh3_128=xxh3(content))
