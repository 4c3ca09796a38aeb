"""Compile the kernels of the relation loss for GPUs that need not be there, and read what they use.

    python -m benchmarks.kernels

Triton and its assembler come with PyTorch for GPUs; the extra `dev` installs them, too. For each kernel it
writes the greatest figures of all GPUs: registers of a thread (255 at most), bytes of a thread that did not
fit into them, bytes of fast memory of a program, and instructions that multiply matrices. Times need a GPU:
`python -m benchmarks.gpu`.
"""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.report import write_result
from minilm_cache.relations import fused, kernels
from minilm_cache.relations.scores import SparseRows, VectorRows, Vectors
from minilm_cache.storage_schema.identity import RelationKind

GPUS: Final = {80: "A100", 86: "RTX 3090", 89: "RTX 4090, L4", 90: "H100, H200"}
"""Compute capabilities, and GPUs that have them."""
CASES: Final = (
    ("vectors", torch.bfloat16, 32, 64),
    ("vectors", torch.float32, 32, 64),
    ("vectors", torch.bfloat16, 64, 64),
    ("vectors", torch.bfloat16, 128, 128),
    ("vectors", torch.float32, 128, 128),
    ("topk", torch.bfloat16, 32, 16),
    ("topk", torch.float32, 32, 16),
)
"""Codec, type of the student's vectors, its size of a head, and the teacher's, or entries of a row."""
HEADS, LENGTH = 12, 128
_TYPES: Final = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class _Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: object) -> Any:  # noqa: ANN401 - as Triton has it
        del grid
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


def main() -> None:
    """Compile all kernels, and write what they use."""
    rows = [row for case in CASES for row in compiled(*case)]
    write_result("kernels", {"triton": triton.__version__, "gpus": GPUS, "kernels": rows})


def compiled(codec: str, dtype: torch.dtype, *sizes: int) -> list[dict[str, Any]]:
    """Compile the kernels of a relation for all GPUs; return what they use.

    Args:
        codec: `vectors` or `topk`.
        dtype: type of the student's vectors.
        sizes: size of the student's heads, and of the teacher's, or entries of a row.
    """
    size, other = sizes
    case = {"codec": codec, "dtype": str(dtype).removeprefix("torch."), "head": size, "teacher": other}
    rows = []
    for kernel, args, kwargs in _launches(codec, dtype, size=size, other=other):
        side = {True: ", columns", False: ", rows"}.get(kwargs.get("BY_COLUMNS"), "")
        used = [_used(kernel, args, kwargs, capability=capability) for capability in GPUS]
        greatest = {name: max(each[name] for each in used) for name in used[0]}
        rows.append({**case, "kernel": f"{kernel.__name__}{side}", **greatest})
    return rows


def _launches(codec: str, dtype: torch.dtype, *, size: int, other: int) -> list[tuple[Any, Any, Any]]:
    """Return the kernels of a relation, and what they are launched with: `(kernel, args, kwargs)`."""

    def vectors(width: int, of: torch.dtype) -> Vectors:
        query, key, value = (
            torch.zeros(1, LENGTH, HEADS, width, dtype=of).transpose(1, 2).requires_grad_() for _ in range(3)
        )
        return Vectors(query, key, value, None, width**-0.5)

    targets = VectorRows(vectors(other, torch.float32), RelationKind.ATTENTION)
    index = torch.zeros(1, HEADS, LENGTH, other, dtype=torch.int64)
    rows = targets if codec == "vectors" else SparseRows(index, index.float(), None)
    forward, backward = _Recorder(), _Recorder()
    with (
        patch.object(fused, "losses_of_rows", forward),
        patch.object(fused, "gradients_of_vectors", backward),
    ):
        student = vectors(size, dtype)
        loss = fused.cross_entropy(student, RelationKind.ATTENTION, rows=rows, lengths=torch.tensor([LENGTH]))
        torch.autograd.grad(loss, student[:2])
    found = [(kernels.losses_of_rows, *launch) for launch in forward.launches]
    return found + [(kernels.gradients_of_vectors, *launch) for launch in backward.launches]


def _used(kernel: Any, args: Any, kwargs: Any, *, capability: int) -> dict[str, int]:  # noqa: ANN401
    """Return what a kernel uses of a GPU of a compute capability."""
    options = {name: kwargs[name] for name in ("num_warps", "num_stages")}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and values[name] % 16 == 0)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _resources(made.asm["cubin"])
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": made.metadata.shared,
        "matrix_instructions": len(re.findall(r"mma\.sync|wgmma\.mma", made.asm["ptx"])),
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and its bytes that are outside of them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack)


if __name__ == "__main__":
    main()
