"""Evaluate models on tasks, in one trial per setting and seed. Finished trials are not run again."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from math import isclose, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from minilm_cache.errors import CorpusError, IdentityMismatchError, InvalidConfigError
from minilm_cache.evaluate.card import Summary, check_cards, summarise, write_card
from minilm_cache.evaluate.examples import TextExample, Track, is_labelled
from minilm_cache.evaluate.files import Source, data_source
from minilm_cache.evaluate.finetune import TRAIN, TRIALS_KEPT, Tuned, check_device, fine_tune
from minilm_cache.evaluate.kind import Kind, Scores, kind_of
from minilm_cache.evaluate.models import Evaluated, find_models
from minilm_cache.evaluate.own_task import read_own_task
from minilm_cache.evaluate.settings import TRIAL_FILE, EvaluateConfig, TrialIdentity, TrialRecord, is_own_task
from minilm_cache.evaluate.tasks import TASKS, TextTask
from minilm_cache.models.device import enough_memory
from minilm_cache.models.exported import ExportedModel
from minilm_cache.models.files import weight_files
from minilm_cache.models.truncate import saving
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import refuse_other_kind
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.store.durable import bounded_bytes, new_folder, refuse_file, refuse_unwritable
from minilm_cache.wording import Made, Place, cut_in_words, some_of

if TYPE_CHECKING:
    import pandas as pd

MODEL: Final = "model"
PREDICTIONS: Final = "predictions"
_LIBRARIES: Final = (
    *("minilm-cache", "torch", "transformers", "scikit-learn", "scipy", "torchmetrics"),
    *("nltk", "rouge-score", "sacrebleu"),
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evaluation(Made):
    """Trials, summaries and files of an evaluation."""

    path: Path
    """Folder of all trials."""
    trials: list[TrialRecord]
    folders: list[Path]
    """Folders of the trials, in the order of `trials`."""
    summaries: list[Summary]
    cards: list[Path]
    """Model cards that scores were written into."""
    remarks: tuple[str, ...] = ()
    """What scores do not say, such as which ones may be those of a constant answer."""

    def describe(self) -> dict[str, object]:
        """Return the lines of its description, by the names that people read."""
        scores = {
            " ".join(filter(None, (summary.model, "on", summary.task, summary.track, name))): ", ".join(
                f"{metric} {score.mean:.1f}" for metric, score in of_set.items()
            )
            for summary in self.summaries
            for name, of_set in summary.scores.items()
        }
        return {"evaluation": self.path, "trials": len(self.trials), **scores}

    def frame(self) -> "pd.DataFrame":
        """Return a row for each model, task, set and metric: mean over seeds, deviation, number of seeds."""
        import pandas as pd  # noqa: PLC0415 - only notebooks need it

        rows = [
            {
                "model": summary.model,
                "task": summary.task,
                "track": summary.track,
                "set": name,
                "metric": metric,
                "mean": score.mean,
                "stddev": score.stddev,
                "seeds": summary.seeds,
            }
            for summary in self.summaries
            for name, of_set in summary.scores.items()
            for metric, score in of_set.items()
        ]
        return pd.DataFrame(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A trial of this evaluation, finished or not."""

    model: Evaluated
    kind: Kind[Any, Any]
    track: Track[Any]
    tokenizer: PreTrainedTokenizerFast
    identity: TrialIdentity
    folder: Path

    def predictions(self, sets: Iterable[str]) -> list[Path]:
        """Return the prediction files of some sets."""
        return [self.folder / PREDICTIONS / self.kind.file(name) for name in sets]


