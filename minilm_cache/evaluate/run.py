"""Evaluation: trials of models, tasks, settings and seeds; what is done already is not done again."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from minilm_cache.errors import CorpusError, IdentityMismatchError
from minilm_cache.evaluate.card import check_cards, write_card
from minilm_cache.evaluate.examples import Track, is_labelled
from minilm_cache.evaluate.files import data_source
from minilm_cache.evaluate.finetune import Told, Tuned, Watcher, check_device, fine_tune
from minilm_cache.evaluate.glue import Source, read_text_task
from minilm_cache.evaluate.metrics import Scores, headline, span_scores, text_scores
from minilm_cache.evaluate.models import Evaluated, find_models
from minilm_cache.evaluate.predictions import predictions_file, write_predictions
from minilm_cache.evaluate.settings import TRIAL_FILE, EvaluateConfig, TrialIdentity, TrialRecord
from minilm_cache.evaluate.squad import read_span_task
from minilm_cache.evaluate.summary import Summary, summarise
from minilm_cache.evaluate.tasks import TASKS, SpanTask, Task
from minilm_cache.models.device import enough_memory
from minilm_cache.models.saving import saving
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.store.durable import new_folder, refuse_file

MODEL: Final = "model"
PREDICTIONS: Final = "predictions"
_LIBRARIES: Final = ("minilm-cache", "torch", "transformers", "scikit-learn", "scipy", "torchmetrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation has come to."""

    path: Path
    trials: list[TrialRecord]
    folders: list[Path]
    """Of the trials, in their order."""
    summaries: list[Summary]
    cards: list[Path]
    """That scores were written into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One that is to be done."""

    model: Evaluated
    task: Task
    track: Track[Any]
    tokenizer: PreTrainedTokenizerFast
    identity: TrialIdentity
    folder: Path

    def predictions(self, sets: Iterable[str]) -> list[Path]:
        """Return the files of predictions of sets."""
        return [self.folder / PREDICTIONS / predictions_file(self.task, name) for name in sets]


def evaluate_models(
    config: EvaluateConfig,
    names: Sequence[str],
    *,
    out: Path,
    progress: Progress | None = None,
    should_stop: ShouldStop = never_stop,
) -> Evaluation:
    """Fine-tune models on tasks, score them, and tell means over seeds.

    Args:
        config: tasks, data, settings.
        names: of models: `mini`, aliases, hub ids, folders of models or of runs.
        out: folder of trials; those that it has are not done again.
        progress: told of examples.
        should_stop: asked between steps; trials that have ended are kept.

    Raises:
        CorpusError: the data of a task are not there, or damaged.
        TeacherError: a model is not there.
        InvalidConfigError: a setting that cannot be meant.
        StorageError: the file system refused.
        InterruptedRunError: it was asked to stop.
    """
    watcher = Watcher(progress or Silent(), should_stop)
    device = check_device(config.device)
    refuse_file(out)
    models = find_models(names, config.revision, untrained=config.untrained)
    own = [model for model in models if not model.untrained]
    if config.card:
        check_cards(own, names)
    trials = [
        trial
        for name in config.task
        for task, tracks in [_read(config, TASKS[name], watcher.progress)]
        for model in models
        for trial in _trials(config, model, task=task, tracks=tracks, out=out)
    ]
    records = []
    for number, trial in enumerate(trials, 1):
        watcher.stop_if_asked()
        record = _kept(trial, config)
        records.append(
            record or _do(trial, config, device=device, watcher=watcher, which=f"{number} of {len(trials)}")
        )
    summaries = summarise(records)
    cards = [_card(model, summaries) for model in own] if config.card else []
    others = sum(record.versions != _versions() for record in records)
    if others:
        watcher.progress.note(
            f"{others} of {len(records)} trials were done with other versions of libraries: trial.json says "
            "which. Another --out does them again."
        )
    folders = [trial.folder for trial in trials]
    return Evaluation(path=out, trials=records, folders=folders, summaries=summaries, cards=cards)


def _card(model: Evaluated, summaries: Sequence[Summary]) -> Path:
    return write_card(model, [one for one in summaries if one.model == model.title and one.scores])


def _read(config: EvaluateConfig, task: Task, progress: Progress) -> tuple[Task, list[Track[Any]]]:
    """Return a task as it is asked for, and its tracks."""
    task = task if config.max_length is None else task.cut(config.max_length)
    folder, hub = data_source(config.data)
    source = Source(folder=folder, hub=hub, unlabelled=config.predict, note=progress.note)
    reader = read_span_task if isinstance(task, SpanTask) else read_text_task
    tracks = [track.subset(config.max_train, config.max_dev) for track in reader(task, source)]  # type: ignore[arg-type]
    if config.predict and not any(track.unlabelled() for track in tracks):
        raise CorpusError(f"--predict: there is no test set of {task.title} without labels. Leave it out.")
    for track in tracks:
        sizes = ", ".join(f"{name} {len(examples):,}" for name, examples in track.sets().items())
        language = f" ({track.name})" if track.name else ""
        progress.note(f"{task.title}{language}: {len(track.train):,} training examples, {sizes}")
    return task, tracks


