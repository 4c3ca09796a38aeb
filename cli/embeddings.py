"""`minilm-cache embeddings`: students of sentence encoders, without fine-tuning."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs, print_table
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import DeviceOption, JsonOption, RevisionOption, quiet_libraries
from minilm_cache.config import make_config


def embeddings(  # noqa: PLR0913 - one parameter for each option
    models: Annotated[
        list[str],
        typer.Argument(metavar="TEACHER MODEL...", help="mini, hub ids, folders of models or of runs"),
    ],
    data: Annotated[
        str,
        typer.Option(help="Folder of STS-B in GLUE's layout, or of such folders; hf, hf:ID for the hub"),
    ],
    max_pairs: Annotated[int | None, typer.Option(help="Pairs of the dev set at most [default: all]")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a text")] = 128,
    batch_size: Annotated[int, typer.Option(help="Texts of a pass")] = 32,
    save: Annotated[
        Path | None, typer.Option(help="Folder: write each model there as a sentence-transformer")
    ] = None,
    mteb: Annotated[
        list[str] | None, typer.Option(help="Task of the MTEB benchmark, like STS12; may be repeated")
    ] = None,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Compare mean-pooled embeddings with a teacher's, and with people's scores of STS-B, untuned.

    Example: minilm-cache embeddings mini RUN --data glue --save encoders
    """
    from minilm_cache.evaluate.embeddings import EmbeddingsConfig, compare_embeddings  # noqa: PLC0415

    config = make_config(
        EmbeddingsConfig,
        data=data,
        max_pairs=max_pairs,
        max_length=max_length,
        batch_size=batch_size,
        save=save,
        mteb=tuple(mteb or ()),
        revision=revision,
        device=device,
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        found = compare_embeddings(config, models, progress=progress, should_stop=should_stop)
    if json:
        rows = [asdict(one) | {"path": None if one.path is None else str(one.path)} for one in found]
        print_json({"models": rows})
        return
    saved = {one.model: one.path for one in found if one.path is not None}
    if saved:
        print_pairs(dict(saved))
    print_table(
        f"Embeddings of STS-B's pairs without fine-tuning, correlations times 100; teacher: {found[0].model}",
        [
            *("model", "width", "Spearman, people", "Pearson, people", "Spearman, teacher"),
            *("cosines off by", "cosine with teacher's", *config.mteb),
        ],
        [
            [
                *(one.model, str(one.width), f"{one.spearman:.1f}", f"{one.pearson:.1f}"),
                *(f"{one.teacher_spearman:.1f}", f"{one.cosine_error:.3f}"),
                "-" if one.teacher_cosine is None else f"{one.teacher_cosine:.3f}",
                *(f"{one.mteb[name]:.3f}" for name in config.mteb),
            ]
            for one in found
        ],
    )
