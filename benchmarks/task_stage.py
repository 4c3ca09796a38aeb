"""Measure the task stage: students of a fine-tuned teacher's answers to the texts of GLUE's tasks.

    python -m benchmarks.task_stage --data DATA [--task NAME ...] [--way NAME ...] [--seeds 3]

`mini` is fine-tuned on a part of a task's training set. Students learn its answers to all texts of that set,
whose labels are not read, and are scored on the dev set as they are (`chain --task`). Beside them stand
students that are fine-tuned alone on the same examples, from a slice of `mini`: for three epochs, for as many
examples as the task stage reads (`as long`), or for three epochs after they learned `mini`'s relations (of
pairs, where texts are pairs) or vectors (of each text alone) of the same texts. Slices are fitted to the text
of `slice`'s default, and those of the task stage to the task's text. Of QNLI the dev set is split in two: the
teacher and students learn from the first half, and are scored on the second one. `stsb-all` is STS-B with all
of its pairs labelled. Where all texts have labels, a third kind of students learns these with the answers,
half and half. A fourth kind learns, in as many steps, also the answers to further pairs of the texts of pairs
(`--mine mini`). With `--augment`, a model with a head for masked tokens (`minilm-cache head`), students learn
the answers to augmented copies of the texts, too. With `--seeds` means and sample deviations over seeds are
written; the students of the task stage then have one teacher, the one that was fine-tuned with seed 0.
`--way` makes some of the rows, and leaves others in the result as they are. The published copies are made
with `--augment HEAD --copies 4`, and 10 of CoLA's texts.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from benchmarks.report import add_to_result, cpu, read_result
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.evaluate.run import Evaluation, evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.models.locate import MINI
from minilm_cache.session import Session
from minilm_cache.settings import SliceConfig, validated
from minilm_cache.slicing.run import slice_teacher
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from minilm_cache.workflows.config import TaskStageConfig
from minilm_cache.workflows.task_stage import RUN, TEXTS, TRIALS, run_task_stage

LABELLED: Final = {
    "sst2": 3000,
    "stsb": 2000,
    "mrpc": 3668,
    "rte": 2490,
    "cola": 8551,
    "qnli": 2731,
    "stsb-all": 5749,
}
"""Training examples that the teacher is fine-tuned on."""
ALL_LABELLED: Final = ("mrpc", "rte", "cola", "qnli", "stsb-all")
"""Tasks all of whose texts have labels here."""
OF_PAIRS: Final = ("stsb", "stsb-all", "mrpc", "qnli")
"""Tasks whose texts are also paired anew; of RTE the teacher knows too little."""
LABEL_WEIGHT: Final = 0.5
COPIES: Final = 10
"""Augmented copies of each text."""
ALONE: Final = "fine-tuned alone"
AS_LONG: Final = "fine-tuned alone, as long"
BEFORE: Final = {"relations, then fine-tuned": "minilm", "vectors, then fine-tuned": "embedding"}
"""What students learn of `mini` before they are fine-tuned."""
TUNED: Final[dict[str, Any]] = {"lr": (1e-4,), "epochs": (3,), "batch_size": 32, "precision": "bfloat16"}
ARCHS: Final = ("3x384", "3x192")
_SLICED: Final = "1,4,5"
_RECIPE: Final = {"batch_size": 64, "lr": 3e-4, "dropout": "none", "precision": "bfloat16"}
RECIPES: Final[dict[str, dict[str, Any]]] = {
    "sst2": {**_RECIPE, "steps": 1500, "batches": "by-length"},
    "stsb": {**_RECIPE, "steps": 800, "batches": "by-length"},
    "mrpc": {**_RECIPE, "steps": 500, "batches": "by-length"},
    "rte": {**_RECIPE, "steps": 400, "batches": "by-length"},
    "cola": {**_RECIPE, "steps": 1500, "batches": "by-length"},
    "qnli": {**_RECIPE, "steps": 500, "batches": "by-length"},
    "stsb-all": {**_RECIPE, "steps": 800, "batches": "by-length"},
}
_MAX_LENGTH: Final = 128
_Scores = dict[str, dict[str, float]]
"""Scores and their deviations by metric, of a model in a row."""


def main() -> None:
    """Make what is missing, measure it, and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("task-stages"))
    parser.add_argument("--task", action="append", help="all of them without it")
    parser.add_argument("--way", action="append", help="names of rows; all of them without it")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--augment", help="model that augments texts; without it, no student learns copies")
    parser.add_argument("--copies", type=int, default=COPIES)
    given = parser.parse_args()
    for label in given.task or LABELLED:
        rows = read_result("task_stage").get("tasks", {})
        known = rows.get(label, {})
        scores, num_texts = _measured(label, given)
        facts = {"labelled": LABELLED[label], "texts": num_texts or known["texts"]}
        facts["steps"] = RECIPES[label]["steps"]
        rows[label] = {**known, **facts, "scores": known.get("scores", {}) | scores}
        add_to_result("task_stage", tasks=rows, tuned={**TUNED, "lr": 1e-4, "epochs": 3}, cpu=cpu())


