"""Paths below a cache's root, sizes of shards, and what a place must hold or must not hold."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    CacheNotFoundError,
    IdentityMismatchError,
    InvalidConfigError,
)
from minilm_cache.settings import looks_like_url
from minilm_cache.storage_schema.arrays import array_specs
from minilm_cache.storage_schema.identity import CacheIdentity
from minilm_cache.storage_schema.manifest import INDEX, CacheManifest, Calibration, Labels
from minilm_cache.store.durable import is_vacant, linked_part


def exported_files(folder: Path) -> list[Path]:
    """Return the files of a model that was exported for ONNX or OpenVINO, which may lie beside weights."""
    return [*folder.glob("onnx/*.onnx"), *folder.glob("openvino/*.xml")]


def described_otherwise(folder: Path) -> str:
    """Return a sentence on what a folder is, and on the command that takes it; empty where nothing is known.

    The sentence begins with a space, to follow a message that says what the folder is not.
    """
    if (folder / MANIFEST).is_file() and (folder / "zarr.json").is_file():
        return " It is a cache: `minilm-cache info` shows it, and `train` takes it."
    if (folder / "run.json").is_file():
        students = ", ".join(str(file.parent) for file in sorted(folder.glob("students/*/config.json")))
        models = f" Its students are models: {students}." if students else " It has no trained student yet."
        return f" It is a run: `minilm-cache info` shows it.{models}"
    if next(folder.glob("runs/*/run.json"), None) is not None:
        return " It is a study or a chain: `minilm-cache report` and `evaluate` take it."
    if (folder / "search.json").is_file():
        return f" It is a search: `minilm-cache report` takes it, and its students are in {folder}/round-*."
    if exported_files(folder) and not any(folder.glob("*.safetensors*")):
        return " It is an exported model: `speed`, `embeddings`, `rerank` and `evaluate --as-is` take it."
    if (folder / "config.json").is_file():
        return " It is a model: `dump --teacher`, `evaluate`, `speed` and `embeddings` take it."
    return ""


MANIFEST: Final = "manifest.json"
BEGUN: Final = "unfinished.json"
"""Manifest of a dump that has begun, in a store."""
CARD: Final = "README.md"
COMMITS: Final = "commits"
"""Folder of the commit records."""
LOCKS: Final = "locks"
SEAL_LOCK: Final = f"{LOCKS}/seal.lock"
CREATE_LOCK: Final = f"{LOCKS}/create.lock"
MAX_SEGMENT_BYTES: Final = 2**32
"""Greatest decoded size of a segment, since readers take whole segments into memory."""
MAX_SHARD_TOKENS: Final = 2**26
GOOD_NUM_SHARDS: Final = 20_000
"""Most shards of a cache by default, as long as its files stay below the next size."""
_GOOD_FILE_BYTES: Final = 2**31
"""Greatest size of a file of a shard by default."""
_MAX_NAME: Final = 255 - 24
"""Most bytes of a cache's name: file systems allow 255, and what arrives or goes has a longer name."""
_MAX_LABEL: Final = 100
"""Most bytes of a label in the name of a cache's folder, where the name would be too long."""
MAX_FILE_BYTES: Final = 2**32
"""Greatest size of a file of a shard: stores copy files of at most 5 GB."""
_PCODEC_RATIO: Final = 8
"""Decoded size of codes by their size in a file, at least (measured for `vectors`: 20)."""
_GOOD_SEGMENT_BYTES: Final = 2**28
"""Greatest decoded size of a layer of a segment."""
_MAX_WRITTEN_BYTES: Final = 2**31
"""Greatest decoded size of a segment, since writers hold all layers of it."""


def refuse_no_cache(root: Path) -> None:
    """Raise CacheNotFoundError for a folder that holds no cache.

    Raises:
        CacheIncompleteError: a dump into a store has begun there.
        InvalidConfigError: it is a URL.
    """
    if not (root / MANIFEST).is_file():
        if looks_like_url(root):
            raise InvalidConfigError(
                f"{root}: this is a URL, and a folder of this machine is wanted here. Fetch the cache first: "
                "`minilm-cache pull URL`. In Python, give a URL as text and not as a Path."
            )
        if (root / BEGUN).is_file():
            raise CacheIncompleteError(
                f"{root} is an unfinished dump into a store. The `minilm-cache dump` command that began it "
                "finishes it."
            )
        if (root / INDEX).is_file():
            raise CacheNotFoundError(
                f"{root} is a cache without its {MANIFEST}. Pull it again into this folder, or dump it into "
                "another one."
            )
        lacking = f"{MANIFEST} is not there" if root.exists() else "there is no such folder"
        raise CacheNotFoundError(
            f"no cache at {root}: {lacking}."
            f"{described_otherwise(root) or ' Make one with `minilm-cache dump`, or check the path.'}"
        )


def refuse_no_answers(place: str | Path, identity: CacheIdentity, *, scores: bool) -> None:
    """Raise InvalidConfigError for a cache without pooled vectors, or without scores if they are wanted."""
    if scores and identity.num_classes is None:
        raise InvalidConfigError(
            f"{place} holds no scores or answers of a teacher. Dump a cache with --logits, or import scores."
        )
    if not scores and identity.pooled is None:
        raise InvalidConfigError(
            f"{place} holds no pooled vectors. Dump a cache with --for embedding, or add them with --pooled."
        )


