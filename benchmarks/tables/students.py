"""Tables of students: what they learn from each codec, objective and start, and how they score."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, Final

from benchmarks.tables.cells import mean_of, read, signed, table_of

NAMES: Final = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "stsb": "STS-B",
    "mrpc": "MRPC",
    "rte": "RTE",
    "squad2": "SQuAD 2.0",
}
STARTS: Final = ("random", "embeddings", "teacher-layers", "slice")
SHORT_STEPS: Final = 300
LONG_STEPS: Final = 3000


def students() -> str:
    """Return held-out KLs of students from each codec, and their ratio to online training."""
    result = read("student_quality")
    sizes = result["bytes_per_token"]
    rows = [
        [
            way,
            f"{sizes[way]:,.0f}" if way in sizes else "-",
            f"{kls['attention']:.4f} + {kls['value']:.4f}",
            f"{kls['over_online']:.4f} ({', '.join(f'{ratio:.4f}' for ratio in kls['over_online_by_seed'])})",
        ]
        for way, kls in result["held_out_kl_nats"].items()
    ]
    kl = "held-out KL of the student, attention + value, nats"
    return table_of(["targets", "bytes per token", kl, "over online, mean (each seed)"], rows)


def many_epochs() -> str:
    """Return KLs of students after many epochs over few sequences, over those from the dense cache."""
    result = read("many_epochs")
    sizes = result["bytes_per_token"]
    rows = []
    for way, texts in result["kl_nats"].items():
        rows.append([way, f"{sizes[way]:,.0f}" if way in sizes else "-"])
        for kls in texts.values():
            rows[-1].append(
                f"{kls['sum']:.4f} ({signed(kls['over_dense'])} ± {100 * kls['over_dense_stdev']:.2f})"
            )
    head = [
        "targets",
        "bytes per token",
        "KL on the training text (over dense)",
        "KL on fresh text (over dense)",
    ]
    return table_of(head, rows)


def scores() -> str:
    """Return fine-tuned scores of teacher and students, means over seeds with standard deviations."""
    trials = read("evaluation")
    models = list(dict.fromkeys(trial["model"] for trial in trials))
    rows = []
    for task, size in dict.fromkeys((trial["task"], trial["num_train"]) for trial in trials):
        of_task = [trial for trial in trials if (trial["task"], trial["num_train"]) == (task, size)]
        for metric in of_task[0]["scores"]["dev"]:
            cells = [
                mean_of([trial["scores"]["dev"][metric] for trial in of_task if trial["model"] == model])
                for model in models
            ]
            rows.append([f"{NAMES.get(task, task)}, {size:,}, {metric}", *cells])
    return table_of(["task, training examples, metric", *models], rows)


def objective_students() -> str:
    """Return the held-out KLs of a student of each objective."""
    results = read("objectives_trained")["results"]
    rows = []
    for name, starts in results.items():
        shown = [starts.get(start) for start in ("random", "slice", "teacher-layers")]
        losses = [_loss(sum(start["after"].values())) if start else "-" for start in shown]
        rows.append([name, *losses, *(_kls(start["kl"]) if start else "-" for start in shown[:2])])
    head = ["objective", *(f"loss, `{start}`" for start in ("random", "slice", "teacher-layers"))]
    return table_of([*head, "KL, `random`", "KL, `slice`"], rows)


def _loss(value: float) -> str:
    return f"{value:.3f}" if value >= 5e-4 else "below 0.0005"


def _kls(relations: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.3f}" for kind, value in relations.items())


def dropouts() -> str:
    """Return held-out KLs of students of relations with their teacher's dropout and without any."""
    kls: dict[tuple[str, str], dict[str, float]] = {}
    for row in read("dropout")["rows"]:
        of_student = kls.setdefault((row["training"], row["student"]), {})
        of_student["before"] = sum(row["before"].values())
        of_student[row["dropout"]] = sum(row["after"].values())
    rows = []
    for (training, arch), kl in kls.items():
        cells = [f"{kl[name]:.3f}" for name in ("before", "teacher", "none")]
        rows.append([training, f"`{arch}`", *cells, signed(kl["none"] / kl["teacher"])])
    head = [
        "students begin with",
        "student",
        "KL before training",
        "with dropout",
        "`--dropout none`",
        "change",
    ]
    return table_of(head, rows)


