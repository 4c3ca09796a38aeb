"""Write what the format looks like: its JSON Schema, a cache, and codec bytes. Never part of a test run.

Run it by hand, from the repository's root, when a new format version is released, into a folder of that
version; what an earlier version wrote stays as it is:

    python -m tests.golden.regenerate
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from minilm_cache import open_cache
from minilm_cache.cache import CachedSequence
from minilm_cache.codecs.rows import DenseCodec, RowsCodec
from minilm_cache.codecs.topk import TopKCodec
from minilm_cache.relations.scores import key_mask, to_dense
from minilm_cache.relations.signals import SparseLabels
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest
from tests.support import World, save_teacher, write_corpus

HERE = Path(__file__).parent
CODECS: dict[str, RowsCodec] = {
    "topk-pps": TopKCodec(max_length=12, k=4, seed=3),
    "topk-largest": TopKCodec(max_length=12, k=4, select="largest", tail="uniform"),
    "dense": DenseCodec(max_length=12),
}


def write_codec_bytes() -> None:
    """Write encoded rows beside what they decode to."""
    lengths = torch.tensor([12, 5])
    hidden = ~key_mask(lengths, 12)[:, None, None, :]
    scores = torch.randn(2, 2, 12, 12, generator=torch.Generator().manual_seed(0)) * 2
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    for name, codec in CODECS.items():
        rows = codec.encode_relation(probs, RelationKind.ATTENTION, sequences=[0, 1], lengths=lengths)
        decoded = codec.decode_relation(rows, lengths)
        expected = to_dense(decoded, lengths, 12).numpy()
        folder = HERE / "codecs"
        folder.mkdir(exist_ok=True)
        arrays: dict[str, Any] = {name: values.numpy() for name, values in rows.items()}
        arrays |= {"expected": expected, "lengths": lengths.numpy()}
        np.savez(folder / f"{name}.npz", **arrays)
        (folder / f"{name}.json").write_text(json.dumps(codec.parameters.model_dump(mode="json")) + "\n")


CACHES: dict[str, dict[str, Any]] = {"v2": {"k": 4}}
"""Format 2 changed how shards are listed, not what they hold: one cache shows it. Format 1 has three."""


def write_cache(name: str, settings: dict[str, Any]) -> None:
    """Write a cache and what it says of its sequences."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        world = World(
            root,
            save_teacher(root / "teacher", head="tokens" if "labels" in settings else None),
            write_corpus(root / "corpus.txt", 12),
        )
        path = HERE / name
        world.dump(str(path), **{"shard_tokens": 128, "max_length": 16, **settings})
    cache = open_cache(path)
    expected: dict[str, Any] = {}
    for number in range(len(cache)):
        sequence = cache[number]
        expected[f"ids_{number}"] = sequence.input_ids.numpy()
        for kind in cache.codec.everything.kinds if cache.codec is not None else ():
            expected[f"{kind}_{number}"] = sequence.relation(kind).numpy()
        if cache.signals_codec is not None:
            expected |= {f"{name}_{number}": values for name, values in states_of(sequence).items()}
    np.savez_compressed(HERE / f"{name}.npz", **expected)


def states_of(sequence: CachedSequence) -> dict[str, Any]:
    """Return what is stored of a sequence beside relations, as arrays."""
    states = sequence.states()
    assert states.masked is not None
    assert isinstance(states.masked.labels, SparseLabels)
    return {
        **{name.folder: values.numpy() for name, values in states.values.items()},
        "read": states.masked.ids.numpy(),
        "chosen": states.masked.chosen.numpy(),
        "token": states.masked.labels.token.numpy(),
        "weight": states.masked.labels.weight.numpy(),
    }


def write_schema() -> None:
    """Write the JSON Schema of the manifest."""
    schema = json.dumps(CacheManifest.model_json_schema(), indent=1)
    (HERE.parents[1] / "storage_schema/manifest.schema.json").write_text(schema + "\n")


if __name__ == "__main__":
    write_schema()
    write_codec_bytes()
    for name, settings in CACHES.items():
        write_cache(name, settings)
