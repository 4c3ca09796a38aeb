"""Saves a trained student as a Hugging Face folder, with a card that names what is untrained."""

import json
import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import transformers
from huggingface_hub import ModelCardData
from torch import nn
from transformers import PreTrainedTokenizerFast

from minilm_cache.errors import CacheCorruptError, TeacherError, first_line
from minilm_cache.models.arch import own_seed
from minilm_cache.models.locate import ALIASES, MINI, MINI_ID
from minilm_cache.models.prompts import GIVEN, Prompts, prompts_of
from minilm_cache.models.student_tokens import StudentTokens
from minilm_cache.models.tap import Head
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.models.truncate import saving
from minilm_cache.storage_schema.base import REMEDY
from minilm_cache.storage_schema.manifest import (
    PROMPTS_FILE,
    TEACHER_FOLDER,
    TEACHER_PROMPTS,
    TOKENIZER_FILES,
    CacheManifest,
)
from minilm_cache.store.durable import new_folder
from minilm_cache.store.reader import CacheReader
from minilm_cache.train.record import (
    ANOTHER_MODEL,
    RunIdentity,
    RunRecord,
    StudentRecord,
    VocabularyRecord,
    measure_in_words,
)
from minilm_cache.train.trainer import StudentTrainer
from minilm_cache.wording import rendered


def save_student(
    folder: Path,
    trainer: StudentTrainer,
    *,
    reader: CacheReader,
    run: RunRecord,
    record: StudentRecord,
    tokens: StudentTokens | None = None,
) -> None:
    """Write a folder of a student that `AutoModel.from_pretrained` and `AutoTokenizer.from_pretrained` open.

    Args:
        folder: folder of the student.
        trainer: the student.
        reader: reader of the cache, whose tokenizer the student gets where `tokens` is None.
        run: record of the run.
        record: record of the student.
        tokens: how the student reads the sequences of the cache. None means that it reads its token ids.

    Raises:
        StorageError: the file system refused.
        CacheCorruptError: the tokenizer in the cache is damaged.
    """
    model = trainer.model.model
    is_scoring = trainer.learner.objective.needs.head == "sequences" and model.config.num_labels == 1
    if is_scoring and not getattr(model.config, "sentence_transformers", None):
        # The scores that were learned are logits: CrossEncoder would put a sigmoid over them, unless the
        # teacher's configuration, which the student has, says what it puts there.
        model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    with saving("write student", folder), new_folder(folder) as new:
        if tokens is None:
            _write_tokenizer(reader, new)
        else:
            tokens.tokenizer.backend_tokenizer.no_truncation()  # a setting of the last texts that it read
            tokens.tokenizer.save_pretrained(new)
        objective = trainer.learner.objective
        is_of_texts = objective.needs.head == "sequences" or objective.sentence_pooler is not None
        # What opens the folder would read as many tokens as there are positions, or as a donor said.
        most = reader.manifest.identity.packing.max_length if is_of_texts else None
        _as_trained(new / "tokenizer_config.json", most)
        model.save_pretrained(new)
        _save_pooling(new, trainer, reader=reader, run=run)
        frozen = model.get_input_embeddings() if run.identity.frozen else None
        untrained = untrained_modules(model, kept=frozen)
        if objective.sentence_pooler is not None:  # vectors of texts have no use for it
            untrained = [name for name in untrained if name.rpartition(".")[2] != "pooler"]
        (new / "README.md").write_text(
            student_card(
                reader.manifest,
                run.identity,
                record=record,
                untrained=untrained,
                head=objective.needs.head,
                similarity=_similarity(trainer),
                vocabulary=run.vocabulary,
                prompt_name=_named_prompt(reader),
            ),
            encoding="utf-8",
        )


def _named_prompt(reader: CacheReader) -> str | None:
    """Return the prompt of every text that `encode` must be told. None means that there is none to tell."""
    prompts, words = student_prompts(reader), reader.manifest.identity.packing.prompt
    if words is None or prompts.default is not None:
        return None
    return next(name for name, prompt in prompts.by_name.items() if prompt == words)


def _similarity(trainer: StudentTrainer) -> str | None:
    """Return what compares a student's vectors of texts: `cosine` or `dot`. None means that it has none."""
    objective = trainer.learner.objective
    return None if objective.sentence_pooler is None else objective.similarity or "cosine"


