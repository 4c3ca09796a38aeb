"""Measure bytes per token against KL for every codec, as a dump measures itself on held-out sequences.

The known alternative is measured, too: the layer's input, rounded to 8 or 4 bits per component with a scale
for each token, from which queries, keys and values are computed again.

    python -m benchmarks.fidelity [--corpus FILE --label NAME]
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from numcodecs.zstd import Zstd
from torch import Tensor, nn

from benchmarks.inputs import KINDS, mini_teacher
from benchmarks.plots import plot_fidelity
from benchmarks.report import write_result
from minilm_cache.cache import Cache, open_cache
from minilm_cache.corpus.formats import PYTHON_DOCS
from minilm_cache.dump.audit import audit_sequences
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import Session

LENGTHS = (128, 256, 512)
MAX_TOKENS = 65_536
SETTINGS: dict[str, dict[str, object]] = {
    "topk pps k=8": {"k": 8},
    "topk pps k=16": {"k": 16},
    "topk largest k=16, uniform tail": {"k": 16, "select": "largest"},
    "topk largest k=64, uniform tail": {"k": 64, "select": "largest"},
    "vectors, KL at most 0.05": {"codec": "vectors", "max_kl": 0.05},
    "vectors, KL at most 0.02": {"codec": "vectors", "max_kl": 0.02},
    "vectors, KL at most 0.015": {"codec": "vectors", "max_kl": 0.015},
    "vectors, KL at most 0.005": {"codec": "vectors", "max_kl": 0.005},
    "dense": {"codec": "dense"},
}
Row = dict[str, Any]


def dumped(corpus: str, length: int, *, settings: dict[str, object], folder: Path) -> tuple[Cache, Row]:
    """Dump a cache, and return it with its measured bytes per token and fidelity."""
    base = {"teacher": "mini", "corpus": corpus, "max_length": length, "max_tokens": MAX_TOKENS}
    cache = open_cache(
        dump_cache(
            DumpConfig.model_validate({**base, **settings}), out=folder / "cache", session=Session(folder)
        ).path
    )
    measured = cache.manifest.measured
    assert measured is not None
    relations = measured.fidelity[-1].relations
    return cache, {
        "bytes_per_token": round(measured.bytes_per_token, 1),
        "kl_teacher_to_stored": {
            str(kind): fidelity.kl_teacher_to_stored for kind, fidelity in relations.items()
        },
        "kl_stored_to_teacher": {
            str(kind): fidelity.kl_stored_to_teacher for kind, fidelity in relations.items()
        },
    }


class RoundedInput:
    """Forward pre-hook that rounds the input of a layer, and counts the bytes that storing it takes."""

    def __init__(self, bits: int) -> None:
        self.greatest = 2 ** (bits - 1) - 1
        self.bits = bits
        self.num_bytes = 0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the rounded inputs of a layer for one sequence."""
        del module
        scale = (inputs[0].abs().amax(-1, keepdim=True) / self.greatest).half().float()
        codes = (inputs[0] / scale).round().clamp(-self.greatest, self.greatest)
        stored = codes.to(torch.int8)
        if self.bits == 4:
            stored = (stored[..., ::2] << 4) | (stored[..., 1::2] & 0xF)
        self.num_bytes += len(Zstd(level=1).encode(stored.numpy())) + 2 * scale.numel()
        return (codes * scale, *inputs[1:])


def layer_input(teacher: Teacher, cache: Cache, bits: int) -> Row:
    """Measure the rounded input on the sequences that the dump measures itself on."""
    rounded = RoundedInput(bits)
    layer = teacher.model.get_submodule(f"encoder.layer.{teacher.layers[-1]}.attention.self")
    sums = dict.fromkeys(KINDS, 0.0)
    num_rows = num_tokens = 0
    for number in audit_sequences(cache.manifest.num_train, len(cache)):
        inputs = Inputs.full(cache[number].input_ids[None])
        (exact,) = teacher.relations(inputs)
        hook = layer.register_forward_pre_hook(rounded)
        (stored,) = teacher.relations(inputs)
        hook.remove()
        for kind in KINDS:
            probs = exact.probs(kind)
            sums[kind] += float(torch.special.xlogy(probs, probs / stored.probs(kind)).sum())
        num_tokens += inputs.ids.shape[1]
        num_rows += inputs.ids.shape[1] * exact.vectors.query.shape[1]
    return {
        "bytes_per_token": round(rounded.num_bytes / num_tokens, 1),
        "kl_teacher_to_stored": {str(kind): total / num_rows for kind, total in sums.items()},
    }


def main(
    corpus: Annotated[str, typer.Option(help="Corpus, same as for `dump`")] = PYTHON_DOCS,
    label: Annotated[
        str, typer.Option(help="Name of the corpus in the names of the results")
    ] = "python_docs",
) -> None:
    """Dump the same tokens with every codec at every length, and write the measurements."""
    teacher = mini_teacher()
    table: dict[str, dict[str, Row]] = {}
    for length in LENGTHS:
        rows = table.setdefault(str(length), {})
        for name, settings in SETTINGS.items():
            with TemporaryDirectory() as folder:
                cache, rows[name] = dumped(corpus, length, settings=settings, folder=Path(folder))
                if name == "dense":
                    for bits in (8, 4):
                        rows[f"layer's input, {bits} bits"] = layer_input(teacher, cache, bits)
            print(length, name, rows[name], flush=True)
    write_result(f"fidelity_{label}", {"corpus": label, "tokens": MAX_TOKENS, "lengths": table})
    plot_fidelity(f"fidelity_{label}")


if __name__ == "__main__":
    typer.run(main)
