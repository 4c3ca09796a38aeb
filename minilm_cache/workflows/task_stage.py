"""TinyBERT's task stage: students of a fine-tuned teacher's answers, over a task's own texts and copies.

The task's training texts, without their labels, and augmented copies of them are dumped once; students learn
the teacher's layers, if wanted, and then its answers, and are scored as they are (Jiao et al. 2020, arXiv
1909.10351, section 3.2). Texts of pairs can be paired anew, with near ones, which is the semantic search
sampling of Augmented SBERT (Thakur et al. 2021, arXiv 2010.08240, section 3.1). Everything that is made is
an ordinary file, cache or run in one folder.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minilm_cache.cache import open_cache
from minilm_cache.dump.augment import augment
from minilm_cache.dump.config import AugmentConfig, DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import CorpusError, IdentityMismatchError, first_line
from minilm_cache.evaluate.examples import TextExample, Track, sample_examples
from minilm_cache.evaluate.models import find_models
from minilm_cache.evaluate.own_task import note_overlap
from minilm_cache.evaluate.run import Evaluation, evaluate_models, text_task
from minilm_cache.evaluate.settings import is_own_task
from minilm_cache.evaluate.texts import TextKind, class_order, classes_of
from minilm_cache.models.files import weights_sha256
from minilm_cache.models.load import read_config
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import SentenceModel
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import option_of, validated
from minilm_cache.store.durable import new_file, read_bounded, refuse_file, storage_errors
from minilm_cache.train.config import TrainConfig, check_parts
from minilm_cache.train.initial import model_folder
from minilm_cache.train.ranks import refuse_ranks
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.workflows.config import RENAMED, TaskStageConfig, evaluation_of
from minilm_cache.workflows.further_pairs import encoder_of_pairs, other_classes, write_further_pairs
from minilm_cache.workflows.stages import check_student, check_training, refuse_foreign

TEXTS, COPIES, MINED = "texts.jsonl", "augmented.jsonl", "mined.jsonl"
CACHE, RUN, TRIALS = "cache", "run", "evaluations"
"""Names of what is made, in the folder of the stage."""
_STATED: Final = "stage.json"
_MADE_BY: Final = {"augment": "augment_weights", "mine": "mine_weights"}
"""Names there of the SHA-256 of the weights that made copies of the texts, and further pairs of them."""
_MAX_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStage:
    """What a task stage has made."""

    path: Path
    num_texts: int
    """Texts, or pairs, that the task has to train on."""
    run: TrainResult
    evaluation: Evaluation
    """Scores of the teacher and of the students, as they are."""


def run_task_stage(
    config: TaskStageConfig,
    *,
    dump: Mapping[str, Any],
    train: Mapping[str, Any],
    out: Path,
    session: Session = ALONE,
) -> TaskStage:
    """Dump a fine-tuned teacher over the texts of its task, train students on its answers, and score them.

    What is complete is not done again.

    Args:
        config: the task, and what students learn from it.
        dump: settings of `DumpConfig`, by name; the teacher, its device, ...
        train: settings of `TrainConfig`, by name; shapes, steps, ...
        out: folder of everything that is made.
        session: its home is the folder of tokens. Its progress shows each part. Its `should_stop` is called
            before each step; True stops.

    Raises:
        IdentityMismatchError: the folder is of another stage.
        MiniLMCacheError: see the functions of dumps, trainings and evaluations.
    """
    refuse_ranks("a task stage", "it has made")
    assert config.task is not None
    shared = {name: dump[name] for name in ("max_length", "device") if name in dump}
    evaluating = evaluation_of(config, {**shared, "revision": dump.get("revision")})
    task, track = text_task(evaluating, config.task, session)
    examples = _learned(config, track, session)
    teacher = str(dump["teacher"])
    for model in find_models([teacher], dump.get("revision"), note=session.progress.note):
        TextKind(task).as_tuned(model, evaluating)  # refuses one of other classes before anything is made
    of_teacher = classes_of(read_config(locate_teacher(teacher, dump.get("revision")).folder))
    is_pair = len(examples[0].texts) > 1
    encoder = None if config.mine is None else encoder_of_pairs(config.mine, dump, is_pair=is_pair)
    labels, own = None, {}
    if "label_weight" in train:  # each label by the teacher's name of it
        labels = [of_teacher[number] for number in class_order(of_teacher, task.labels) or ()] * bool(
            task.labels
        )
        own = {"own_labels": str(out / (TEXTS if config.mine is None else MINED))}
    training = _training(config, {**train, **own}, len(of_teacher))
    columns = {"pair_columns": "first,second"} if is_pair else {"text_column": "text"}
    served = ["tinybert"] * config.intermediate + ["tinybert-prediction"]
    stored = {"for": served} if config.intermediate else {"codec": "none", "logits": True}
    settings = {**dump, **columns, **stored, "packing": "pairs" if is_pair else "records"}
    planned = validated(DumpConfig, settings, RENAMED)
    _check_training(training, planned, begun=config.student)
    refuse_file(out)
    _write_texts(config, examples, out, labels=labels, max_length=planned.max_length)
    corpus = _with_more(config, examples, encoder, out=out, session=session, more={**columns, **shared})
    dump_cache(planned.with_changes(corpus=str(corpus)), out=out / CACHE, session=session)
    if encoder is not None and config.augment is None and len(of_teacher) > 1:
        for remark in other_classes(open_cache(out / CACHE), len(examples), of_teacher):
            session.progress.note(remark)
    run = train_students(training, out / CACHE, out=out / RUN, session=session)
    evaluation = evaluate_models(evaluating, [teacher, str(run.path)], out=out / TRIALS, session=session)
    return TaskStage(path=out, num_texts=len(examples), run=run, evaluation=evaluation)


def _learned(config: TaskStageConfig, track: Track[TextExample], session: Session) -> Sequence[TextExample]:
    """Return the examples to learn from, without empty texts, of which a teacher has nothing to read.

    Raises:
        CorpusError: all are empty.
    """
    name, examples = str(config.task), sample_examples(track.train, config.max_train)
    kept = [example for example in examples if all(text.strip() for text in example.texts)]
    if not kept:
        raise CorpusError(f"--task {name}: no example has a text. Name other columns, or give other data.")
    if lacking := len(examples) - len(kept):
        session.progress.note(
            f"{lacking:,} of {len(examples):,} examples have an empty text and are left out"
        )
    if is_own_task(name):
        learned, scored = ([each.texts for each in some] for some in (kept, *track.dev.values()))
        note_overlap(Path(name), learned, scored, note=session.progress.note)
    return kept


def _check_training(training: TrainConfig, dump: DumpConfig, *, begun: str | None) -> None:
    """Check the settings of the training, and of the dump before it, before texts are written.

    `begun` is the run whose students are trained further. None means that students begin anew.
    """
    check_parts(training)
    config = read_config(locate_teacher(dump.teacher, dump.revision, without_weights=True).folder)
    check_training(training, dump, depth=config.num_hidden_layers)
    for arch in training.arch:
        if begun is not None:
            model_folder(Path(begun), arch, "--student")
        check_student(training, arch, config, heads=config.num_attention_heads)


def _training(config: TaskStageConfig, train: Mapping[str, Any], num_classes: int) -> TrainConfig:
    """Return the settings of the training: one objective, or the teacher's layers first.

    Raises:
        InvalidConfigError: a setting is not valid.
    """
    answers = "score" if num_classes == 1 and not config.intermediate else "tinybert-prediction"
    settings: dict[str, Any] = {"objective": answers, "dropout": "none", **train}
    if config.intermediate:
        settings = {"first": "tinybert", **settings}
    if config.student is not None:
        settings["init"] = config.student
    return validated(TrainConfig, settings)


def _write_texts(
    config: TaskStageConfig,
    examples: Sequence[TextExample],
    out: Path,
    *,
    labels: Sequence[str] | None,
    max_length: int,
) -> None:
    """Write the texts of examples once, with their labels only if students learn these.

    Labels are the teacher's names of the task's classes, empty for values on a scale; None means that they
    stay out. The length is the most tokens that are read of a text, also for copies and further pairs.

    Raises:
        IdentityMismatchError: the folder has the texts of another stage, or is not empty.
        StorageError: the folder cannot be written to.
    """
    mined = {"mine", "mined"} if config.mine is not None else set()
    stated = config.model_dump(mode="json", include={"task", "max_train", "augment", "copies"} | mined)
    stated["label_weight"] = True if labels is not None else None
    if config.augment is not None or config.mine is not None:
        stated["max_length"] = max_length
    for option, name in _MADE_BY.items():
        model = getattr(config, option)
        if model is not None:
            stated[name] = weights_sha256(locate_teacher(model).folder)
    file, content = out / TEXTS, "".join(_lines(examples, labels)).encode()
    with storage_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
        if (out / _STATED).exists():
            _refuse_other(out, stated, content)
            return
        refuse_foreign(out, "task stage", own=(TEXTS,))
        if file.exists() and file.read_bytes() != content:
            raise IdentityMismatchError(f"{out} holds other texts ({TEXTS}). Choose another --out.")
        with new_file(file) as opened:
            opened.write(content)
        with new_file(out / _STATED) as opened:
            opened.write((json.dumps(stated, indent=1) + "\n").encode())


def _lines(examples: Sequence[TextExample], labels: Sequence[str] | None) -> Iterator[str]:
    for example in examples:
        names = ("text",) if len(example.texts) == 1 else ("first", "second")
        row: dict[str, object] = dict(zip(names, example.texts, strict=True))
        if labels is not None:
            row["label"] = (
                labels[int(example.label)] if labels and example.label is not None else example.label
            )
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _refuse_other(out: Path, stated: Mapping[str, object], texts: bytes) -> None:
    """Raise IdentityMismatchError where a folder is of another stage, or of other texts."""
    try:
        known = json.loads(read_bounded(out / _STATED, _MAX_BYTES))
        # Stages of earlier releases do not say which weights made their copies, and of which length.
        later = {*_MADE_BY.values(), "max_length"}
        compared = [name for name in {**stated, **known} if name not in later or name in known]
        other = [name for name in compared if known.get(name) != stated.get(name)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise IdentityMismatchError(
            f"{out / _STATED} is damaged: {first_line(error)}. Choose another --out."
        ) from error
    if other or not (out / TEXTS).is_file() or (out / TEXTS).read_bytes() != texts:
        options = [option_of(name) for name in other if name not in _MADE_BY.values()]
        weights = [f"the weights of --{option}" for option, name in _MADE_BY.items() if name in other]
        what = ", ".join(options or weights) or "the task's texts"
        raise IdentityMismatchError(f"{out} was begun with other settings: {what}. Choose another --out.")


def _with_more(
    config: TaskStageConfig,
    examples: Sequence[TextExample],
    encoder: SentenceModel | None,
    *,
    out: Path,
    session: Session,
    more: Mapping[str, object],
) -> Path:
    """Return the file of the stage's texts with their copies and further pairs, each made once."""
    corpus = out / TEXTS
    if config.augment is not None:
        settings = {"teacher": config.augment, "corpus": str(corpus), "copies": config.copies, **more}
        corpus = out / COPIES
        if not corpus.exists():
            augment(validated(AugmentConfig, settings), corpus, session=session)
    if encoder is None:
        return corpus
    if not (out / MINED).exists():
        write_further_pairs(
            [(example.texts[0], example.texts[1]) for example in examples],
            encoder,
            out / MINED,
            corpus=corpus,
            each=config.mined,
            has_copies=config.augment is not None,
            session=session,
        )
    return out / MINED
