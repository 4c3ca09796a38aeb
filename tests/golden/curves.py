"""The learning curves that every objective must keep to: fixed seeds, a short training on a CPU.

python -m tests.golden.curves        writes them anew, after a change that is meant to change them
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, get_args

from transformers import AutoModelForSequenceClassification

from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.support import World, save_teacher, write_corpus, write_groups

FILE: Final = Path(__file__).with_name("curves.json")
LOOKS: Final = 5
"""Evaluations of each training."""
ARCH: Final = {"distilbert": "2x32", "bert-pkd": "2x32", "mobilebert": "3x32:b16"}
"""Shapes that an objective asks for; others learn at any width, those of pairs at 32."""
Kind = Literal["words", "classes", "pairs"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
OF_CLASSES: Final = ("tinybert-prediction", "embedding")
"""Objectives that learn answers or vectors of whole texts."""
OF_PAIRS: Final = ("score", "margin-mse", "listwise", "ranknet")
"""Objectives that learn scores of pairs of texts."""
SLOW: Final = ("mlm-kd", "distilbert", *OF_PAIRS)
"""Objectives that learn little in 100 steps and take 200."""
TRAINED: Final = frozenset(OBJECTIVES)
"""Objectives of this release; tests register others."""


def served(kind: Kind) -> list[str]:
    """Return the objectives that a world serves."""
    others = {"classes": OF_CLASSES, "pairs": OF_PAIRS, "words": TRAINED - {*OF_CLASSES, *OF_PAIRS}}
    return sorted(others[kind])


_WORDS, _SPREAD = 5.0, 8.0
"""What the teacher of pairs is multiplied by: its word embeddings and its classifier. With random weights it
hardly tells texts apart."""
_DUMPS: Final[dict[Kind, dict[str, Any]]] = {
    "words": {"codec": "vectors", "max_kl": 0.003, "max_error": 0.02},
    "classes": {"packing": "records", "pooling": "mean"},
    "pairs": {"pair_columns": "query,right+wrong"},
}


def make_world(root: Path, kind: Kind) -> World:
    """Return a world whose cache serves some of the objectives."""
    teacher = root / "teacher"
    if kind == "words":
        save_teacher(teacher, head="tokens")
    else:
        save_teacher(teacher, head="sequences", num_labels=3 if kind == "classes" else 1)
    if kind == "pairs":
        model = AutoModelForSequenceClassification.from_pretrained(teacher)
        model.get_input_embeddings().weight.data.mul_(_WORDS)
        model.classifier.weight.data.mul_(_SPREAD)
        model.save_pretrained(teacher)
    corpus = write_corpus(root / "corpus.txt", num_documents=100)
    if kind == "pairs":
        corpus = write_groups(root / "groups.jsonl", num_groups=400)
    world = World(root, teacher, corpus)
    settings: dict[str, Any] = {"for": ",".join(served(kind)), **_DUMPS[kind]}
    world.dump(**settings)
    return world


def curve(world: World, objective: str) -> list[float]:
    """Return the held-out loss of a student as training goes on."""
    reads_pairs, steps = objective in OF_PAIRS, 200 if objective in SLOW else 100
    config = TrainConfig(
        arch=(ARCH.get(objective, "2x32" if reads_pairs else "2x16"),),
        objective=objective,
        init="random",
        steps=steps,
        batch_size=8,
        lr=2e-3 if reads_pairs else 5e-3,
        eval_steps=steps // LOOKS,
        device="cpu",
        precision="float32",
    )
    out = world.root / f"curve-{objective}"
    train_students(config, world.root / "cache", out=out, session=Session(world.home))
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [student["loss"] for line in lines for student in line.get("held_out", {}).values()]


def main() -> None:
    """Write the curves of all objectives."""
    curves: dict[str, list[float]] = {}
    for kind in KINDS:
        with TemporaryDirectory() as folder:
            world = make_world(Path(folder), kind)
            curves |= {name: curve(world, name) for name in served(kind)}
    FILE.write_text(json.dumps(dict(sorted(curves.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
