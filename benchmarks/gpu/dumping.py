"""Tokens per second of dumps, by codec and precision, over the same teacher's plain forward pass."""

import time
from collections.abc import Iterator
from typing import Any, get_args

import torch
from transformers import AutoModel

from benchmarks.gpu.inputs import Bench
from benchmarks.loops import synchronize
from minilm_cache.dump.plan import TaskClock
from minilm_cache.dump.run import dump_cache
from minilm_cache.session import Session, Silent
from minilm_cache.storage_schema.identity import Precision

CODECS = {"topk": 1, "vectors": 1, "dense": 4}
"""Codecs, and the part of the tokens that each dumps: dense relations take 6 KB each."""
FORWARD_S = 2.0


def dumping(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each codec, in the precision that a GPU has by default."""
    yield from _dumps(bench, "bfloat16")


def dumping_otherwise(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each codec and each other precision that the device has."""
    for precision in get_args(Precision):
        if precision != "bfloat16" and (precision != "tf32" or bench.device.type == "cuda"):
            yield from _dumps(bench, precision)


def _dumps(bench: Bench, precision: Precision) -> Iterator[dict[str, Any]]:
    length = min(bench.sizes.lengths)
    plain = plain_rate(bench, length, precision)
    for codec, part in CODECS.items():
        path = bench.folder / f"dumped-{codec}-{precision}"
        config = bench.config(codec, length, tokens=bench.sizes.dump_tokens // part, precision=precision)
        clock = TaskClock(Silent())
        manifest = dump_cache(config, out=path, session=Session(bench.folder, progress=clock)).manifest
        clock.stop()
        rate = manifest.num_tokens / clock.seconds["dump"]
        yield {
            "codec": codec,
            "precision": precision,
            "tokens": manifest.num_tokens,
            "tokens_per_s": round(rate),
            "plain_forward_tokens_per_s": round(plain),
            "over_plain_forward": round(rate / plain, 3),
        }


def plain_rate(bench: Bench, length: int, precision: Precision) -> float:
    """Return tokens per second of the teacher's whole forward pass by sdpa, nothing captured."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = AutoModel.from_pretrained(bench.teacher, dtype=dtype, attn_implementation="sdpa")
    model = model.eval().to(bench.device)
    ids = torch.randint(5, 30_000, (32 if bench.device.type == "cpu" else 512, length), device=bench.device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.inference_mode():
            model(input_ids=ids)
            synchronize(bench.device)
            started, passes = time.perf_counter(), 0
            while time.perf_counter() - started < FORWARD_S * bench.sizes.seconds:
                model(input_ids=ids)
                synchronize(bench.device)
                passes += 1
            return passes * ids.numel() / (time.perf_counter() - started)
    finally:
        torch.set_float32_matmul_precision(before)
