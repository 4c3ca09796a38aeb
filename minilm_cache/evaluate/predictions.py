"""Predictions as the servers of benchmarks want them, and as official scoring scripts read them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minilm_cache.evaluate.examples import Track
from minilm_cache.evaluate.finetune import Told
from minilm_cache.evaluate.tasks import SpanTask, Task, TextTask

_SCALE = (0.0, 5.0)
"""Of STS-B's scores; others are refused by GLUE's server."""


def predictions_file(task: Task, set_name: str) -> str:
    """Return the name of the file of predictions of a set."""
    return f"{set_name}.json" if isinstance(task, SpanTask) else task.submission(set_name)


def write_predictions(folder: Path, task: Task, *, track: Track[Any], told: Mapping[str, Told]) -> None:
    """Write what a model tells of each set.

    GLUE: `index` and `prediction`, tab-separated, in files of the server's names; of dev sets, too. XNLI: a
    label per line (XTREME). SQuAD and MLQA: a JSON object of answers by identifier, and beside it, where
    questions may have no answer, the probability of that, for `evaluate-v2.0.py --na-prob-file`.

    Args:
        folder: that exists.
        task: which.
        track: whose sets they are.
        told: by set.
    """
    for name, found in told.items():
        file = folder / predictions_file(task, name)
        if isinstance(task, SpanTask):
            assert isinstance(found, Mapping)
            _write_json(file, {key: one.text for key, one in found.items()})
            if task.has_unanswerable:
                missing = {key: one.no_answer for key, one in found.items()}
                _write_json(folder / f"{name}.na_prob.json", missing)
        else:
            words = _words(task, np.asarray(found))
            indices = [example.index for example in track.sets()[name]]
            lines = words if task.languages != "one" else _with_index(indices, words)
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _words(task: TextTask, told: np.ndarray) -> list[str]:
    if task.is_regression:
        return [f"{value:.3f}" for value in np.clip(told, *_SCALE)]
    return [task.labels[int(value)] for value in told]


def _with_index(indices: list[str], words: list[str]) -> list[str]:
    pairs = zip(indices, words, strict=True)
    return ["index\tprediction", *(f"{index}\t{word}" for index, word in pairs)]


def _write_json(file: Path, document: Mapping[str, object]) -> None:
    file.write_text(json.dumps(document, ensure_ascii=False, indent=0), encoding="utf-8")
