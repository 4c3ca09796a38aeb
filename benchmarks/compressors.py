"""Measure the bytes per token of stored arrays: codec `topk` as columns or gaps, `vectors` by compressor.

The compressors of `vectors` are timed too, over what is stored.

python -m benchmarks.compressors
"""

import io
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from pcodec import ChunkConfig, standalone

from benchmarks.inputs import KINDS, mini_relations, mini_teacher
from benchmarks.report import write_result
from minilm_cache.codecs.topk import TopKCodec
from minilm_cache.codecs.vectors import calibrate
from minilm_cache.corpus.formats import PYTHON_DOCS
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.teacher import Teacher
from minilm_cache.relations.scores import LayerRelations
from minilm_cache.storage_schema.arrays import PCODEC_ROWS, ArraySpec
from minilm_cache.storage_schema.identity import Packing
from minilm_cache.storage_schema.metadata import PCODEC_LEVEL
from minilm_cache.store.shards import ShardEncoder

LENGTHS = (128, 256, 512)
NUM_TOKENS = 16_384
K = 16
MAX_KL = 0.015

Array = npt.NDArray[np.generic]


def zstd(array: Array, level: int) -> int:
    """Return the size of an array in bytes, compressed with zstd."""
    return len(Zstd(level=level).encode(np.ascontiguousarray(array)))


def pcodec(array: Array) -> int:
    """Return the size of an array in bytes, compressed with pcodec, whose narrowest type has 16 bits."""
    return len(standalone.simple_compress(array.astype(np.uint16).ravel(), ChunkConfig()))


def sizes(rows: Mapping[str, Array]) -> dict[str, int]:
    """Return the bytes of one relation for each way to store it."""
    gap = rows["gap"].astype(np.int64) + (rows["gap_high"].astype(np.int64) << 8 if "gap_high" in rows else 0)
    column = gap.cumsum(-1)
    narrow = np.uint16 if "gap_high" in rows else np.uint8
    parts = [values for name, values in rows.items() if name.startswith("gap")]
    weight = zstd(rows["weight"], 1)
    sized = {"column, pcodec": pcodec(column) + weight, "gap, pcodec": pcodec(gap) + weight}
    for level in (1, 9):
        sized[f"column, zstd {level}"] = zstd(column.astype(narrow), level) + weight
        sized[f"gap, zstd {level}"] = zstd(gap.astype(narrow), level) + weight
        sized[f"gap, bytes apart, zstd {level}"] = sum(zstd(part, level) for part in parts) + weight
    return sized


def stored(codes: Array) -> int:
    """Return the size of a chunk of codes as caches hold it."""
    spec = ArraySpec(
        path="codes",
        dtype="int16",
        row_shape=codes.shape[1:],
        dimension_names=("token", "component"),
        fill_value=-(2**15),
        meaning="",
        compressor="pcodec",
    )
    return len(ShardEncoder(io.BytesIO(), spec, len(codes)).encoded(codes))


def automatic_pcodec(codes: Array) -> int:
    """Return the size of codes where pcodec looks for neighbours and multiples itself."""
    config = ChunkConfig(compression_level=PCODEC_LEVEL)
    return len(standalone.simple_compress(np.ascontiguousarray(codes.T).ravel(), config))


def one_byte(codes: Array) -> int:
    """Return the size of codes in one byte each, and what more of them have in another array."""
    by_component = np.ascontiguousarray(codes.T)
    low = by_component.astype(np.int8)
    high = (by_component.astype(np.int16) - low) >> 8
    return zstd(low, 1) + zstd(high.astype(np.int8), 1)


def planes(codes: Array) -> int:
    """Return the size of codes bit by bit."""
    shuffled = Blosc(cname="zstd", clevel=1, shuffle=Blosc.BITSHUFFLE)
    return len(shuffled.encode(np.ascontiguousarray(codes.T)))


WAYS: Mapping[str, Callable[[Array], int]] = {
    "as stored": stored,
    "component by component, pcodec as it comes": automatic_pcodec,
    "component by component, one byte each, zstd 1": one_byte,
    "component by component, bits apart, zstd 1": planes,
    "component by component, zstd 1": lambda codes: zstd(codes.T, 1),
    "component by component, zstd 19": lambda codes: zstd(codes.T, 19),
    "token by token, zstd 1": lambda codes: zstd(codes, 1),
}


def code_sizes(codes: Array) -> dict[str, dict[str, float]]:
    """Return bytes a token, and the speed over that of what is stored, for each way to compress codes."""
    chunks = [codes[first : first + PCODEC_ROWS] for first in range(0, len(codes), PCODEC_ROWS)]
    sizes: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(3):
        for name, compress in WAYS.items():
            start = time.perf_counter()
            sizes[name] = sum(compress(chunk) for chunk in chunks) / len(codes)
            seconds[name].append(time.perf_counter() - start)
    best = {name: min(each) for name, each in seconds.items()}
    return {
        name: {"bytes": round(size, 1), "speed": round(best["as stored"] / best[name], 2)}
        for name, size in sizes.items()
    }


def mini_codes(teacher: Teacher) -> Array:
    """Return codes of codec `vectors` for tokens that it was not fitted to."""
    packing = Packing(mode="packed", max_length=128, max_tokens=None, seed=0)
    sequences = SequenceTable(tokenise(load_corpus(PYTHON_DOCS), teacher.tokenizer), packing)

    def signals(first: int, last: int) -> list[LayerRelations]:
        batches = []
        for number in range(first, last, 32):
            ids = torch.stack([torch.from_numpy(row) for row in sequences.read(number, number + 32).ids])
            batches += teacher.relations(Inputs.full(ids))
        return batches

    codec = calibrate(signals(0, 256), signals(256, 320), MAX_KL, layer=teacher.layers[-1]).codec
    parts = [
        codec.encode(signal, (), lengths=signal.lengths)[codec.codes_path].numpy()
        for signal in signals(320, 320 + NUM_TOKENS // 128)
    ]
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


def main() -> None:
    """Measure and write the result."""
    teacher = mini_teacher()
    table: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        relations, lengths = mini_relations(teacher, length, NUM_TOKENS)
        codec = TopKCodec(max_length=length, k=K)
        sized = [
            sizes({name: values.numpy() for name, values in encoded.items()})
            for kind in KINDS
            for encoded in [
                codec.encode_relation(relations[kind], kind, sequences=range(len(lengths)), lengths=lengths)
            ]
        ]
        table[str(length)] = {
            name: round(sum(relation[name] for relation in sized) / int(lengths.sum()), 1)
            for name in sized[0]
        }
    codes = mini_codes(teacher)
    write_result(
        "compressors",
        {"tokens": NUM_TOKENS, f"topk k={K}": table, f"vectors, KL at most {MAX_KL}": code_sizes(codes)},
    )


if __name__ == "__main__":
    main()
