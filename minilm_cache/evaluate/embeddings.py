"""Compare students of sentence encoders with their teacher by embeddings, without fine-tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from minilm_cache.errors import CorpusError, InvalidConfigError, TeacherError, first_line, needs
from minilm_cache.evaluate.examples import TextExample, sample_examples
from minilm_cache.evaluate.files import Source, data_source
from minilm_cache.evaluate.glue import read_dev
from minilm_cache.evaluate.metrics import text_scores
from minilm_cache.evaluate.models import Evaluated, find_models
from minilm_cache.evaluate.settings import EmbeddingsConfig
from minilm_cache.evaluate.tasks import TASKS, TextTask
from minilm_cache.models.classifier import refuse_answers
from minilm_cache.models.complete import text_length
from minilm_cache.models.device import choose_device, enough_memory
from minilm_cache.models.exported import ExportedModel
from minilm_cache.models.load import IN_FLOAT32, read_config, usable_length
from minilm_cache.models.pooling import load_pooler
from minilm_cache.models.prompts import read_prompts
from minilm_cache.models.tokenizer import load_tokenizer, tokenizer_sha256
from minilm_cache.models.truncate import saving
from minilm_cache.session import ALONE, NOTHING_KEPT, Session
from minilm_cache.store.durable import bounded_bytes, new_folder, prepare_new, refuse_file
from minilm_cache.store.layout import CARD
from minilm_cache.train.folder import refuse_run_as_teacher
from minilm_cache.wording import cut_in_words

with needs("embeddings", "sentence-transformers,eval"):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import InputModule, Transformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

if TYPE_CHECKING:
    from mteb import AbsTask

Vectors = npt.NDArray[np.float64]
"""Unit vectors, `(texts, width)`."""
_KEPT: Final = "interrupted: models that were saved are kept. Run it again with another --save."
_COUNTED_AT_ONCE: Final = 256
"""Texts whose tokens are in memory at once where those that are cut are counted."""
BATCHES_OF_A_PART: Final = 16
"""Batches that are encoded between two steps of the progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingScores:
    """Scores of a model's embeddings, without fine-tuning."""

    model: str
    width: int
    """Components of an embedding."""
    spearman: float
    """Spearman correlation of pairs' cosines with human scores, times 100 (Reimers and Gurevych 2019, arXiv
    1908.10084)."""
    pearson: float
    """Pearson correlation of pairs' cosines with human scores, times 100."""
    teacher_spearman: float
    """Spearman correlation of pairs' cosines with the teacher's, times 100."""
    teacher_pearson: float
    """Pearson correlation of pairs' cosines with the teacher's, times 100."""
    cosine_error: float
    """Mean absolute difference of pairs' cosines from the teacher's."""
    teacher_cosine: float | None
    """Mean cosine of texts' embeddings with the teacher's. None means that the widths differ."""
    mteb: dict[str, float]
    """Main score of each MTEB task, between 0 and 1."""
    path: Path | None
    """Folder that the model was saved to. None means that it was not saved."""