def assistants() -> str:
    """Return KLs and scores of students of a base-sized teacher, directly and through an assistant."""
    rows = []
    for row in read("assistants")["rows"]:
        learned = "the assistant" if "-via-" in row["cache"] else "the teacher"
        kl = f"{row['kl_attention']:.3f} + {row['kl_value']:.3f}"
        score = f"{row['sst2']:.1f} ± {row['sst2_stddev']:.1f}" if "sst2" in row else "-"
        arch = row["arch"].removesuffix(":h12")
        rows.append([f"`{arch}`", learned, f"{row['num_parameters']:,}", kl, score])
    kl = "held-out KL to the teacher, attention + value, nats"
    return table_of(["student", "learned from", "parameters", kl, "SST-2 dev, 3,000 examples"], rows)


def head_starts() -> str:
    """Return KLs of students by shape and start, before and after training."""
    rows = short_starts()
    names = [f"{start}, {when}" for start in STARTS for when in ("before", "after")]
    table = []
    for arch in dict.fromkeys(row["arch"] for row in rows):
        cells = []
        for start in STARTS:
            seeds = [row for row in rows if (row["arch"], row["start"]) == (arch, start)]
            cells += [_mean_sum([row[when] for row in seeds]) for when in ("before", "after")]
        table.append([f"`{arch}`", *cells])
    return table_of(["student", *names], table)


def short_starts() -> list[dict[str, Any]]:
    """Return the rows of students that were trained for 300 steps in float32."""
    return [
        row
        for row in read("head_start")["starts"]
        if (row["steps"], row["precision"]) == (SHORT_STEPS, "float32")
    ]


def long_starts() -> dict[str, dict[str, list[dict[int, float]]]]:
    """Return the curves of students that were trained for 3,000 steps: KL by step, by shape and start.

    Shapes are left out that lack random weights or slices. A seed that was trained in both precisions counts
    once.
    """
    seeds: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in sorted(read("head_start")["starts"], key=lambda row: STARTS.index(row["start"])):
        if row["steps"] == LONG_STEPS:
            curve = {0: sum(row["before"].values())}
            curve |= {int(step): kl for step, kl in row["curve"].items()}
            seeds[row["arch"], row["start"], row["seed"]] = curve
    curves: dict[str, dict[str, list[dict[int, float]]]] = {}
    for (arch, start, _), curve in seeds.items():
        curves.setdefault(arch, {}).setdefault(start, []).append(curve)
    return {arch: starts for arch, starts in curves.items() if {"random", "slice"} <= starts.keys()}


def head_starts_long() -> str:
    """Return KLs after 3,000 steps by shape and start, and the steps of slices to random weights' best."""
    table = []
    for arch, starts in sorted(long_starts().items()):
        cells = [_mean_sum([{"": curve[LONG_STEPS]} for curve in starts.get(start, [])]) for start in STARTS]
        best = min(min(curve.values()) for curve in starts["random"])
        first = [min(step for step, kl in curve.items() if kl <= best) for curve in starts["slice"]]
        table.append([f"`{arch}`", *cells, f"{best:.3f}", ", ".join(map(str, first))])
    return table_of(
        ["student", *STARTS, "lowest KL from random weights", "steps until each slice is as close"], table
    )


def _mean_sum(kls: Sequence[dict[str, float]]) -> str:
    """Return the mean over seeds of a sum over relations, its deviation, and the number of seeds."""
    if not kls:
        return "-"
    sums = [sum(kl.values()) for kl in kls]
    spread = f" ± {stdev(sums):.3f}" if len(sums) > 1 else ""
    return f"{mean(sums):.3f}{spread} ({len(sums)})"


def head_start_recipe() -> str:
    """Return KLs of slices without training, by what is changed in the recipe."""
    rows = [
        [name, f"{row['attention']:.4f}", f"{row['value']:.4f}", ", ".join(f"{e:.2f}" for e in row["errors"])]
        for name, row in read("head_start")["recipe"].items()
    ]
    return table_of(["student, change", "attention", "value", "relative errors of hidden states"], rows)


def pair_scores() -> str:
    """Return the correlations of a cross-encoder and of the student of its scores."""
    result = read("pair_scores")
    labelled, pairs = f"{result['labelled']:,}", f"{result['pairs']:,}"
    names = {
        "teacher": f"`mini`, fine-tuned on {labelled} labelled pairs",
        "3x384": f"`3x384`, {result['steps']:,} steps on its scores of {pairs} pairs",
    }
    rows = [
        [names[name], f"{scores['pearson']:.1f}", f"{scores['spearman']:.1f}"]
        for name, scores in result["scores"].items()
    ]
    return table_of(["model", "Pearson", "Spearman"], rows)


