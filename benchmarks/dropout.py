"""Measure students of relations with their teacher's dropout and without any.

    python -m benchmarks.dropout --data DATA [--home DIR]

A `3x384` and a `3x192` of `mini` learn its relations of the text of `benchmarks.crowded` in one pass, from
slices and from random weights, by few passes over the text and by many. Held-out KLs, one seed.
"""

import argparse
from pathlib import Path
from typing import Any, Final

from benchmarks.crowded import text_of
from benchmarks.report import write_result
from minilm_cache import DumpConfig, TrainConfig, dump_cache, train_students
from minilm_cache.session import Session
from minilm_cache.settings import validated

TOKENS: Final = {"few passes": 300_000, "many passes": 60_000}
"""Tokens of each cache."""
TRAINED: Final[dict[str, dict[str, Any]]] = {
    "slices, few passes": {"cache": "few passes", "steps": 300},
    "slices, many passes": {"cache": "many passes", "epochs": 15},
    "random weights, few passes": {"cache": "few passes", "steps": 300, "init": "random"},
}
"""Settings of each training."""
ARCHS: Final = ("3x384", "3x192")


def main() -> None:
    """Train what is missing, and write the held-out KLs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("dropout"))
    given = parser.parse_args()
    rows = []
    for name, settings in TRAINED.items():
        for dropout in ("teacher", "none"):
            config = {key: value for key, value in settings.items() if key != "cache"}
            values = {**config, "arch": ARCHS, "dropout": dropout, "precision": "bfloat16"}
            out = given.home / f"{name.replace(', ', '-').replace(' ', '-')}-{dropout}"
            cache = _cache(settings["cache"], given.home, given.data)
            session = Session(given.home)
            record = train_students(validated(TrainConfig, values), cache, out=out, session=session).record
            for student in record.students:
                kls = {"before": student.held_out_before, "after": student.held_out_after}
                shown = {
                    time: {kind: round(kl, 4) for kind, kl in (of or {}).items()} for time, of in kls.items()
                }
                rows.append({"training": name, "dropout": dropout, "student": student.arch, **shown})
    write_result("dropout", {"tokens": TOKENS, "settings": TRAINED, "rows": rows})


def _cache(name: str, home: Path, data: Path) -> Path:
    """Return the cache of a text, which is dumped where it is missing."""
    path = home / f"{name.replace(' ', '-')}.cache"
    dumped = {"teacher": "mini", "corpus": str(text_of(home, data)), "documents": "lines"}
    limits = {"max_length": 128, "max_tokens": TOKENS[name], "precision": "bfloat16"}
    dump_cache(validated(DumpConfig, dumped | limits), out=path, session=Session(home))
    return path


if __name__ == "__main__":
    main()