def refuse_other_cache(place: str | Path, differing: Iterable[str]) -> None:
    """Raise IdentityMismatchError if a place has another cache than the one that is to be dumped there.

    Args:
        place: folder or URL.
        differing: where they differ, as `wording.differing_values` says it.
    """
    if words := ", ".join(differing):
        raise IdentityMismatchError(
            f"{place} holds another cache, which differs in {words}. Choose another --out, or repeat the "
            "settings of the first dump, on the same text."
        )


def refuse_inside_cache(out: Path, option: str) -> None:
    """Raise InvalidConfigError if a folder, whose path has no links, lies in a cache."""
    around = next((folder for folder in out.parents if (folder / MANIFEST).is_file()), None)
    if around is not None:
        raise InvalidConfigError(f"{option} {out}: it lies in the cache {around}. Choose another folder.")


def refuse_begun(path: Path) -> None:
    """Raise IdentityMismatchError if a folder exists that is to be begun, and not resumed."""
    if path.exists():
        raise IdentityMismatchError(
            f"{path} exists. Leave out --no-resume to resume it, or choose another --out."
        )


def cache_name(labels: Labels, identity: CacheIdentity) -> str:
    """Return the name of a cache's folder: labels and codec for people, then 12 digits of the fingerprint.

    A cache without relations has `states` in place of their codec.
    """
    # `?` and `#` would end the path of a URL.
    words = [re.sub("[:/?#]", "-", label) for label in (labels.teacher, labels.corpus)]
    stored = identity.codec.name if identity.has_relations else "states"
    name = "-".join([*words, stored, identity.fingerprint()[:12]])
    if len(name.encode()) <= _MAX_NAME:
        return name
    return "-".join([*map(_shortened, words), stored, identity.fingerprint()[:12]])


def _shortened(label: str) -> str:
    """Return the beginning of a label, so that the name of a folder is not too long for file systems."""
    return label.encode()[:_MAX_LABEL].decode(errors="ignore")


def commit_path(shard: int) -> str:
    """Return the path of a shard's commit record."""
    return f"{COMMITS}/{shard:05d}.json"


def sequences_path(shard: int) -> str:
    """Return the path of a shard's sequence table."""
    return f"sequences/part-{shard:05d}.parquet"


def lock_path(shard: int) -> str:
    """Return the path of the lock that a shard's writer holds."""
    return f"{LOCKS}/{shard:05d}.lock"


def shard_files(manifest: CacheManifest, shard: int) -> tuple[str, ...]:
    """Return the paths of a shard's files: exactly those that its commit record must list."""
    arrays = tuple(spec.shard_path(shard) for spec in array_specs(manifest.identity, manifest.calibration))
    return (*arrays, sequences_path(shard))


def decoded_bytes(identity: CacheIdentity, calibration: Calibration | None, num_tokens: int) -> int:
    """Return the memory that decoded rows take, bytes."""
    return num_tokens * sum(spec.row_bytes for spec in array_specs(identity, calibration))


def default_shard_tokens(identity: CacheIdentity, calibration: Calibration | None, num_tokens: int) -> int:
    """Return the rows of a shard: those of a segment, or for a large corpus a power of two times as many.

    Shards are so large that there are at most 20,000 of them, but not so large that one of their files has
    more than 2 GiB: whoever reads a segment from a store fetches the files of its shard.

    Args:
        identity: identity of the cache.
        calibration: how the codes were fitted. None means that nothing is fitted.
        num_tokens: tokens of the corpus.
    """
    tokens = segment_tokens(identity, calibration)
    while (
        num_tokens > GOOD_NUM_SHARDS * tokens
        and 2 * tokens <= MAX_SHARD_TOKENS
        and file_bytes(identity, calibration, 2 * tokens) <= _GOOD_FILE_BYTES
    ):
        tokens *= 2
    return tokens


def file_bytes(identity: CacheIdentity, calibration: Calibration | None, shard_tokens: int) -> int:
    """Return the size of the largest file of a shard, bytes: decoded, or for codes what is left of that."""
    return max(
        shard_tokens * spec.row_bytes // (_PCODEC_RATIO if spec.compressor == "pcodec" else 1)
        for spec in array_specs(identity, calibration)
    )


def segment_tokens(identity: CacheIdentity, calibration: Calibration | None) -> int:
    """Return the rows of a segment: 2**18, or fewer if a layer of it would decode to more than 256 MiB.

    A student reads a single layer, but a writer holds all layers, which together stay below 2 GiB.
    """
    tokens = 2**18
    least = 2 * identity.packing.max_length
    most = min(_GOOD_SEGMENT_BYTES * max(1, len(identity.layers)), _MAX_WRITTEN_BYTES)
    while tokens >= least and decoded_bytes(identity, calibration, tokens) > most:
        tokens //= 2
    return tokens


def below(root: Path, path: str) -> Path:
    """Join a path of the format to the root.

    Raises:
        CacheCorruptError: a part of the path is a symbolic link, which may lead out of the cache.
    """
    link = linked_part(root, path)
    if link is not None:
        raise CacheCorruptError(
            f"{link} is a symbolic link, which no cache has. Put the file itself there, or fetch the cache "
            f"again."
        )
    return root.joinpath(*path.split("/"))


def refuse_occupied(root: Path) -> None:
    """Raise IdentityMismatchError if a folder holds something that is not a cache."""
    locks = below(root, CREATE_LOCK).parent
    occupied = root.is_dir() and not is_vacant(root, apart_from=locks)
    # Another rank may have started in the meantime; the manifest is the first file that it writes.
    if occupied and not (root / MANIFEST).exists():
        raise IdentityMismatchError(f"{root} is not empty and is not a cache. Choose another --out.")