def compare_embeddings(
    config: EmbeddingsConfig, names: Sequence[str], *, session: Session = ALONE
) -> list[EmbeddingScores]:
    """Compare models' embeddings with those of the teacher, the first model, and with human scores.

    A folder with a `modules.json` of sentence-transformers pools as that says. For other models an embedding
    is the mean of the last hidden states over tokens. All are scaled to unit length. The pairs are those of
    STS-B's dev set, which no training from a cache has seen.

    Args:
        config: pairs, lengths, MTEB tasks, and where to save.
        names: names of the models, same as for `evaluate`; the first one is the teacher.
        session: its progress shows the number of encoded texts. Its `should_stop` is called before each
            model; True stops.

    Returns:
        Scores of each model, in the order of the models.

    Raises:
        CorpusError: the pairs are missing or damaged.
        TeacherError: a model does not exist.
        InvalidConfigError: the first model is a run, a model has fewer positions than `max_length`, or an
            extra is not installed.
        StorageError: a folder exists already, or cannot be written.
        InterruptedRunError: a stop was requested.
    """
    device = choose_device(config.device)
    refuse_run_as_teacher(names)
    models = find_models(names, config.revision, note=session.progress.note)
    exported = [model.name for model in models if model.runtime is not None]
    if config.save is not None and exported:
        raise InvalidConfigError(
            f"--save: {exported[0]} is a model that was exported, so it is saved already. Leave it out, or "
            "leave --save out."
        )
    paths = {model.name: _path(config, model) for model in models}
    tasks = _mteb_tasks(config.mteb)
    pairs = _pairs(config, session.progress.note)
    texts = [text for pair in pairs for text in pair.texts]
    human = np.asarray([pair.label for pair in pairs], np.float64)
    session.progress.start("embed", len(texts) * len(models), "texts")
    scores: list[EmbeddingScores] = []
    teacher: Vectors | None = None
    for model in models:
        encoder = sentence_encoder(model, config.max_length, str(device))
        with enough_memory(device, "Take a lower --batch-size or --max-length"):
            vectors = encoded(
                encoder.encode, texts, config.batch_size, session=session, message=_KEPT
            ).astype(np.float64)
        refuse_no_direction(vectors, model.name)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # a dot product's are not of unit length
        teacher = vectors if teacher is None else teacher
        path = paths[model.name]
        if path is not None:
            _save(encoder, path, model)
        mteb = mteb_scores(encoder, tasks)
        scores.append(_scores(model.name, vectors, teacher=teacher, human=human, mteb=mteb, path=path))
    return scores


def refuse_no_direction(vectors: npt.NDArray[np.floating[Any]], name: str) -> None:
    """Raise TeacherError for vectors that are NaN, infinite or of length 0, which are near to nothing.

    Args:
        vectors: vectors of texts, `(texts, width)`.
        name: name of the model, for the message.
    """
    lengths = np.linalg.norm(vectors, axis=1)
    wrong = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(wrong):
        raise TeacherError(
            f"{name} gives {len(wrong):,} of {len(vectors):,} texts a vector that is NaN, infinite or of "
            "length 0. Get its weights again."
        )


@dataclass(frozen=True, slots=True)
class CutTexts:
    """Says how many texts models cut, once for models that read alike."""

    most: int
    """Most tokens of a text; a folder that reads fewer reads as many."""
    session: Session
    seen: set[tuple[str, int, str, str]] = field(default_factory=set)

    def count(
        self, model: Evaluated, texts: Sequence[tuple[str, ...]], noun: str, *, prompt: str = ""
    ) -> None:
        """Say how many texts, or pairs, are longer than a model reads.

        Args:
            model: the model.
            texts: the sides of each.
            noun: what they are, one of them.
            prompt: what stands before each.

        Raises:
            InterruptedRunError: a stop was requested.
        """
        tokenizer = load_tokenizer(model.folder, has_ends=False)
        most = min(self.most, _own_length(model)) if model.pools else self.most
        key = (tokenizer_sha256(tokenizer), most, noun, prompt)
        if key in self.seen:
            return
        self.seen.add(key)
        num_cut = 0
        self.session.progress.start("count tokens", len(texts), "texts")
        for part in self.session.parts(texts, _COUNTED_AT_ONCE):
            first, *second = map(list, zip(*part, strict=True))
            sides = [[prompt + text for text in first], *second]
            read = tokenizer(*sides, truncation=True, max_length=most, verbose=False)
            num_cut += sum(bool(each.overflowing) for each in read.encodings or ())
        if num_cut:
            self.session.progress.note(cut_in_words(num_cut, len(texts), noun, most=f"{most} tokens"))


def encoded(
    encode: Callable[..., Any],
    texts: Sequence[str],
    batch_size: int,
    *,
    session: Session,
    message: str = NOTHING_KEPT,
) -> npt.NDArray[np.float32]:
    """Return the vectors of texts, `(texts, width)`.

    Args:
        encode: method of a sentence-transformer, which puts texts of like length into one batch.
        texts: the texts.
        batch_size: texts of a forward pass.
        session: its progress advances. Its `should_stop` is called before each part; True stops.
        message: what the error then says.
    """
    parts = [
        encode(list(part), batch_size=batch_size, show_progress_bar=False)
        for part in session.parts(texts, BATCHES_OF_A_PART * batch_size, message)
    ]
    return np.concatenate(parts).astype(np.float32)


