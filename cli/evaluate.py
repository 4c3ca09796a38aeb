"""`minilm-cache evaluate`: models fine-tuned on downstream tasks, and their scores."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_error, print_json, print_pairs, print_table
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import DeviceOption, JsonOption, RevisionOption, home, quiet_libraries
from minilm_cache.config import make_config

if TYPE_CHECKING:
    from minilm_cache.evaluate.run import Evaluation
    from minilm_cache.evaluate.summary import Score, Summary


def evaluate(  # noqa: PLR0913 - one parameter for each option
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="mini, bert-base, hub ids, folders of models or of runs"),
    ],
    task: Annotated[
        list[str],
        typer.Option(
            help="cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli, squad, squad2, xnli, "
            "xnli-translate-train or mlqa; may be repeated"
        ),
    ],
    data: Annotated[
        str, typer.Option(help="Folder in the official layout, or of such folders; hf or hf:ID for the hub")
    ],
    grid: Annotated[
        str, typer.Option(help="none: one setting; paper: the learning rates and epochs that MiniLM tried")
    ] = "none",
    lr: Annotated[
        list[float] | None,
        typer.Option(help="Peak learning rate; may be repeated [default: 3e-5; squad and squad2 6e-5]"),
    ] = None,
    epochs: Annotated[
        list[int] | None,
        typer.Option(help="Passes over the training set; may be repeated [default: 3; mlqa 2]"),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step [default: 32]")] = None,
    seeds: Annotated[int, typer.Option(help="Trials of each setting, with seeds 0, 1, ...")] = 1,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens at most [default: 128; of questions with contexts 384]")
    ] = None,
    max_train: Annotated[
        int | None, typer.Option(help="Training examples, drawn once for all models [default: all]")
    ] = None,
    max_dev: Annotated[int | None, typer.Option(help="Likewise of each dev set [default: all]")] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Each model's shape with random weights, too")
    ] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Predict unlabelled test sets, too, for a benchmark's server")
    ] = False,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep the fine-tuned models")] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Write the scores into the README.md of models that are folders")
    ] = False,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    out: Annotated[
        Path | None, typer.Option(help="Folder of trials [default: evaluations, in the cache home]")
    ] = None,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Fine-tune models on downstream tasks and score them, seed by seed, with means and spreads.

    A trial that is done is not done again: the same command resumes, and more seeds, settings or models add
    to what is there. Of several settings the one that is best on dev is told.

    Example: minilm-cache evaluate mini RUN --task sst2 --task rte --data glue --seeds 3
    """
    from minilm_cache.evaluate.run import evaluate as run_evaluate  # noqa: PLC0415 - importing takes seconds
    from minilm_cache.evaluate.settings import EvaluateConfig  # noqa: PLC0415 - likewise

    config = make_config(
        EvaluateConfig,
        task=tuple(task),
        data=data,
        grid=grid,
        lr=tuple(lr or ()),
        epochs=tuple(epochs or ()),
        batch_size=batch_size,
        seeds=seeds,
        max_length=max_length,
        max_train=max_train,
        max_dev=max_dev,
        untrained=untrained,
        predict=predict,
        keep_models=keep_models,
        card=card,
        precision=precision,
        revision=revision,
        device=device,
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        found = run_evaluate(
            config, models, out or home() / "evaluations", progress=progress, should_stop=should_stop
        )
    if json:
        print_json(
            {
                "evaluations": str(found.path),
                "trials": [
                    {**trial.model_dump(mode="json"), "folder": str(folder)}
                    for trial, folder in zip(found.trials, found.folders, strict=True)
                ],
                "summaries": [asdict(one) for one in found.summaries],
                "cards": [str(file) for file in found.cards],
            }
        )
    else:
        _print_evaluation(found)
    lost = [f"{one.model} on {one.task}" for one in found.summaries if not one.scores]
    if lost:
        print_error(f"{', '.join(lost)}: the loss was no number in the end, with every setting. Lower --lr.")
        raise typer.Exit(1)


def _print_evaluation(found: "Evaluation") -> None:
    """Print scores, and where predictions are."""
    print_pairs(
        {"evaluations": found.path, "trials": len(found.trials)} | {str(file): "card" for file in found.cards}
    )
    tried = max(one.settings for one in found.summaries)
    chosen = (
        "" if tried == 1 else f"; of {tried} settings the best on dev, so that dev figures are optimistic"
    )
    print_table(
        f"Scores between 0 and 100, mean over seeds +- standard deviation{chosen}",
        ["model", "task", "set", "score", "seeds", "lr", "epochs", "diverged"],
        [row for one in found.summaries for row in _rows(one)],
    )
    print_pairs(
        {"predictions": "in the folders of trials; of what was chosen, seed by seed:"} | _folders(found)
    )


def _folders(found: "Evaluation") -> dict[str, object]:
    """Return the folders of the trials that were chosen, by what they are of."""
    chosen = {(one.model, one.task, one.track, one.lr, one.epochs) for one in found.summaries}
    named: dict[str, object] = {}
    for trial, folder in zip(found.trials, found.folders, strict=True):
        identity = trial.identity
        if (trial.model, identity.task, identity.track, identity.lr, identity.epochs) in chosen:
            words = f"{trial.model} {identity.task} {identity.track}".strip()
            named[f"{words}, seed {identity.seed}"] = folder.relative_to(found.path)
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
