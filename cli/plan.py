"""`minilm-cache plan`: what a dump would cost and be worth, before it is made."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs, print_table
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import (
    DeviceOption,
    ForOption,
    JsonOption,
    LabelTokensOption,
    MaskingsOption,
    quiet_libraries,
)
from minilm_cache.config import DumpConfig, make_config
from minilm_cache.errors import InvalidConfigError
from minilm_cache.needs import needs_of, objective_names
from minilm_cache.storage_schema.manifest import LayerFidelity

if TYPE_CHECKING:
    from minilm_cache.costs import Costs
    from minilm_cache.dump.plan import Plan, PlannedSetting


DEFAULT_KS = (8, 16)
DEFAULT_MAX_KLS = (0.02, 0.015, 0.005)


def plan(  # noqa: PLR0913 - one parameter for each option
    teacher: Annotated[
        str, typer.Option(help="mini, bert-base, bert-large, xlm-r-base, a folder, or a hub id")
    ],
    corpus: Annotated[str | None, typer.Option(help="As for dump [default: python-docs]")] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column with the text, in records [default: text]")
    ] = None,
    k: Annotated[list[int] | None, typer.Option(help="For topk; repeat [default: 8, 16]")] = None,
    max_kl: Annotated[
        list[float] | None, typer.Option(help="For vectors; repeat [default: 0.02, 0.015, 0.005]")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="last, all, or numbers from 0 on like 2,5,8; several for vectors [default: last]"),
    ] = None,
    objectives: ForOption = None,
    dense: Annotated[bool, typer.Option(help="Look at the exact reference, too")] = True,
    packing: Annotated[str, typer.Option(help="packed or records")] = "packed",
    max_length: Annotated[int, typer.Option(help="Tokens per sequence, at most")] = 128,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the dump, at most [default: the whole corpus]")
    ] = None,
    sample_tokens: Annotated[int, typer.Option(min=512, help="Tokens that are really dumped")] = 65_536,
    arch: Annotated[
        list[str] | None, typer.Option(help="Student to estimate the training of; repeat [default: none]")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Recipe of --arch, as for train")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of --arch, in place of a recipe's steps")] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="Operations per second for hours of --arch, in 10^12 [default: the teacher's rate here]",
        ),
    ] = None,
    label_tokens: LabelTokensOption = None,
    maskings: MaskingsOption = None,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Choose the best setting of this size")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass")] = 32,
    revision: Annotated[str | None, typer.Option(help="Of a teacher from the hub")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of documents and of the sample")] = 0,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Show bytes, fidelity, time and break-even of each codec for your teacher and text.

    Example: minilm-cache plan --teacher mini --max-bytes 50000000
    """
    from minilm_cache.costs import CostConfig, estimate, operations  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.dump.plan import plan as run_plan  # noqa: PLC0415 - likewise

    served = {"for": objectives, "label_tokens": label_tokens, "maskings": maskings}
    wanted = make_config(DumpConfig, teacher=teacher, codec="vectors", layers=layers, **served)
    asked = wanted.layers
    # Only vectors store several layers: the others are then measured on the last one.
    one = "last" if asked == "all" or len(asked) > 1 else asked
    settings: list[dict[str, Any]] = [
        {"codec": "vectors", "max_kl": bound, "layers": asked} for bound in max_kl or DEFAULT_MAX_KLS
    ]
    if not needs_of(objective_names(objectives or ())).vectors:
        ks = k or sorted({min(n, max_length) for n in DEFAULT_KS})
        settings = [{"codec": "topk", "k": number, "layers": one} for number in ks] + settings
        settings += [{"codec": "dense", "layers": one}] if dense else []
    configs = [
        make_config(
            DumpConfig,
            teacher=teacher,
            corpus=corpus or DumpConfig.model_fields["corpus"].default,
            text_column=text_column,
            packing=packing,
            max_length=max_length,
            max_tokens=max_tokens,
            batch_size=batch_size,
            seed=seed,
            revision=revision,
            device=device,
            **setting,
            **served,
        )
        for setting in settings
    ]
    asked_costs = make_config(CostConfig, arch=tuple(arch or ()), preset=preset, epochs=epochs, tflops=tflops)
    work = operations(asked_costs, teacher, revision, max_length)
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        if corpus is None:
            progress.note(f"no --corpus given: taking {configs[0].corpus}")
        found = run_plan(configs, sample_tokens, progress, should_stop)
        costs = estimate(asked_costs, work, found.num_tokens, max_length, found.teacher_tokens_per_s)
    best = None if max_bytes is None else found.best_within(max_bytes)
    if json and not (max_bytes is not None and best is None):
        print_json(_document(found, best) | {"costs": asdict(costs) if arch else None})
    elif not json:
        _print_plan(found)
        if arch:
            _print_costs(costs)
        if best is not None:
            print_pairs({"best within --max-bytes": best.words})
    if max_bytes is not None and best is None:
        least = min(found.settings, key=lambda setting: setting.total_bytes)
        raise InvalidConfigError(
            f"--max-bytes {max_bytes}: nothing is so small; the least is {least.words} with "
            f"{least.total_bytes:,} bytes. Give more, or dump fewer --max-tokens."
        )