def sentence_encoder(model: Evaluated, max_length: int, device: str) -> SentenceTransformer:
    """Return a model as a sentence-transformer that pools as its folder says, and scales to unit length.

    Vectors are not scaled where the folder says that their dot products are compared.

    Args:
        model: model to wrap.
        max_length: most tokens of a text; a folder that reads fewer (`max_seq_length`) reads as many.
        device: device in torch's notation, such as `cuda:0`.

    Raises:
        InvalidConfigError: it has fewer positions than `max_length`, or gives answers in place of vectors.
        TeacherError: its folder has no model that is safe to load, or a pooling that cannot be computed.
    """
    refuse_answers(model.folder, model.name)
    if model.pools:  # what its folder reads of a text is what it gives in use
        max_length = min(max_length, _own_length(model))
    tokenizer = model.tokenizer(max_length, has_ends=False)
    safely = {"trust_remote_code": False, "local_files_only": True}
    transformer: Transformer | _ExportedTransformer
    if model.runtime is not None:
        transformer = _ExportedTransformer(ExportedModel(model.folder, model.runtime), tokenizer, max_length)
    else:
        transformer = Transformer(
            str(model.folder),
            max_seq_length=max_length,
            model_kwargs={**safely, **IN_FLOAT32},
            processor_kwargs=safely,
            config_kwargs=safely,
        )
    width = transformer.get_embedding_dimension()
    pooler = load_pooler(model.folder, None if model.pools else "mean", width)
    pooling = Pooling(width, pooling_mode=pooler.mode, include_prompt=pooler.includes_prompt)
    dense = [
        Dense(
            layer.linear.in_features,
            layer.linear.out_features,
            bias=layer.linear.bias is not None,
            activation_function=layer.activation,
            init_weight=layer.linear.weight.detach(),
            init_bias=layer.linear.bias,
        )
        for layer in pooler.dense
    ]
    prompts = read_prompts(model.folder)
    has_units = pooler.normalize or prompts.similarity != "dot"
    return SentenceTransformer(
        modules=[transformer, pooling, *dense, *([Normalize()] if has_units else [])],
        device=device,
        similarity_fn_name=prompts.similarity,
        prompts=prompts.by_name,
        default_prompt_name=prompts.default,
    )


class _ExportedTransformer(InputModule):
    """The first module of a sentence-transformer whose model was exported."""

    def __init__(self, model: ExportedModel, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.max_seq_length = model, max_length
        self._tokenizer = tokenizer

    def get_embedding_dimension(self) -> int:
        return int(self.model.config.hidden_size)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: object) -> dict[str, Any]:
        texts = [f"{prompt or ''}{text}" for text in inputs]
        encoded: dict[str, Any] = dict(
            self._tokenizer(
                texts, padding=True, truncation=True, max_length=self.max_seq_length, return_tensors="pt"
            )
        )
        if prompt:  # poolings that leave a prompt out need its length, without the token that ends a text
            ids = self._tokenizer(prompt)["input_ids"]
            encoded["prompt_length"] = len(ids) - (ids[-1] in self._tokenizer.all_special_ids)
        return encoded

    def forward(self, features: dict[str, Any], **_: object) -> dict[str, Any]:
        output = self.model(features["input_ids"], features["attention_mask"])
        device = features["attention_mask"].device
        return {**features, "token_embeddings": output.last_hidden_state.to(device)}

    def save(self, output_path: str, *_: object, **__: object) -> None:
        raise InvalidConfigError(
            f"{output_path}: a model that was exported is saved already. Copy its folder."
        )


def _pairs(config: EmbeddingsConfig, note: Callable[[str], None]) -> Sequence[TextExample]:
    task = TASKS["stsb"]
    assert isinstance(task, TextTask)
    assert config.data is not None, "it is measured only where it is given"
    folder, hub = data_source(config.data)
    source = Source(folder=folder, hub=hub, tests=False, note=note)
    return sample_examples(read_dev(task, source), config.max_pairs)


