"""Tables that several commands print."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from minilm_cache.cli.console import print_pairs, print_table
from minilm_cache.dump.fidelity import kl_infinite_because, verdict
from minilm_cache.storage_schema.manifest import CacheManifest, StateFidelity
from minilm_cache.train.record import RunIdentity, StudentRecord, measure_in_words
from minilm_cache.wording import number_text

if TYPE_CHECKING:
    import pyarrow as pa


def fidelity_table(manifest: CacheManifest, *, verbose: bool = False) -> None:
    """Print how faithful a complete cache is, and what that means for students.

    Args:
        manifest: manifest of the cache.
        verbose: print the reverse KL and the mass kept, too.
    """
    measured = manifest.measured
    assert measured is not None
    rows = []
    for layer in measured.fidelity:
        for kind, fidelity in layer.relations.items():
            forward = fidelity.kl_teacher_to_stored
            rows.append(
                [
                    f"{kind}" if len(measured.fidelity) == 1 else f"{kind} {layer.layer}",
                    (kl_infinite_because(manifest) or "-") if forward is None else f"{forward:.4f}",
                    f"{fidelity.cross_entropy_bias:+.4f}",
                    *(
                        [f"{fidelity.kl_stored_to_teacher:.4f}", f"{fidelity.mass_kept:.3f}"]
                        if verbose
                        else []
                    ),
                ]
            )
    if rows:
        print_table(
            f"Fidelity on {manifest.measured_on} (nats); {measured.bytes_per_token:.1f} bytes per token",
            [
                *("relation", "KL(teacher, stored)", "CE bias"),
                *(["KL(stored, teacher)", "mass kept"] if verbose else []),
            ],
            rows,
        )
        if verdict(manifest) is not None:
            print_pairs({"verdict": verdict(manifest)})
    if measured.states:
        errors = [_state_errors(state) for state in measured.states]
        headings = [name for name in errors[0] if any(error[name] for error in errors)]
        print_table(
            f"States, on {manifest.measured_on}",
            ["state", "B/token", "B/sequence", *headings],
            [
                [
                    state.path,
                    f"{state.bytes_per_token:.1f}",
                    f"{state.bytes_per_token * manifest.num_tokens / manifest.num_sequences:,.0f}",
                    *(error[name] for name in headings),
                ]
                for state, error in zip(measured.states, errors, strict=True)
            ],
        )


def _state_errors(state: StateFidelity) -> dict[str, str]:
    """Return error, bias and cosine of a state by their headings; what is not measured is an empty text."""
    return {
        "relative error": "" if state.relative_error is None else f"{state.relative_error:.4f}",
        "CE bias, nats": "" if state.cross_entropy_bias is None else f"{state.cross_entropy_bias:+.4f}",
        "cosine": "" if state.cosine is None else f"{state.cosine:.5f}",
    }


def students_table(students: Sequence[StudentRecord], identity: RunIdentity) -> None:
    """Print the held-out losses of students before and after training."""
    parts = sorted({part for student in students for part in student.held_out_before or ()})
    print_table(
        f"{measure_in_words(identity, students[0])} on held-out sequences, before -> after",
        ["student", "parameters", *(parts or ["KL"])],
        [[student.arch, f"{student.num_parameters:,}", *_changes(student, parts)] for student in students],
    )


def _changes(student: StudentRecord, parts: Sequence[str]) -> list[str]:
    before, after = student.held_out_before, student.held_out_after
    if student.diverged_at is not None:
        return [f"diverged, stopped at step {student.diverged_at}"]
    if before is None or after is None:
        return ["nothing held out"]
    return [f"{number_text(before.get(part))} -> {number_text(after.get(part))}" for part in parts]


def print_summary(summary: "pa.Table") -> None:
    """Print means over seeds, which `report.tables.summary_table` computes: closeness and cost of students.

    Names that all rows share are printed once, so that both tables fit a terminal.
    """
    from minilm_cache.report.tables import NAMES, SCORE, heading_of, measured_text, measures, row_names  # noqa: PLC0415 - it takes seconds

    rows = summary.to_pylist()
    differing, shared = row_names(summary)
    if shared and rows:
        print_pairs({NAMES[name]: rows[0][name] for name in shared})
    measured = measures(summary)
    headings = [NAMES[name] for name in differing]
    named = [["-" if row[name] is None else str(row[name]) for name in differing] for row in rows]
    priced = ["cost"] if summary["cost"].null_count < len(summary) else []
    scores = ", and scores on tasks" * any(name.startswith(SCORE) for name in measured)
    nats = ". KLs are in nats" * any(name.startswith("kl_") for name in measured)
    print_table(
        f"Measured on held-out sequences{scores}: mean over seeds +- standard deviation{nats}",
        [*headings, *map(heading_of, measured), "seeds"],
        [
            [*names, *(measured_text(row, name) for name in measured), str(row["seeds"])]
            for names, row in zip(named, rows, strict=True)
        ],
    )
    print_table(
        "Speed: of the teacher = 1. Read: by the whole pass. Seconds: a student's share of its pass",
        [*headings, "parameters", "of layers", "MFLOPs/token", "speed", "read", "seconds", *priced],
        [
            [*names, *_costs(row), *(number_text(row[name]) for name in priced)]
            for names, row in zip(named, rows, strict=True)
        ],
    )


def _costs(row: dict[str, Any]) -> list[str]:
    flops = row["flops_per_token"]
    return [
        *(number_text(row[name], 0) for name in ("num_parameters", "transformer_parameters")),
        number_text(None if flops is None else flops / 1e6, 1),
        number_text(row["speedup"], 1),
        "-" if row["bytes_read"] is None else decimal(round(row["bytes_read"])),
        number_text(row["own_train_s"], 1),
    ]
