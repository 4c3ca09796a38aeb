"""Where runs are from: fingerprints, and the commands that make the same again."""

import shlex
from typing import Any

from minilm_cache.config import DumpConfig, TrainConfig
from minilm_cache.runs import TrainedRun
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.train.card import layers_in_words


def provenance(run: TrainedRun) -> list[tuple[str, str]]:
    """Return names and values: what a run and its cache were made of, and by which commands."""
    manifest, identity = run.cache.manifest, run.record.identity
    teacher, corpus = manifest.identity.teacher, manifest.identity.corpus
    return [
        ("run", str(run.path)),
        ("cache", run.record.cache),
        ("fingerprint", manifest.fingerprint),
        ("teacher", f"{manifest.labels.teacher}, weights SHA-256 {teacher.weights_sha256}"),
        ("corpus", f"{manifest.labels.corpus}, SHA-256 {corpus.sha256}, {manifest.num_tokens:,} tokens"),
        ("written by", manifest.labels.created_by),
        ("learned from", layers_in_words(identity)),
        ("dumped by (names as the cache carries them)", dump_command(manifest)),
        ("trained by", train_command(run)),
    ]


def dump_command(manifest: CacheManifest) -> str:
    """Return a command that makes a cache of the same fingerprint.

    As far as the cache tells: it names teacher and corpus by the ends of their paths, and neither a text
    column nor a revision.
    """
    identity = manifest.identity
    codec = identity.codec.model_dump(exclude={"weight_ratio", "calibration_tokens", "seed"})
    last = (identity.teacher.num_layers - 1,)
    given: dict[str, Any] = {
        "corpus": manifest.labels.corpus,
        "codec": codec.pop("name"),
        **codec,
        "layers": "last" if identity.layers == last else ",".join(map(str, identity.layers)),
        "packing": identity.packing.mode,
        "max_length": identity.packing.max_length,
        "max_tokens": identity.packing.max_tokens,
        "shard_tokens": manifest.shard_tokens,
        "seed": identity.packing.seed,
    }
    return _command(["minilm-cache", "dump", "--teacher", manifest.labels.teacher], given, DumpConfig)


def train_command(run: TrainedRun) -> str:
    """Return a command that trains the same students."""
    identity = run.record.identity
    arch = [word for one in identity.arch for word in ("--arch", one)]
    content = identity.model_dump(exclude={"arch", "fingerprint", "shard_tokens", "compiled"})
    given = {name: value for name, value in content.items() if name in TrainConfig.model_fields}
    given |= {"streams": identity.num_streams, "accumulate": identity.num_parts}
    if identity.num_streams == 1:
        del given["streams"]
    switches = {
        "--compile": identity.compiled,
        "--no-value-relation": not given.pop("value_relation"),
        "--query-key-relations": given.pop("query_key_relations"),
    }
    on = [name for name, is_on in switches.items() if is_on]
    return _command(["minilm-cache", "train", run.record.cache, *arch, *on], given, TrainConfig)


def _command(words: list[str], given: dict[str, Any], settings: type[DumpConfig | TrainConfig]) -> str:
    """Return a command line; what is as it would be anyway is left out."""
    for name, value in given.items():
        if value is not None and value != settings.model_fields[name].default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