def _trials(
    config: EvaluateConfig, model: Evaluated, *, task: Task, tracks: Sequence[Track[Any]], out: Path
) -> Iterator[_Trial]:
    tokenizer = model.tokenizer(task.max_length)
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    tokenizer_sha256 = canonical_sha256(
        [tokenizer.backend_tokenizer.to_str(), tokenizer.model_input_names, special]
    )
    model_sha256 = model.sha256()
    for track in tracks:
        data_sha256 = track.sha256()
        for lr, epochs in config.settings(task):
            for seed in range(config.seeds):
                identity = TrialIdentity(
                    task=task.name,
                    track=track.name,
                    data_sha256=data_sha256,
                    model_sha256=model_sha256,
                    tokenizer_sha256=tokenizer_sha256,
                    untrained=model.untrained,
                    lr=lr,
                    epochs=epochs,
                    batch_size=config.batch_size or task.recipe.batch_size,
                    seed=seed,
                    max_length=task.max_length,
                    precision=config.precision,
                )
                yield _Trial(
                    model=model,
                    task=task,
                    track=track,
                    tokenizer=tokenizer,
                    identity=identity,
                    folder=_folder(out / task.name, identity, model.slug),
                )


def _folder(beside: Path, identity: TrialIdentity, slug: str) -> Path:
    """Return a trial's folder: one that is there, though the model had another name then, or a new one."""
    return next(beside.glob(f"*-{identity.digest()}"), beside / identity.name(slug))


def _kept(trial: _Trial, config: EvaluateConfig) -> TrialRecord | None:
    """Return the record of a trial that is done, with all that is asked for."""
    file = trial.folder / TRIAL_FILE
    if not file.is_file():
        return None
    try:
        record = TrialRecord.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise IdentityMismatchError(
            f"{file} is damaged: {problem}. Remove its folder, and run again."
        ) from error
    if record.identity != trial.identity:
        raise IdentityMismatchError(f"{file} is of another trial. Choose another --out.")
    if record.scores:
        lacks_tests = not all(file.is_file() for file in trial.predictions(trial.track.unlabelled()))
        lacks_model = config.keep_models and not (trial.folder / MODEL).is_dir()
        if lacks_tests or lacks_model:
            return None
    return record.model_copy(update={"model": trial.model.title})


def _do(
    trial: _Trial, config: EvaluateConfig, *, device: torch.device, watcher: Watcher, which: str
) -> TrialRecord:
    identity = trial.identity
    what = f"{trial.task.title}, {trial.model.title}, lr {identity.lr:g}, seed {identity.seed}"
    watcher = replace(watcher, doing=f"{what} ({which})")
    model = trial.model.load(trial.task, identity.seed)
    with enough_memory(device, "Take a lower --batch-size or --max-length"):
        tuned = fine_tune(
            model,
            trial.tokenizer,
            task=trial.task,
            track=trial.track,
            identity=identity,
            device=device,
            watcher=watcher,
        )
    track = trial.track
    scores = _scores(trial.task, track, tuned)
    record = TrialRecord(
        identity=identity,
        model=trial.model.title,
        num_train=len(track.train),
        num_scored={name: len(track.sets()[name]) for name in scores},
        train_s=tuned.train_s,
        scores=scores,
        headline=headline({name: scores[name] for name in track.dev}) if scores else None,
        versions=_versions(),
    )
    _write(trial, config, tuned=tuned, record=record)
    return record


def _scores(task: Task, track: Track[Any], tuned: Tuned) -> dict[str, Scores]:
    if tuned.told is None:
        return {}
    sets = track.sets()
    labelled = {name: sets[name] for name in tuned.told if is_labelled(sets[name])}
    return {name: _score(task, name, examples=some, told=tuned.told[name]) for name, some in labelled.items()}


def _score(task: Task, name: str, *, examples: Sequence[Any], told: Told) -> Scores:
    if isinstance(task, SpanTask):
        assert not isinstance(told, np.ndarray)
        language = name.partition("-")[2] if task.by_language else None
        return span_scores(examples, {key: one.text for key, one in told.items()}, language)
    labels = np.asarray([example.label for example in examples], np.float64)
    return text_scores(task.metrics, np.asarray(told), labels)


def _write(trial: _Trial, config: EvaluateConfig, *, tuned: Tuned, record: TrialRecord) -> None:
    """Write a trial as one folder, whole or not at all."""
    keeps_model = config.keep_models or (trial.folder / MODEL).is_dir()
    before = trial.folder / PREDICTIONS
    with saving("write trial", trial.folder), new_folder(trial.folder) as folder:
        (folder / TRIAL_FILE).write_text(record.model_dump_json(indent=1), encoding="utf-8")
        if before.is_dir():  # of test sets that were asked for then, by the same trial
            shutil.copytree(before, folder / PREDICTIONS)
        (folder / PREDICTIONS).mkdir(exist_ok=True)
        write_predictions(folder / PREDICTIONS, trial.task, track=trial.track, told=tuned.told or {})
        if keeps_model and tuned.told is not None:
            tuned.model.save_pretrained(folder / MODEL)
            trial.tokenizer.save_pretrained(folder / MODEL)


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}
