"""Write the tables of README and docs from the result files of the benchmarks.

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. Never edit one by hand.

    python -m benchmarks.tables
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

from benchmarks.report import RESULTS
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.settings import flag_of

ROOT: Final = Path(__file__).parents[1]
STARTS: Final = ("random", "embeddings", "teacher-layers", "slice")
SHORT_STEPS: Final = 300
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK: Final = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _read(name: str) -> Any:  # noqa: ANN401 - JSON of any benchmark
    return json.loads((RESULTS / f"{name}.json").read_text())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _signed(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def students() -> str:
    """Return held-out KLs of students from each codec, and their ratio to online training."""
    result = _read("student_quality")
    sizes = result["bytes_per_token"]
    rows = [
        [
            way,
            f"{sizes[way]:,.0f}" if way in sizes else "-",
            f"{kls['attention']:.4f} + {kls['value']:.4f}",
            f"{kls['over_online']:.4f} ({', '.join(f'{ratio:.4f}' for ratio in kls['over_online_by_seed'])})",
        ]
        for way, kls in result["held_out_kl_nats"].items()
    ]
    kl = "held-out KL of the student, attention + value, nats"
    return _table(["targets", "bytes per token", kl, "over online, mean (each seed)"], rows)


def many_epochs() -> str:
    """Return KLs of students after many epochs over few sequences, over those from the dense cache."""
    result = _read("many_epochs")
    sizes = result["bytes_per_token"]
    rows = []
    for way, texts in result["kl_nats"].items():
        rows.append([way, f"{sizes[way]:,.0f}" if way in sizes else "-"])
        for kls in texts.values():
            rows[-1].append(
                f"{kls['sum']:.4f} ({_signed(kls['over_dense'])} ± {100 * kls['over_dense_stdev']:.2f})"
            )
    head = [
        "targets",
        "bytes per token",
        "KL on the training text (over dense)",
        "KL on fresh text (over dense)",
    ]
    return _table(head, rows)


def many_shards() -> str:
    """Return what opening and reading caches of many shards takes."""
    rows = [
        [
            f"{row['shards']:,}",
            f"{row['index_bytes'] / 1e6:,.1f} MB",
            f"{row['open_s']:.3f} s",
            f"{row['open_mib']:,.0f} MiB",
            f"{row['info_s']:.1f} s ({row['info_of_a_small_cache_s']:.1f} s)",
            f"{row['first_batch_s']:.2f} s",
            f"{row['sequence_ms']:.2f} ms",
            f"{row['plan_s']:.2f} s",
            f"{row['seal_s']:,.1f} s",
        ]
        for row in _read("scale")["shards"]
    ]
    head = [
        "shards",
        "index",
        "open",
        "memory of that",
        "`info` (of a small cache)",
        "first batch of a training",
    ]
    return _table([*head, "what a sequence's shard is", "plan", "seal"], rows)


def far_and_together() -> str:
    """Return what reading from a slow store costs, and how long uneven ranks take together."""
    result = _read("scale")
    remote, ranks = result["remote"], result["ranks"]
    rows = [
        ["requests that open a cache in a store", f"{remote['requests_to_open']}"],
        [
            "16 shards, one thread over four threads",
            f"{remote['threads_1_s']:.2f} s / {remote['threads_4_s']:.2f} s = {remote['ratio']:.2f}",
        ],
        [
            "requests for the whole cache: two processes at once, one process",
            f"{remote['requests_of_two_processes']}, {remote['requests_of_one_process']}",
        ],
        [
            "an epoch for a consumer of a million tokens a second: share of its time that it waits",
            f"{100 * remote['epoch']['share_waiting']:.1f} %",
        ],
        [
            f"{ranks['ranks']} ranks, {ranks['shards']} shards, over what their speeds allow",
            f"{ranks['took_s']:.1f} s / {ranks['ideal_s']:.1f} s = {ranks['over_ideal']:.2f}",
        ],
    ]
    return _table(["", "measured"], rows)


def steps() -> str:
    """Return tokens per second of training steps, and their ratios to other ways of training."""
    rows = []
    for name, result in _read("train_speed_ratios").items():
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
    return _table([*head, "over the best online loop", "over the usual online loop"], rows)


NAMES: Final = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "stsb": "STS-B",
    "mrpc": "MRPC",
    "rte": "RTE",
    "squad2": "SQuAD 2.0",
}


def scores() -> str:
    """Return fine-tuned scores of teacher and students, means over seeds with standard deviations."""
    trials = _read("evaluation")
    models = list(dict.fromkeys(trial["model"] for trial in trials))
    rows = []
    for task, size in dict.fromkeys((trial["task"], trial["num_train"]) for trial in trials):
        of_task = [trial for trial in trials if (trial["task"], trial["num_train"]) == (task, size)]
        for metric in of_task[0]["scores"]["dev"]:
            cells = [
                _mean([trial["scores"]["dev"][metric] for trial in of_task if trial["model"] == model])
                for model in models
            ]
            rows.append([f"{NAMES.get(task, task)}, {size:,}, {metric}", *cells])
    return _table(["task, training examples, metric", *models], rows)


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else " (one seed)")


def objective_bytes() -> str:
    """Return the bytes per token that objectives add to a cache of codec `vectors` of the last layer."""
    added = _read("objectives")["objectives"]
    errors = list(added)
    rows = [[f"`{name}`", *(f"{added[error][name]:,.1f}" for error in errors)] for name in added[errors[0]]]
    return _table(["objective", *(f"`--max-error {error}`" for error in errors)], rows)


def objective_students() -> str:
    """Return the held-out KLs of a student of each objective."""
    results = _read("objectives_trained")["results"]
    rows = []
    for name, starts in results.items():
        shown = [starts.get(start) for start in ("random", "slice", "teacher-layers")]
        losses = [_loss(sum(start["after"].values())) if start else "-" for start in shown]
        rows.append([name, *losses, *(_kls(start["kl"]) if start else "-" for start in shown[:2])])
    head = ["objective", *(f"loss, `{start}`" for start in ("random", "slice", "teacher-layers"))]
    return _table([*head, "KL, `random`", "KL, `slice`"], rows)


def _loss(value: float) -> str:
    return f"{value:.3f}" if value >= 5e-4 else "below 0.0005"


def head_starts() -> str:
    """Return KLs of students by shape and start, before and after training."""
    rows = [row for row in _read("head_start")["starts"] if row["steps"] == SHORT_STEPS]
    names = [f"{start}, {when}" for start in STARTS for when in ("before", "after")]
    table = []
    for arch in dict.fromkeys(row["arch"] for row in rows):
        cells = []
        for start in STARTS:
            seeds = [row for row in rows if (row["arch"], row["start"]) == (arch, start)]
            cells += [_mean_sum([row[when] for row in seeds]) for when in ("before", "after")]
        table.append([f"`{arch}`", *cells])
    return _table(["student", *names], table)


def _mean_sum(kls: Sequence[dict[str, float]]) -> str:
    """Return the mean over seeds of a sum over relations, its deviation, and the number of seeds."""
    if not kls:
        return "-"
    sums = [sum(kl.values()) for kl in kls]
    spread = f" ± {stdev(sums):.3f}" if len(sums) > 1 else ""
    return f"{mean(sums):.3f}{spread} ({len(sums)})"


def head_start_recipe() -> str:
    """Return KLs of slices without training, by what is changed in the recipe."""
    rows = [
        [name, f"{row['attention']:.4f}", f"{row['value']:.4f}", ", ".join(f"{e:.2f}" for e in row["errors"])]
        for name, row in _read("head_start")["recipe"].items()
    ]
    return _table(["student, change", "attention", "value", "relative errors of hidden states"], rows)


def embedding_bytes() -> str:
    """Return the bytes of a text's vector, stored in several ways."""
    result = _read("embeddings")["cache"]
    width = 384
    rows = [
        ["lists of float64", f"{8 * width:,}", "1"],
        ["float32", f"{4 * width:,}", "1"],
        ["the cache", f"{result['bytes_per_text']:,.0f}", f"{result['cosine']:.5f}"],
    ]
    return _table(["vectors of width 384", "bytes per text", "mean cosine with the teacher's"], rows)


