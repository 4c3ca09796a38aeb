"""Exports a model for a CPU, fitted to texts of its cache, and refuses one that has lost too much."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from minilm_cache.cache import open_cache
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.pairs import BETWEEN
from minilm_cache.deploy.config import ExportModelConfig, no_texts
from minilm_cache.deploy.forms import Form, write_form
from minilm_cache.errors import DeviceError, IdentityMismatchError, InvalidConfigError
from minilm_cache.evaluate.models import Evaluated, find_model
from minilm_cache.evaluate.settings import EmbeddingsConfig
from minilm_cache.models.classifier import load_pooled_head
from minilm_cache.models.complete import text_length
from minilm_cache.models.exported import IDS, MASK, SEGMENTS, Run
from minilm_cache.models.load import has_sides, load_model, own_head, usable_length
from minilm_cache.models.pooling import SentencePooler, copy_pooling, load_pooler, refuse_other_scores
from minilm_cache.models.prompts import read_prompts
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.models.truncate import saving
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import option_of, validated
from minilm_cache.storage_schema.states import PoolingMode
from minilm_cache.store.durable import new_folder, prepare_new
from minilm_cache.store.layout import CARD, MANIFEST
from minilm_cache.store.urls import is_url, without_secrets
from minilm_cache.train.folder import is_run
from minilm_cache.train.record import load_record
from minilm_cache.wording import rendered
from minilm_cache.workflows.export import texts_of

RECORD: Final = "export.json"
"""What an exported folder says about how it was made, and what it lost."""
_BATCH: Final = 32
_LONGEST: Final = 2**30
"""Tokens of a text for tokenizers that name no limit, or one beyond any text."""
_FEWEST: Final = 16
"""Fewest texts: half of them to fit to, and half to judge by."""
Texts = tuple[str, ...]
"""A text, or the two texts of a pair."""


class Drop(NamedTuple):
    """A score of the model itself and of what was exported, between 0 and 100."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedResult:
    """A model that was exported."""

    path: Path
    model: Path
    """Folder of the model that it was made from."""
    source: str
    """Name of the model that it was made from."""
    source_sha256: str
    """SHA-256 (hex) of that model."""
    runtime: str
    """What runs it: onnx or openvino."""
    precision: str
    """float32 or int8."""
    num_bytes: int
    """Bytes of the file and its weights."""
    bytes_before: int
    """Bytes of the weights that it was made from."""
    fitted_to: int
    """Texts that the ranges of 8 bit were taken from; 0 where nothing was fitted."""
    judged_by: int
    """Texts, none of them fitted to, that the cosine is of."""
    cosine: float
    """Mean cosine of vectors with those of the model, or the cosine of all centred answers."""
    least_cosine: float | None
    """Least cosine of a text's vector. None means a model that answers."""
    drops: tuple[Drop, ...]
    """Scores on the data that were given."""


