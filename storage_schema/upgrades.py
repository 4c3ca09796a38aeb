"""What documents of earlier releases lack, and how names stay as they were: the settings that came later.

Settings that the first documents had are listed here once and for all. Any other setting came later: where it
says nothing it is left out of documents and names, so that those of older runs, chains and studies do not
change.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from pydantic import BaseModel

OBJECTIVE_OF_RUNS: Final = frozenset(
    {"objective", "relation_heads", "value_relation", "query_key_relations", "layer_map", "teacher_layer"}
)
"""Settings of objectives that the record of every run has."""
TRAININGS_OF_STUDIES: Final = OBJECTIVE_OF_RUNS | frozenset(
    {
        *("accumulate", "arch", "batch_size", "buffer_shards", "checkpoint_steps", "compiled", "device"),
        *("epochs", "eval_steps", "gradient_checkpointing", "init", "init_teacher", "keep_checkpoints"),
        *("local_bytes", "lr", "max_grad_norm", "max_hours", "place", "precision", "seed", "steps"),
        *("streams", "tracker", "warmup", "weight_decay"),
    }
)
"""Settings of trainings that the passes of the first studies were named with."""
TRAININGS_OF_CHAINS: Final = TRAININGS_OF_STUDIES | frozenset(
    {"form", "patience", "temperature", "ground_truth", "init_layers"}
)
"""Settings of trainings that the first chains were named with."""
DUMPS_OF_CHAINS: Final = frozenset(
    {
        *("batch_size", "check", "codec", "compiled", "corpus", "device", "first_hidden", "hidden", "k"),
        *("keep_weights", "label_k", "label_temperature", "label_tokens", "labels", "layers", "logits"),
        *("masked_hidden", "maskings", "max_error", "max_kl", "max_length", "max_tokens", "packing", "rank"),
        *("revision", "seed", "select", "serve", "shard_tokens", "tail", "teacher", "text_column"),
        "world_size",
    }
)
"""Settings of dumps that the first chains were named with."""

KEPT_IN_NAMES: Final = (0, 1)
"""What names of chains and passes say of `keep_checkpoints`, which changes no student: now, and in 0.1.0."""


def refuse_lacking(given: Collection[str], earliest: Collection[str]) -> None:
    """Raise ValueError if a document lacks what every release has written."""
    lacking = min({*earliest} - {*given}, default=None)
    if lacking is not None:
        raise ValueError(f"the document has no {lacking}, which all releases since 0.1.0 wrote")


def defaults_of_later(model: type[BaseModel], earlier: Collection[str]) -> dict[str, Any]:
    """Return the settings of a model that came after some, with their defaults as JSON has them."""
    defaults = {name: field.default for name, field in model.model_fields.items() if name not in earlier}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}


def without_defaults(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that have these defaults, so that earlier names stay as they are."""
    return {name: value for name, value in content.items() if name not in defaults or value != defaults[name]}
