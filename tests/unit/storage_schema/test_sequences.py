"""The table of sequences: its columns are those of the files that are on disk."""

import pyarrow.parquet as pq
import pytest

from minilm_cache.storage_schema.arrays import SEQUENCE_COLUMNS, entropy_column, sequence_columns
from minilm_cache.storage_schema.identity import RelationKind
from tests.unit.storage_schema.test_documents import ROOT

ALWAYS = ["sequence", "offset", "length", "document"]


@pytest.mark.parametrize(
    ("name", "relations"),
    [("v1", ("attention", "value")), ("v1-states", ("attention", "value")), ("v1-vectors", ())],
    ids=["v1", "v1-states", "v1-vectors"],
)
def test_columns_are_those_of_the_tables_on_disk(name: str, relations: tuple[str, ...]) -> None:
    columns = sequence_columns(tuple(RelationKind(kind) for kind in relations))
    for file in sorted((ROOT / "tests/golden" / name / "sequences").iterdir()):
        schema = pq.read_schema(file)

        assert schema.names == list(columns)
        assert [str(kind).replace("float", "float32") for kind in schema.types] == list(columns.values())


def test_a_table_without_relations_has_no_entropies() -> None:
    assert sequence_columns(()) == {
        "sequence": "int64",
        "offset": "int64",
        "length": "int32",
        "document": "int64",
    }


@pytest.mark.parametrize("kind", RelationKind)
def test_each_relation_adds_one_column_at_the_end(kind: RelationKind) -> None:
    columns = sequence_columns((kind,))

    assert list(columns) == [*ALWAYS, f"entropy_{kind.value}"]
    assert columns[entropy_column(kind)] == "float32"


def test_entropies_come_in_the_order_of_the_relations() -> None:
    columns = sequence_columns((RelationKind.VALUE, RelationKind.ATTENTION))

    assert list(columns)[len(ALWAYS) :] == ["entropy_value", "entropy_attention"]


def test_asking_for_columns_leaves_the_table_of_them_as_it_is() -> None:
    sequence_columns((RelationKind.ATTENTION,))["sequence"] = "float32"

    assert list(SEQUENCE_COLUMNS) == ALWAYS
    assert SEQUENCE_COLUMNS["sequence"][0] == "int64"
    assert all(meaning for _, meaning in SEQUENCE_COLUMNS.values())