def evaluate_models(
    config: EvaluateConfig, names: Sequence[Place] | Place, *, out: str | Path, session: Session = ALONE
) -> Evaluation:
    """Fine-tune models on tasks, score them, and return means over seeds.

    Args:
        config: tasks, data and settings.
        names: names or folders of models and of runs, or results of trainings; one is a list of one.
        out: folder of trials. Finished trials in it are not run again.
        session: its progress shows the number of processed sequences. Its `should_stop` is called after each
            step; True stops. Trials that have ended are kept.

    Raises:
        CorpusError: the data of a task are missing or damaged.
        TeacherError: a model does not exist.
        InvalidConfigError: a setting is not valid for these models or this machine.
        IdentityMismatchError: a trial in `out` is damaged, or belongs to another evaluation.
        StorageError: a file cannot be written.
        InterruptedRunError: a stop was requested.
    """
    refuse_other_kind(config, EvaluateConfig)
    device, out = check_device(config.device), Path(out)
    places = [os.fspath(name) for name in ([names] if isinstance(names, str | os.PathLike) else names)]
    models, trials = _planned(config, places, out=out, session=session)
    trained = [model for model in models if not model.untrained]
    records = []
    for number, trial in enumerate(trials, 1):
        session.stop_if_asked(TRIALS_KEPT)
        record = _finished_record(trial, config)
        if record is None:
            refuse_unwritable(out)
        which = f"{number} of {len(trials)}"
        records.append(record or _run_trial(trial, config, device=device, session=session, which=which))
    summaries = summarise(records)
    remarks = (*_no_better_than_chance(trials, summaries), *_cut(trials, records), *_gone(trials, records))
    for remark in remarks:
        session.progress.note(remark)
    cards = [_card(model, summaries) for model in trained] if config.card else []
    num_other_versions = sum(
        any(record.versions.get(name, now) != now for name, now in _versions().items()) for record in records
    )
    if num_other_versions:
        session.progress.note(
            f"{num_other_versions} of {len(records)} trials were run with other versions of libraries; "
            "trial.json lists them. Give another --out to run these trials again."
        )
    folders = [trial.folder for trial in trials]
    return Evaluation(
        path=out, trials=records, folders=folders, summaries=summaries, cards=cards, remarks=remarks
    )


def check_evaluation(config: EvaluateConfig, names: Sequence[str], *, out: Path, session: Session) -> None:
    """Raise the error that an evaluation of models would end in before its first trial.

    Data are read for it, and models are not trained or scored.

    Args:
        config: tasks, data and settings.
        names: names or folders of models that are there already.
        out: folder of trials.
        session: its home is the folder of what is kept; nothing is shown.

    Raises:
        MiniLMCacheError: same as for `evaluate_models`.
    """
    check_device(config.device)
    refuse_file(out)
    session = session.with_progress(None)
    models = find_models(names, config.revision, note=session.progress.note, without_weights=True)
    for kind, _ in _tasks(config, session):
        for model in models:
            _fitted(config, model, kind, note=session.progress.note)


def _tasks(config: EvaluateConfig, session: Session) -> list[tuple[Kind[Any, Any], list[Track[Any]]]]:
    """Return the tasks and their tracks; refuse settings of generated texts where there are none."""
    tasks = [_read(config, name, session) for name in config.task]
    if config.generation_given is not None and all(kind.generation is None for kind, _ in tasks):
        titles = " and ".join(kind.task.title for kind, _ in tasks)
        raise InvalidConfigError(
            f"{config.generation_given} is about generated texts, and {titles} has none. Leave it out."
        )
    return tasks


def _fitted(
    config: EvaluateConfig, model: Evaluated, kind: Kind[Any, Any], *, note: Callable[[str], None]
) -> tuple[Kind[Any, Any], PreTrainedTokenizerFast]:
    """Return a task as a model does it, and its tokenizer, after all checks that need no weights."""
    if model.runtime is not None and not config.as_is:
        weight_files(model.folder)  # refuses one that was exported, which cannot be fine-tuned
    kind = kind.as_tuned(model, config) if config.as_is else kind
    tokenizer = model.tokenizer(kind.must_read)
    if remark := kind.check(model, tokenizer):
        note(remark)
    return kind, tokenizer


def _planned(
    config: EvaluateConfig, places: Sequence[str], *, out: Path, session: Session
) -> tuple[list[Evaluated], list[_Trial]]:
    """Return the models and the trials of an evaluation, after every check that needs no training."""
    refuse_file(out)
    models = find_models(places, config.revision, note=session.progress.note, untrained=config.untrained)
    if config.card:
        check_cards([model for model in models if not model.untrained], places)
    trials = [
        trial
        for kind, tracks in _tasks(config, session)
        for model in models
        for trial in _trials(config, model, kind=kind, tracks=tracks, out=out, note=session.progress.note)
    ]
    return models, trials


