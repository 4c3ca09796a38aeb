"""Measure question generation: questions of SQuAD's dev set from sentences and answers, split by articles.

    python -m benchmarks.questions --data DATA [NAME=]FOLDER ...

Each model is fine-tuned on the questions of 38 articles and generates those of five others (the first
`--max-dev` drawn ones). A source is the sentence that has the answer, and the answer. Finished trials are
kept and reused. Beside them stands what copying the sentence scores.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.report import add_to_result, cpu, read_result
from minilm_cache.evaluate.generation import generation_scores
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.models.locate import locate_teacher
from minilm_cache.session import Session
from minilm_cache.settings import validated

_NUM_DEV: Final = 5
"""Articles whose questions are scored."""
_LEFT_OUT: Final = 5
"""Articles that nothing is done with."""
_SETTINGS: Final[dict[str, Any]] = {
    "task": ("squad-qg",),
    "lr": (5e-4,),
    "batch_size": 24,
    "max_length": 64,
    "max_new_tokens": 24,
    "keep_models": True,
    "device": "cpu",
    "precision": "bfloat16",
}
_SHOWN: Final = 10


def main() -> None:
    """Write the data, fine-tune what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("questions"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-dev", type=int, default=300)
    parser.add_argument("models", nargs="+", help="[NAME=]FOLDER, or mini")
    given = parser.parse_args()
    _write(given.data, given.home / "data")
    settings = {**_SETTINGS, "epochs": (given.epochs,), "max_dev": given.max_dev}
    config = validated(EvaluateConfig, {**settings, "data": str(given.home / "data")})
    for each in given.models:
        name, _, place = each.rpartition("=")
        folder = str(locate_teacher(place).folder) if "=" in each else place
        trials = evaluate_models(
            config, [folder], out=given.home / "trials", session=Session(given.home, progress=True)
        )
        (trial,), (where,) = trials.trials, trials.folders
        rows = [json.loads(line) for line in (where / "predictions/dev.jsonl").read_text().splitlines()]
        models = read_result("questions").get("models", {})
        models[name or place] = {
            "epochs": given.epochs,
            "steps": -(-trial.num_train // 24) * given.epochs,
            "train_s": round(trial.train_s),
            **{key: round(value, 2) for key, value in trial.scores["dev"].items()},
            "questions": [row["generated"] for row in rows[:_SHOWN]],
        }
        copied = generation_scores([row["tgt"] for row in rows], [_sentence(row["src"]) for row in rows])
        add_to_result(
            "questions",
            models=models,
            copied={key: round(value, 2) for key, value in copied.items()},
            asked=[{"source": row["src"], "question": row["tgt"]} for row in rows[:_SHOWN]],
            settings={**_SETTINGS, "num_train": trial.num_train, "num_dev": len(rows)},
            cpu=cpu(),
        )


def _sentence(source: str) -> str:
    return source.rpartition(" [SEP] ")[0]


def _write(data: Path, folder: Path) -> None:
    """Write the questions of each set of articles, always the same ones."""
    articles = json.loads((data / "squad/dev-v1.1.reconstructed.json").read_text())["data"]
    order = list(range(len(articles)))
    random.Random(0).shuffle(order)  # noqa: S311 - no secret
    sets = {"dev": order[:_NUM_DEV], "train": order[_NUM_DEV + _LEFT_OUT :]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in sets.items():
        rows = [row for number in numbers for row in _rows(articles[number])]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(article: dict[str, Any]) -> Iterator[dict[str, str]]:
    for paragraph in article["paragraphs"]:
        context = paragraph["context"]
        for question in paragraph["qas"]:
            answer = question["answers"][0]
            start, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
            begins = max(context.rfind(sign, 0, start) for sign in (". ", "? ", "! "))
            ends = [place for sign in (". ", "? ", "! ") if (place := context.find(sign, end)) >= 0]
            yield {
                "src": context[begins + 2 if begins >= 0 else 0 : min(ends, default=len(context) - 1) + 1],
                "answer": answer["text"],
                "tgt": question["question"].strip(),
            }


if __name__ == "__main__":
    main()