def _save_pooling(folder: Path, trainer: StudentTrainer, *, reader: CacheReader, run: RunRecord) -> None:
    """Add to a student's folder how its vectors are made and compared, and the prompts of its texts."""
    objective, manifest = trainer.learner.objective, reader.manifest
    pooler, similarity = objective.sentence_pooler, objective.similarity
    learns_lengths = any(part.startswith("mse") for part in run.identity.loss)
    if pooler is not None and similarity is None and not pooler.normalize and learns_lengths:
        similarity = _teacher_prompts(reader).similarity
    if pooler is not None:
        pooler.save(
            folder,
            hidden_size=trainer.model.model.config.hidden_size,
            max_length=manifest.identity.packing.max_length,
        )
    prompts = student_prompts(reader)
    has_prompts = prompts.by_name and (pooler is not None or manifest.labels.role_column is not None)
    if has_prompts or similarity is not None:
        (folder / PROMPTS_FILE).write_bytes(prompts._replace(similarity=similarity).to_json())


def student_prompts(reader: CacheReader) -> Prompts:
    """Return the prompts that students get: the teacher's, and what every text of the cache begins with.

    Raises:
        CacheCorruptError: the prompts in the cache are damaged.
    """
    prompts = _teacher_prompts(reader)
    words = reader.manifest.identity.packing.prompt
    if words is None:
        # Columns name the prompts of texts; else no text had one, and so none is the default.
        return prompts if reader.manifest.labels.role_column is not None else prompts._replace(default=None)
    names = chain([GIVEN], (f"{GIVEN}-{number}" for number in count(2)))
    free = next(name for name in names if name not in prompts.by_name)
    known = next((name for name, prompt in prompts.by_name.items() if prompt == words), free)
    # A text without a prompt stays one, but the teacher's default is not what the student has read.
    return Prompts({**prompts.by_name, known: words}, None if prompts.default is None else known)


def _teacher_prompts(reader: CacheReader) -> Prompts:
    """Return a teacher's prompts, and what compares its vectors, as a cache has them.

    Raises:
        CacheCorruptError: they are damaged.
    """
    if TEACHER_PROMPTS not in reader.manifest.files:
        return Prompts({})
    try:
        content = json.loads(reader.attachment(TEACHER_PROMPTS))
        return prompts_of(content, TEACHER_PROMPTS)
    except (ValueError, RecursionError, TeacherError) as error:
        raise CacheCorruptError(f"{TEACHER_PROMPTS} of the cache: {first_line(error)} {REMEDY}") from error


def cached_tokenizer(reader: CacheReader) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a cache holds.

    Raises:
        TeacherError: the cache holds no usable tokenizer.
    """
    with TemporaryDirectory() as folder:
        _write_tokenizer(reader, Path(folder))
        return load_tokenizer(Path(folder), has_ends=False)


def _write_tokenizer(reader: CacheReader, folder: Path) -> None:
    """Write the files of the tokenizer that a cache holds.

    Raises:
        CacheCorruptError: it holds none.
    """
    if not any(f"{TEACHER_FOLDER}/{name}" in reader.manifest.files for name in TOKENIZER_FILES):
        raise CacheCorruptError(f"{reader.root} holds no tokenizer. {REMEDY}")
    for name in TOKENIZER_FILES:
        path = f"{TEACHER_FOLDER}/{name}"
        if path in reader.manifest.files:
            (folder / name).write_bytes(safe_tokenizer_file(name, reader.attachment(path)))


def _as_trained(file: Path, max_length: int | None) -> None:
    """Let a tokenizer pad and cut texts on the right, as trainings do, and to a number of tokens.

    Args:
        file: its settings, which the teacher or a donor may have had otherwise.
        max_length: most tokens where it is asked to cut. None means what the file says.
    """
    settings: dict[str, object] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    sides = {name: "right" for name in ("padding_side", "truncation_side") if settings.get(name) == "left"}
    lengths = {} if max_length is None else {"model_max_length": max_length}
    if sides or lengths:
        file.write_text(json.dumps({**settings, **sides, **lengths}, indent=1), encoding="utf-8")


def safe_tokenizer_file(name: str, content: bytes) -> bytes:
    """Return a file of a tokenizer without keys that would select code or a chat template.

    Raises:
        CacheCorruptError: the file is not a JSON object.
    """
    if name != "tokenizer_config.json":
        return content
    try:
        settings = json.loads(content)
        kept = {key: value for key, value in settings.items() if key not in _DROPPED_TOKENIZER_KEYS}
    except (ValueError, AttributeError, RecursionError) as error:
        raise CacheCorruptError(
            f"{TEACHER_FOLDER}/{name} of the cache is not a JSON object. Fetch the cache again or redo the "
            "dump."
        ) from error
    kind = getattr(transformers, str(kept.get("tokenizer_class")), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedTokenizerBase)):
        kept.pop("tokenizer_class", None)
    return json.dumps(kept, indent=2, ensure_ascii=False).encode()


_DROPPED_TOKENIZER_KEYS: Final = frozenset({"auto_map", "chat_template", "name_or_path"})
"""Keys of an untrusted tokenizer configuration that are not copied to students."""
_PIPELINES: Final[dict[Head | None, str]] = {
    None: "feature-extraction",
    "tokens": "fill-mask",
    "sequences": "text-classification",
}
_TERMS: Final = {
    MINI_ID: ("apache-2.0", "en"),
    ALIASES["bert-base"]: ("apache-2.0", "en"),
    ALIASES["bert-large"]: ("apache-2.0", "en"),
    ALIASES["xlm-r-base"]: ("mit", "multilingual"),
}
"""Licence and language of the models that have names here; those of others are for the publisher to state."""


def untrained_modules(model: nn.Module, kept: nn.Module | None = None) -> list[str]:
    """Return the outermost modules none of whose weights are trained.

    Args:
        model: the model.
        kept: a module that the user wants unchanged, which is not returned. None means no such module.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        weights = list(module.parameters())
        is_within = any(name.startswith(f"{outer}.") for outer in names)
        if (
            weights
            and module is not kept
            and not is_within
            and not any(weight.requires_grad for weight in weights)
        ):
            names.append(name)
    return names


