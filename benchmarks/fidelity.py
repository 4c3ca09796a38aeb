"""Bytes per token against KL for every codec: what a dump measures of itself, on sequences held out.

python -m benchmarks.fidelity [--corpus FILE]
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks.report import write_result
from minilm_cache.config import DumpConfig
from minilm_cache.dump.corpus import PYTHON_DOCS
from minilm_cache.dump.run import dump

LENGTHS = (128, 256, 512)
MAX_TOKENS = 65_536
SETTINGS: dict[str, dict[str, object]] = {
    "topk pps, k=8": {"k": 8},
    "topk pps, k=16": {"k": 16},
    "topk largest, k=16, uniform tail": {"k": 16, "select": "largest"},
    "topk largest, k=64, uniform tail": {"k": 64, "select": "largest"},
    "vectors, KL at most 0.05": {"codec": "vectors", "max_kl": 0.05},
    "vectors, KL at most 0.02": {"codec": "vectors", "max_kl": 0.02},
    "vectors, KL at most 0.005": {"codec": "vectors", "max_kl": 0.005},
    "dense": {"codec": "dense"},
}


def main(corpus: Annotated[str, typer.Option(help="A corpus, as for `dump`")] = PYTHON_DOCS) -> None:
    """Dump the same tokens with every codec at every length, and write what each measured."""
    table: dict[str, dict[str, dict[str, object]]] = {}
    for length in LENGTHS:
        found = table.setdefault(str(length), {})
        for name, settings in SETTINGS.items():
            base = {"teacher": "mini", "corpus": corpus, "max_length": length, "max_tokens": MAX_TOKENS}
            config = DumpConfig.model_validate({**base, **settings})
            with TemporaryDirectory() as folder:
                measured = dump(config, Path(folder) / "cache", Path(folder)).manifest.measured
            assert measured is not None
            found[name] = {
                "bytes_per_token": round(measured.bytes_per_token, 1),
                "kl_teacher_to_stored": {
                    str(kind): fidelity.kl_teacher_to_stored for kind, fidelity in measured.fidelity.items()
                },
                "kl_stored_to_teacher": {
                    str(kind): fidelity.kl_stored_to_teacher for kind, fidelity in measured.fidelity.items()
                },
            }
    label = Path(corpus).stem.replace("python-docs", "python_docs")
    write_result(f"fidelity_{label}", {"corpus": label, "tokens": MAX_TOKENS, "lengths": table})


if __name__ == "__main__":
    typer.run(main)
