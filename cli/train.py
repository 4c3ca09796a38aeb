"""`minilm-cache train`: trains students from a cache."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minilm_cache.cli.console import print_error, print_json, print_pairs
from minilm_cache.cli.early import (
    refuse_files,
    refuse_missing,
    refuse_no_labels,
    refuse_run_of_others,
    refuse_unserved,
)
from minilm_cache.cli.environment import chosen_cache, is_first_process
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import (
    CacheOrUrlArgument,
    Given,
    JsonOption,
    PresetOption,
    ResumeOption,
    options,
    out_option,
)
from minilm_cache.cli.tables import students_table
from minilm_cache.settings import validated
from minilm_cache.store.urls import is_url, without_secrets
from minilm_cache.train.config import TrainConfig, describe_preset, refuse_no_tracker, with_preset
from minilm_cache.train.record import FEW_HELD_OUT, StudentRecord
from minilm_cache.wording import counted

if TYPE_CHECKING:
    from minilm_cache.train.run import TrainResult


@options(
    TrainConfig,
    common=(
        *("arch", "objective", "preset", "steps", "epochs", "batch_size", "lr", "seed", "init"),
        *("eval_steps", "compiled", "device", "out", "json"),
    ),
)
def train(
    given: Given,
    *,
    cache: CacheOrUrlArgument = None,
    preset: PresetOption = None,
    out: Annotated[Path | None, out_option("Folder of the run. [default: in the cache home]")] = None,
    resume: ResumeOption = True,
    json: JsonOption = False,
) -> None:
    """Train students from a cache in one pass, without the teacher in the loop.

    Example: minilm-cache train notes.cache --arch 3x384 --arch 4x312:ff1200 --epochs 5
    """
    config = validated(TrainConfig, with_preset(preset, given))
    refuse_missing(cache=cache, arch=config.arch)
    refuse_files(out=out)
    for other in config.also:
        refuse_missing(cache=other)
    refuse_no_labels(config)
    if cache is not None:
        refuse_unserved(config, cache)
    refuse_run_of_others(config, out)
    refuse_no_tracker(config.tracker)
    from minilm_cache.train.run import train_students  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        if preset is not None and is_first_process():
            session.progress.note(describe_preset(preset, config))
        place = cache or chosen_cache(session)
        result = train_students(config, place, out=out, resume=resume, session=session)
    if not result.is_first:  # only one process of torchrun prints the results
        return
    if json:
        print_json(_document(result, str(place)))
    else:
        _print(result, str(place))
    _end_if_worse(result)


def _document(result: "TrainResult", cache: str) -> dict[str, Any]:
    return {
        "run": result.path,
        "cache": cache,
        "tokens_per_s": result.tokens_per_s,
        "steps": result.record.identity.steps,
        "num_held_out": result.num_held_out,
        "students": [
            {
                **dict(student),
                "ended_worse": student.ended_worse if result.num_held_out >= FEW_HELD_OUT else None,
                "path": _path(result, student),
            }
            for student in result.record.students
        ],
    }


def _print(result: "TrainResult", place: str) -> None:
    record = result.record
    rate = "" if result.tokens_per_s is None else f", {result.tokens_per_s:,.0f} tokens/s"
    print_pairs(
        {"run": result.path, "steps": f"{record.identity.steps}{rate}"}
        | {student.arch: _path(result, student) or "diverged" for student in record.students}
    )
    students_table(record.students, record.identity)
    if 0 < result.num_held_out < FEW_HELD_OUT:
        few = counted(result.num_held_out, "sequence")
        print_pairs({"held out": f"{few}, too few to tell whether students became better: give more text"})
    elif level := [student.arch for student in record.students if student.ended_level]:
        print_pairs({"note": f"{', '.join(level)} did not become better on held-out text: give more steps"})
    if not record.ended_worse(result.num_held_out):
        # A report opens no URL that a run names: whoever runs it says that it is trusted.
        cache = ["--cache", without_secrets(place)] if is_url(place) else []
        report = shlex.join(["minilm-cache", "report", str(result.path), *cache, "--out", "report.html"])
        print_pairs({"next": report})


def _end_if_worse(result: "TrainResult") -> None:
    """End with exit code 1 if students ended worse than they began."""
    if worse := result.worse_in_words:
        lr = result.record.identity.lr
        lower = min(lr / 5, TrainConfig.model_fields["lr"].default)
        print_error(
            f"{worse}. Train again with another --out and more --steps, a lower rate, like --lr {lower:g} "
            f"instead of {lr:g}, or from more text; what was trained is kept in {result.path}."
        )
        raise typer.Exit(1)


def _path(result: "TrainResult", student: StudentRecord) -> str | None:
    return None if student.diverged_at is not None else str(result.student_path(student.arch))
