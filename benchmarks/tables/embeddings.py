"""Tables of students of embeddings."""

from collections.abc import Sequence
from statistics import mean
from typing import Any, Final

from benchmarks.tables.cells import read, spread_of, table_of

_SCORES: Final = ("stsb_spearman", "squad_ndcg", "squad_ndcg_128")
_HEAD: Final = ("STS-B", "retrieval", "retrieval, 128 tokens")
_RECOMMENDED: Final = {
    "init": "slice",
    "frozen": "none",
    "loss": "cosine",
    "max_length": 128,
    "paragraphs": 0.25,
    "questions": 0.0,
    "precision": "bfloat16",
    "steps": 3000,
}
"""What the commands in docs/embeddings.md do."""
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
    """Return scores and cost of the teacher and of students that were trained as the page recommends."""
    result = read("embeddings")
    teacher = result["teacher"]
    table = [["teacher", f"{teacher['num_parameters']:,}", "-", "-", *_each_score(teacher), "-"]]
    for rows in groups(_students_of_vectors(recommended=True), *_SETTINGS):
        row = max(rows, key=lambda row: row["threads"])
        cores = "a core" if row["threads"] == 1 else f"{row['threads']} cores"
        cost = f"{row['train_s'] / 60:.1f} minutes on {cores} of {row['cpu']}"
        size = f"{row['num_parameters']:,}"
        start = f"slice {row['layers'] or ''}".strip()
        table.append([f"`{row['arch']}`", size, start, f"{row['lr']:g}", *_scores(rows), cost])
    head = ["model", "parameters", "begins with", "rate", *_HEAD, "training"]
    return table_of(head, table)


def embedding_untrained() -> str:
    """Return scores of students before training, by the layers that they begin with."""
    table = [
        [f"`{arch}`", init, *_each_score(row)]
        for (arch, init), row in sorted(
            (name.split(" ", 1), row) for name, row in read("embeddings")["untrained"].items()
        )
    ]
    return table_of(["student", "begins with", *_HEAD], table)


def embedding_trials() -> str:
    """Return scores of students that were trained with other steps, text, layers, losses and rates."""
    table = []
    for rows in groups(_students_of_vectors(recommended=False), *_SETTINGS):
        row = rows[0]
        minutes = [row["train_s"] / 60 for row in rows if row["threads"] == 2]
        table.append(
            [
                f"`{row['arch']}`",
                " ".join(filter(None, [row["init"], row["layers"], _FROZEN[row["frozen"]]])),
                f"{100 * row['paragraphs']:.1f} %",
                "yes" if row["questions"] else "-",
                str(row["max_length"]),
                row["loss"],
                row["precision"],
                f"{row['lr']:g}",
                f"{row['steps']:,}",
                *_scores(rows),
                f"{mean(minutes):.1f}" if minutes else "-",
            ]
        )
    head = ["student", "begins with", "whole paragraphs", "questions", "cut at", "loss", "precision", "rate"]
    return table_of([*head, "steps", *_HEAD, "minutes on two cores"], table)


def _students_of_vectors(*, recommended: bool) -> list[dict[str, Any]]:
    """Return the rows of students that learned vectors alone, as recommended or otherwise."""
    return [
        row
        for row in read("embeddings")["students"]
        if not row["relations"] and (row.items() >= _RECOMMENDED.items()) == recommended
    ]


def _each_score(row: dict[str, Any]) -> list[str]:
    """Return the scores of one model."""
    return [f"{row[name]:.1f}" if name in row else "-" for name in _SCORES]


def groups(rows: Sequence[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """Return rows that differ in their seed only, together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [groups[group] for group in sorted(groups, key=str)]


def _scores(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the scores over those seeds that have them."""
    seeds = [[row[name] for row in rows if name in row] for name in _SCORES]
    return [spread_of(values) if values else "-" for values in seeds]


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
            *_scores(rows)[:2],
        ]
        for rows in groups(chosen, "arch", "init", "first", "steps")
    ]
    head = ["student", "begins with", "steps of relations", "steps of vectors", *_HEAD[:2]]
    return table_of(head, table)