def export_model(
    config: ExportModelConfig, name: str, out: Path, *, session: Session = ALONE
) -> ExportedResult:
    """Write a model as a folder that onnxruntime or OpenVINO runs, and sentence-transformers opens.

    Args:
        config: runtime, precision, texts, and what the export may lose.
        name: the model: `mini`, a folder such as RUN/students/3x384, a run of one student, or a hub id.
        out: new folder; it must not exist.
        session: its home is the folder for local copies of caches. Its progress shows texts done. Its
            `should_stop` is called before each batch; True stops, and nothing is left.

    Raises:
        InvalidConfigError: the folder exists, the name stands for several models, a package is not installed,
            or there is no text to fit to.
        TeacherError: the model does not exist, or was exported before.
        CorpusError: the texts, or the data that are measured on, cannot be read.
        DeviceError: the model cannot be exported, or has lost more than it may; nothing is written.
        StorageError: the folder cannot be written.
        InterruptedRunError: a stop was requested.
    """
    prepare_new(out)
    model = find_model(name, config.revision, note=session.progress.note)
    _refuse_lost_head(model)
    refuse_other_scores(model.folder)
    answers = model.answers or load_pooled_head(model.folder) is not None
    if answers and (config.data or config.retrieval):
        raise InvalidConfigError(
            f"--retrieval and --data are about vectors, and {model.name} answers. Leave them out, and "
            "measure it by `minilm-cache rerank` or `evaluate --as-is`."
        )
    export = _Export.of(config, model, session, answers=answers)
    texts = list(islice(_texts(config, model, session), 2 * config.texts))
    if len(texts) < _FEWEST:
        raise InvalidConfigError(
            f"--corpus has {len(texts)} texts, and at least {_FEWEST} are needed to fit and to judge an "
            "export. Give another --corpus."
        )
    if export.source.config.num_labels == 1 and answers and not any(len(each) > 1 for each in texts):
        session.progress.note(
            "judged by single texts: for a model that reads pairs, give a --corpus and --pair-columns"
        )
    if not answers:
        texts = [(each[number % len(each)],) for number, each in enumerate(texts)]
    fitted, judged = [], texts[-config.texts :]
    if config.openvino and config.int8:
        fitted = texts[: len(texts) // 2]
        judged = [each for each in texts[len(texts) // 2 :] if each not in set(fitted)]
    if len(judged) < _FEWEST // 2:
        raise InvalidConfigError(
            f"--corpus: only {len(judged)} of its texts differ from those that the export is fitted to, and "
            f"at least {_FEWEST // 2} have to judge it. Give another --corpus."
        )
    with saving("write", out), new_folder(out, replaces=False) as new:
        return export.write(fitted, judged, new, out=out)


def _refuse_lost_head(model: Evaluated) -> None:
    """Raise InvalidConfigError for a model whose head an export would leave out."""
    if model.answers or model.pools or model.runtime is not None:
        return
    head = own_head(model.folder, model.name)
    if head is not None:
        raise InvalidConfigError(
            f"{model.name} has a head for {head}, which an export would leave out: vectors, classes and "
            "scores of texts are exported. For its vectors, save the model without it: "
            "AutoModel.from_pretrained(OLD).save_pretrained(NEW)."
        )


def _texts(config: ExportModelConfig, model: Evaluated, session: Session) -> Iterator[Texts]:
    """Yield texts, or pairs, of the cache or the corpus; of a cache those that it holds out come last."""
    place, expected = config.corpus, ""
    if place is None:
        run = model.folder.resolve().parent.parent
        if not is_run(run):
            raise no_texts(model.name)
        record = load_record(run)
        place, expected = record.cache, record.identity.fingerprint
        if is_url(place):
            raise InvalidConfigError(
                f"run {run} says that its cache is at {without_secrets(place)}, but a URL from a run is not "
                "opened by itself. Give it by --corpus if you trust it."
            )
    if is_url(place) or (Path(place) / MANIFEST).is_file() or config.corpus is None:
        cache = open_cache(place, home=session.home)
        of_files = {"text_column", "documents", "pair_columns"} & config.model_fields_set
        if of_files:
            option = option_of(min(of_files))
            raise InvalidConfigError(f"{option}: {place} is a cache, whose texts are read. Leave it out.")
        if expected not in ("", cache.manifest.fingerprint):
            raise IdentityMismatchError(
                f"{place} is not the cache that {model.name} was trained from. Give texts by --corpus: that "
                "cache, or others such as the student will read."
            )
        last = range(cache.manifest.num_train, len(cache))[: config.texts]
        needed = 2 * config.texts - len(last)
        step = max(1, cache.manifest.num_train // needed)
        numbers = [*range(0, cache.manifest.num_train, step)][:needed]
        yield from (texts for _, texts in texts_of(cache, [*numbers, *last]))
        return
    corpus = load_corpus(
        place, config.text_column, config.documents, home=session.home, pair_columns=config.pair_columns
    )
    step = max(1, len(corpus.documents) // (2 * config.texts))
    # What encode puts before each text; the texts of a cache hold their prompts.
    prompt = read_prompts(model.folder).of_every_text if model.pools else ""
    for text in islice(corpus.texts(), 0, None, step):
        yield tuple(f"{prompt}{text}".split(BETWEEN))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """An export of a model."""

    config: ExportModelConfig
    model: Evaluated
    source: PreTrainedModel
    """The model itself, in torch."""
    tokenizer: PreTrainedTokenizerFast
    pooler: SentencePooler | None
    """What makes the model's vectors, or its answers. None means that its head does."""
    answers: bool
    """Whether it answers a task, by a head or by what its folder pools."""
    session: Session

    @classmethod
    def of(cls, config: ExportModelConfig, model: Evaluated, session: Session, *, answers: bool) -> "_Export":
        """Load a model."""
        source = load_model(model.folder, "sequences" if model.answers else None, attention="sdpa").eval()
        mode: PoolingMode | None = None if model.pools else "mean"
        width = source.config.hidden_size
        return cls(
            config=config,
            model=model,
            source=source,
            tokenizer=model.tokenizer(config.max_length),
            pooler=None if model.answers else load_pooler(model.folder, mode, width),
            answers=answers,
            session=session,
        )

    def write(
        self, fitted: Sequence[Texts], judged: Sequence[Texts], folder: Path, *, out: Path
    ) -> ExportedResult:
        """Write the folder of an export, which will be moved to `out`, and return what it lost."""
        config, model = self.config, self.model
        self.session.progress.note(f"exporting {model.name}")
        form, inputs = Form(config.runtime, config.int8), self._batches(fitted, size=1)
        run = write_form(self.source, folder, form, inputs=inputs, name=model.name, reads_pairs=self.answers)
        cosine, least = self._agreement(judged, *run)
        if not cosine >= config.min_cosine:  # also where it is not a number
            raise DeviceError(
                f"{model.name}: the export agrees with the model to a cosine of {cosine:.6f}, and "
                f"--min-cosine is {config.min_cosine:g}, so nothing is written. {self._remedy}"
            )
        self.source.config.architectures = [type(self.source).__name__]  # what the file gives
        self.source.config.save_pretrained(folder)
        # The one that judged cuts on the right, at --max-length.
        tokenizer = load_tokenizer(model.folder, has_ends=False)
        own = text_length(model.folder, tokenizer, self.source.config)
        longest = int(min(max(tokenizer.model_max_length, own), _LONGEST))
        tokenizer.model_max_length = usable_length(self.source, longest)
        tokenizer.save_pretrained(folder)
        copy_pooling(model.folder, folder, self.source.config, most=tokenizer.model_max_length)
        result = ExportedResult(
            path=out,
            model=model.folder,
            source=model.name,
            source_sha256=model.sha256(),
            runtime=config.runtime,
            precision="int8" if config.int8 else "float32",
            num_bytes=Evaluated(name=model.name, folder=folder).num_bytes,
            bytes_before=model.num_bytes,
            fitted_to=len(fitted),
            judged_by=len(judged),
            cosine=cosine,
            least_cosine=least,
            drops=self._drops(folder),
        )
        record = {key: value for key, value in asdict(result).items() if key not in ("path", "model")}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        card = rendered("minilm_cache.workflows", "exported.md.jinja", exported=result, out=out.name)
        (folder / CARD).write_text(card, encoding="utf-8")
        return result

    def _batches(self, texts: Sequence[Texts], size: int = _BATCH) -> Iterator[dict[str, Tensor]]:
        """Yield texts as a model takes them."""
        self.session.progress.start("read", len(texts), "texts")
        kept = "interrupted before a model was written. Run the same command again."
        for part in self.session.parts(texts, size, kept):
            encoded = self.tokenizer(
                *map(list, zip(*part, strict=True)),
                padding=True,
                truncation="longest_first",
                max_length=self.config.max_length,
                return_tensors="pt",
            )
            yield {SEGMENTS: torch.zeros_like(encoded[IDS]), **encoded}

    @torch.no_grad()
    def _agreement(
        self, judged: Sequence[Texts], run: Run, wanted: Sequence[str]
    ) -> tuple[float, float | None]:
        """Return how far an export agrees with its model, and the least cosine of a text's vector."""
        pairs = []
        for batch in self._batches(judged):
            read = (IDS, MASK, SEGMENTS) if has_sides(self.source.config) else (IDS, MASK)
            theirs = self.source(**{name: batch[name] for name in read})
            mine = run({name: batch[name] for name in wanted})
            if self.pooler is None:
                pairs.append((theirs.logits, mine))
            else:
                lengths = batch[MASK].sum(1)
                pairs.append((self.pooler(theirs.last_hidden_state, lengths), self.pooler(mine, lengths)))
        before, after = (torch.cat(each).double() for each in zip(*pairs, strict=True))
        if self.answers:
            # Without what all texts have in common. What an export adds to all of them changes no order of
            # texts by one score, and which of several classes is the likeliest.
            common = before.mean(0), (after if after.shape[1] == 1 else before).mean(0)
            before, after = ((before - common[0]).reshape(1, -1), (after - common[1]).reshape(1, -1))
            return float(F.cosine_similarity(before, after)), None
        cosines = F.cosine_similarity(before, after)
        return float(cosines.mean()), float(cosines.min())

    @property
    def _remedy(self) -> str:
        if not self.config.int8:
            return "Use the model itself."
        other = "--openvino, which is fitted to texts" if self.config.onnx else "more --texts"
        return f"Leave out --int8, or try {other}."

    def _drops(self, folder: Path) -> tuple[Drop, ...]:
        """Return the scores before and after on the data that were given.

        Raises:
            DeviceError: a score has lost more than it may.
        """
        config, drops = self.config, list[Drop]()
        if config.data is None and config.retrieval is None:
            return ()
        from minilm_cache.evaluate.embeddings import compare_embeddings  # noqa: PLC0415 - an extra
        from minilm_cache.evaluate.retrieval import compare_retrieval  # noqa: PLC0415 - an extra

        names = [str(self.model.folder), str(folder)]
        measured = {"data": config.data, "retrieval": config.retrieval, "max_length": config.max_length}
        settings = validated(EmbeddingsConfig, {**measured, "device": "cpu"})
        if config.data is not None:
            scores = [each.spearman for each in compare_embeddings(settings, names, session=self.session)]
            drops.append(Drop("STS-B, Spearman", *scores))
        if config.retrieval is not None:
            found = compare_retrieval(settings, names, session=self.session)
            drops.append(Drop("nDCG@10", *(each.ndcg_at_10.mean for each in found)))
        for drop in drops:
            if not drop.before - drop.after <= config.max_drop:
                raise DeviceError(
                    f"{self.model.name}: {drop.name} falls from {drop.before:.2f} to {drop.after:.2f}, which "
                    f"is more than --max-drop {config.max_drop:g}, so nothing is written. {self._remedy}"
                )
        return tuple(drops)
