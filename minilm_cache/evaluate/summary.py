"""Of many trials, the setting that does best on dev, with the mean and the spread over its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from minilm_cache.evaluate.settings import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A figure over seeds, between 0 and 100."""

    mean: float
    stddev: float | None
    """Of a sample (n - 1); none: there is one seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A model on a task, and in XNLI's translate-train on a language, in the setting that was chosen."""

    model: str
    task: str
    track: str
    lr: float
    epochs: int
    seeds: int
    settings: int
    """That were tried; of more than one, that with the best mean over seeds on dev was chosen."""
    diverged: int
    """Trials of all settings whose loss was no number in the end."""
    num_train: int
    num_scored: Mapping[str, int]
    """Examples by set."""
    scores: Mapping[str, Mapping[str, Score]]
    """By set and metric; empty where every setting has trials that diverged."""


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
        setting: mean(found)
        for setting, some in settings.items()
        if len(found := [one.headline for one in some if one.headline is not None]) == len(some)
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
        diverged=sum(one.headline is None for some in settings.values() for one in some),
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
