"""Find and load the models to evaluate: teachers, teacher assistants and students, trained or untrained."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.evaluate.settings import TRIAL_FILE
from minilm_cache.models.complete import pools_texts
from minilm_cache.models.exported import (
    ExportedModel,
    Runtime,
    exported_bytes,
    exported_sha256,
    load_to_run,
    runtime_of,
)
from minilm_cache.models.files import weight_files, weights_sha256
from minilm_cache.models.load import (
    TaskHead,
    check_positions,
    draw_weights,
    is_classifier,
    load_for_task,
    read_config,
)
from minilm_cache.models.locate import ALIASES, CONFIG, MINI, locate_teacher
from minilm_cache.models.pooling import SentenceEncoder, load_pooler, map_files
from minilm_cache.models.tokenizer import load_tokenizer, refuse_more_words, some_token
from minilm_cache.store.checked import sha256_file, sha256_texts
from minilm_cache.train.folder import RunFolder, is_run, refuse_no_models, runs_of
from minilm_cache.train.record import load_record
from minilm_cache.train.students import finished_record, unfinished_in_words
from minilm_cache.wording import some_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A model to evaluate."""

    name: str
    """Name of the model in tables, without `(untrained)`."""
    folder: Path
    untrained: bool = False
    """Whether only the shape is used, with weights drawn by each trial's seed."""

    @property
    def title(self) -> str:
        """Name of the model in tables."""
        return f"{self.name} (untrained)" if self.untrained else self.name

    def sha256(self) -> str:
        """Return the SHA-256 (hex) of its weights, configuration and pooling."""
        runtime = self.runtime
        weights = weights_sha256(self.folder) if runtime is None else exported_sha256(self.folder, runtime)
        texts = [sha256_file(self.folder / "config.json"), weights]
        if self.pools:
            width = read_config(self.folder).hidden_size
            pooler = load_pooler(self.folder, None, width)
            texts += [pooler.mode, pooler.dense_sha256() or ""]
            texts += [] if pooler.normalize else ["not scaled"]
        return sha256_texts(texts)

    @property
    def pools(self) -> bool:
        """Whether its folder says how it pools, as those of sentence encoders do."""
        return pools_texts(self.folder)

    @property
    def answers(self) -> bool:
        """Whether it gives logits: classes, or the score of a pair."""
        return is_classifier(read_config(self.folder)) and not self.pools

    @property
    def runtime(self) -> Runtime | None:
        """What runs it where it was exported. None means torch."""
        return runtime_of(self.folder)

    @property
    def num_bytes(self) -> int:
        """Bytes of its files of weights, those of linear maps behind its pooling included."""
        files = [*(weight_files(self.folder) if self.runtime is None else ()), *map_files(self.folder)]
        exported = 0 if self.runtime is None else exported_bytes(self.folder, self.runtime)
        return exported + sum(int(file.stat().st_size) for file in files)

    def encoder(self) -> SentenceEncoder | PreTrainedModel | ExportedModel:
        """Return the model without a head: with its pooling where the folder has one, and without otherwise.

        A classifier that was exported keeps its head.

        Raises:
            TeacherError: the folder holds no model, or a pooling that cannot be computed.
        """
        return SentenceEncoder.load(self.folder) if self.pools else load_to_run(self.folder)

    @property
    def slug(self) -> str:
        """Name of the model as a file name."""
        return "".join(char if char.isalnum() or char in "-." else "-" for char in self.name).strip("-.")

    def tokenizer(
        self, max_length: int, option: str = "--max-length", *, has_ends: bool = True
    ) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer, set to pad and truncate on the right, as windows and heads need it.

        Args:
            max_length: most tokens of a sequence.
            option: option that `max_length` comes from, for the error message.
            has_ends: whether it must have tokens that begin and end texts, as windows and heads need them.

        Raises:
            TeacherError: there is no tokenizer, it has more words than the model has embeddings, or the model
                has no padding token.
            InvalidConfigError: the model has fewer positions than `max_length`.
        """
        tokenizer = load_tokenizer(self.folder, has_ends=has_ends)
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        model = load_to_run(self.folder)
        refuse_more_words(tokenizer, model, self.folder)
        if getattr(model.config, "pad_token_id", None) is None:
            raise TeacherError(
                f"{self.folder}/config.json names no pad_token_id, which is needed to batch texts of "
                "different lengths. Set it there, or give an encoder."
            )
        # A runtime may read beyond a table of positions without a word.
        if self.runtime is not None and max_length > tokenizer.model_max_length:
            raise InvalidConfigError(
                f"{option} {max_length} is more than {self.name} reads, which are "
                f"{tokenizer.model_max_length} tokens by its tokenizer. Choose a smaller one."
            )
        ids = torch.full((1, max_length), some_token(tokenizer))
        with torch.no_grad():
            check_positions(model, model.config, name=self.name, ids=ids, option=option)
        return tokenizer


def load_with_head(
    model: Evaluated, head: TaskHead, seed: int, *, labels: Sequence[str] | None = None
) -> PreTrainedModel:
    """Return a model with a head; weights that its folder lacks are drawn by the seed.

    Args:
        model: model to load.
        head: what the head scores.
        seed: seed of the drawn weights, and of dropout after that.
        labels: labels of sequences, in the order of their numbers. None means another head.

    Raises:
        TeacherError: the folder has no model that can be loaded.
    """
    set_seed(seed)
    loaded = load_for_task(model.folder, head, labels)
    if not model.untrained:
        return loaded
    set_seed(seed)
    drawn = draw_weights(loaded.config, head, attention="sdpa")
    drawn.eval()
    return drawn


def _with_runs(names: Iterable[str], note: Callable[[str], None]) -> Iterator[str]:
    """Yield names of models; a chain or a study stands for its complete runs, and a note names the others."""
    for name in names:
        if left_out := unfinished_in_words(Path(name)):
            note(left_out)
        yield from [str(run) for run in runs_of(Path(name)) if load_record(run).complete] or [name]


def _doubled(models: Sequence[Evaluated]) -> set[str]:
    """Return the file names that several models would have."""
    slugs = [model.slug for model in models]
    return {slug for slug in slugs if slugs.count(slug) > 1}


def _told_apart(models: Sequence[Evaluated]) -> list[Evaluated]:
    """Return models, those of one name, such as a student and its export, with the names of their folders.

    Raises:
        InvalidConfigError: two still have one name.
    """
    alike = _doubled(models)
    told = [
        replace(model, name=f"{model.folder.resolve().parent.name}/{model.name}")
        if model.slug in alike and "/" not in model.name
        else model
        for model in models
    ]
    if alike := _doubled(told):
        doubled = next(model.name for model in told if model.slug in alike)
        raise InvalidConfigError(
            f"two models are called {doubled}. Rename a folder, so that tables can tell them apart."
        )
    return told


def _students_of(folder: Path, note: Callable[[str], None]) -> list[Evaluated]:
    """Return the students of a run that did not diverge; those that did are named in a note."""
    record, run = finished_record(folder), folder.resolve().name
    lost = record.diverged
    if not record.trained:
        raise TeacherError(f"{folder}: all students diverged. Train them again with a lower --lr.")
    if lost:
        note(f"{run}: {some_of(lost)} diverged, and {'are' if len(lost) > 1 else 'is'} left out")
    return [
        Evaluated(name=f"{run}/{student.arch}", folder=RunFolder(path=folder).student(student.arch))
        for student in record.trained
    ]


def find_models(
    names: Sequence[str],
    revision: str | None,
    *,
    note: Callable[[str], None],
    untrained: bool = False,
    without_weights: bool = False,
) -> list[Evaluated]:
    """Return the models that the names stand for. A run stands for its students that did not diverge.

    Args:
        names: `mini`, aliases, hub ids, folders of models, of runs, of chains or of studies.
        revision: revision of models from the hub; runs have none. None means the default revision.
        note: shows a line; students that diverged are named.
        untrained: whether to return each model's shape with random weights, too.
        without_weights: whether configurations and tokenizers are enough of models that are no runs.

    Raises:
        TeacherError: a model does not exist, or all students of a run diverged.
        InvalidConfigError: two models have the same name, or there is a revision of runs alone.
    """
    models: list[Evaluated] = []
    found = list(_with_runs(dict.fromkeys(names), note))
    if revision is not None and all(is_run(Path(name)) for name in found):
        raise InvalidConfigError(
            f"--revision {revision} goes with a model from the hub; {found[0]} is a run."
        )
    for name in found:
        folder = Path(name)
        if is_run(folder):
            models += _students_of(folder, note)
        else:
            if name not in (MINI, *ALIASES) and folder.is_dir():
                refuse_no_models(folder)
                if runs_of(folder) and not (folder / CONFIG).is_file():
                    raise TeacherError(f"none of the runs of {folder} is complete. Finish one of them first.")
            source = locate_teacher(name, revision, without_weights=without_weights)
            trial = source.folder.resolve().parent  # all models that trials keep have one name
            own_name = trial.name if (trial / TRIAL_FILE).is_file() else source.name
            models.append(Evaluated(name=own_name, folder=source.folder))
    once: dict[Path, Evaluated] = {}
    for model in models:  # a run, and a study that has it, name the same students
        once.setdefault(model.folder.resolve(), model)
    models = _told_apart(list(once.values()))
    return models + [replace(model, untrained=True) for model in models if untrained]


def find_model(name: str, revision: str | None, *, note: Callable[[str], None]) -> Evaluated:
    """Return the one model that a name stands for; arguments and errors: see `find_models`.

    Raises:
        InvalidConfigError: the name stands for several models.
    """
    models = find_models([name], revision, note=note)
    if len(models) != 1:
        raise InvalidConfigError(
            f"{name} is a run of {len(models)} students. Name the folder of one: {models[0].folder}."
        )
    return models[0]