_CLASSES: Final[dict[Head | None, tuple[str, str]]] = {
    None: ("AutoModel", "last_hidden_state"),
    "tokens": ("AutoModelForMaskedLM", "logits"),
    "sequences": ("AutoModelForSequenceClassification", "logits"),
}
"""Class that opens a student, and its output, by the student's head."""
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _base_model(teacher: str) -> str | None:
    """Return the hub id of a teacher. None means that it is not known to be from the hub."""
    if teacher == MINI:
        return MINI_ID
    name = ALIASES.get(teacher, teacher)
    return name if _HUB_ID.fullmatch(name) else None


def student_card(
    manifest: CacheManifest,
    identity: RunIdentity,
    *,
    record: StudentRecord,
    untrained: Sequence[str],
    head: Head | None,
    similarity: str | None = None,
    vocabulary: VocabularyRecord | None = None,
    prompt_name: str | None = None,
) -> str:
    """Return the model card.

    Args:
        manifest: manifest of the cache.
        identity: identity of the run.
        record: record of the student.
        untrained: names of modules that keep their initial values.
        head: head of the student. None means no head.
        similarity: what compares its vectors of texts. None means that it has none.
        vocabulary: the pieces that the student has. None means all of the teacher's.
        prompt_name: name of the prompt that texts begin with. None means none, or the default one.
    """
    pair = manifest.identity.packing.pair
    is_scorer = head == "sequences" and pair is not None and manifest.identity.num_classes == 1
    of_texts = {"similarity": "sentence-similarity", "scores": "text-ranking"}
    use = "similarity" if similarity is not None else "scores" if is_scorer else None
    is_of_donor = record.init == ANOTHER_MODEL  # whose licence is not known here
    base_model = None if is_of_donor else _base_model(manifest.labels.teacher)
    licence, language = _TERMS.get(base_model or "", (None, None))
    data = ModelCardData(
        license=licence,
        language=language,
        library_name="transformers" if use is None else "sentence-transformers",
        pipeline_tag=_PIPELINES[head] if use is None else of_texts[use],
        base_model=base_model,
        tags=["minilm-cache", "knowledge-distillation"],
    )
    auto_class, output = _CLASSES[head]
    return rendered(
        "minilm_cache.train",
        "card.md.jinja",
        data=data.to_yaml(),
        manifest=manifest,
        teacher=manifest.identity.teacher,
        identity=identity,
        record=record,
        untrained=untrained,
        vocabulary=vocabulary,
        prompt_name=prompt_name,
        measure=measure_in_words(identity, record),
        use=use,
        similarity=similarity,
        auto_class=auto_class,
        output=output,
        seed=identity.seed if (own := own_seed(record.arch)) is None else own,
        reads_pairs=pair is not None,
        is_limited=head == "sequences",
    )
