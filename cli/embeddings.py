"""`minilm-cache embeddings`: compares students of sentence encoders, without fine-tuning."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from minilm_cache.cli.console import print_json, print_pairs, print_table
from minilm_cache.cli.environment import quiet_libraries
from minilm_cache.cli.interrupt import stoppable_session
from minilm_cache.cli.options import ComparedModelsArgument, Given, JsonOption, options
from minilm_cache.evaluate.settings import EmbeddingsConfig
from minilm_cache.settings import validated

if TYPE_CHECKING:
    from minilm_cache.evaluate.embeddings import EmbeddingScores


@options(EmbeddingsConfig)
def embeddings(
    given: Given,
    *,
    models: ComparedModelsArgument,
    json: JsonOption = False,
) -> None:
    """Score embeddings against a teacher's and against people's.

    Example: minilm-cache embeddings mini RUN --data glue --save encoders
    """
    from minilm_cache.evaluate.embeddings import compare_embeddings  # noqa: PLC0415 - takes seconds

    config = validated(EmbeddingsConfig, given)
    quiet_libraries()
    with stoppable_session() as session:
        scores = compare_embeddings(config, models, session=session)
    if json:
        rows = [asdict(model) | {"path": None if model.path is None else str(model.path)} for model in scores]
        print_json({"models": rows})
    else:
        _print(scores, config)


def _print(scores: "list[EmbeddingScores]", config: EmbeddingsConfig) -> None:
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
