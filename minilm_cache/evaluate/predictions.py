"""Write predictions in the formats that benchmark servers and official scoring scripts read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minilm_cache.evaluate.examples import Track
from minilm_cache.evaluate.finetune import Predictions
from minilm_cache.evaluate.tasks import SpanTask, Task, TextTask

_SCALE = (0.0, 5.0)
"""Range of STS-B's scores; GLUE's server rejects values outside of it."""


def predictions_file(task: Task, set_name: str) -> str:
    """Return the name of the file for the predictions of a set."""
    return f"{set_name}.json" if isinstance(task, SpanTask) else task.submission(set_name)


def write_predictions(
    folder: Path, task: Task, *, track: Track[Any], predictions: Mapping[str, Predictions]
) -> None:
    """Write a model's predictions of each set.

    GLUE: `index` and `prediction`, tab-separated, in files with the server's names, also for dev sets. XNLI:
    one label per line (XTREME). SQuAD and MLQA: a JSON object of answers by identifier. Where questions may
    have no answer, a second file has the probability of that, for `evaluate-v2.0.py --na-prob-file`.

    Args:
        folder: existing folder to write to.
        task: task of the predictions.
        track: track whose sets were predicted.
        predictions: predictions by set.
    """
    for name, predicted in predictions.items():
        file = folder / predictions_file(task, name)
        if isinstance(task, SpanTask):
            assert isinstance(predicted, Mapping)
            _write_json(file, {key: answer.text for key, answer in predicted.items()})
            if task.has_unanswerable:
                no_answer = {key: answer.no_answer for key, answer in predicted.items()}
                _write_json(folder / f"{name}.na_prob.json", no_answer)
        else:
            words = _words(task, np.asarray(predicted))
            indices = [example.index for example in track.sets()[name]]
            lines = words if task.languages != "one" else _with_index(indices, words)
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _words(task: TextTask, predicted: np.ndarray) -> list[str]:
    """Return predictions as text: names of classes, or values within the scale."""
    if task.is_regression:
        return [f"{value:.3f}" for value in np.clip(predicted, *_SCALE)]
    return [task.labels[int(value)] for value in predicted]


def _with_index(indices: list[str], words: list[str]) -> list[str]:
    pairs = zip(indices, words, strict=True)
    return ["index\tprediction", *(f"{index}\t{word}" for index, word in pairs)]


def _write_json(file: Path, document: Mapping[str, object]) -> None:
    file.write_text(json.dumps(document, ensure_ascii=False, indent=0), encoding="utf-8")