def embedding_students() -> str:
    """Return scores of students of embeddings, means over seeds, the teacher first."""
    result = _read("embeddings")
    teacher = result["teacher"]
    scores = [f"{teacher['stsb_spearman']:.1f}", f"{teacher['squad_ndcg']:.1f}"]
    table = [["teacher", f"{teacher['num_parameters']:,}", "-", "-", "-", *scores, "-"]]
    chosen = [row for row in result["students"] if not row["relations"]]
    for rows in _groups(chosen, "arch", "init", "layers", "paragraphs", "steps", "lr"):
        row = rows[0]
        minutes = [row["train_s"] / 60 for row in rows if row["threads"] == 2]
        table.append(
            [
                f"`{row['arch']}`",
                f"{row['num_parameters']:,}",
                f"{row['init']} {row['layers'] or ''}".strip(),
                f"{100 * row['paragraphs']:.1f} %",
                f"{row['steps']:,}",
                *_scores(rows),
                f"{mean(minutes):.1f}" if minutes else "-",
            ]
        )
    head = ["student", "parameters", "begins with", "whole paragraphs", "steps", "STS-B", "retrieval"]
    return _table([*head, "minutes on two cores"], table)


def _groups(rows: Sequence[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """Return rows that differ in their seed only, together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [groups[group] for group in sorted(groups, key=str)]


def _scores(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return both scores over seeds."""
    return [_spread([row[name] for row in rows]) for name in ("stsb_spearman", "squad_ndcg")]


def _spread(values: Sequence[float]) -> str:
    """Return the mean over seeds, its deviation, and the number of seeds."""
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread} ({len(values)})"


def embedding_peer() -> str:
    """Return time and scores of a student that was trained in two ways."""
    result = _read("embeddings")["peer"]
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
    return _table(["`3x384` trained by", "steps", "seconds per step", "STS-B", "retrieval"], rows)


def embedding_first() -> str:
    """Return scores of students that learned relations before vectors, and of those that did not."""
    chosen = [row for row in _read("embeddings")["students"] if row["relations"]]
    table = [
        [
            f"`{rows[0]['arch']}`",
            rows[0]["init"],
            f"{rows[0]['first']:,}",
            f"{rows[0]['steps']:,}",
            *_scores(rows),
        ]
        for rows in _groups(chosen, "arch", "init", "first", "steps")
    ]
    head = ["student", "begins with", "steps of relations", "steps of vectors", "STS-B", "retrieval"]
    return _table(head, table)


def embedding_imported() -> str:
    """Return scores of a student of imported vectors, and of one from the cache that they came from."""
    result = _read("embeddings")["imported"]
    names = {"dumped": "the cache that `dump` made", "imported": "the cache that `import` made"}
    rows = [
        [names[name], f"{row['stsb_spearman']:.2f}", f"{row['squad_ndcg']:.2f}"]
        for name, row in result.items()
        if name in names
    ]
    return _table([f"`3x384` after {result['steps']:,} steps from", "STS-B", "retrieval"], rows)


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
        rows.append(
            [
                f"`{spec.name}`",
                _code(stored),
                _code(spec.maps),
                _code(options),
                _code(spec.presets),
            ]
        )
    return _table(
        ["objective", "`--for` stores", "`--layer-map`, default first", "own options", "`--preset`"], rows
    )


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "-"


def _kls(relations: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.3f}" for kind, value in relations.items())


def codecs() -> str:
    """Return bytes per token and KLs of codecs at three lengths, on the embedded text and on Wikipedia."""
    rows = []
    for text in ("python_docs", "enwiki"):
        for length, settings in _read(f"fidelity_{text}")["lengths"].items():
            for setting, result in settings.items():
                kls = result["kl_teacher_to_stored"]
                shown = "sampled" if None in kls.values() else " / ".join(f"{kl:.4f}" for kl in kls.values())
                rows.append([text, length, setting, f"{result['bytes_per_token']:,.0f}", shown])
    return _table(["text", "length", "setting", "bytes per token", "KL, attention / value, nats"], rows)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "students": students,
    "many_epochs": many_epochs,
    "many_shards": many_shards,
    "far_and_together": far_and_together,
    "steps": steps,
    "scores": scores,
    "objective_bytes": objective_bytes,
    "objective_rows": objective_rows,
    "objective_students": objective_students,
    "codecs": codecs,
    "head_starts": head_starts,
    "head_start_recipe": head_start_recipe,
    "embedding_bytes": embedding_bytes,
    "embedding_students": embedding_students,
    "embedding_peer": embedding_peer,
    "embedding_first": embedding_first,
    "embedding_imported": embedding_imported,
}


def rendered(text: str) -> str:
    """Return the text of a page with every table written again from the results."""
    return _BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