def _no_better_than_chance(trials: Sequence[_Trial], summaries: Sequence[Summary]) -> Iterator[str]:
    """Yield a remark for each task on models whose accuracy may be that of a constant answer."""
    tried = {(trial.identity.task, trial.track.name): trial for trial in trials}
    for (task, name), trial in tried.items():
        chances = trial.kind.by_chance(trial.track)
        ours = [summary for summary in summaries if (summary.task, summary.track) == (task, name)]
        models = [summary.model for summary in ours if chances and _may_be_chance(summary, chances)]
        shares = ", ".join(f"{100 * share:.1f} in {dev}" for dev, share in chances.items())
        if models:
            yield (
                f"{task} {name}".strip() + f": {some_of(models)} may be no better than chance, with so few "
                "examples or so little training: the commonest class of the training set, answered for "
                f"every text, has an accuracy of {shares}"
            )


def _cut(trials: Sequence[_Trial], records: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield a remark for each task of whose texts models have not read the ends."""
    most: dict[tuple[str, str], tuple[int, str]] = {}
    for trial, record in zip(trials, records, strict=True):
        sizes = _sizes(trial.track)
        for name, count in record.num_cut.items():
            if name not in sizes:  # a test set of an earlier run, which is not asked for now
                continue
            length = record.identity.max_length
            longest = trial.kind.longest_learned(length) if name == TRAIN else f"{length} tokens"
            words = cut_in_words(count, sizes[name], "text", most=longest)
            key = trial.kind.task.title, name
            most[key] = max(most.get(key, (0, "")), (count, words))
    for (title, name), (_, words) in most.items():
        yield f"{title}, {name}: {words}"


def _gone(trials: Sequence[_Trial], records: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield a remark for finished trials whose predictions somebody has removed."""
    gone = [
        str(trial.folder)
        for trial, record in zip(trials, records, strict=True)
        if not all(file.is_file() for file in trial.predictions(record.scores))
    ]
    if gone:
        yield f"predictions are gone from {some_of(gone)}. Remove these folders to make them again"


def _may_be_chance(summary: Summary, chances: Mapping[str, float]) -> bool:
    """Return whether accuracies are within two standard errors of shares, between 0 and 1, by dev set."""
    found = {name: summary.scores.get(name, {}).get("accuracy") for name in chances}
    return all(
        score is not None
        and score.mean / 100 <= chances[name] + 2 * sqrt(chances[name] * (1 - chances[name]) / count)
        for name, score in found.items()
        for count in (summary.num_scored.get(name, 1),)
    )


def _card(model: Evaluated, summaries: Sequence[Summary]) -> Path:
    return write_card(
        model, [summary for summary in summaries if summary.model == model.title and summary.scores]
    )


def _read(config: EvaluateConfig, name: str, session: Session) -> tuple[Kind[Any, Any], list[Track[Any]]]:
    """Return a task with the configured lengths, and its tracks."""
    whole, tracks = _whole_task(config, name, session)
    kind = whole.configured(config)
    task = kind.task
    tracks = [track.subset(config.max_train, config.max_dev) for track in tracks]
    if config.predict and not any(kind.predicts(track) for track in tracks):
        raise CorpusError(f"--predict: {task.title} has no test set to predict. Leave --predict out.")
    for track in tracks:
        sizes = ", ".join(f"{name} {len(examples):,}" for name, examples in track.sets().items())
        language = f" ({track.name})" if track.name else ""
        learned = "" if config.as_is else f"{len(track.train):,} training examples, "
        session.progress.note(f"{task.title}{language}: {learned}{sizes}")
        for name, examples in track.dev.items():
            labels = [each.label for each in examples if isinstance(each, TextExample)]
            if len(labels) > 1 and len(set(labels)) == 1:
                is_scale = isinstance(task, TextTask) and task.is_regression
                says = "no correlation says" if is_scale else "only their accuracy says"
                session.progress.note(
                    f"{task.title}{language}: all examples of {name} have one label, so that {says} something"
                )
    return kind, tracks


def text_task(config: EvaluateConfig, name: str, session: Session) -> tuple[TextTask, Track[TextExample]]:
    """Return a task of single texts or pairs in one language, and its examples.

    Args:
        config: where its data are.
        name: name of the task, or the file of one of your own.
        session: its progress shows what was found.

    Raises:
        CorpusError: the data are missing or damaged.
        InvalidConfigError: the task is about spans, or has several languages.
    """
    known = TASKS.get(name)
    is_served = isinstance(known, TextTask) and known.languages == "one"
    kind, tracks = (None, []) if known and not is_served else _whole_task(config, name, session)
    if kind is None or not isinstance(kind.task, TextTask):
        raise InvalidConfigError(f"--task {name}: take a task of single texts or pairs in one language.")
    return kind.task, tracks[0]


def _whole_task(
    config: EvaluateConfig, name: str, session: Session
) -> tuple[Kind[Any, Any], list[Track[Any]]]:
    if is_own_task(name):
        task, tracks = read_own_task(Path(name), config, session.progress.note)
        return kind_of(task), tracks
    assert config.data is not None
    kind, (folder, hub) = kind_of(TASKS[name]), data_source(config.data)
    source = Source(folder=folder, hub=hub, tests=config.predict, note=session.progress.note)
    return kind, kind.read(source)


def _trials(
    config: EvaluateConfig,
    model: Evaluated,
    *,
    kind: Kind[Any, Any],
    tracks: Sequence[Track[Any]],
    out: Path,
    note: Callable[[str], None],
) -> Iterator[_Trial]:
    kind, tokenizer = _fitted(config, model, kind, note=note)
    task = kind.task
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    tokenizer_sha256 = canonical_sha256(
        [tokenizer.backend_tokenizer.to_str(), tokenizer.model_input_names, special]
    )
    model_sha256 = model.sha256()
    for track in tracks:
        data_sha256 = track.sha256()
        if task.name not in TASKS:  # of one's own, whose kind, classes and metric are settings
            data_sha256 = canonical_sha256([data_sha256, *kind.own_settings()])
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
                    generation=kind.generation,
                )
                yield _Trial(
                    model=model,
                    kind=kind,
                    track=track,
                    tokenizer=tokenizer,
                    identity=identity,
                    folder=_folder(out / task.name, identity, model.slug),
                )


