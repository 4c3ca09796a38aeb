"""`minilm-cache evaluate`, `speed`, `embeddings`: scores of models on tasks, their speed, their vectors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from minilm_cache.cli.console import print_error, print_json, print_pairs, print_table
from minilm_cache.cli.early import (
    refuse_files,
    refuse_missing,
    refuse_no_columns,
    refuse_no_extra,
    refuse_no_own_data,
    refuse_no_task_data,
    refuse_too_long,
    refuse_too_long_of,
)
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import ComparedModelsArgument, Given, JsonOption, options, out_option
from minilm_cache.evaluate.settings import EmbeddingsConfig, EvaluateConfig, SpeedConfig
from minilm_cache.settings import cache_home, validated
from minilm_cache.train.folder import refuse_run_as_teacher

if TYPE_CHECKING:
    from minilm_cache.evaluate.card import Score, Summary
    from minilm_cache.evaluate.embeddings import EmbeddingScores
    from minilm_cache.evaluate.retrieval import Measured, RetrievalScores
    from minilm_cache.evaluate.run import Evaluation
    from minilm_cache.evaluate.speed import ModelSpeed


@options(
    EvaluateConfig,
    common=(
        *("task", "data", "text_columns", "label_column", "target_column", "dev", "lr", "epochs", "seeds"),
        *("max_train", "max_length", "as_is", "keep_models", "device", "out", "json"),
    ),
)
def evaluate(
    given: Given,
    *,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="mini, bert-base, hub ids, folders of models or of runs."),
    ],
    out: Annotated[
        Path | None, out_option("Folder of trials. [default: evaluations, in the cache home]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fine-tune models on downstream tasks and score them, over seeds.

    A complete trial is not done again: the same command resumes, and more seeds, settings or models add
    trials. Of several settings, the best one on the dev set is reported.

    Example: minilm-cache evaluate mini RUN --task sst2 --task rte --data glue --seeds 3
    """
    config = validated(EvaluateConfig, given)
    refuse_missing(models=models, revision=config.revision)
    refuse_files(out=out)
    refuse_no_extra("eval", for_what="evaluate")
    refuse_no_task_data(config.data, config.task)
    refuse_no_columns(config)
    if config.max_length is not None:
        refuse_too_long_of(config, models, config.revision)
    from minilm_cache.evaluate.run import evaluate_models  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        evaluation = evaluate_models(config, models, out=out or cache_home() / "evaluations", session=session)
    if json:
        print_json(document_of(evaluation))
    else:
        _print(evaluation)
    failed = [f"{summary.model} on {summary.task}" for summary in evaluation.summaries if not summary.scores]
    if failed:
        print_error(
            f"{', '.join(failed)}: the loss was NaN or infinite in the end, with every setting. Lower --lr."
        )
        raise typer.Exit(1)


def document_of(evaluation: "Evaluation") -> dict[str, Any]:
    """Return an evaluation as commands print it as JSON."""
    return {
        "evaluations": evaluation.path,
        "trials": [
            {**dict(trial), "folder": folder}
            for trial, folder in zip(evaluation.trials, evaluation.folders, strict=True)
        ],
        "summaries": evaluation.summaries,
        "cards": evaluation.cards,
        "remarks": evaluation.remarks,
    }


def _print(evaluation: "Evaluation") -> None:
    """Print scores, and the folders of predictions."""
    print_pairs(
        {"evaluations": evaluation.path, "trials": len(evaluation.trials)}
        | {str(file): "card" for file in evaluation.cards}
    )
    print_scores(evaluation)
    print_pairs(
        {"predictions": "in the folders of trials; of the reported settings, by seed:"} | _folders(evaluation)
    )


def print_scores(evaluation: "Evaluation") -> None:
    """Print the scores of an evaluation as a table, with names of models without digests."""
    from minilm_cache.report.runs import short_models  # noqa: PLC0415 - importing it takes seconds

    names = short_models(summary.model for summary in evaluation.summaries)
    tried = max(summary.settings for summary in evaluation.summaries)
    chosen = "" if tried == 1 else f"; best of {tried} settings on dev, so that scores on dev are optimistic"
    print_table(
        f"Scores between 0 and 100, mean over seeds +- standard deviation{chosen}",
        ["model", "task", "set", "score", "seeds", "lr", "epochs", "diverged"],
        [[names[summary.model], *row] for summary in evaluation.summaries for row in _rows(summary)],
    )


def _folders(evaluation: "Evaluation") -> dict[str, object]:
    """Return the folders of the trials of the reported settings, by model, task and seed."""
    chosen = {
        (summary.model, summary.task, summary.track, summary.lr, summary.epochs)
        for summary in evaluation.summaries
    }
    named: dict[str, object] = {}
    for trial, folder in zip(evaluation.trials, evaluation.folders, strict=True):
        identity = trial.identity
        if (trial.model, identity.task, identity.track, identity.lr, identity.epochs) in chosen:
            words = f"{trial.model} {identity.task} {identity.track}".strip()
            named[f"{words}, seed {identity.seed}"] = folder.relative_to(evaluation.path)
    return named


def _rows(summary: "Summary") -> list[list[str]]:
    task = f"{summary.task} {summary.track}".strip()
    if not summary.scores:
        return [[task, "-", "diverged", *("-",) * 3, str(summary.diverged)]]
    return [
        [
            *(task, name),
            ", ".join(f"{metric} {_text(score)}" for metric, score in scores.items()),
            *(str(summary.seeds), f"{summary.lr:g}", str(summary.epochs), str(summary.diverged)),
        ]
        for name, scores in summary.scores.items()
    ]


