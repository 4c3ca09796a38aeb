"""Measure bytes per token and fidelity of everything that objectives need, as a dump measures itself.

    python -m benchmarks.objectives TEACHER-WITH-HEAD

The teacher has a head for masked tokens: `minilm-cache head --teacher mini --out FOLDER` makes one.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.report import write_result
from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.objectives.spec import OBJECTIVES, Needs
from minilm_cache.session import Session
from minilm_cache.storage_schema.arrays import codes_path

MAX_TOKENS = 16_384
ERRORS = (0.05, 0.1, 0.2)
ENTRIES = (16, 32, 64)
Row = dict[str, Any]


def dumped(teacher: Path, folder: Path, add: Path | None = None, **settings: object) -> Cache:
    """Dump a sample with these settings. A cache as `add` means to add to its targets."""
    base = {"teacher": str(teacher), "max_tokens": MAX_TOKENS, **settings}
    path = folder / f"{len(list(folder.iterdir()))}"
    return open_cache(
        dump_cache(DumpConfig.model_validate(base), out=path, add=add, session=Session(folder)).path
    )


def states_of(cache: Cache) -> dict[str, Row]:
    """Return the measured bytes and errors of a cache's states, and the bytes of its layers' codes."""
    measured = cache.manifest.measured
    assert measured is not None
    rows: dict[str, Row] = {
        state.path: {
            "bytes_per_token": round(state.bytes_per_token, 2),
            "relative_error": state.relative_error,
            "cross_entropy_bias": state.cross_entropy_bias,
        }
        for state in measured.states
    }
    sizes = cache.reader.records.bytes_by_name()
    for layer in cache.layers:
        size = sizes.get(codes_path(layer), 0)
        rows[f"vectors/{layer}"] = {"bytes_per_token": round(size / cache.manifest.num_tokens, 2)}
    return rows


def added_bytes(needs: Needs, states: dict[str, Row], depth: int) -> float:
    """Return the bytes per token that an objective adds to a cache of codec vectors of the last layer."""

    def total(prefix: str, numbers: range) -> float:
        return sum(float(states[f"{prefix}/{number}"]["bytes_per_token"]) for number in numbers)

    spans = {"last": range(depth, depth + 1), "all": range(depth + 1)}
    added = total("vectors", range(depth - 1)) if needs.layers == "all" else 0.0
    added += total("states/hidden", spans[needs.hidden]) if needs.hidden else 0.0
    added += total("states/masked", spans[needs.masked_hidden]) if needs.masked_hidden else 0.0
    added += total("states/first", spans[needs.first]) if needs.first else 0.0
    labels = "labels of all tokens" if needs.all_labels else "labels"
    return added + (float(states[labels]["bytes_per_token"]) if needs.labels else 0.0)


def main(teacher: Annotated[Path, typer.Argument(help="Folder with a head for masked tokens")]) -> None:
    """Measure, and write `results/objectives.json`."""
    result: dict[str, Any] = {"max_error": {}, "label_k": {}, "objectives": {}}
    with TemporaryDirectory() as folder:
        home = Path(folder)
        layers: dict[str, Any] = {"codec": "vectors", "layers": "all"}
        base = dumped(teacher, home, **layers).reader.root
        # The temperature of DistilBERT.
        label_settings: dict[str, Any] = {"labels": True, "label_tokens": "all", "label_temperature": 2.0}
        all_labels = states_of(dumped(teacher, home, base, **layers, **label_settings))["labels"]
        for error in ERRORS:
            state_settings: dict[str, Any] = {
                "hidden": "all",
                "first_hidden": "all",
                "masked_hidden": "last",
                "labels": True,
            }
            cache = dumped(teacher, home, base, **layers, **state_settings, max_error=error)
            states, depth = states_of(cache), cache.manifest.identity.teacher.num_layers
            states["labels of all tokens"] = all_labels
            result["max_error"][str(error)] = states
            result["objectives"][str(error)] = {
                name: round(added_bytes(spec.needs, states, depth), 1)
                for name, spec in OBJECTIVES.items()
                if not spec.needs.logits
            }
        plain = dumped(teacher, home).reader.root
        for entries in ENTRIES:
            for temperature in (1.0, 2.0):
                settings: dict[str, Any] = {
                    "labels": True,
                    "label_k": entries,
                    "label_temperature": temperature,
                }
                row = states_of(dumped(teacher, home, plain, **settings))["labels"]
                result["label_k"][f"{entries}, temperature {temperature:g}"] = row
    write_result("objectives", result)


if __name__ == "__main__":
    typer.run(main)
