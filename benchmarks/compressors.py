"""Measure the bytes per token of stored arrays: codec `topk` as columns or gaps, `vectors` by compressor.

python -m benchmarks.compressors
"""

from collections.abc import Mapping

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
from minilm_cache.storage_schema.identity import Packing
from minilm_cache.storage_schema.metadata import PCODEC_LEVEL

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


def code_sizes(codes: Array) -> dict[str, int]:
    """Return the bytes of codes, `(tokens, components)` int16, for each way to store them."""
    by_component = np.ascontiguousarray(codes.T)
    shuffled = Blosc(cname="zstd", clevel=3, shuffle=Blosc.BITSHUFFLE)
    config = ChunkConfig(compression_level=PCODEC_LEVEL)
    return {
        "token by token, zstd 1": zstd(codes, 1),
        "component by component, zstd 1": zstd(by_component, 1),
        "component by component, zstd 19": zstd(by_component, 19),
        "component by component, bitshuffle and zstd 3": len(shuffled.encode(by_component)),
        "component by component, pcodec": len(standalone.simple_compress(by_component.ravel(), config)),
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
    per_token = {name: round(size / len(codes), 1) for name, size in code_sizes(codes).items()}
    write_result(
        "compressors",
        {"tokens": NUM_TOKENS, f"topk k={K}": table, f"vectors, KL at most {MAX_KL}": per_token},
    )


if __name__ == "__main__":
    main()
