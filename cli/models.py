"""`minilm-cache head` and `minilm-cache truncate`: models made of a teacher, before a dump or a training."""

from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import (
    CorpusOption,
    DeviceOption,
    JsonOption,
    MaxLengthOption,
    MaxTokensOption,
    RevisionOption,
    TeacherOption,
    TextColumnOption,
    quiet_libraries,
)
from minilm_cache.config import HeadConfig, make_config


def head(  # noqa: PLR0913 - one parameter for each option
    teacher: TeacherOption,
    out: Annotated[Path, typer.Option(help="Folder of the model, which must not exist")],
    corpus: CorpusOption = None,
    text_column: TextColumnOption = None,
    max_length: MaxLengthOption = 128,
    max_tokens: MaxTokensOption = None,
    epochs: Annotated[int, typer.Option(help="Passes over the text, each masked anew")] = 2,
    batch_size: Annotated[int, typer.Option(help="Sequences per step")] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate at the beginning")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights, order and masks")] = 0,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Fit a head for masked tokens to a teacher that has none, so that soft labels can be dumped.

    Example: minilm-cache head --teacher mini --out mini-with-head
    """
    from minilm_cache.dump.head import fit_head  # noqa: PLC0415 - importing it takes seconds

    config = make_config(
        HeadConfig,
        teacher=teacher,
        corpus=corpus or HeadConfig.model_fields["corpus"].default,
        text_column=text_column,
        max_length=max_length,
        max_tokens=max_tokens,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        revision=revision,
        device=device,
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        if corpus is None:
            progress.note(f"no --corpus given: taking {config.corpus}")
        found = fit_head(config, out, progress=progress, should_stop=should_stop)
    if json:
        print_json(
            {
                "model": str(found.path),
                "steps": found.steps,
                "accuracy": found.accuracy,
                "cross_entropy": found.cross_entropy,
            }
        )
        return
    print_pairs(
        {
            "model": found.path,
            "steps": found.steps,
            "masked tokens told": f"{found.accuracy:.1%} of held-out ones, cross-entropy "
            f"{found.cross_entropy:.3f} nats",
        }
    )


def truncate(
    teacher: TeacherOption,
    layers: Annotated[str, typer.Option(help="Layers to keep, counted from 0, like 0,1,2")],
    out: Annotated[Path, typer.Option(help="Folder of the model, which must not exist")],
    revision: RevisionOption = None,
    json: JsonOption = False,
) -> None:
    """Write a teacher with some of its layers alone: the baseline that learns nothing.

    Example: minilm-cache truncate --teacher mini --layers 0,1,2 --out bottom-3
    """
    from minilm_cache.dump.truncate import truncate as run_truncate  # noqa: PLC0415 - takes seconds

    quiet_libraries()
    kept = run_truncate(teacher, revision, layers, out)
    if json:
        print_json({"model": str(out), "layers": kept})
        return
    print_pairs({"model": out, "layers": ", ".join(map(str, kept))})