def rerankers() -> str:
    """Return how well and how fast students of a reranker's scores rank, beside the teacher."""
    result = read("rerankers")
    rates = {name: f"{rate:.0f}" for name, rate in result["pairs_per_s"].items()}
    rows = [
        [
            _reranker(name),
            f"{row['ndcg_at_10']:.1f} ({row['interval'][0]:.1f} to {row['interval'][1]:.1f})",
            f"{row['mrr_at_10']:.1f}",
            "-" if " bi " in name else rates.get(name.split()[0], "-"),
        ]
        for name, row in result["rows"].items()
    ]
    return table_of(["model", "nDCG@10, 95 % interval", "MRR@10", "pairs per second, one core"], rows)


def _reranker(name: str) -> str:
    others = {"first stage": "`mini` alone, the first stage", "teacher": "the teacher, 6x384"}
    if name in others:
        return others[name]
    student, _, begun = name.partition(", from ")
    arch, kind, objective = student.split()
    first = {"": "", "vectors": " after `embedding`", "relations": " after `minilm`"}[begun]
    return f"`{arch}`, {kind}-encoder, `{objective}`{first}"


def questions() -> str:
    """Return what generated questions score, beside copying the sentence."""
    found = read("questions")
    rows = [
        [_generator(name), *map(str, (each["steps"], round(each["train_s"] / 60))), *_generated(each)]
        for name, each in found["models"].items()
    ]
    rows.append(["the sentence copied", "", "", *_generated(found["copied"])])
    return table_of(
        ["model", "steps", "minutes on one core", "BLEU-4", "ROUGE-1", "ROUGE-2", "ROUGE-L"], rows
    )


def _generator(name: str) -> str:
    """Return the name of a model, and what it is called besides; its steps have a column of their own."""
    model, _, besides = name.partition(", ")
    return f"`{model}`" + ("" if not besides or besides.endswith("steps") else f", {besides}")


def _generated(scores: Mapping[str, float]) -> list[str]:
    return [f"{scores[name]:.1f}" for name in ("BLEU-4", "rouge1", "rouge2", "rougeL")]


def question_examples() -> str:
    """Return the first questions of the dev set, and what each model asks."""
    found = read("questions")
    names = [name for name in found["models"] if not name.endswith(" steps")]
    rows = []
    for number, asked in enumerate(found["asked"]):
        sentence, _, answer = asked["source"].rpartition(" [SEP] ")
        said = [found["models"][name]["questions"][number] for name in names]
        rows.append([sentence, answer, asked["question"], *said])
    return table_of(["sentence", "answer", "SQuAD's question", *map(_generator, names)], rows)


def exported_models() -> str:
    """Return what each form of a model costs and is worth, beside the model in torch."""
    rows = []
    for name, forms in read("exported_models")["models"].items():
        for form, row in forms.items():
            speeds = {(each["batch_size"], each["length"]): each["speedup"] for each in row["passes"]}
            latencies = {(each["batch_size"], each["length"]): each["latency_ms"] for each in row["passes"]}
            rows.append(
                [
                    f"`{name}`, {form}",
                    f"{row['bytes'] / 1e6:.1f} MB",
                    f"{latencies[1, 32]:.1f} ms",
                    f"{speeds[1, 32]:.1f}x",
                    f"{speeds[32, 128]:.1f}x",
                    f"{row['cosine']:.4f}",
                    f"{row['stsb_spearman']:.1f}",
                    f"{row['squad_ndcg']:.1f}",
                ]
            )
    heads = [
        "model",
        "size",
        "one text",
        "speed, one text",
        "speed, 32 texts",
        "cosine",
        "STS-B",
        "retrieval",
    ]
    return table_of(heads, rows)


def static_models() -> str:
    """Return what a static model of the teacher costs and is worth, beside the teacher."""
    models = read("static_models")["models"]
    rows = [
        [
            f"`{name}`" if name == "mini" else "static, 256 dimensions",
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{models['mini']['ms_of_1'] / row['ms_of_1']:.0f}x",
            f"{models['mini']['ms_of_32'] / row['ms_of_32']:.0f}x",
            f"{row['stsb_spearman']:.1f}",
            f"{row['squad_ndcg']:.1f}",
        ]
        for name, row in models.items()
    ]
    return table_of(["model", "size", "speed, one text", "speed, 32 texts", "STS-B", "retrieval"], rows)


