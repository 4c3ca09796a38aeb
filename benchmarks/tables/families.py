"""Tables of what is known of families of models: from the rows that the code itself reads."""

from benchmarks.tables.cells import table_of
from minilm_cache.models.families import FAMILIES, Family


def families() -> str:
    """Return what a cache can hold of each family, and how its students begin."""
    head = ("family", "models", "relations", "students as slices")
    rows = [(f"`{name}`", row.models, _relations(row), _slices(row)) for name, row in FAMILIES.items()]
    other = "every codec, if its attention is served by transformers' interface; else none"
    return table_of(head, [*rows, ("any other", "that transformers loads and that reads text", other, "-")])


def _relations(row: Family) -> str:
    codecs = "`topk`, `dense`: attention scores have a bias" if row.has_bias else "every codec"
    return codecs + ("; causal" if row.is_decoder else "")


def _slices(row: Family) -> str:
    if row.parts is None:
        return "-"
    return "all heads kept" if row.parts.head_bias else "any size"
