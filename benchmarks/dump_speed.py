"""Measure tokens per second of a dump's inner loop, over the same teacher's plain forward pass, in turns.

python -m benchmarks.dump_speed
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import AutoModel

from benchmarks.inputs import KINDS, mini_teacher
from benchmarks.plots import plot_dump_speed
from benchmarks.report import write_for_cpu
from minilm_cache.codecs.base import RelationCodec
from minilm_cache.codecs.build import build_codec
from minilm_cache.codecs.vectors import calibrate
from minilm_cache.corpus.formats import PYTHON_DOCS
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.identity import codec_parameters
from minilm_cache.models.inputs import Inputs
from minilm_cache.relations.scores import mean_row_entropy
from minilm_cache.storage_schema.identity import DenseParameters, Packing, TopKParameters

BATCH, LENGTH = 32, 128
ROUNDS = 12
MAX_KL = 0.015


def main() -> None:
    """Time every codec and the plain forward pass in turns, and write medians and ratios."""
    teacher = mini_teacher()
    plain = AutoModel.from_pretrained(teacher.folder).eval()
    packing = Packing(mode="packed", max_length=LENGTH, max_tokens=None, seed=0)
    sequences = SequenceTable(tokenise(load_corpus(PYTHON_DOCS), teacher.tokenizer), packing)

    def batch(number: int) -> torch.Tensor:
        rows = sequences.read(number * BATCH, (number + 1) * BATCH).ids
        return torch.stack([torch.from_numpy(row) for row in rows])

    samples = [signal for number in range(6) for signal in teacher.relations(Inputs.full(batch(number)))]
    fitted = calibrate(samples[:4], samples[4:], MAX_KL, layer=teacher.layers[-1]).codec
    codecs: dict[str, RelationCodec] = {"vectors": fitted}
    for name in ("topk", "dense"):
        parameters = codec_parameters(DumpConfig.model_validate({"teacher": "mini", "codec": name}))
        assert isinstance(parameters, TopKParameters | DenseParameters)
        codecs[name] = build_codec(parameters, LENGTH, KINDS)

    def dump_with(codec: RelationCodec) -> Callable[[torch.Tensor], None]:
        def run(ids: torch.Tensor) -> None:
            (signal,) = teacher.relations(Inputs.full(ids))
            codec.encode(signal, range(BATCH), lengths=signal.lengths)
            if codec is not fitted:
                for kind in KINDS:
                    mean_row_entropy(signal.probs(kind), signal.lengths)

        return run

    def forward(ids: torch.Tensor) -> None:
        with torch.no_grad():
            plain(ids, attention_mask=torch.ones_like(ids))

    ways = {"plain forward": forward, **{name: dump_with(codec) for name, codec in codecs.items()}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        ids = batch(number)
        for name, way in ways.items():
            started = time.perf_counter()
            way(ids)
            times[name].append(time.perf_counter() - started)
    seconds = {name: median(values[1:]) for name, values in times.items()}
    write_for_cpu(
        "dump_speed",
        {
            "teacher": "mini (6 layers, hidden 384)",
            "batch": BATCH,
            "length": LENGTH,
            "tokens_per_s": {name: round(BATCH * LENGTH / value) for name, value in seconds.items()},
            "over_plain_forward": {
                name: round(seconds["plain forward"] / value, 3) for name, value in seconds.items()
            },
        },
    )
    plot_dump_speed()


if __name__ == "__main__":
    main()
