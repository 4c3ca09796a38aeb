"""How many bytes per token the arrays of codec `topk` take: columns or gaps, zstd or pcodec.

python -m benchmarks.compressors
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd
from pcodec import ChunkConfig, standalone

from benchmarks.inputs import KINDS, mini_relations, mini_teacher
from benchmarks.report import write_result
from minilm_cache.codecs.topk import TopKCodec

LENGTHS = (128, 256, 512)
NUM_TOKENS = 16_384
K = 16

Array = npt.NDArray[np.generic]


def zstd(array: Array, level: int) -> int:
    """Return the compressed size in bytes."""
    return len(Zstd(level=level).encode(np.ascontiguousarray(array)))


def pcodec(array: Array) -> int:
    """Return the compressed size in bytes; pcodec's narrowest type is 16 bits wide."""
    return len(standalone.simple_compress(array.astype(np.uint16).ravel(), ChunkConfig()))


def sizes(rows: Mapping[str, Array]) -> dict[str, int]:
    """Return the bytes of one relation, stored in each way."""
    gap = rows["gap"].astype(np.int64) + (rows["gap_high"].astype(np.int64) << 8 if "gap_high" in rows else 0)
    column = gap.cumsum(-1)
    narrow = np.uint16 if "gap_high" in rows else np.uint8
    parts = [values for name, values in rows.items() if name.startswith("gap")]
    weight = zstd(rows["weight"], 1)
    found = {"column, pcodec": pcodec(column) + weight, "gap, pcodec": pcodec(gap) + weight}
    for level in (1, 9):
        found[f"column, zstd {level}"] = zstd(column.astype(narrow), level) + weight
        found[f"gap, zstd {level}"] = zstd(gap.astype(narrow), level) + weight
        found[f"gap, bytes apart, zstd {level}"] = sum(zstd(part, level) for part in parts) + weight
    return found


def main() -> None:
    """Measure and write the result."""
    teacher = mini_teacher()
    table: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        relations, lengths = mini_relations(teacher, length, NUM_TOKENS)
        codec = TopKCodec(max_length=length, k=K)
        found = [sizes(codec.encode(relations[kind], kind, range(len(lengths)), lengths)) for kind in KINDS]
        table[str(length)] = {
            name: round(sum(one[name] for one in found) / int(lengths.sum()), 1) for name in found[0]
        }
    write_result("compressors", {"k": K, "tokens": NUM_TOKENS, "bytes_per_token": table})


if __name__ == "__main__":
    main()
