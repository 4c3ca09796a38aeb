"""`minilm-cache plan`: estimates cost and fidelity of a dump before it is made."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minilm_cache.cli.console import print_json, print_pairs, print_table
from minilm_cache.cli.early import refuse_missing, refuse_no_text, refuse_too_long
from minilm_cache.cli.environment import note_default_corpus
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import Given, JsonOption, options
from minilm_cache.dump.config import PLANNED, DumpConfig, PlanConfig
from minilm_cache.settings import flag_of, option_words, validated
from minilm_cache.storage_schema.identity import TopKParameters, VectorsParameters
from minilm_cache.storage_schema.manifest import LayerFidelity
from minilm_cache.train.config import CostConfig

if TYPE_CHECKING:
    from minilm_cache.dump.plan import Plan, PlannedSetting
    from minilm_cache.workflows.plan import Costs


@options(
    DumpConfig,
    PlanConfig,
    CostConfig,
    leave_out={DumpConfig: PLANNED},
    common=(
        *("teacher", "corpus", "text_column", "max_length", "max_tokens", "serve", "k", "max_kl"),
        *("sample_tokens", "max_bytes", "arch", "preset", "device", "json"),
    ),
)
def plan(dump: Given, compared: Given, trained: Given, *, json: JsonOption = False) -> None:
    """Estimate size, fidelity and time of a dump with each codec.

    Example: minilm-cache plan --teacher mini --max-bytes 50000000
    """
    config, cost = validated(PlanConfig, compared), validated(CostConfig, trained)
    teacher, revision, corpus = (dump.get(name) for name in ("teacher", "revision", "corpus"))
    refuse_missing(teacher=teacher, revision=revision, corpus=corpus, arch=cost.arch)
    if corpus is not None:
        refuse_no_text(corpus, dump.get("text_column"), dump.get("pair_columns"))
    if teacher is not None:
        refuse_too_long(dump.get("max_length"), [teacher], revision, is_teacher=True)
    from minilm_cache.workflows.plan import plan_dump, refuse_too_large  # noqa: PLC0415 - takes seconds

    with quiet_session() as session:
        note_default_corpus(dump, DumpConfig.model_fields["corpus"].default, session)
        result = plan_dump(dump, config, cost=cost, session=session)
    is_possible = config.max_bytes is None or result.best is not None
    if json and is_possible:
        print_json(_document(result.plan, result.best) | {"costs": result.costs if cost.arch else None})
    elif not json:
        _print_plan(result.plan)
        if cost.arch:
            _print_costs(result.costs)
        if result.best is not None:
            print_pairs({"best within --max-bytes": result.best.words})
        settings = result.plan.settings
        default = [setting for setting in settings if setting.codec.name in {"vectors", "none"}] or settings
        chosen = result.best or min(default, key=lambda setting: setting.worst_kl)
        if is_possible:
            print_pairs({"next": _dump_command(dump, chosen)})
    refuse_too_large(result, config)


def _dump_command(dump: Given, chosen: "PlannedSetting") -> str:
    """Return the command that makes a planned cache."""
    codec, config = chosen.codec, chosen.config
    given = dict(dump)
    if codec.name != "none":
        given |= {"codec": codec.name} | ({"layers": "last"} if config.layers == "last" else {})
    if isinstance(codec, VectorsParameters):
        given["max_kl"] = codec.max_kl
    if isinstance(codec, TopKParameters):
        given["k"] = codec.k
    fields = DumpConfig.model_fields
    words: list[str] = []
    for name, value in given.items():
        words += option_words(flag_of(name, fields[name]), value)
    return shlex.join(["minilm-cache", "dump", *words])


def _document(measured: "Plan", best: "PlannedSetting | None") -> dict[str, object]:
    return {
        "num_tokens": measured.num_tokens,
        "num_sequences": measured.num_sequences,
        "cut": measured.cut,
        "sample_tokens": measured.sample_tokens,
        "teacher_tokens_per_s": measured.teacher_tokens_per_s,
        "teacher_bytes": measured.memory.num_bytes,
        "free_bytes": measured.memory.free,
        "settings": [
            {
                "codec": setting.codec,
                "bytes_per_token": setting.bytes_per_token,
                "total_bytes": setting.total_bytes,
                "weights_bytes": setting.weights_bytes,
                "fidelity": setting.fidelity,
                "states": setting.states,
                "tokens_per_s": setting.tokens_per_s,
                "dump_s": setting.dump_s,
                "break_even_epochs": setting.break_even_epochs,
            }
            for setting in measured.settings
        ],
        "best": None if best is None else best.codec,
    }


def _print_plan(measured: "Plan") -> None:
    layers = [
        ", ".join(str(layer.layer) for layer in setting.fidelity) or "none" for setting in measured.settings
    ]
    differ = len(set(layers)) > 1
    if measured.cut is not None:
        print_pairs({"cut off": measured.cut.in_words})
    print_pairs({"teacher": measured.memory.in_words})
    print_table(
        f"{measured.num_tokens:,} tokens, estimated from a sample of {measured.sample_tokens:,}"
        + ("" if differ or not measured.settings[0].fidelity else f"; layers: {layers[0]}"),
        [
            *("codec", *(["layers"] if differ else []), "B/token", "all files"),
            *("KL(teacher, stored)", "dump", "cheaper from epoch"),
        ],
        [
            [
                setting.words,
                *([numbers] if differ else []),
                f"{setting.bytes_per_token:.1f}",
                f"{setting.total_bytes / 1e6:,.1f} MB",
                _kls(setting.fidelity),
                f"{setting.dump_s / 60:,.1f} min",
                str(setting.break_even_epochs),
            ]
            for setting, numbers in zip(measured.settings, layers, strict=True)
        ],
    )
    states, length = measured.settings[0].states, measured.num_tokens / measured.num_sequences
    if states:
        print_table(
            "Signals",
            ["signal", "B/token", "B/text"],
            [
                [state.path, f"{state.bytes_per_token:.1f}", f"{state.bytes_per_token * length:,.0f}"]
                for state in states
            ],
        )
    kept = measured.settings[0].weights_bytes
    if kept is not None:
        print_pairs({"teacher's weights": f"{kept / 1e6:,.1f} MB, among all files"})
    kl = {
        "KL": "KL of attention distribution / value relation in the worst layer, in nats; sampled rows have "
        "no KL, but are unbiased"
    }
    print_pairs(
        {
            **(kl if any(setting.fidelity for setting in measured.settings) else {}),
            "cheaper": "epochs, summed over all students, from which the cache costs less than running the "
            "teacher in every epoch; one epoch of one student is never enough",
        }
    )


def _print_costs(costs: "Costs") -> None:
    source = "measured in the teacher's forward pass here" if costs.is_measured else "as given"
    print_table(
        f"Operations, and time at {costs.flops_per_s / 1e12:,.4g} TFLOP/s ({source}); "
        f"a training is {costs.train_tokens:,} tokens; the loss and reading are not counted",
        ["work", "TFLOP", "time"],
        [[part.what, _digits(part.flops / 1e12), _duration(part.hours)] for part in costs.parts],
    )


def _digits(value: float) -> str:
    """Return a number with three significant digits, or as a whole number from 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _duration(hours: float) -> str:
    """Return a time in the largest unit that it has one of: hours, minutes or seconds."""
    for unit, count in (("h", hours), ("min", hours * 60)):
        if count >= 1:
            return f"{_digits(count)} {unit}"
    return f"{_digits(hours * 3600)} s"


def _kls(layers: Sequence[LayerFidelity]) -> str:
    """Return the KL of each relation in its worst layer."""
    texts = []
    for kind in layers[0].relations if layers else ():
        kls = [layer.relations[kind].kl_teacher_to_stored for layer in layers]
        known = [kl for kl in kls if kl is not None]
        texts.append(f"{max(known):.4f}" if len(known) == len(kls) else "sampled")
    return " / ".join(dict.fromkeys(texts) if "sampled" in texts else texts)