def _measured(label: str, given: argparse.Namespace) -> tuple[_Scores, int | None]:
    """Return a task's scores in the ways that are asked for, and its texts; None without a task stage."""
    home, session = given.home, Session(given.home)
    task = label.removesuffix("-all")
    data = str(_halves(given.data / "glue", home) if task == "qnli" else given.data / "glue")
    tuning = {**TUNED, "task": (task,), "data": data, "max_train": LABELLED[label], "keep_models": True}
    config = validated(EvaluateConfig, {**tuning, "seeds": given.seeds})
    train = {**RECIPES[label], "arch": ARCHS, "init": "slice", "init_layers": _SLICED}
    stages = _stages(label, train, augment=given.augment, copies=given.copies)
    asked = given.way or [ALONE, AS_LONG, *stages, *BEFORE]
    found: _Scores = {}
    num_texts = None
    tuned = None
    if any(way == ALONE or way in stages for way in asked):
        tuned = evaluate_models(config, [MINI], out=home / "tuned", session=session)
        (found["teacher"],) = _scores(tuned)
    for way in asked:
        names = [f"{arch}, {way}" for arch in ARCHS]
        if way in {ALONE, AS_LONG}:
            as_long = round(train["steps"] * train["batch_size"] / LABELLED[label])
            changed = config if way == ALONE else config.with_changes(epochs=(as_long,))
            scores = _scores(evaluate_models(changed, _slices(home), out=home / "tuned", session=session))
        elif way in BEFORE:
            scores = _fine_tuned_after(
                BEFORE[way], home / label, recipe=RECIPES[label], config=config, session=session
            )
        else:
            assert tuned is not None
            name = f"{label}{way.removeprefix('task stage').replace(' ', '-')}"
            stage = {"task": task, "data": data, **stages[way][0]}
            made = [
                run_task_stage(
                    validated(TaskStageConfig, stage),
                    dump={"teacher": str(tuned.folders[0] / "model"), "max_length": _MAX_LENGTH},
                    train={**stages[way][1], "seed": seed},
                    out=_folder(home / name, seed),
                    session=session,
                )
                for seed in range(given.seeds)
            ]
            num_texts = max(each.num_texts for each in made)
            of_seeds = zip(*(_scores(each.evaluation) for each in made), strict=True)
            found["teacher, as it is"], *scores = map(_over_seeds, of_seeds)
        found |= dict(zip(names, scores, strict=True))
    return found, num_texts


