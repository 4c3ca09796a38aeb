"""Measure students of a base-sized teacher's relations, learned from it and from an assistant.

    python -m benchmarks.assistants --data DATA --base DIR [--home DIR] [--scores]

The teacher is all-mpnet-base-v2 (12 layers of width 768); the assistant has its layers and half its width.
All learn by the same number of steps of the text of `benchmarks.crowded`, and are compared with the teacher
itself by held-out text; with `--scores` students also on SST-2, fine-tuned on 3,000 examples. One seed of the
students, two of the fine-tuning.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.crowded import text_of
from benchmarks.report import write_result
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.workflows.study import run_study
from minilm_cache.workflows.study_spec import read_study

DUMPED: Final = {"documents": "lines", "max_length": 128, "max_tokens": 500_000, "precision": "bfloat16"}
"""Settings of the dump; attention scores of this teacher have a bias, so that rows are sampled."""
TRAINED: Final = {
    "steps": 150,
    "batch_size": 32,
    "lr": 2e-4,
    "max_grad_norm": 1.0,
    "warmup": 0.2,
    "dropout": "none",
    "init": "slice",
    "precision": "bfloat16",
}
"""Settings of every training. With a rate of 0.0005 and no limit of gradients the assistant collapsed."""
ARCHS: Final = ["6x384:h12", "3x384:h12"]
ASSISTANT: Final = "12x384:h12"
_COLUMNS: Final = ("cache", "arch", "num_parameters", "kl_attention", "kl_value")


def main() -> None:
    """Train and compare what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="folder of the teacher")
    parser.add_argument("--home", type=Path, default=Path("assistants"))
    parser.add_argument("--scores", action="store_true", help="fine-tune the students on SST-2, too")
    given = parser.parse_args()
    document: dict[str, Any] = {
        "dump": {"teacher": str(given.base), "corpus": str(text_of(given.home, given.data)), "codec": "topk"},
        "arch": ARCHS,
        "objective": ["minilm"],
        "seed": [0],
        "assistants": [ASSISTANT],
        "train": TRAINED,
    }
    document["dump"] |= DUMPED
    spec, folder, session = given.home / "relations.yaml", given.home / "relations", Session(given.home)
    spec.write_text(yaml.safe_dump(document))
    table = run_study(read_study(spec), folder, session=session).students.to_pylist()
    rows = {f"{row['run']}/{row['arch']}": {name: row[name] for name in _COLUMNS} for row in table}
    if given.scores:
        settings = {"task": ("sst2",), "data": str(given.data / "glue"), "lr": (1e-4,)}
        config = validated(EvaluateConfig, settings | {"max_train": 3000, "seeds": 2})
        runs = [run for run in sorted((folder / "runs").iterdir()) if "-assistant-" not in run.name]
        found = evaluate_models(config, runs, out=given.home / "evaluations", session=session)
        for summary in found.summaries:
            score = summary.scores["dev"]["accuracy"]
            rows[summary.model] |= {"sst2": score.mean, "sst2_stddev": score.stddev}
    write_result("assistants", {"dumped": DUMPED, "trained": TRAINED, "rows": list(rows.values())})


if __name__ == "__main__":
    main()