def _document(found: "Plan", best: "PlannedSetting | None") -> dict[str, object]:
    return {
        "num_tokens": found.num_tokens,
        "sample_tokens": found.sample_tokens,
        "teacher_tokens_per_s": found.teacher_tokens_per_s,
        "settings": [
            {
                "codec": setting.codec.model_dump(mode="json"),
                "bytes_per_token": setting.bytes_per_token,
                "total_bytes": setting.total_bytes,
                "fidelity": [one.model_dump(mode="json") for one in setting.fidelity],
                "states": [one.model_dump(mode="json") for one in setting.states],
                "tokens_per_s": setting.tokens_per_s,
                "dump_s": setting.dump_s,
                "break_even_epochs": setting.break_even_epochs,
            }
            for setting in found.settings
        ],
        "best": None if best is None else best.codec.model_dump(mode="json"),
    }


def _print_plan(found: "Plan") -> None:
    print_table(
        f"{found.num_tokens:,} tokens, from a sample of {found.sample_tokens:,}",
        ["codec", "layers", "B/token", "all files", "KL(teacher, stored)", "dump", "pays from"],
        [
            [
                setting.words,
                ", ".join(str(one.layer) for one in setting.fidelity),
                f"{setting.bytes_per_token:.1f}",
                f"{setting.total_bytes / 1e6:,.1f} MB",
                _kls(setting.fidelity),
                f"{setting.dump_s / 60:,.1f} min",
                f"{setting.break_even_epochs} epochs",
            ]
            for setting in found.settings
        ],
    )
    states = found.settings[0].states
    if states:
        print_table(
            "Stored in addition to relations",
            ["state", "B/token"],
            [[one.path, f"{one.bytes_per_token:.1f}"] for one in states],
        )
    print_pairs(
        {
            "KL": "of attention and value relation, nats, of the worst layer; "
            "sampled rows are unbiased instead",
            "pays": "after so many student-epochs the cache is cheaper than the teacher running along; "
            "one epoch of one student never is",
        }
    )


def _print_costs(costs: "Costs") -> None:
    source = "as the teacher's forward pass goes here" if costs.is_measured else "as given"
    print_table(
        f"Operations, and hours at {costs.flops_per_s / 1e12:,.4g} TFLOP/s ({source}); "
        f"a training is {costs.train_tokens:,} tokens; the loss and reading are not counted",
        ["work", "TFLOP", "hours"],
        [[one.what, _digits(one.flops / 1e12), _digits(one.hours)] for one in costs.parts],
    )


def _digits(value: float) -> str:
    """Return a figure to three digits, or all of a whole number that has more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _kls(layers: Sequence[LayerFidelity]) -> str:
    """Return the KL of each relation, of its worst layer."""
    found = []
    for kind in layers[0].relations:
        kls = [one.relations[kind].kl_teacher_to_stored for one in layers]
        known = [kl for kl in kls if kl is not None]
        found.append(f"{max(known):.4f}" if len(known) == len(kls) else "sampled")
    return " / ".join(found)
