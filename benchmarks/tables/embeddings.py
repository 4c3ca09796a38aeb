"""Tables of students of embeddings."""

from collections.abc import Sequence
from statistics import mean
from typing import Any, Final

from benchmarks.tables.cells import read, spread_of, table_of

_SCORES: Final = ("stsb_spearman", "squad_ndcg")
_AT_128: Final = "squad_ndcg_128"
_SETTINGS: Final = (
    "arch",
    "init",
    "layers",
    "frozen",
    "max_length",
    "paragraphs",
    "questions",
    "loss",
    "precision",
    "steps",
    "lr",
)
"""What students share that differ in their seed only."""
_FROZEN: Final = {"none": "", "embeddings": "(word embeddings frozen)"}


def embedding_bytes() -> str:
    """Return the bytes of a text's vector, stored in several ways."""
    result = read("embeddings")["cache"]
    width = 384
    rows = [
        ["lists of float64", f"{8 * width:,}", "1"],
        ["float32", f"{4 * width:,}", "1"],
        ["the cache", f"{result['bytes_per_text']:,.0f}", f"{result['cosine']:.5f}"],
    ]
    return table_of(["vectors of width 384", "bytes per text", "mean cosine with the teacher's"], rows)


def embedding_students() -> str:
    """Return scores of students of embeddings, means over seeds, the teacher first."""
    result = read("embeddings")
    teacher = result["teacher"]
    scores = [f"{teacher[name]:.1f}" for name in (*_SCORES, _AT_128)]
    table = [["teacher", f"{teacher['num_parameters']:,}", *["-"] * 7, *scores, "-"]]
    for name, row in sorted(result["untrained"].items()):
        arch, init = name.split(" ", 1)
        scores = [f"{row[score]:.1f}" for score in (*_SCORES, _AT_128)]
        table.append([f"`{arch}`", "", init, *["-"] * 5, "0", *scores, "-"])
    chosen = [row for row in result["students"] if not row["relations"]]
    for rows in groups(chosen, *_SETTINGS):
        row = rows[0]
        minutes = [row["train_s"] / 60 for row in rows if row["threads"] == 2]
        table.append(
            [
                f"`{row['arch']}`",
                f"{row['num_parameters']:,}",
                " ".join(filter(None, [row["init"], row["layers"], _FROZEN[row["frozen"]]])),
                f"{100 * row['paragraphs']:.1f} %",
                "yes" if row["questions"] else "-",
                str(row["max_length"]),
                row["loss"],
                row["precision"],
                f"{row['steps']:,}",
                *_scores(rows),
                spread_of(at_128) if (at_128 := [row[_AT_128] for row in rows if _AT_128 in row]) else "-",
                f"{mean(minutes):.1f}" if minutes else "-",
            ]
        )
    head = ["student", "parameters", "begins with", "whole paragraphs", "questions", "cut at", "loss"]
    head += ["precision", "steps", "STS-B", "retrieval", "retrieval, 128 tokens", "minutes on two cores"]
    return table_of(head, table)


def groups(rows: Sequence[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """Return rows that differ in their seed only, together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [groups[group] for group in sorted(groups, key=str)]


def _scores(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return both scores over seeds."""
    return [spread_of([row[name] for row in rows]) for name in _SCORES]


def embedding_peer() -> str:
    """Return time and scores of a student that was trained in two ways."""
    result = read("embeddings")["peer"]
    rows = [
        [
            name,
            f"{result['steps']:,}",
            f"{row['seconds_per_step']:.2f}",
            f"{row['stsb_spearman']:.1f}",
            f"{row['squad_ndcg']:.1f}",
        ]
        for name, row in result["models"].items()
    ]
    return table_of(["`3x384` trained by", "steps", "seconds per step", "STS-B", "retrieval"], rows)


def embedding_first() -> str:
    """Return scores of students that learned relations before vectors, and of those that did not."""
    chosen = [row for row in read("embeddings")["students"] if row["relations"]]
    table = [
        [
            f"`{rows[0]['arch']}`",
            rows[0]["init"],
            f"{rows[0]['first']:,}",
            f"{rows[0]['steps']:,}",
            *_scores(rows),
        ]
        for rows in groups(chosen, "arch", "init", "first", "steps")
    ]
    head = ["student", "begins with", "steps of relations", "steps of vectors", "STS-B", "retrieval"]
    return table_of(head, table)


def embedding_imported() -> str:
    """Return scores of a student of imported vectors, and of one from the cache that they came from."""
    result = read("embeddings")["imported"]
    names = {"dumped": "the cache that `dump` made", "imported": "the cache that `import` made"}
    rows = [
        [names[name], f"{row['stsb_spearman']:.2f}", f"{row['squad_ndcg']:.2f}"]
        for name, row in result.items()
        if name in names
    ]
    return table_of([f"`3x384` after {result['steps']:,} steps from", "STS-B", "retrieval"], rows)
