"""Choose the setting that scores best on dev, and summarise its trials by mean and standard deviation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from minilm_cache.evaluate.settings import TrialRecord


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
        }
        for name in trials[0].scores
    }


def _score(values: Sequence[float]) -> Score:
    return Score(mean=mean(values), stddev=stdev(values) if len(values) > 1 else None)
