"""Files of tensors: written for everybody who may read the folder, and compared before a tensor is taken.

A file may be damaged, or come from a stranger, and what reads a tensor later trusts its size: the fused AdamW
writes as far as the weight is long, whatever the length of its moments.
"""

import os
import stat
from collections.abc import Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Final

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minilm_cache.storage_schema.documents import Xxh3
from minilm_cache.store.fingerprint import xxh3_file
from minilm_cache.store.regular_files import open_regular

TENSOR_ERRORS: Final = (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError)
"""Errors of files of tensors that are missing, damaged or not what they should be."""
_HEADER_BYTES: Final = 2**20
_TENSOR_HEADER_BYTES: Final = 512
_TYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Header = dict[str, tuple[tuple[int, ...], str]]
"""Shape and type of each tensor of a file, by name."""


class StoredFile(BaseModel):
    """Size and hash of a file, which tell decay, not malice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0, lt=2**53)
    """Size in bytes."""
    xxh3_128: Xxh3

    @classmethod
    def of(cls, file: BufferedIOBase) -> "StoredFile":
        """Return size and hash of an open file."""
        file.seek(0)
        return cls(size=os.fstat(file.fileno()).st_size, xxh3_128=xxh3_file(file))


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> StoredFile:
    """Write tensors durably, and return what the file is; its permissions follow the umask.

    safetensors writes files that only their owner may read.

    Raises:
        OSError: the file system refused.
        SafetensorError: the same, for some reasons.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(dict(tensors), file)
    file.chmod(mode)
    with file.open("rb") as written:
        os.fsync(written.fileno())
        return StoredFile.of(written)


def header_of(file: Path, *, most: int, follow_links: bool = False) -> Header:
    """Return shapes and types of the tensors in a file, none of which is read.

    Args:
        file: a file in the format of safetensors.
        most: number of tensors that it may have; a longer header is refused.
        follow_links: whether a symbolic link to a regular file is accepted.

    Raises:
        OSError: it is missing, or not a regular file.
        ValueError: its header is longer than it can be.
        SafetensorError: it is not such a file.
    """
    with open_regular(file, follow_links=follow_links) as opened:
        if int.from_bytes(opened.read(8), "little") > _HEADER_BYTES + _TENSOR_HEADER_BYTES * most:
            raise ValueError("its header is longer than it can be")
    with safe_open(file, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no dictionary
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def load_tensors(
    file: Path,
    expected: Mapping[str, Tensor],
    *,
    stored: StoredFile | None = None,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a file, which must have exactly the names, shapes and types that are expected.

    Args:
        file: a file that `save_tensors` wrote.
        expected: tensors like those that it should hold.
        stored: size and hash of the file. None means that they were not noted.
        device: device to load them to. None means the CPU.

    Raises:
        OSError: it is missing, or not a regular file.
        ValueError: it is not the file that was written, or holds other tensors.
        SafetensorError: it is damaged.
    """
    header = header_of(file, most=len(expected))
    if stored is not None:
        with open_regular(file) as opened:
            if StoredFile.of(opened) != stored:
                raise ValueError("its bytes are not those that were written")
    wanted = {name: (tuple(tensor.shape), _TYPES[tensor.dtype]) for name, tensor in expected.items()}
    odd = next((name for name in sorted({*header, *wanted}) if header.get(name) != wanted.get(name)), None)
    if odd is not None:
        raise ValueError(f"{odd} is {_in_words(header.get(odd))}, and should be {_in_words(wanted.get(odd))}")
    with safe_open(file, framework="pt", device=str(device or "cpu")) as tensors:
        return {name: tensors.get_tensor(name) for name in wanted}


def _in_words(described: tuple[tuple[int, ...], str] | None) -> str:
    if described is None:
        return "not there"
    shape, kind = described
    return f"{kind} of shape {list(shape)}"
