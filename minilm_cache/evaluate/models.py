"""The models that are evaluated: teachers, assistants and students alike, whole or by their shape alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.evaluate.tasks import SpanTask, Task
from minilm_cache.models.files import weights_sha256
from minilm_cache.models.load import (
    HEADS,
    TaskHead,
    check_positions,
    load_for_task,
    load_model,
    load_tokenizer,
    locate_teacher,
)
from minilm_cache.store.fingerprint import sha256_file, sha256_texts
from minilm_cache.train.folder import RUN_FILE, RunFolder, is_run
from minilm_cache.train.record import load_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A model by the name that tables have for it."""

    name: str
    folder: Path
    untrained: bool = False
    """Of its shape alone: weights are drawn by each trial's seed."""

    @property
    def title(self) -> str:
        """Its name in tables."""
        return f"{self.name} (untrained)" if self.untrained else self.name

    def sha256(self) -> str:
        """Return the SHA-256 (hex) of its weights and configuration."""
        return sha256_texts([sha256_file(self.folder / "config.json"), weights_sha256(self.folder)])

    @property
    def slug(self) -> str:
        """Its name as that of a file."""
        return "".join(char if char.isalnum() or char in "-." else "-" for char in self.name).strip("-.")

    def tokenizer(self, max_length: int, option: str = "--max-length") -> PreTrainedTokenizerFast:
        """Return its tokenizer, which pads and cuts at the end, as windows and heads have it.

        Args:
            max_length: tokens that a sequence may have.
            option: that they were given by.

        Raises:
            TeacherError: there is none, it knows more words than the model, or the model knows no padding.
            InvalidConfigError: the model has fewer positions.
        """
        tokenizer = load_tokenizer(self.folder)
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        model = load_model(self.folder, attention="sdpa")
        table = model.get_input_embeddings()
        rows = table.num_embeddings if isinstance(table, nn.Embedding) else len(tokenizer)
        if len(tokenizer) > rows:
            raise TeacherError(
                f"the tokenizer in {self.folder} has {len(tokenizer)} words, and the model {rows} "
                "embeddings. Save the tokenizer that it was trained with there."
            )
        if getattr(model.config, "pad_token_id", None) is None:
            raise TeacherError(
                f"{self.folder}/config.json names no pad_token_id, without which texts of several lengths "
                "cannot be read together. Set it there, or give an encoder."
            )
        ids = torch.full((1, max_length), tokenizer.cls_token_id)
        with torch.no_grad():
            check_positions(model, model.config, name=self.name, ids=ids, option=option)
        return tokenizer

    def load(self, task: Task, seed: int) -> PreTrainedModel:
        """Return it with a head for a task; what it lacks is drawn by the seed.

        Raises:
            TeacherError: the folder holds no model that it can be loaded from.
        """
        set_seed(seed)
        head: TaskHead = "spans" if isinstance(task, SpanTask) else "sequences"
        labels = None if isinstance(task, SpanTask) else task.labels
        model = load_for_task(self.folder, head, labels)
        if not self.untrained:
            return model
        set_seed(seed)
        drawn: PreTrainedModel = HEADS[head].from_config(
            model.config, attn_implementation="sdpa", dtype=torch.float32
        )
        drawn.eval()
        return drawn


def find_models(names: Sequence[str], revision: str | None, *, untrained: bool) -> list[Evaluated]:
    """Return the models that names stand for: of a run, all students that did not diverge.

    Args:
        names: `mini`, aliases, hub ids, folders of models or of runs.
        revision: of models from the hub.
        untrained: each model's shape, too.

    Raises:
        TeacherError: there is no such model.
        InvalidConfigError: two have one name.
    """
    found: list[Evaluated] = []
    for name in dict.fromkeys(names):
        folder = Path(name)
        if is_run(folder):
            if revision is not None:
                raise InvalidConfigError(
                    f"--revision {revision} goes with a model from the hub; {name} is a run."
                )
            students = [one for one in load_record(folder).students if one.diverged_at is None]
            run = folder.resolve().name
            found += [
                Evaluated(name=f"{run}/{one.arch}", folder=RunFolder(path=folder).student(one.arch))
                for one in students
            ]
        elif folder.is_dir() and not (folder / "config.json").is_file():
            raise TeacherError(
                f"{folder} is no model, for it holds no config.json, and no run, for it holds no {RUN_FILE}. "
                "Name a folder that does."
            )
        else:
            source = locate_teacher(name, revision)
            found.append(Evaluated(name=source.name, folder=source.folder))
    slugs = [one.slug for one in found]
    doubled = next((one.name for one in found if slugs.count(one.slug) > 1), None)
    if doubled is not None:
        raise InvalidConfigError(
            f"two models are called {doubled}. Rename a folder, so that tables can tell."
        )
    shapes = (
        [Evaluated(name=one.name, folder=one.folder, untrained=True) for one in found] if untrained else []
    )
    return found + shapes