def embedding_crowded() -> str:
    """Return scores of students of a teacher whose vectors crowd together."""
    names = {
        "teacher": ("the teacher", "-"),
        "cosine": ("`3x384`, slice 1,10,11", "`cosine`, 5e-4"),
        "centred": ("`3x384`, slice 1,10,11", "`centred`, 5e-4"),
        "neighbours": ("`3x384`, slice 1,10,11", "`neighbours`, 5e-4"),
        "both": ("`3x384`, slice 1,10,11", "`centred`, `neighbours=0.3`, 5e-4"),
        "rate": ("`3x384`, slice 1,10,11", "`cosine`, 1e-3"),
        "six": ("`6x384`, slice 0,2,4,8,10,11, 300 steps", "`cosine`, 1e-3"),
        "of six": ("`3x384`, slice 1,4,5 of that student", "`cosine`, 1e-3"),
        **{size: (f"the first `3x384`, trimmed to {size} pieces", "-") for size in ("20k", "10k", "5k")},
    }
    rows = [
        [model, how, f"{row['num_parameters']:,}", *(f"{row[name]:.1f}" for name in _CROWDED)]
        for name, row in read("crowded")["rows"].items()
        for model, how in [names[name]]
    ]
    head = ["model", "loss, rate", "parameters", "STS-B dev", "STS-B test", "retrieval, 128 tokens"]
    return table_of(head, rows)


_CROWDED = ("stsb_dev", "stsb_test", "squad_ndcg_128")
_LARGER = {
    "base": ("all-mpnet-base-v2", "-"),
    "crowded": ("multilingual-e5-small", "-"),
    "base, cut from mini": ("all-mpnet-base-v2", "`mini`"),
    "both, cut from mini": ("both, `--also`", "`mini`"),
    "base, 6x384 of mini": ("all-mpnet-base-v2", "`mini`"),
    "base, cut from mini, more text": ("all-mpnet-base-v2", "`mini`"),
    "base, 6x384 of mini, more text": ("all-mpnet-base-v2", "`mini`"),
    "base, 6x768": ("all-mpnet-base-v2", "the teacher"),
    "base, 3x384": ("all-mpnet-base-v2", "the teacher"),
    "decoder, cut from mini": ("SmolLM2-135M, last token", "`mini`"),
}
"""Teacher, and what students are cut from, by the name of the row."""


def embedding_languages() -> str:
    """Return scores of students of a multilingual encoder, between languages and in English."""
    rows = []
    trained = read("languages")["trained"]
    for name, row in read("languages")["rows"].items():
        student, _, pieces = name.partition(", ")
        kept = {"": "all", "texts": "those of the text"}.get(pieces, f"{pieces} of the text")
        parallel, xnli = row["parallel"], dict(row["xnli"])
        figures = (
            *(parallel["english"], parallel["others"], xnli.pop("dev-en"), mean(xnli.values())),
            *(row[score] for score in _CROWDED),
        )
        shape, _, longer = student.partition(" ")
        model = "the teacher" if student == "teacher" else f"`{shape}`"
        model += f", {trained[student]['steps']:,} steps" if longer else ""
        english = trained.get(student, {}).get("english")
        model += f", {english:,} English texts" if english else ""
        rows.append([model, kept, f"{row['num_parameters']:,}", *(f"{figure:.1f}" for figure in figures)])
    head = ["model", "word pieces", "parameters", "translations, English", "others"]
    head += ["XNLI, English", "others", "STS-B dev", "STS-B test", "retrieval, 128 tokens"]
    return table_of(head, rows)


def embedding_larger() -> str:
    """Return scores of students of larger teachers, and of two together."""
    rows, result = [], read("larger_teachers")
    for name, row in result["rows"].items():
        teacher, begun = _LARGER[name]
        shape = "the teacher" if "steps" not in row else f"`{row.get('arch', ['3x384'])[0]}`"
        trained = "-" if "steps" not in row else f"{row['steps']:,} at {row['lr']:g}"
        texts = "-" if "cache" not in row else f"{result['caches'][row['cache']]['texts']:,}"
        scores = [f"{row[score]:.1f}" for score in _CROWDED]
        rows.append([teacher, shape, begun, texts, trained, f"{row['num_parameters']:,}", *scores])
    head = ["teacher", "model", "cut from", "texts", "steps, rate", "parameters", "STS-B dev", "STS-B test"]
    return table_of([*head, "retrieval, 128 tokens"], rows)


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