def _folder(parent: Path, identity: TrialIdentity, slug: str) -> Path:
    """Return a trial's folder: the existing one, even if the model had another name then, or a new one."""
    return next(parent.glob(f"*-{identity.digest()}"), parent / identity.name(slug))


def _finished_record(trial: _Trial, config: EvaluateConfig) -> TrialRecord | None:
    """Return the record of a finished trial. None means that it, its model or its predictions are missing."""
    file = trial.folder / TRIAL_FILE
    if not file.is_file():
        return None
    try:
        record = TrialRecord.model_validate_json(bounded_bytes(file, 2**20))
    except (OSError, ValidationError) as error:
        problem = error.strerror if isinstance(error, OSError) else error.errors(include_url=False)[0]["msg"]
        raise IdentityMismatchError(
            f"{file} is damaged: {problem}. Remove its folder, and run again."
        ) from error
    if record.identity != trial.identity:
        raise IdentityMismatchError(f"{file} belongs to another trial. Choose another --out.")
    if not _is_sound(record, trial.kind, trial.track):
        raise IdentityMismatchError(
            f"{file} is damaged: its scores are not those of this trial. Remove its folder, and run again."
        )
    if record.scores:
        asked = trial.track.predicted_sha256()
        has_files = all(file.is_file() for file in trial.predictions(trial.track.unlabelled()))
        lacks_tests = not has_files or (asked is not None and asked != record.predicted_sha256)
        lacks_model = config.keep_models and not (trial.folder / MODEL).is_dir()
        if lacks_tests or lacks_model:
            return None
    return record.model_copy(update={"model": trial.model.title})


