"""`minilm-cache evaluate`: fine-tunes models on downstream tasks and scores them."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minilm_cache.cli.console import print_error, print_json, print_pairs, print_table
from minilm_cache.cli.environment import quiet_libraries
from minilm_cache.cli.interrupt import stoppable_session
from minilm_cache.cli.options import Given, JsonOption, options
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.settings import cache_home, validated

if TYPE_CHECKING:
    from minilm_cache.evaluate.run import Evaluation
    from minilm_cache.evaluate.summary import Score, Summary


@options(EvaluateConfig)
def evaluate(
    given: Given,
    *,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="mini, bert-base, hub ids, folders of models or of runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of trials. [default: evaluations, in the cache home]"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fine-tune models on downstream tasks and score them, over seeds.

    A complete trial is not done again: the same command resumes, and more seeds, settings or models add
    trials. Of several settings, the best one on the dev set is reported.

    Example: minilm-cache evaluate mini RUN --task sst2 --task rte --data glue --seeds 3
    """
    from minilm_cache.evaluate.run import evaluate_models  # noqa: PLC0415 - importing it takes seconds

    config = validated(EvaluateConfig, given)
    quiet_libraries()
    with stoppable_session() as session:
        evaluation = evaluate_models(
            config,
            models,
            out=out or cache_home() / "evaluations",
            session=session,
        )
    if json:
        print_json(_document(evaluation))
    else:
        _print(evaluation)
    failed = [f"{summary.model} on {summary.task}" for summary in evaluation.summaries if not summary.scores]
    if failed:
        print_error(
            f"{', '.join(failed)}: the loss was NaN or infinite in the end, with every setting. Lower --lr."
        )
        raise typer.Exit(1)


def _document(evaluation: "Evaluation") -> dict[str, Any]:
    return {
        "evaluations": str(evaluation.path),
        "trials": [
            {**trial.model_dump(mode="json"), "folder": str(folder)}
            for trial, folder in zip(evaluation.trials, evaluation.folders, strict=True)
        ],
        "summaries": [asdict(summary) for summary in evaluation.summaries],
        "cards": [str(file) for file in evaluation.cards],
    }


def _print(evaluation: "Evaluation") -> None:
    """Print scores, and the folders of predictions."""
    print_pairs(
        {"evaluations": evaluation.path, "trials": len(evaluation.trials)}
        | {str(file): "card" for file in evaluation.cards}
    )
    tried = max(summary.settings for summary in evaluation.summaries)
    chosen = "" if tried == 1 else f"; best of {tried} settings on dev, so that scores on dev are optimistic"
    print_table(
        f"Scores between 0 and 100, mean over seeds +- standard deviation{chosen}",
        ["model", "task", "set", "score", "seeds", "lr", "epochs", "diverged"],
        [row for summary in evaluation.summaries for row in _rows(summary)],
    )
    print_pairs(
        {"predictions": "in the folders of trials; of the reported settings, by seed:"} | _folders(evaluation)
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
        return [[summary.model, task, "-", "diverged", *("-",) * 3, str(summary.diverged)]]
    return [
        [
            *(summary.model, task, name),
            ", ".join(f"{metric} {_text(score)}" for metric, score in scores.items()),
            *(str(summary.seeds), f"{summary.lr:g}", str(summary.epochs), str(summary.diverged)),
        ]
        for name, scores in summary.scores.items()
    ]


def _text(score: "Score") -> str:
    return f"{score.mean:.1f}" + ("" if score.stddev is None else f" +- {score.stddev:.1f}")
