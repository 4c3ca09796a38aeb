"""Write the tables of README and docs from the result files of the benchmarks.

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. Never edit one by hand.

    python -m benchmarks.tables
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.tables.caches import codecs, objective_bytes, objective_rows, steps
from benchmarks.tables.device import (
    cpu_precision,
    device_counts,
    feeding,
    gpu_dumps,
    gpu_training,
    kernels,
    precision,
    precision_of_vectors,
)
from benchmarks.tables.embeddings import (
    embedding_bytes,
    embedding_crowded,
    embedding_first,
    embedding_imported,
    embedding_larger,
    embedding_peer,
    embedding_students,
    embedding_trials,
    embedding_untrained,
)
from benchmarks.tables.families import families
from benchmarks.tables.scale import far_and_together, growth, large_shards, many_shards, text_once
from benchmarks.tables.students import (
    exported_models,
    halving,
    head_start_recipe,
    head_starts,
    head_starts_long,
    many_epochs,
    objective_students,
    pair_scores,
    question_examples,
    questions,
    reranker_peer,
    rerankers,
    scores,
    shapes,
    shapes_predicted,
    static_models,
    students,
    task_stages,
)

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK: Final = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

TABLES: Final[dict[str, Callable[[], str]]] = {
    "gpu_training": gpu_training,
    "gpu_dumps": gpu_dumps,
    "device_counts": device_counts,
    "kernels": kernels,
    "feeding": feeding,
    "precision": precision,
    "precision_of_vectors": precision_of_vectors,
    "cpu_precision": cpu_precision,
    "students": students,
    "many_epochs": many_epochs,
    "many_shards": many_shards,
    "far_and_together": far_and_together,
    "text_once": text_once,
    "growth": growth,
    "large_shards": large_shards,
    "steps": steps,
    "scores": scores,
    "pair_scores": pair_scores,
    "rerankers": rerankers,
    "exported_models": exported_models,
    "static_models": static_models,
    "questions": questions,
    "question_examples": question_examples,
    "halving": halving,
    "shapes": shapes,
    "shapes_predicted": shapes_predicted,
    "reranker_peer": reranker_peer,
    "task_stages": task_stages,
    "objective_bytes": objective_bytes,
    "objective_rows": objective_rows,
    "objective_students": objective_students,
    "codecs": codecs,
    "head_starts": head_starts,
    "head_starts_long": head_starts_long,
    "head_start_recipe": head_start_recipe,
    "families": families,
    "embedding_bytes": embedding_bytes,
    "embedding_students": embedding_students,
    "embedding_trials": embedding_trials,
    "embedding_untrained": embedding_untrained,
    "embedding_peer": embedding_peer,
    "embedding_crowded": embedding_crowded,
    "embedding_larger": embedding_larger,
    "embedding_first": embedding_first,
    "embedding_imported": embedding_imported,
}


def rendered(text: str) -> str:
    """Return the text of a page with every table written again from the results."""
    return _BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)
