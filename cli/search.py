"""`minilm-cache search`: finds the best shape of a student within a budget."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.filesize import decimal

from minilm_cache.cli.console import print_error, print_json, print_notes, print_pairs, print_table
from minilm_cache.cli.early import refuse_missing, refuse_no_extra, refuse_unserved
from minilm_cache.cli.environment import chosen_cache
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import CacheOrUrlArgument, Given, JsonOption, options, out_option
from minilm_cache.deploy.config import ExportModelConfig
from minilm_cache.models.outline import Outline
from minilm_cache.objectives.spec import ObjectiveSpec
from minilm_cache.settings import validated
from minilm_cache.store.durable import refuse_file
from minilm_cache.store.urls import is_url, without_secrets
from minilm_cache.train.config import TrainConfig
from minilm_cache.wording import number_text
from minilm_cache.workflows.config import SearchConfig, about, numbers_of, refuse_of_one_shape

if TYPE_CHECKING:
    from minilm_cache.report.front import Candidate
    from minilm_cache.workflows.search import SearchResult

_RESERVED: Final = 2
"""Positions that some families keep for themselves."""


@options(
    SearchConfig,
    TrainConfig,
    leave_out={TrainConfig: ("arch",)},
    common=(
        *("max_latency_ms", "speedup", "max_parameters", "max_bytes", "runtime", "layers", "widths", "every"),
        *("objective", "steps", "epochs", "batch_size", "lr", "out", "json"),
    ),
)
def search(
    given: Given,
    train: Given,
    *,
    cache: CacheOrUrlArgument = None,
    out: Annotated[Path, out_option("Folder of the search; the same command goes on with it.")],
    json: JsonOption = False,
) -> None:
    """Find the best student within a budget of latency, weights or bytes.

    Shapes are timed on this machine before any is trained. Those within the budget are trained together, the
    better ones go on, and the last one is trained for all of --steps.

    Example: minilm-cache search notes.cache --speedup 4 --objective embedding --out found
    """
    config = validated(SearchConfig, given)
    layers, widths = numbers_of(config.layers, "--layers"), numbers_of(config.widths, "--widths")
    arch = tuple(f"{number}x{width}" for number in layers or [1] for width in widths)
    probe = validated(TrainConfig, {**train, "init_layers": None, "arch": arch or ("1x12",)})
    refuse_of_one_shape(probe, layers)
    refuse_file(out)
    refuse_missing(cache=cache)
    runtime = config.runtime.removesuffix("-int8")
    if runtime != "torch":
        refuse_no_extra(runtime, for_what=f"--runtime {config.runtime}")
    if cache is not None:
        with about("--arch", "--widths: shape", 1):
            refuse_unserved(probe, cache, has_shapes=bool(arch))
    from minilm_cache.workflows.search import search as run_search  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        place = cache or chosen_cache(session)
        result = run_search(config, train, place, out=out, session=session)
    if json:
        student = {"student": result.student, "latency_ms": result.latency_ms}
        files = {"search": out, "report": result.report}
        found = {"winner": result.winner.name, **student, "cautions": result.cautions}
        print_json({**files, **found, **dict(result.record)})
    else:
        _print(result, config, place, objective=probe.spec)
        print_notes(result.cautions)
    if result.ended_worse:
        print_error(
            f"{result.winner.name} ended worse than it began its last round. Search again with another --out "
            f"and more --steps, a lower --lr, or more text; all is kept in {result.path}."
        )
        raise typer.Exit(1)


def _print(
    result: "SearchResult", config: SearchConfig, place: str | Path, *, objective: ObjectiveSpec
) -> None:
    record = result.record
    rounds = [f"loss after {each.steps:,} steps" for each in record.rounds]
    print_table(
        f"Shapes, {record.timed}; the teacher takes {record.teacher_latency_ms:.2f} ms in torch",
        ["shape", "weights", "bytes", "ms", "speed", *rounds, "outcome"],
        [_row(each, result) for each in record.candidates],
    )
    form = {"torch": "--onnx"}.get(config.runtime, f"--{config.runtime.replace('-', ' --')}")
    positions = Outline.of(str(result.student)).positions
    if positions is not None and positions < ExportModelConfig.model_fields["max_length"].default:
        form += f" --max-length {positions - _RESERVED}"
    if is_url(str(place)):  # a run's own URL is not opened by itself
        form += f" --corpus {quote(without_secrets(str(place)))}"
    print_pairs(
        {
            "best": f"{result.winner.name}, {result.latency_ms:.2f} ms when measured anew",
            "student": result.student,
            "report": result.report,
        }
    )
    if not result.ended_worse:
        student, exported = quote(str(result.student)), quote(str(result.path / "exported"))
        ship = f"minilm-cache export-model {student} {form} --out {exported}"
        is_counted = config.runtime != "torch" or config.max_bytes is None  # a graph has bytes of its own
        following = ship if is_counted else f"minilm-cache speed {student}"
        if objective.untrained is not None:  # what an export would give is of no use yet
            following = f"minilm-cache evaluate {student} --task sst2 --data hf"
        print_pairs({"next": following})


def _row(each: "Candidate", result: "SearchResult") -> list[str]:
    record = result.record
    losses = [part.losses.get(each.name) for part in record.rounds]
    return [
        *(each.name, f"{each.num_parameters:,}", decimal(each.num_bytes), f"{each.latency_ms:.2f}"),
        f"{record.teacher_latency_ms / each.latency_ms:.1f}x",
        *("-" if loss is None else number_text(loss) for loss in losses),
        record.outcome(each),
    ]
