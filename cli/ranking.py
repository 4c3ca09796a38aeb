"""`minilm-cache mine`, `rerank`: candidates of queries, to learn from and to rank anew."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from minilm_cache.cli.console import print_json, print_pairs, print_table
from minilm_cache.cli.early import (
    refuse_missing,
    refuse_no_extra,
    refuse_no_own_data,
    refuse_no_rerankers,
    refuse_several,
    refuse_too_long,
)
from minilm_cache.cli.evaluate import in_words
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import Given, JsonOption, options, out_option
from minilm_cache.evaluate.settings import MineConfig, RerankConfig
from minilm_cache.settings import validated

if TYPE_CHECKING:
    from minilm_cache.evaluate.reranking import RerankScores


@options(MineConfig)
def mine(
    given: Given,
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="mini, a hub id or a folder: the encoder that finds negatives."),
    ],
    out: Annotated[Path, out_option("JSON lines file, which must not exist yet.")],
    json: JsonOption = False,
) -> None:
    """Mine hard negatives: write queries with relevant documents and near others, for a teacher to score.

    Example: minilm-cache mine mini --retrieval questions.jsonl --out groups.jsonl
    """
    config = validated(MineConfig, given)
    refuse_missing(
        models=[model], revision=config.revision, data=config.retrieval, corpus=config.beside, out=out
    )
    refuse_several(model)
    refuse_too_long(config.max_length, [model], config.revision)
    refuse_no_own_data(config)
    refuse_no_extra("sentence-transformers", "eval", for_what="mine")
    from minilm_cache.evaluate.reranking import mine_negatives  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        mined = mine_negatives(config, model, out, session=session)
    if json:
        print_json(mined)
        return
    lacking = {"fewer negatives": f"{mined.lacking:,} queries have fewer than {config.negatives}"}
    print_pairs(
        {
            "file": mined.path,
            "queries": f"{mined.queries:,}",
            "pairs": f"{mined.pairs:,}",
            **(lacking if mined.lacking else {}),
            "next": f"minilm-cache dump --teacher CROSS-ENCODER --corpus {quote(str(mined.path))} "
            "--pair-columns query,positive+negative --for listwise",
        }
    )


@options(RerankConfig)
def rerank(
    given: Given,
    *,
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Hub ids, folders of cross-encoders or of runs.")
    ],
    json: JsonOption = False,
) -> None:
    """Score cross-encoders by how they rank what a first stage finds in data of your own.

    Example: minilm-cache rerank TEACHER RUN --retrieval questions.jsonl --first-stage mini
    """
    config = validated(RerankConfig, given)
    named = [*models, config.first_stage]
    refuse_missing(models=named, revision=config.revision, data=config.retrieval, corpus=config.beside)
    refuse_no_own_data(config)
    refuse_no_extra("sentence-transformers", "eval", for_what="rerank")
    refuse_no_rerankers(models, config.revision)
    refuse_several(config.first_stage)
    refuse_too_long(config.max_length, named, config.revision)
    from minilm_cache.evaluate.reranking import compare_rerankers  # noqa: PLC0415 - takes seconds

    with quiet_session() as session:
        scores = compare_rerankers(config, models, session=session)
    if json:
        print_json({"models": scores, "candidates": config.candidates})
        return
    print_table(
        f"At most {config.candidates} nearest documents of each query in {config.judged}, ranked anew, "
        f"pairs cut at {config.max_length} tokens: means over queries times 100, with 95 % intervals",
        ["model", "nDCG@10", "MRR@10", "pairs/s"],
        list(map(_row, scores)),
    )


def _row(scores: "RerankScores") -> list[str]:
    speed = "-" if scores.pairs_per_s is None else f"{scores.pairs_per_s:,.0f}"
    return [scores.model, in_words(scores.ndcg_at_10), in_words(scores.mrr_at_10), speed]
