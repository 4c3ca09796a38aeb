"""Candidates of a first stage: written as groups to learn from, or ranked anew by cross-encoders."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from minilm_cache.corpus.beir import NEGATIVE, POSITIVE, QUERY, best_first
from minilm_cache.corpus.formats import words_of
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.evaluate.embeddings import BATCHES_OF_A_PART, CutTexts
from minilm_cache.evaluate.models import Evaluated, find_model, find_models
from minilm_cache.evaluate.own_data import OwnData, own_data
from minilm_cache.evaluate.retrieval import (
    Measured,
    Ranked,
    Vectors,
    count_cut,
    drawn_order,
    measured,
    nearest,
    values_of,
    vectors_of,
)
from minilm_cache.evaluate.settings import MineConfig, OwnDataSettings, RerankConfig
from minilm_cache.models.classifier import load_pooled_head
from minilm_cache.models.device import choose_device, enough_memory
from minilm_cache.models.exported import ExportedModel
from minilm_cache.models.load import IN_FLOAT32, is_classifier, load_model, read_config
from minilm_cache.models.outline import no_reranker
from minilm_cache.session import ALONE, Session
from minilm_cache.store.durable import new_file, prepare_new, storage_errors

Pairs = Sequence[tuple[str, str]]
"""Queries with documents."""
Scores = npt.NDArray[np.float32]
"""A score of each pair, `(pairs,)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mined:
    """What was written of hard negatives."""

    path: Path
    queries: int
    pairs: int
    """Pairs of a query with a relevant document or a negative."""
    lacking: int
    """Queries with fewer negatives than were asked for."""


def mine_negatives(config: MineConfig, name: str, out: Path, *, session: Session = ALONE) -> Mined:
    """Write each query with its relevant documents and hard negatives (near others), as JSON lines.

    Args:
        config: the data, and which negatives are taken.
        name: sentence encoder that finds them, same as for `compare_embeddings`.
        out: file to write, which must not exist.
        session: its progress shows the number of encoded texts. Its `should_stop` is called before each
            part; True stops.

    Raises:
        CorpusError: the data are missing or damaged.
        TeacherError: the model does not exist.
        InvalidConfigError: the model has fewer positions than `max_length`, or stands for several.
        StorageError: the file exists, or cannot be written.
        InterruptedRunError: a stop was requested.
    """
    prepare_new(out)
    data = own_data(config, session=session)
    to_train_on = config.retrieval and config.retrieval / "qrels" / "train.tsv"
    if to_train_on is not None and to_train_on.is_file():
        session.progress.note(
            f"these queries are those to test on ({to_train_on.with_name('test.tsv')}). For a training, mine "
            f"--retrieval {to_train_on}."
        )
    found = _hard_negatives(data, _encoded(data, name, config, session=session), config)
    if not any(found.values()):
        within = "" if config.margin is None else f" outside --margin {config.margin:g}"
        raise InvalidConfigError(
            f"no query has a hard negative: of {len(data.documents):,} documents, none{within} is near a "
            "query and not relevant to it. Search more documents (--corpus), or lower --margin."
        )
    drawn, num_pairs, lacking = np.random.default_rng(config.seed), 0, 0
    with storage_errors("write", out), new_file(out, replaces=False) as opened:
        for query, text in data.queries.items():
            negatives = found[query]
            lacking += len(negatives) < config.negatives
            chosen = negatives
            if len(negatives) > config.negatives:
                chosen = [
                    negatives[at]
                    for at in sorted(drawn.choice(len(negatives), config.negatives, replace=False))
                ]
            group = {
                QUERY: text,
                POSITIVE: [data.documents[each] for each in best_first(data.right[query])],
                NEGATIVE: [data.documents[each] for each in chosen],
            }
            opened.write((json.dumps(group, ensure_ascii=False) + "\n").encode())
            num_pairs += len(data.right[query]) + len(chosen)
    return Mined(path=out, queries=len(data.queries), pairs=num_pairs, lacking=lacking)


def _hard_negatives(
    data: OwnData, vectors: tuple[Vectors, Vectors], config: MineConfig
) -> dict[str, list[str]]:
    """Return the nearest documents of each query that are not relevant, nor too near, the nearest first.

    The margin is from the relevant document that is farthest, as sentence-transformers takes it. A document
    is none of them if it is the query, or relevant to a query with the same words. White space and capital
    letters do not count. Of documents with the same words one is taken.
    """
    (queries, documents), names = vectors, list(data.documents)
    names_at = {name: at for at, name in enumerate(names)}
    places, right_of = defaultdict[str, list[int]](list), defaultdict[str, set[str]](set)
    for at, text in enumerate(data.documents.values()):
        places[words_of(text)].append(at)
    repeated = [at for same in places.values() for at in same[1:]]
    for query, text in data.queries.items():
        right_of[words_of(text)] |= {words_of(data.documents[name]) for name in data.right[query]}
    found = dict[str, list[str]]()
    for (query, text), vector in zip(data.queries.items(), queries, strict=True):
        cosines, words = documents @ vector, words_of(text)
        farthest = min(float(cosines[at]) for at in map(names_at.__getitem__, data.right[query]))
        cosines[[at for known in (words, *right_of[words]) for at in places.get(known, ())]] = -np.inf
        cosines[repeated] = -np.inf
        if query in names_at and data.is_itself(query, query):
            cosines[names_at[query]] = -np.inf
        if config.margin is not None:
            cosines[cosines > farthest - config.margin * abs(farthest)] = -np.inf
        order = np.argsort(-cosines, kind="stable")[: config.among]
        found[query] = [names[at] for at in order if cosines[at] > -np.inf]
    return found


def _encoded(
    data: OwnData, name: str, config: OwnDataSettings, *, session: Session
) -> tuple[Vectors, Vectors]:
    """Return a sentence encoder's vectors of the queries and of the documents."""
    model = find_model(name, config.revision, note=session.progress.note)
    if is_classifier(read_config(model.folder)) and not model.pools:
        raise InvalidConfigError(
            f"{name} scores or classifies, and is no sentence encoder, which finds texts by their vectors. "
            "Name a sentence encoder, such as mini."
        )
    count_cut(data, model, CutTexts(config.max_length, session))
    session.progress.start("embed", len(data.queries) + len(data.documents), "texts")
    return vectors_of(model, data, config, session=session)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankScores:
    """Scores of a cross-encoder that ranks candidates anew, or of the first stage itself."""

    model: str
    ndcg_at_10: Measured
    mrr_at_10: Measured
    pairs_per_s: float | None
    """Pairs that were scored in a second. None means the first stage, which scores no pairs."""


def compare_rerankers(
    config: RerankConfig, names: Sequence[str], *, session: Session = ALONE
) -> list[RerankScores]:
    """Score cross-encoders by how well they rank the candidates of a first stage, after the first stage.

    Scores are taken before any activation.

    Args:
        config: the data, the first stage and the number of candidates.
        names: cross-encoders: folders of models or of runs, or hub ids.
        session: its progress shows the number of encoded texts and of pairs. Its `should_stop` is called
            before each part; True stops.

    Raises:
        CorpusError: the data are missing or damaged.
        TeacherError: a model does not exist.
        InvalidConfigError: a model answers with more than one score, or has fewer positions than
            `max_length`.
        InterruptedRunError: a stop was requested.
    """
    data = _first(own_data(config, session=session), config.max_queries)
    models = find_models(names, config.revision, note=session.progress.note)
    for model in models:
        _refuse_other_answers(model)
    vectors = _encoded(data, config.first_stage, config, session=session)
    found = nearest(data, *vectors, most=config.candidates)
    first = _scores_of(f"{config.first_stage} (first stage)", data, found, pairs_per_s=None)
    cut, texts = CutTexts(config.max_length, session), texts_of(data, found)
    for model in models:
        cut.count(model, texts, "pair")
    session.progress.start("rank", len(models) * sum(map(len, found.values())), "pairs")
    return [first, *(_reranked(model, data, found, config=config, session=session) for model in models)]


def texts_of(data: OwnData, found: Ranked) -> list[tuple[str, str]]:
    """Return the texts of queries with the documents that were found, in their order."""
    return [
        (data.queries[query], data.documents[name])
        for query, documents in found.items()
        for name in documents
    ]


def _first(data: OwnData, most: int | None) -> OwnData:
    queries = dict(islice(data.queries.items(), most))
    return replace(data, queries=queries, right={query: data.right[query] for query in queries})


def _refuse_other_answers(model: Evaluated) -> None:
    """Raise InvalidConfigError for a model that is no cross-encoder of one score."""
    config = read_config(model.folder)
    is_pooled = model.runtime is None and load_pooled_head(model.folder) is not None
    answers = config.num_labels if is_pooled or is_classifier(config) else None
    if answers != 1:
        raise no_reranker(model.name, answers)
    if not is_pooled and model.runtime is None:
        load_model(model.folder, "sequences", attention="sdpa", name=model.name)  # refuses one without a head


def _scorer(model: Evaluated, config: RerankConfig, device: str) -> Callable[[Pairs], Scores]:
    """Return a function that scores pairs by a cross-encoder, before any activation."""
    tokenizer = model.tokenizer(config.max_length)
    if load_pooled_head(model.folder) is not None:  # a sentence encoder that was fine-tuned to score pairs
        pooled = SentenceTransformer(
            str(model.folder), device=device, local_files_only=True, model_kwargs=dict(IN_FLOAT32)
        )
        pooled.max_seq_length = min(pooled.max_seq_length or config.max_length, config.max_length)
        return lambda pairs: np.asarray(
            pooled.encode(list(pairs), batch_size=config.batch_size, show_progress_bar=False)
        )[:, 0]
    if model.runtime is None:
        encoder = CrossEncoder(
            str(model.folder),
            device=device,
            max_length=config.max_length,
            activation_fn=torch.nn.Identity(),
            local_files_only=True,
            model_kwargs=dict(IN_FLOAT32),
        )
        return partial(encoder.predict, batch_size=config.batch_size, show_progress_bar=False)
    exported = ExportedModel(model.folder, model.runtime)

    def scores(pairs: Pairs) -> Scores:
        found = []
        for first in range(0, len(pairs), config.batch_size):
            sides = map(list, zip(*pairs[first : first + config.batch_size], strict=True))
            encoded = tokenizer(
                *sides, padding=True, truncation=True, max_length=config.max_length, return_tensors="pt"
            )
            found.append(exported(**encoded).logits[:, 0])
        return np.asarray(torch.cat(found))

    return scores


def _reranked(
    model: Evaluated, data: OwnData, found: Ranked, *, config: RerankConfig, session: Session
) -> RerankScores:
    """Return the scores of a cross-encoder."""
    device = choose_device(config.device)
    score = _scorer(model, config, str(device))
    pairs = [(query, name) for query, documents in found.items() for name in documents]
    texts = texts_of(data, found)
    # Pairs of about one length share a batch across parts, too: padding would be most of a reranker's time.
    order = np.argsort([len(one) + len(other) for one, other in texts], kind="stable")[::-1]
    scores, started = np.empty(len(texts)), time.perf_counter()
    with enough_memory(device, "Take a lower --batch-size or --max-length"):
        for part in session.parts(order.tolist(), BATCHES_OF_A_PART * config.batch_size):
            scores[part] = score([texts[at] for at in part])
    pairs_per_s = len(texts) / (time.perf_counter() - started)
    if not np.isfinite(scores).all():  # which have no order
        raise TeacherError(f"{model.name} gives scores that are NaN or infinite. Get its weights again.")
    names = list(data.documents)
    drawn = {names[place]: number for number, place in enumerate(drawn_order(len(names)))}
    run: Ranked = {query: {} for query in found}
    # Equal scores must not keep the order of the first stage, which would help a model that has no other.
    for at in sorted(range(len(pairs)), key=lambda at: (-scores[at], drawn[pairs[at][1]])):
        query, name = pairs[at]
        run[query][name] = float(scores[at])
    return _scores_of(model.name, data, run, pairs_per_s=pairs_per_s)


def _scores_of(name: str, data: OwnData, run: Ranked, *, pairs_per_s: float | None) -> RerankScores:
    means = {metric: measured(each) for metric, each in values_of(data, run).items()}
    ndcg, mrr = means["ndcg_at_10"], means["mrr_at_10"]
    return RerankScores(model=name, ndcg_at_10=ndcg, mrr_at_10=mrr, pairs_per_s=pairs_per_s)
