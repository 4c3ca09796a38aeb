"""Tables of caches and speed: bytes and errors of codecs, what objectives add, training steps."""

from collections.abc import Iterable

from benchmarks.tables.cells import read, table_of
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.settings import flag_of


def codecs() -> str:
    """Return bytes per token and KLs of codecs at three lengths, on the embedded text and on Wikipedia."""
    rows = []
    for text in ("python_docs", "enwiki"):
        for length, settings in read(f"fidelity_{text}")["lengths"].items():
            for setting, result in settings.items():
                kls = result["kl_teacher_to_stored"]
                shown = "sampled" if None in kls.values() else " / ".join(f"{kl:.4f}" for kl in kls.values())
                rows.append([text, length, setting, f"{result['bytes_per_token']:,.0f}", shown])
    return table_of(["text", "length", "setting", "bytes per token", "KL, attention / value, nats"], rows)


def objective_bytes() -> str:
    """Return the bytes per token that objectives add to a cache of codec `vectors` of the last layer."""
    added = read("objectives")["objectives"]
    errors = list(added)
    rows = [[f"`{name}`", *(f"{added[error][name]:,.1f}" for error in errors)] for name in added[errors[0]]]
    return table_of(["objective", *(f"`--max-error {error}`" for error in errors)], rows)


def objective_rows() -> str:
    """Return what each objective stores and takes, from its row in `objectives/spec.py`."""
    rows = []
    for spec in OBJECTIVES.values():
        stored = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in spec.needs.settings().items()
        ]
        fields = ObjectiveConfig.model_fields
        options = [flag_of(name, fields[name]).split("/")[-1] for name in sorted(spec.options)]
        options += ["--form"] * spec.has_forms + ["--teacher-layer"] * spec.one_layer
        rows.append([f"`{spec.name}`", _code(stored), _code(spec.maps), _code(options), _code(spec.presets)])
    return table_of(
        ["objective", "`--for` stores", "`--layer-map`, default first", "own options", "`--preset`"], rows
    )


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "-"


def steps() -> str:
    """Return tokens per second of training steps, and their ratios to other ways of training."""
    rows = []
    for name, result in read("train_speed_ratios").items():
        if name in ("benchmark", "machine"):
            continue
        arch, batch = name.split(", batch ")
        topk, vectors, rates = result["topk"], result["vectors"], result["tokens_per_s"]
        pairs = [
            f"{topk[baseline]:.2f} / {vectors[baseline]:.2f}"
            for baseline in ("over in memory", "over best online", "over usual online")
        ]
        label = "all four in one pass" if "+" in arch else arch
        offline = f"{rates['topk from disk']:,} / {rates['vectors from disk']:,}"
        rows.append([f"{label}, {batch}", offline, *pairs])
    head = ["student, batch", "from the cache (`topk` / `vectors`), tokens/s", "over targets in memory"]
    return table_of([*head, "over the best online loop", "over the usual online loop"], rows)