def shapes() -> str:
    """Return how well an early loss, and weights alone, rank shapes, for each teacher."""
    teachers = read("shapes")["teachers"]
    loss, end = "held-out loss", "held-out loss at the end"
    orders = {
        (f"{loss} after a tenth of the steps", end): [
            each["tau_by_share"]["0.1"] for each in teachers.values()
        ],
        (f"{loss} after three tenths", end): [each["tau_by_share"]["0.3"] for each in teachers.values()],
        ("number of weights", end): [each["tau_weights_loss"] for each in teachers.values()],
        (end, "STS-B"): [each["tau_loss_stsb"] for each in teachers.values()],
    }
    rows = [[*order, *(f"{tau:.2f}" for tau in taus)] for order, taus in orders.items()]
    return table_of(["order by", "and by", *(f"Kendall's tau, {name}" for name in teachers)], rows)


def halving() -> str:
    """Return what a search found within budgets, beside a full grid."""
    rows = []
    for name, found in read("halving")["searches"].items():
        most, how = name.split("-")
        rows.append(
            [
                f"{int(most) / 1e6:.0f} million",
                f"{found['tried']} of {found['shapes']}" + (" (`--every`)" if how == "every" else ""),
                f"`{found['found']}`, place {found['place_in_grid']} of the grid",
                f"{found['loss_found']:.3f} ({found['loss_of_best']:.3f})",
                f"{found['share_of_tokens']:.0%} / {found['share_of_seconds']:.0%}",
            ]
        )
    heads = [
        "most weights",
        "shapes trained",
        "found",
        "held-out loss (grid)",
        "of the grid's tokens / seconds",
    ]
    return table_of(heads, rows)


def shapes_predicted() -> str:
    """Return how well the losses of shapes at the end can be predicted from those of others."""
    teachers = read("shapes")["teachers"]
    names = {
        "law": "a law of weights and tokens, E + a / weights^p + b / tokens^q",
        "loss after 10%": "the shape's own loss after a tenth of the steps",
        "loss after 20%": "the shape's own loss after a fifth of the steps",
    }
    rows = [
        [words, *(f"{each['predicted'][name]:.1f} %" for each in teachers.values())]
        for name, words in names.items()
    ]
    heads = ["held-out loss at the end, predicted by", *(f"mean error, {name}" for name in teachers)]
    return table_of(heads, rows)


def reranker_peer() -> str:
    """Return what the same student costs and is worth by sentence-transformers; each seed has its figures."""
    peer = read("rerankers")["peer"]
    rows = [
        [
            name,
            *(
                ", ".join(f"{run[name][figure]:.{digits}f}" for run in peer["runs"].values())
                for figure, digits in (("held_out_error", 3), ("ndcg_at_10", 1))
            ),
            f"{seconds:.2f}",
            f"{peer['bytes'][name] / 1e6:.1f}",
        ]
        for name, seconds in peer["seconds_a_step"].items()
    ]
    columns = ["trained by", "held-out error of scores, each run", "nDCG@10, each run"]
    columns += ["seconds a step, one core", "MB of scores and texts"]
    return table_of(columns, rows)


def task_stages() -> str:
    """Return dev scores of teachers, of students that are fine-tuned alone, and of task stages.

    Where there are several seeds, scores are means with sample deviations; the students of a task stage have
    one teacher, whose score is shown.
    """
    rows = []
    for task, found in read("task_stage")["tasks"].items():
        scores = found["scores"]
        metric = next(iter(scores[_TEACHER]))
        labelled = f"{min(found['labelled'], found['texts']):,} of {found['texts']:,}"
        for arch in ("3x384", "3x192"):
            reached = (_score(scores.get(f"{arch}, {way}"), metric) for way in _WAYS)
            rows.append(
                [f"{task}, {metric}", labelled, _score(scores[_TEACHER], metric), f"`{arch}`", *reached]
            )
    return table_of(["task", "labelled examples", "teacher", "student", *_WAYS.values()], rows)


_TEACHER: Final = "teacher, as it is"
_WAYS: Final = {
    "fine-tuned alone": "fine-tuned alone",
    "fine-tuned alone, as long": "as long",
    "relations, then fine-tuned": "after relations",
    "vectors, then fine-tuned": "after vectors",
    "task stage": "task stage",
    "task stage with labels": "with labels, too",
    "task stage with copies": "with copies, too",
    "task stage with further pairs": "with further pairs",
}


def _score(scores: Mapping[str, float] | None, metric: str) -> str:
    if scores is None:
        return "-"
    deviation = scores.get(f"{metric} +-")
    return f"{scores[metric]:.1f}" + ("" if not deviation else f" ± {deviation:.1f}")