def _path(config: EmbeddingsConfig, model: Evaluated) -> Path | None:
    if config.save is None:
        return None
    refuse_file(config.save, "--save")
    path = config.save / model.slug
    prepare_new(path, "--save")
    return path


def _own_length(model: Evaluated) -> int:
    """Return how many tokens of a text a folder reads."""
    tokenizer = load_tokenizer(model.folder, has_ends=False)
    return text_length(model.folder, tokenizer, read_config(model.folder))


def _save(encoder: SentenceTransformer, path: Path, model: Evaluated) -> None:
    """Write a model with its pooling, and the card of the folder that it comes from.

    The folder reads as many tokens of a text as the model's own, and not as few as were measured.
    """
    measured, encoder.max_seq_length = encoder.max_seq_length, _own_length(model)
    if isinstance(first := encoder[0], Transformer):
        encoder.max_seq_length = usable_length(first.auto_model, encoder.max_seq_length)
    with saving("write model", path), new_folder(path, replaces=False) as folder:
        encoder.save_pretrained(str(folder), create_model_card=False, safe_serialization=True)
        if (model.folder / CARD).is_file():
            (folder / CARD).write_bytes(bounded_bytes(model.folder / CARD, 2**20))
    encoder.max_seq_length = measured  # for what is measured after it


def _scores(
    name: str,
    vectors: Vectors,
    *,
    teacher: Vectors,
    human: Vectors,
    mteb: dict[str, float],
    path: Path | None,
) -> EmbeddingScores:
    cosines, teacher_cosines = _cosines(vectors), _cosines(teacher)
    to_human = text_scores(("spearman", "pearson"), cosines, human)
    to_teacher = text_scores(("spearman", "pearson"), cosines, teacher_cosines)
    same_width = vectors.shape[1] == teacher.shape[1]
    return EmbeddingScores(
        model=name,
        width=vectors.shape[1],
        spearman=to_human["spearman"],
        pearson=to_human["pearson"],
        teacher_spearman=to_teacher["spearman"],
        teacher_pearson=to_teacher["pearson"],
        cosine_error=float(np.abs(cosines - teacher_cosines).mean()),
        teacher_cosine=float((vectors * teacher).sum(1).mean()) if same_width else None,
        mteb=mteb,
        path=path,
    )


def _cosines(vectors: Vectors) -> Vectors:
    """Return the cosine of each pair, `(pairs,)`. The two texts of a pair are neighbouring rows."""
    cosines: Vectors = (vectors[0::2] * vectors[1::2]).sum(1)
    return cosines


def _mteb_tasks(names: Sequence[str]) -> "list[AbsTask]":
    """Return the MTEB tasks of these names."""
    if not names:
        return []
    try:
        import mteb  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise InvalidConfigError("--mteb needs mteb: pip install 'minilm-cache[mteb]'.") from error
    try:
        return list(mteb.get_tasks(tasks=list(names)))
    except KeyError as error:
        reason = str(error.args[0]).rstrip(".")
        raise InvalidConfigError(f"--mteb: {reason}. Names are those of mteb.get_tasks().") from error


def mteb_scores(encoder: SentenceTransformer, tasks: "Sequence[AbsTask]") -> dict[str, float]:
    """Return the main score of each task of the Massive Text Embedding Benchmark (arXiv 2210.07316).

    Args:
        encoder: sentence-transformer to evaluate.
        tasks: tasks as `mteb.get_tasks` returns them.

    Returns:
        Main scores between 0 and 1, by the name of the task.

    Raises:
        CorpusError: the data of a task cannot be loaded.
    """
    if not tasks:
        return {}
    import mteb  # noqa: PLC0415 - an extra

    try:
        results = mteb.evaluate(encoder, tasks, cache=None, show_progress_bar=False)
    except (OSError, ValueError) as error:
        raise CorpusError(f"mteb cannot evaluate: {first_line(error)}.") from error
    return {result.task_name: float(result.get_score()) for result in results.task_results}
