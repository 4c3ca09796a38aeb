"""Scores in a model's card: rows that people read, and the `model-index` that the hub reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from minilm_cache.errors import InvalidConfigError, first_line
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.evaluate.summary import Summary
from minilm_cache.evaluate.tasks import TASKS, SpanTask
from minilm_cache.store.durable import write_file

_BEGIN: Final = "<!-- minilm-cache scores -->"
_END: Final = "<!-- end of minilm-cache scores -->"


def check_cards(models: Sequence[Evaluated], names: Sequence[str]) -> None:
    """Raise InvalidConfigError if a model has no card of the user's to write into."""
    foreign = next((name for name in names if not Path(name).is_dir()), None)
    if foreign is not None:
        raise InvalidConfigError(
            f"--card writes into folders of your own, and {foreign} is none. Leave --card out, or copy "
            "it first."
        )
    for model in models:
        _load(model)


def write_card(model: Evaluated, summaries: Sequence[Summary]) -> Path:
    """Write a model's scores into its README.md; those of the same tasks are replaced.

    Returns:
        The file.

    Raises:
        InvalidConfigError: its README.md is no model card.
        StorageError: the file system refused.
    """
    card = _load(model)
    assert isinstance(card.data, ModelCardData)
    names = {_dataset(one) for one in summaries}
    kept = [one for one in card.data.eval_results or [] if one.dataset_name not in names]
    card.data.model_name = card.data.model_name or model.name
    card.data.eval_results = [*kept, *(result for one in summaries for result in _results(one))]
    text = card.text
    if _BEGIN in text and _END in text:
        text = text[: text.index(_BEGIN)].rstrip() + "\n" + text[text.index(_END) + len(_END) :].lstrip()
    rows = [
        f"| {one.dataset_name} | {one.dataset_split} | {one.metric_name} | {one.metric_value:.1f} |"
        for one in card.data.eval_results
    ]
    table = ["## Scores", "", "| task | set | metric | score |", "|---|---|---|---|", *rows]
    card.text = "\n".join([text.rstrip(), "", _BEGIN, *table, "", *_how(summaries), _END, ""])
    file = model.folder / "README.md"
    write_file(file, str(card).encode())
    return file


def _load(model: Evaluated) -> ModelCard:
    file = model.folder / "README.md"
    if not file.is_file():
        return ModelCard(f"---\nlibrary_name: transformers\n---\n\n# {model.name}\n")
    try:
        return ModelCard(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidConfigError(
            f"{file} is no model card that scores can be written into: {first_line(error)}. Mend it, or "
            "leave --card out."
        ) from error


def _dataset(summary: Summary) -> str:
    return f"{TASKS[summary.task].title} {summary.track}".strip()


def _results(summary: Summary) -> list[EvalResult]:
    task = TASKS[summary.task]
    is_span = isinstance(task, SpanTask)
    return [
        EvalResult(
            task_type="question-answering" if is_span else "text-classification",
            dataset_type=task.hub,
            dataset_name=_dataset(summary),
            dataset_config=f"{summary.task} {summary.track}".strip(),
            dataset_split=name,
            metric_type=metric.replace(" ", "_"),
            metric_name=metric,
            metric_value=round(score.mean, 2),
        )
        for name, scores in summary.scores.items()
        for metric, score in scores.items()
    ]


def _how(summaries: Sequence[Summary]) -> list[str]:
    """Return how figures came about, a line for each task."""
    return [
        f"{_dataset(one)}: fine-tuned with learning rate {one.lr:g}, {one.epochs} epochs; mean over "
        f"{one.seeds} seeds" + (f"; the best on dev of {one.settings} settings." if one.settings > 1 else ".")
        for one in summaries
    ]
