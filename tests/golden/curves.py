"""The learning curves that every objective must keep to: fixed seeds, 200 steps on a CPU.

python -m tests.golden.curves        writes them anew, after a change that is meant to change them
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.session import Session
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.support import World, save_teacher, write_corpus

FILE: Final = Path(__file__).with_name("curves.json")
EVERY: Final = 40
"""Steps between evaluations."""
ARCH: Final = {"distilbert": "2x32", "bert-pkd": "2x32", "mobilebert": "3x32:b16"}
"""Shapes that an objective asks for; others learn at any width."""
OF_CLASSES: Final = ("tinybert-prediction", "embedding")
"""Objectives that learn answers or vectors of whole texts."""
TRAINED: Final = frozenset(OBJECTIVES)
"""Objectives of this release; tests register others."""


def served(*, classes: bool) -> list[str]:
    """Return the objectives that a world serves."""
    return sorted(name for name in TRAINED if (name in OF_CLASSES) == classes)


def make_world(root: Path, *, classes: bool) -> World:
    """Return a world whose cache serves half of the objectives."""
    teacher = root / "teacher"
    if classes:
        save_teacher(teacher, head="sequences", num_labels=3)
    else:
        save_teacher(teacher, head="tokens")
    world = World(root, teacher, write_corpus(root / "corpus.txt", num_documents=100))
    more = {"packing": "records", "pooling": "mean"} if classes else {}
    bounds = {} if classes else {"codec": "vectors", "max_kl": 0.003, "max_error": 0.02}
    settings: dict[str, Any] = {"for": ",".join(served(classes=classes)), **bounds, **more}
    world.dump(**settings)
    return world


def curve(world: World, objective: str) -> list[float]:
    """Return the held-out loss of a student as training goes on."""
    config = TrainConfig(
        arch=(ARCH.get(objective, "2x16"),),
        objective=objective,
        init="random",
        steps=200,
        batch_size=8,
        lr=5e-3,
        eval_steps=EVERY,
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
    for classes in (False, True):
        with TemporaryDirectory() as folder:
            world = make_world(Path(folder), classes=classes)
            curves |= {name: curve(world, name) for name in served(classes=classes)}
    FILE.write_text(json.dumps(dict(sorted(curves.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
