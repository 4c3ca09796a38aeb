"""Summaries of scores, in a model card: tables for people, and the `model-index` for the hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Final

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from minilm_cache.errors import InvalidConfigError, first_line
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.evaluate.settings import TrialRecord
from minilm_cache.evaluate.tasks import TASKS, GenerationTask, Task, TextTask
from minilm_cache.store.durable import bounded_bytes, storage_errors, write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Mean and standard deviation of a metric over seeds, times 100."""

    mean: float
    stddev: float | None
    """Standard deviation of a sample (n - 1). None means that there is one seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Scores of a model on one track of a task, with the setting that was chosen."""

    model: str
    task: str
    track: str
    """Language of the training set. Empty if the task is trained on one language only."""
    lr: float
    epochs: int
    seeds: int
    """Number of trials of the chosen setting."""
    settings: int
    """Number of settings that were tried. The one with the best mean over seeds on dev was chosen."""
    diverged: int
    """Number of trials, of all settings, whose loss was NaN or infinite in the end."""
    num_train: int
    num_scored: Mapping[str, int]
    """Number of examples by set."""
    scores: Mapping[str, Mapping[str, Score]]
    """Scores by set and metric. Empty if every setting has a trial that diverged."""


def summarise(trials: Sequence[TrialRecord]) -> list[Summary]:
    """Return a summary for each model and task, in the order of the trials."""
    groups: dict[tuple[str, str, str], dict[tuple[float, int], list[TrialRecord]]] = {}
    for trial in trials:
        identity = trial.identity
        group = groups.setdefault((trial.model, identity.task, identity.track), {})
        group.setdefault((identity.lr, identity.epochs), []).append(trial)
    return [_summary(key, settings) for key, settings in groups.items()]


def _summary(
    key: tuple[str, str, str], settings: Mapping[tuple[float, int], Sequence[TrialRecord]]
) -> Summary:
    model, task, track = key
    means = {
        setting: mean(headlines)
        for setting, trials in settings.items()
        if len(headlines := [trial.headline for trial in trials if trial.headline is not None]) == len(trials)
    }
    chosen = max(means, key=means.__getitem__) if means else next(iter(settings))
    first = settings[chosen][0]
    return Summary(
        model=model,
        task=task,
        track=track,
        lr=chosen[0],
        epochs=chosen[1],
        seeds=len(settings[chosen]),
        settings=len(settings),
        diverged=sum(trial.headline is None for trials in settings.values() for trial in trials),
        num_train=first.num_train,
        num_scored=first.num_scored,
        scores=_over_seeds(settings[chosen]) if means else {},
    )


def _over_seeds(trials: Sequence[TrialRecord]) -> dict[str, dict[str, Score]]:
    return {
        name: {
            metric: _score([trial.scores[name][metric] for trial in trials])
            for metric in trials[0].scores[name]
            if all(metric in trial.scores[name] for trial in trials)  # METEOR may have been installed since
        }
        for name in trials[0].scores
    }


def _score(values: Sequence[float]) -> Score:
    return Score(mean=mean(values), stddev=stdev(values) if len(values) > 1 else None)


_CARD: Final = "README.md"
_MAX_CARD_BYTES: Final = 2**20


def check_cards(models: Sequence[Evaluated], names: Sequence[str]) -> None:
    """Raise InvalidConfigError if a model is not a local folder, or its card cannot be read."""
    foreign = next((name for name in names if not Path(name).is_dir()), None)
    if foreign is not None:
        raise InvalidConfigError(
            f"--card writes into folders of your own, and {foreign} is not one. Leave --card out, or copy "
            "the model into a folder first."
        )
    for model in models:
        _rendered(model, [])


def write_card(model: Evaluated, summaries: Sequence[Summary]) -> Path:
    """Write a model's scores into its README.md, one section per task.

    An older section of the same task is replaced.

    Returns:
        Path of the README.md.

    Raises:
        InvalidConfigError: its README.md is not a valid model card.
        StorageError: the file cannot be written.
    """
    file = model.folder / _CARD
    content = _rendered(model, summaries)
    with storage_errors("write", file):
        write_file(file, content)
    return file


