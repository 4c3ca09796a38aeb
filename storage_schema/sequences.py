"""The table of sequences: one Parquet file per shard, one row per sequence, in order."""

from typing import Final, Literal

from minilm_cache.storage_schema.identity import RelationKind

ColumnType = Literal["int64", "int32", "float32"]

SEQUENCE_COLUMNS: Final[dict[str, tuple[ColumnType, str]]] = {
    "sequence": ("int64", "number of the sequence in the cache, counted from 0"),
    "offset": ("int64", "row of its first token in every array"),
    "length": ("int32", "tokens, special tokens counted"),
    "document": ("int64", "number in the corpus of the document that its first token is from"),
}


def entropy_column(kind: RelationKind) -> str:
    """Return the name of the float32 column with the teacher's mean row entropy, in nats."""
    return f"entropy_{kind}"


def sequence_columns(relations: tuple[RelationKind, ...]) -> dict[str, ColumnType]:
    """Return the table's columns and their types, in order."""
    columns = {name: kind for name, (kind, _) in SEQUENCE_COLUMNS.items()}
    return columns | {entropy_column(kind): "float32" for kind in relations}