def _sizes(track: Track[Any]) -> dict[str, int]:
    """Return the number of examples of each set, and of those to train on."""
    return {name: len(examples) for name, examples in {**track.sets(), TRAIN: track.train}.items()}


def _is_sound(record: TrialRecord, kind: Kind[Any, Any], track: Track[Any]) -> bool:
    """Return whether a record has the figures of a trial's sets, which belong together."""
    if not record.scores:
        return record.headline is None and not record.num_cut
    try:
        dev = {name: record.scores[name] for name in track.dev}
        headline = kind.headline(dev)
    except (KeyError, ValueError):  # a set or a metric is missing
        return False
    metrics = kind.task.metrics if isinstance(kind.task, TextTask) else ()
    sizes = _sizes(track)
    return (
        all(record.num_scored.get(name) == sizes[name] for name in dev)
        and record.scores.keys() == record.num_scored.keys()
        and all(0 < count <= sizes.get(name, count) for name, count in record.num_cut.items())
        # An earlier run may have predicted test sets that are not asked for now.
        and all(name.startswith("test") for name in record.num_cut.keys() - sizes.keys())
        and all(of_set.keys() == {*(metrics or of_set)} for of_set in dev.values())
        and record.headline is not None
        and isclose(record.headline, headline)
    )


def _run_trial(
    trial: _Trial, config: EvaluateConfig, *, device: torch.device, session: Session, which: str
) -> TrialRecord:
    identity = trial.identity
    name = f"{trial.kind.task.title}, {trial.model.title}, lr {identity.lr:g}, seed {identity.seed}"
    kind = trial.kind
    model = kind.load_as_is(trial.model) if config.as_is else kind.load(trial.model, identity.seed)
    with enough_memory(device, "Take a lower --batch-size or --max-length"):
        tuned = fine_tune(
            model,
            trial.tokenizer,
            kind=kind,
            track=trial.track,
            identity=identity,
            device=device,
            session=session,
            title=f"{name} ({which})",
        )
    track = trial.track
    scores = _scores(kind, track, tuned)
    record = TrialRecord(
        identity=identity,
        model=trial.model.title,
        num_train=len(track.train),
        num_scored={name: len(track.sets()[name]) for name in scores},
        num_cut={name: count for name, count in tuned.num_cut.items() if count and scores},
        train_s=tuned.train_s,
        scores=scores,
        headline=kind.headline({name: scores[name] for name in track.dev}) if scores else None,
        versions=_versions(),
        predicted_sha256=track.predicted_sha256(),
    )
    _write_trial(trial, config, tuned=tuned, record=record)
    return record


def _scores(kind: Kind[Any, Any], track: Track[Any], tuned: Tuned) -> dict[str, Scores]:
    """Return scores by set and metric. They are empty if the training diverged."""
    if tuned.predictions is None:
        return {}
    sets = track.sets()
    labelled = {name: sets[name] for name in tuned.predictions if is_labelled(sets[name])}
    return {name: kind.scores(name, examples, tuned.predictions[name]) for name, examples in labelled.items()}


def _write_trial(trial: _Trial, config: EvaluateConfig, *, tuned: Tuned, record: TrialRecord) -> None:
    """Write the folder of a trial, as a whole or not at all."""
    keeps_model = config.keep_models or (trial.folder / MODEL).is_dir()
    before = trial.folder / PREDICTIONS
    with saving("write trial", trial.folder), new_folder(trial.folder) as folder:
        (folder / TRIAL_FILE).write_text(record.model_dump_json(indent=1), encoding="utf-8")
        if before.is_dir():  # predictions of test sets from an earlier run of the same trial
            shutil.copytree(before, folder / PREDICTIONS, symlinks=True)
        (folder / PREDICTIONS).mkdir(exist_ok=True)
        for name, predicted in (tuned.predictions or {}).items():
            examples = trial.track.sets()[name]
            trial.kind.write(folder / PREDICTIONS, name, examples=examples, predicted=predicted)
        if keeps_model and tuned.predictions is not None:
            assert not isinstance(tuned.model, ExportedModel), "--as-is and --keep-models exclude each other"
            trial.kind.save(tuned.model, trial.tokenizer, track=trial.track, folder=folder / MODEL)


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}
