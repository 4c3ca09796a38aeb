"""Retrieval on data of one's own: how often the nearest documents are the right ones, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import needs
from minilm_cache.evaluate.embeddings import CutTexts, encoded, refuse_no_direction, sentence_encoder
from minilm_cache.evaluate.models import Evaluated, find_models
from minilm_cache.evaluate.own_data import OwnData, own_data
from minilm_cache.evaluate.settings import EmbeddingsConfig, OwnDataSettings
from minilm_cache.models.device import choose_device, enough_memory
from minilm_cache.models.prompts import read_prompts
from minilm_cache.session import ALONE, Session
from minilm_cache.train.folder import refuse_run_as_teacher

with needs("--retrieval", "sentence-transformers,eval"):
    import pytrec_eval

Vectors = npt.NDArray[np.float32]
"""Unit vectors, `(texts, width)`."""
_MEASURES: Final = {"ndcg_at_10": "ndcg_cut_10", "mrr_at_10": "recip_rank", "recall_at_100": "recall_100"}
"""Names that pytrec_eval has for measures: normalised discounted cumulative gain (Jarvelin and Kekalainen
2002), the reciprocal of the first relevant document's rank, and the share of relevant documents found."""
_NEAREST: Final = 100
_QUERIES_AT_ONCE: Final = 256
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A mean over queries, times 100, with the interval that holds 95 % of means of resampled queries."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalScores:
    """Scores of a model's retrieval."""

    model: str
    ndcg_at_10: Measured
    mrr_at_10: Measured
    recall_at_100: Measured
    teachers_index: Measured | None
    """nDCG@10 of the model's queries over the first model's vectors of documents. None means that their
    widths differ, or that it is the first model."""


def compare_retrieval(
    config: EmbeddingsConfig, names: Sequence[str], *, session: Session = ALONE
) -> list[RetrievalScores]:
    """Score models by what they find in data of one's own, beside the teacher, the first model.

    Args:
        config: the data, lengths and batches.
        names: names of the models, same as for `compare_embeddings`.
        session: its progress shows the number of encoded texts. Its `should_stop` is called before each
            part; True stops.

    Raises:
        CorpusError: the data are missing or damaged.
        TeacherError: a model does not exist.
        InvalidConfigError: the first model is a run, or a model has fewer positions than `max_length`.
        InterruptedRunError: a stop was requested.
    """
    data = own_data(config, session=session)
    refuse_run_as_teacher(names)
    models = find_models(names, config.revision, note=session.progress.note)
    session.progress.note(
        f"{config.judged}: {len(data.queries):,} queries, searched in {len(data.documents):,} texts"
    )
    cut = CutTexts(config.max_length, session)
    for model in models:
        count_cut(data, model, cut)
    session.progress.start("embed", len(models) * (len(data.queries) + len(data.documents)), "texts")
    found: list[RetrievalScores] = []
    index: Vectors | None = None
    for model in models:
        queries, documents = vectors_of(model, data, config, session=session)
        values = values_of(data, nearest(data, queries, documents))
        of_index = None
        if index is not None and index.shape[1] == queries.shape[1]:
            of_index = measured(values_of(data, nearest(data, queries, index))["ndcg_at_10"])
        index = documents if index is None else index
        means = {name: measured(each) for name, each in values.items()}
        found.append(RetrievalScores(model=model.name, teachers_index=of_index, **means))
    return found


def count_cut(data: OwnData, model: Evaluated, cut: CutTexts) -> None:
    """Say how many queries and documents a sentence encoder cuts."""
    prompts = read_prompts(model.folder).by_name
    for role, texts in (("query", data.queries), ("document", data.documents)):
        cut.count(model, list(zip(texts.values(), strict=True)), role, prompt=prompts.get(role, ""))


def vectors_of(
    model: Evaluated, data: OwnData, config: EmbeddingsConfig | OwnDataSettings, *, session: Session
) -> tuple[Vectors, Vectors]:
    """Return a model's vectors of the queries and of the documents of data of one's own.

    Raises:
        TeacherError: the model cannot be loaded.
        InvalidConfigError: it has fewer positions than `max_length`.
        InterruptedRunError: a stop was requested.
    """
    device = choose_device(config.device)
    encoder = sentence_encoder(model, config.max_length, str(device))
    with enough_memory(device, "Take a lower --batch-size or --max-length"):
        queries, documents = (
            encoded(encode, list(texts.values()), config.batch_size, session=session)
            for encode, texts in (
                (encoder.encode_query, data.queries),
                (encoder.encode_document, data.documents),
            )
        )
    for vectors in (queries, documents):
        refuse_no_direction(vectors, model.name)
    return queries, documents


Ranked = dict[str, dict[str, float]]
"""For each query, the scores of the documents that were found, the best one first."""


def nearest(data: OwnData, queries: Vectors, documents: Vectors, *, most: int = _NEAREST) -> Ranked:
    """Return the nearest documents of each query, and their cosines.

    Documents of the same cosine come in an order that is drawn (seed 0), the same for all queries: their
    names and places say which ones are right, so that these would help a model that tells nothing apart. A
    document that is the query itself is left out.
    """
    drawn, all_names, run = drawn_order(len(documents)), list(data.documents), Ranked()
    documents, names = documents[drawn], [all_names[place] for place in drawn]
    for first in range(0, len(queries), _QUERIES_AT_ONCE):
        scores = queries[first : first + _QUERIES_AT_ONCE] @ documents.T
        places_of = np.argsort(-scores, axis=1, kind="stable")[:, : most + 1]
        for query, places, row in zip(list(data.queries)[first:], places_of, scores, strict=False):
            others = [place for place in places if not data.is_itself(query, names[place])]
            run[query] = {names[place]: float(row[place]) for place in others[:most]}
    return run


def drawn_order(count: int) -> npt.NDArray[np.int64]:
    """Return the order in which documents of the same score come: drawn, the same each time."""
    return np.random.default_rng(0).permutation(count)


def values_of(data: OwnData, run: Ranked) -> dict[str, list[float]]:
    """Return each measure of each query, by the order in which documents were found."""
    right = {query: dict(grades) for query, grades in data.right.items()}
    # Not by their scores: pytrec_eval orders documents of the same score by their names.
    places = {
        query: {name: float(len(found) - place) for place, name in enumerate(found)}
        for query, found in run.items()
    }
    whole = pytrec_eval.RelevanceEvaluator(right, {"ndcg_cut_10", "recall_100"}).evaluate(places)
    ten = {query: dict(list(found.items())[:10]) for query, found in places.items()}
    first_right = pytrec_eval.RelevanceEvaluator(right, {"recip_rank"}).evaluate(ten)
    return {
        name: [float((first_right if key == "recip_rank" else whole)[query][key]) for query in data.queries]
        for name, key in _MEASURES.items()
    }


def measured(values: Sequence[float]) -> Measured:
    """Return the mean of queries' values, times 100, and its bootstrap interval (2,000 resamples, seed 0)."""
    numbers, draw = 100 * np.asarray(values), np.random.default_rng(0)
    means = [numbers[draw.integers(len(numbers), size=len(numbers))].mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return Measured(mean=float(numbers.mean()), low=float(low), high=float(high))