def _stages(
    label: str, train: dict[str, Any], *, augment: str | None, copies: int
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the settings of each task stage of a task, and those of its training, by its name."""
    stages: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"task stage": ({}, train)}
    if label in ALL_LABELLED:
        stages["task stage with labels"] = {}, {**train, "label_weight": LABEL_WEIGHT}
    if label in OF_PAIRS:
        stages["task stage with further pairs"] = {"mine": MINI}, train
    if augment is not None:
        copied = {"augment": augment, "copies": copies}
        stages["task stage with copies"] = copied, train
        if label not in ALL_LABELLED:
            alone = {"max_train": LABELLED[label]}
            stages["task stage of labelled texts"] = alone, train
            stages["task stage of labelled texts with copies"] = {**alone, **copied}, train
    return stages


def _fine_tuned_after(
    objective: str, stage: Path, *, recipe: Mapping[str, Any], config: EvaluateConfig, session: Session
) -> list[dict[str, float]]:
    """Return scores of students that learn `mini`'s signals of a task's texts first, and then its labels."""
    texts = stage / TEXTS
    cache, run = (stage.with_name(f"{stage.name}-{objective}.{end}") for end in ("cache", "run"))
    is_pair = "first" in json.loads(texts.read_text().split("\n", 1)[0])
    columns = {"text_column": "first,second" if is_pair else "text", "packing": "records"}
    if is_pair and objective == "minilm":
        columns = {"pair_columns": "first,second", "packing": "pairs"}
    dumping = {
        "teacher": MINI,
        "corpus": str(texts),
        "max_length": _MAX_LENGTH,
        "for": (objective,),
        **columns,
    }
    dump_cache(validated(DumpConfig, dumping), out=cache, session=session)
    training = {**recipe, "objective": objective, "arch": ARCHS, "init": "slice", "init_layers": _SLICED}
    train_students(validated(TrainConfig, training), cache, out=run, session=session)
    folders = [str(run / "students" / arch) for arch in ARCHS]
    return _scores(evaluate_models(config, folders, out=run / "tuned", session=session))


def _folder(first: Path, seed: int) -> Path:
    """Return the folder of a seed's stage, which begins with the texts and the cache of the first seed's."""
    folder = first if seed == 0 else first.with_name(f"{first.name}-{seed}")
    if not folder.exists() and first.exists():
        shutil.copytree(first, folder, ignore=shutil.ignore_patterns(RUN, TRIALS))
    return folder


def _over_seeds(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over seeds and, of several, their deviations, of a model's scores."""
    values = {metric: [each[metric] for each in scores] for metric in scores[0] if "+-" not in metric}
    found = {metric: round(fmean(numbers), 2) for metric, numbers in values.items()}
    return found | {f"{name} +-": round(stdev(some), 2) for name, some in values.items() if len(some) > 1}


def _halves(glue: Path, home: Path) -> Path:
    """Return a folder in which QNLI's training set is the first half of its dev set, and that the second."""
    head, *rows = (glue / "QNLI/dev.tsv").read_text().rstrip("\n").split("\n")
    folder = home / "halves" / "QNLI"
    folder.mkdir(parents=True, exist_ok=True)
    for name, half in (("train", rows[: LABELLED["qnli"]]), ("dev", rows[LABELLED["qnli"] :])):
        (folder / f"{name}.tsv").write_text("\n".join([head, *half]) + "\n")
    return folder.parent


def _slices(home: Path) -> list[str]:
    """Return the folders of slices of `mini`, not fitted to any text of a task."""
    folders = []
    for arch in ARCHS:
        folder = home / f"slice-{arch}"
        if not folder.exists():
            slice_teacher(validated(SliceConfig, {"teacher": MINI, "arch": arch, "layers": _SLICED}), folder)
        folders.append(str(folder))
    return folders


def _scores(evaluation: Evaluation) -> list[dict[str, float]]:
    """Return the scores of each model on the dev set, with their deviations over several seeds."""
    return [
        {
            name: round(value, 2)
            for metric, score in summary.scores["dev"].items()
            for name, value in ((metric, score.mean), (f"{metric} +-", score.stddev))
            if value is not None
        }
        for summary in evaluation.summaries
    ]


if __name__ == "__main__":
    main()
