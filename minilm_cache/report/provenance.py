"""Where runs come from: fingerprints, and the commands that make the same cache and students again."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minilm_cache.report.runs import TrainedRun
from minilm_cache.settings import flag_of, option_words
from minilm_cache.storage_schema.identity import CacheIdentity, Truncation
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.storage_schema.states import StatesIdentity
from minilm_cache.store.urls import is_url
from minilm_cache.train.config import FROM_TEACHER, TrainConfig
from minilm_cache.wording import printable


def provenance(run: TrainedRun, *, paths: bool = False) -> list[tuple[str, str]]:
    """Return names and values that say what a run and its cache were made from, and by which commands.

    Args:
        run: a complete run.
        paths: True shows whole paths, which reveal a machine and its user; False shows only names of folders.
    """
    manifest, identity = run.cache.manifest, run.record.identity
    teacher, corpus = manifest.identity.teacher, manifest.identity.corpus
    return [
        ("run", str(run.path) if paths else printable(run.path.name)),
        ("cache", _place(run.record.cache, paths=paths)),
        ("fingerprint", manifest.fingerprint),
        ("teacher", f"{manifest.labels.teacher}, weights SHA-256 {teacher.weights_sha256}"),
        ("corpus", f"{manifest.labels.corpus}, SHA-256 {corpus.sha256}, {manifest.num_tokens:,} tokens"),
        ("written by", manifest.labels.created_by),
        ("learned from", identity.describes_layers()),
        ("dumped by (names as the cache carries them)", dump_command(manifest)),
        ("trained by", train_command(run, paths=paths)),
    ]


def dump_command(manifest: CacheManifest) -> str:
    """Return a command that makes a cache of the same fingerprint, split in the same way.

    Like the cache, it names teacher and corpus by the last parts of their paths.
    """
    identity = manifest.identity
    if manifest.labels.imported:
        return _import_command(manifest)
    codec = identity.codec.model_dump(exclude={"weight_ratio", "calibration_tokens", "seed"})
    last = (identity.teacher.num_layers - 1,)
    given: dict[str, Any] = {
        "corpus": manifest.labels.corpus,
        "text_column": manifest.labels.text_column,
        "documents": manifest.labels.documents,
        "revision": manifest.labels.revision,
        "codec": codec.pop("name"),
        **codec,
        "layers": "last" if identity.layers in ((), last) else _listed(identity.layers),
        **_states(identity.states),
        "precision": identity.precision or "float32",
        "packing": identity.packing.mode,
        "prompt": identity.packing.prompt,
        "role_column": manifest.labels.role_column,
        "pair_columns": manifest.labels.pair_columns,
        "truncation": _truncation(identity),
        "max_length": identity.packing.max_length,
        "max_tokens": identity.packing.max_tokens,
        "shard_tokens": manifest.shard_tokens,
        "seed": identity.packing.seed,
    }
    words = ["minilm-cache", "dump", "--teacher", manifest.labels.teacher]
    # Every setting is named: defaults may change from release to release.
    return shlex.join(words + [word for name, value in given.items() for word in option_words(name, value)])


def _truncation(identity: CacheIdentity) -> Truncation | None:
    """Return the value of `--truncation`. None means that there are no pairs, or that their kind says it."""
    pair = identity.packing.pair
    if pair is None or identity.corpus.groups:
        return None
    return "longest_first" if pair.cut is None else "only_second"


def _import_command(manifest: CacheManifest) -> str:
    """Return a command that imports the same; the cache does not know whose tokenizer it has."""
    identity = manifest.identity
    assert identity.states is not None
    labels, pooled = manifest.labels, identity.states.pooled
    of_vectors: dict[str, Any] = {}
    if pooled is not None:
        of_vectors = {"pooling": pooled.mode, "min_cosine": pooled.min_cosine}
    given: dict[str, Any] = {
        "tokenizer": "MODEL",
        "teacher": labels.teacher,
        "pair_columns": labels.pair_columns,
        "score_columns": labels.score_columns,
        "text_column": labels.text_column,
        **of_vectors,
        "prompt": identity.packing.prompt,
        "max_length": identity.packing.max_length,
        "max_tokens": identity.packing.max_tokens,
        "shard_tokens": manifest.shard_tokens,
        "seed": identity.packing.seed,
    }
    words = ["minilm-cache", "import", labels.corpus]
    return shlex.join(words + [word for name, value in given.items() for word in option_words(name, value)])


def _states(states: StatesIdentity | None) -> dict[str, Any]:
    """Return the settings of a dump that stores these states, by name; empty where states is None."""
    if states is None:
        return {}
    labels, masking = states.labels, states.masking
    return {
        "hidden": _listed(states.hidden),
        "masked_hidden": _listed(states.masked_hidden),
        "first_hidden": _listed(states.first),
        "max_error": states.max_error,
        "labels": labels is not None,
        "label_tokens": None if labels is None else labels.tokens,
        "label_k": None if labels is None else labels.k,
        "label_temperature": None if labels is None else labels.temperature,
        "maskings": None if masking is None else masking.readings,
        "logits": states.num_classes is not None,
        "signal": tuple(other.name for other in states.others),
        "pooled": states.pooled is not None,
        "pooling": None if states.pooled is None else states.pooled.mode,
        "min_cosine": None if states.pooled is None else states.pooled.min_cosine,
    }


def _listed(numbers: Sequence[int]) -> str | None:
    """Return numbers joined by commas, or None where there are none."""
    return ",".join(map(str, numbers)) or None


def train_command(run: TrainedRun, *, paths: bool = True) -> str:
    """Return a command that trains the same students, with whole paths or with only the names of folders."""
    identity, record = run.record.identity, run.record
    place = _place(record.cache, paths=paths)
    words = ["minilm-cache", "train", place, *(word for arch in identity.arch for word in ("--arch", arch))]
    if identity.spec.has_forms and identity.form is None:
        words += ["--form", "paper"]
    content = identity.model_dump(exclude={"arch", "fingerprint", "shard_tokens", "init", "form"})
    fields = TrainConfig.model_fields
    given = {name: value for name, value in content.items() if name in fields}
    given |= {"streams": identity.num_streams, "accumulate": identity.num_parts}
    if identity.num_streams == 1:
        del given["streams"]
    if identity.layer_map != "last" or not identity.spec.one_layer:
        del given["teacher_layer"]
    given |= {
        "dropout": identity.dropout or "teacher",
        "batches": identity.batches or "shuffled",
        "frozen": identity.frozen or "none",
        "also": tuple(_place(place, paths=paths) for place in record.also),
        "own_labels": None if record.own_labels is None else _place(record.own_labels, paths=paths),
        "label_column": record.label_column or fields["label_column"].default,
        "vocab": None if record.vocabulary is None else _place(record.vocabulary.asked, paths=paths),
    }
    words += ["--layer-map", given.pop("layer_map")]
    words += _begun_with(run, paths=paths)
    for name, value in given.items():
        if value != identity.spec.recipe.get(name, fields[name].default):
            words += option_words(flag_of(name, fields[name]).split("/")[value is False], value)
    return shlex.join(words)


def _begun_with(run: TrainedRun, *, paths: bool) -> list[str]:
    """Return the options for the initial weights of students; unnamed weights are shown by their hash."""
    init, record = run.record.identity.init, run.record
    if init == "random":
        return ["--init", "random"]
    kind = next((kind for kind in FROM_TEACHER if init.startswith(kind)), None)
    if kind is not None:
        given = {"--init-teacher": record.init_teacher, "--init-layers": record.init_layers}
        options = [(name, value) for name, value in given.items() if value is not None]
        words = [word for name, value in options for word in (name, _place(value, paths=paths))]
        is_default = len({student.init for student in record.students}) > 1  # some could not be cut
        return words if is_default else ["--init", kind, *words]
    return ["--init", f"FOLDER-OF-{init[:12]}" if record.init is None else _place(record.init, paths=paths)]


def _place(place: str, *, paths: bool) -> str:
    """Return a folder, URL or name as the page shows it."""
    is_folder = not is_url(place) and (Path(place).is_absolute() or Path(place).is_dir())
    return Path(place).name if is_folder and not paths else place