def _rendered(model: Evaluated, summaries: Sequence[Summary]) -> bytes:
    """Return a model's card with its scores.

    Everything that can fail is done here, and `check_cards` calls it before anything is fine-tuned. PyYAML
    and huggingface_hub raise errors of all kinds for what is not a card, so this catches every exception.

    Raises:
        InvalidConfigError: its README.md is not a valid model card, or not a regular file.
    """
    file = model.folder / _CARD
    try:
        text = _text_of(file) or f"---\nlibrary_name: transformers\n---\n\n# {model.name}\n"
        _refuse_aliases(text)
        card = ModelCard(text)
        assert isinstance(card.data, ModelCardData)
        results = [result for summary in summaries for result in _results(summary)]
        replaced = {_place(result) for result in results}
        kept = [result for result in card.data.eval_results or [] if _place(result) not in replaced]
        card.data.model_name = card.data.model_name or model.name
        card.data.eval_results = [*kept, *results]
        for summary in summaries:
            card.text = (
                _without_section(card.text, name_in_cards(summary.task, summary.track)).rstrip()
                + "\n\n"
                + _section(summary)
            )
        return str(card).encode()
    except Exception as error:
        raise InvalidConfigError(
            f"{file} is not a model card that scores can be written into: {first_line(error)}. Fix it, or "
            "leave --card out."
        ) from error


def _text_of(file: Path) -> str | None:
    """Return the text of a card. None means that there is none."""
    try:
        return bounded_bytes(file, _MAX_CARD_BYTES).decode("utf-8")
    except FileNotFoundError:
        return None


def _refuse_aliases(text: str) -> None:
    """Raise ValueError for aliases in a card's front matter: a few may expand to billions of values."""
    matter = text.split("\n---", 1)[0].removeprefix("---")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(matter, Loader=yaml.SafeLoader)):
        raise ValueError("it has aliases")


def _without_section(text: str, name: str) -> str:
    """Return the text of a card without its sections of a task's scores."""
    first, last = f"<!-- scores of {name} -->", f"<!-- end of scores of {name} -->"
    while (start := text.find(first)) >= 0 and (stop := text.find(last, start)) >= 0:
        text = f"{text[:start].rstrip()}\n\n{text[stop + len(last) :].lstrip()}"
    return text


def name_in_cards(task: str, track: str) -> str:
    """Return the name of a track of a task in cards, which no other task has."""
    known = TASKS.get(task)
    name = task if known is None else known.title
    if known is not None and known is not next(each for each in TASKS.values() if each.title == name):
        name += f" ({task})"
    return f"{name} {track}".strip()


def _place(result: EvalResult) -> tuple[object, ...]:
    return result.dataset_type, result.dataset_config, result.dataset_split, result.dataset_name


def _results(summary: Summary) -> list[EvalResult]:
    task = TASKS.get(summary.task)  # None: one's own, which is on no hub
    places = {name: (None, name) if task is None else task.place(name) for name in summary.scores}
    return [
        EvalResult(
            task_type=_card_type(task, scores),
            dataset_type=summary.task if task is None else task.hub,
            dataset_name=name_in_cards(summary.task, summary.track),
            dataset_config=places[name][0],
            dataset_split=places[name][1],
            metric_type=metric.replace(" ", "_"),
            metric_name=f"{metric} of {summary.num_scored[name]:,} examples",
            metric_value=round(score.mean, 2),
        )
        for name, scores in summary.scores.items()
        for metric, score in scores.items()
    ]


def _card_type(task: Task | None, scores: Mapping[str, Score]) -> str:
    """Return the name of a task's kind on the hub; one's own task says by its metrics what it is."""
    if task is not None:
        return task.card_type
    return GenerationTask.card_type if "rougeL" in scores else TextTask.card_type


def _section(summary: Summary) -> str:
    """Return the card section of a task: a table of scores, and the settings of the fine-tuning."""
    name = name_in_cards(summary.task, summary.track)
    rows = [
        f"| {set_name} ({summary.num_scored[set_name]:,} examples) | {metric} | {score.mean:.1f}"
        + (" |" if score.stddev is None else f" ± {score.stddev:.1f} |")
        for set_name, scores in summary.scores.items()
        for metric, score in scores.items()
    ]
    chosen = (
        f" The best on dev of {summary.settings} settings, so that dev figures are optimistic."
        if summary.settings > 1
        else ""
    )
    lines = [
        f"<!-- scores of {name} -->",
        f"## Scores: {name}",
        "",
        "| set | metric | score |",
        "|---|---|---|",
        *rows,
        "",
        "Scored as it is, without fine-tuning."
        if summary.epochs == 0
        else f"Fine-tuned on {summary.num_train:,} examples with learning rate {summary.lr:g} for "
        f"{summary.epochs} epochs; mean over {summary.seeds} seeds.{chosen}",
        f"<!-- end of scores of {name} -->",
    ]
    return "\n".join(lines) + "\n"