def _text(score: "Score") -> str:
    return f"{score.mean:.1f}" + ("" if score.stddev is None else f" +- {score.stddev:.1f}")


@options(SpeedConfig)
def speed(given: Given, *, models: ComparedModelsArgument, json: JsonOption = False) -> None:
    """Measure size, latency and throughput of models against the first.

    Models take turns on the same batches, so that ratios are valid on a busy machine; times are medians.

    Example: minilm-cache speed mini RUN --batch-size 1 --batch-size 64
    """
    config = validated(SpeedConfig, given)
    refuse_missing(models=models, revision=config.revision)
    refuse_run_as_teacher(models)
    refuse_too_long(max(config.length), models, config.revision, option="--length")
    if config.onnx is not None:
        refuse_files(onnx=config.onnx)
        refuse_no_extra("onnx", for_what="--onnx")
    from minilm_cache.evaluate.speed import compare_speed  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        speeds = compare_speed(config, models, session=session)
    if json:
        print_json({"models": speeds})
    else:
        _speed_print(speeds, config)


def _speed_print(speeds: "list[ModelSpeed]", config: SpeedConfig) -> None:
    print_table(
        f"Parameters, and operations of a pass over sequences of {max(config.length)} tokens",
        ["model", "parameters", "embeddings'", "layers'", "bytes", "MFLOPs/token", "of the teacher's"],
        [
            [
                model.model,
                *(f"{count:,}" for count in (model.size.num_parameters, model.size.embedding_parameters)),
                f"{model.size.transformer_parameters:,}",
                decimal(model.num_bytes),
                f"{model.size.flops_per_token / 1e6:.1f}",
                f"{model.flops_share:.1%}",
            ]
            for model in speeds
        ],
    )
    generated = f"; texts have {config.generate} new tokens, relative to the first model that generates"
    print_table(
        f"Passes, medians of {config.turns} turns; speed is relative to {speeds[0].model} in "
        f"{speeds[0].passes[0].runtime}{generated if config.generate else ''}",
        ["model", "runtime", "batch", "length", "latency, ms", "tokens/s", "speed"],
        [
            [
                *(model.model, run.runtime, str(run.batch_size), str(run.length)),
                *(f"{run.latency_ms:.2f}", f"{run.tokens_per_s:,.0f}", f"{run.speedup:.2f}x"),
            ]
            for model in speeds
            for run in model.passes
        ],
    )


@options(EmbeddingsConfig)
def embeddings(given: Given, *, models: ComparedModelsArgument, json: JsonOption = False) -> None:
    """Score embeddings against a teacher's, against people's, and by what they find in data of your own.

    Example: minilm-cache embeddings mini RUN --data glue --save encoders

    Example: minilm-cache embeddings mini RUN --retrieval questions.jsonl
    """
    config = validated(EmbeddingsConfig, given)
    refuse_missing(models=models, revision=config.revision, data=config.retrieval, corpus=config.beside)
    refuse_run_as_teacher(models)
    refuse_files(save=config.save)
    refuse_no_extra("sentence-transformers", "eval", for_what="embeddings")
    refuse_no_task_data(config.data, ["stsb"], reads_training=False)
    refuse_too_long(config.max_length, models, config.revision)
    if config.judged is not None:
        refuse_no_own_data(config)
    from minilm_cache.evaluate.embeddings import compare_embeddings  # noqa: PLC0415 - takes seconds

    with quiet_session() as session:
        scores = [] if config.data is None else compare_embeddings(config, models, session=session)
        found = []
        if config.judged is not None:
            from minilm_cache.evaluate.retrieval import compare_retrieval  # noqa: PLC0415 - needs an extra

            found = compare_retrieval(config, models, session=session)
    if json:
        own = {"retrieval": found, "max_length": config.max_length}
        print_json({"models": scores} | (own if found else {}))
        return
    if scores:
        _embeddings_print(scores, config)
    if found:
        _retrieval_print(found, config)


def in_words(value: "Measured | None") -> str:
    """Return a mean over queries with its interval, for tables."""
    return "-" if value is None else f"{value.mean:.1f} ({value.low:.1f} to {value.high:.1f})"


def _retrieval_print(found: "list[RetrievalScores]", config: EmbeddingsConfig) -> None:
    print_table(
        f"Retrieval in {config.judged}, texts cut at {config.max_length} tokens, or earlier by a model "
        f"itself: means over queries times 100, with 95 % intervals; teacher: {found[0].model}",
        ["model", "nDCG@10", "MRR@10", "Recall@100", "nDCG@10 in the teacher's index"],
        [
            [
                each.model,
                *map(in_words, (each.ndcg_at_10, each.mrr_at_10, each.recall_at_100, each.teachers_index)),
            ]
            for each in found
        ],
    )


def _embeddings_print(scores: "list[EmbeddingScores]", config: EmbeddingsConfig) -> None:
    saved: dict[str, object] = {model.model: model.path for model in scores if model.path is not None}
    if saved:
        print_pairs(saved)
    print_table(
        "Embeddings of STS-B's pairs without fine-tuning, correlations times 100; "
        f"teacher: {scores[0].model}",
        [
            *("model", "width", "Spearman, people", "Pearson, people", "Spearman, teacher"),
            *("cosines off by", "cosine with teacher's", *config.mteb),
        ],
        [
            [
                *(model.model, str(model.width), f"{model.spearman:.1f}", f"{model.pearson:.1f}"),
                *(f"{model.teacher_spearman:.1f}", f"{model.cosine_error:.3f}"),
                "-" if model.teacher_cosine is None else f"{model.teacher_cosine:.3f}",
                *(f"{model.mteb[name]:.3f}" for name in config.mteb),
            ]
            for model in scores
        ],
    )
