"""A pretend accelerator: a device of torch that computes on the CPU and counts what would be waited for.

It needs no GPU. An operation that mixes devices raises, as it does on a GPU. Two things are counted by the
line that caused them: waits, for which the CPU stops until a GPU has computed everything before them (a
scalar that is read, an index of unknown size, a copy that is not from pinned memory), and kernels, one for
each operation that is not a view. Fused kernels of a real GPU may be fewer.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
VIEWS = {
    *("view", "transpose", "expand", "permute", "unsqueeze", "squeeze", "slice", "select", "t", "detach"),
    *("alias", "split", "_unsafe_view", "_reshape_alias", "as_strided", "unbind", "diagonal", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "narrow", "unfold", "mT"),
    *("split_with_sizes", "_local_scalar_dense", "is_same_size", "resize_", "set_", "is_pinned"),
}
"""Operations that launch no kernel."""
UNKNOWN_SIZE = {
    *("nonzero", "bincount", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    "repeat_interleave",
}
"""Operations whose result has a size that the CPU must wait for."""
COPIES = {"copy_", "_to_copy"}
OURS = ("minilm_cache/", "storage_schema/", "transformers/", "torch/nn/utils", "torch/optim")


@dataclass
class Counts:
    """What a real device would have done, by the line of code that caused it."""

    waits: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    """Copies between CPU and device that nothing waits for."""

    def clear(self) -> None:
        """Begin to count anew."""
        for counter in (self.waits, self.kernels, self.copies):
            counter.clear()

    def __str__(self) -> str:
        """Return waits by line, then the number of kernels, for messages of tests."""
        lines = [f"{number} x {line}" for line, number in self.waits.most_common()]
        return "\n".join([f"{self.waits.total()} waits, {self.kernels.total()} kernels", *lines])


_counts = Counts()


class _Module(_DummyBackendModule):
    """The functions of a backend that torch calls."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_: object) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, *_: object) -> None:
        pass


class OnDevice(Tensor):
    """A tensor on the pretend accelerator; `raw` is where its values are."""

    raw: Tensor

    @staticmethod
    def __new__(cls: type["OnDevice"], raw: Tensor) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return _waited("tolist", self).tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return _waited("cpu", self).detach().clone(memory_format=torch.preserve_format)

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"a tensor on a device has no numpy array: {_line()}")


class _Mode(TorchDispatchMode):
    """Sees operations that make tensors on the device from nothing."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _line() -> str:
    """Return file and line of the innermost frame of the packages that are looked at."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in OURS) and "tests/" not in file:
            return f"{file.split('site-packages/')[-1].split('/main/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


def _waited(what: str, tensor: OnDevice) -> Tensor:
    _counts.waits[f"{what} at {_line()}"] += 1
    return tensor.raw


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, OnDevice) else value


def _is_device(value: object) -> bool:
    return value is not None and torch.device(value).type == NAME  # type: ignore[call-overload]


def _refuse_mixed(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for an operation on tensors of both devices, as a GPU does.

    Scalars may be on the CPU.
    """
    others = [part for part in tensors if not isinstance(part, OnDevice) and part.ndim and part.numel()]
    if others:
        shapes = [tuple(part.shape) for part in others]
        raise RuntimeError(f"{name} at {_line()} mixes devices: {shapes} are on the CPU")


def _count_waits(name: str, args: Any) -> None:
    if name == "_local_scalar_dense":
        _counts.waits[f"scalar at {_line()}"] += 1
    elif name in UNKNOWN_SIZE:
        _counts.waits[f"{name} at {_line()}"] += 1
    elif name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
        indices = [part for part in args[1] or () if isinstance(part, Tensor)]
        if any(part.dtype in (torch.bool, torch.uint8) for part in indices):
            _counts.waits[f"{name} by a mask at {_line()}"] += 1
        if any(part.dtype in (torch.uint16, torch.uint32, torch.uint64) for part in (args[0], *indices)):
            raise RuntimeError(f"{name} at {_line()}: a GPU cannot index unsigned integers")


def _count_copy(name: str, args: Any, kwargs: Mapping[str, Any], *, to_device: bool) -> None:
    source, non_blocking = args[0], kwargs.get("non_blocking", False)
    if name == "copy_":
        to_device, source = isinstance(args[0], OnDevice), args[1]
        non_blocking = args[2] if len(args) > 2 else non_blocking
    if to_device == isinstance(source, OnDevice):
        _counts.kernels[name] += to_device
        return
    is_pinned = not to_device or getattr(source, "pretends_pinned", False)
    counter = _counts.copies if non_blocking and is_pinned else _counts.waits
    way = "to" if to_device else "from"
    counter[f"copy {way} the device of {tuple(source.shape)} {source.dtype} at {_line()}"] += 1


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation on the CPU, and count what it would have been on a device."""
    name = func.overloadpacket.__name__
    tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
    on_device = [part for part in tensors if isinstance(part, OnDevice)]
    target = kwargs.get("device")
    is_result_on_device = _is_device(target) if target is not None else bool(on_device)
    if name in COPIES:
        _count_copy(name, args, kwargs, to_device=is_result_on_device)
    elif on_device:
        _refuse_mixed(name, tensors)
        _count_waits(name, args)
    here = dict(kwargs)
    if _is_device(target):
        here["device"] = torch.device("cpu")
    result = func(*tree_map(_raw, args), **tree_map(_raw, here))
    if name == "copy_":
        return args[0]
    if is_result_on_device and name not in VIEWS and name not in COPIES:
        _counts.kernels[name] += 1
    same = {id(part.raw): part for part in on_device}

    def wrapped(part: Any) -> Any:
        if not isinstance(part, Tensor) or isinstance(part, OnDevice):
            return part
        if id(part) in same:
            return same[id(part)]
        return OnDevice(part) if is_result_on_device else part

    return tree_map(wrapped, result)


class _Attention(torch.autograd.Function):
    """Attention as one kernel, and its gradient as three, as fused kernels have."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *parts, mask, scale = args
        _counts.kernels["attention"] += 1
        with torch.enable_grad():
            ctx.parts = [part.raw.detach().requires_grad_() for part in parts]
            query, key, value = ctx.parts
            ctx.output = _attention(query, key, value, _raw(mask), scale=scale)
        return OnDevice(ctx.output.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _counts.kernels["attention backward"] += 3
        gradients = torch.autograd.grad(ctx.output, ctx.parts, grads[0].raw)
        return (*map(OnDevice, gradients), None, None)


_attention = F.scaled_dot_product_attention


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Any:
    if not isinstance(query, OnDevice):
        return _attention(query, key, value, attn_mask, **options)
    parts = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    assert all(isinstance(part, OnDevice) for part in parts), "attention mixes devices"
    return _Attention.apply(query, key, value, attn_mask, options.get("scale"))  # type: ignore[no-untyped-call]


def _pinned(tensor: Tensor, *_: object) -> Tensor:
    if hasattr(tensor, "pretends_pinned"):
        return tensor
    copy = tensor.clone(memory_format=torch.preserve_format)
    copy.pretends_pinned = True  # type: ignore[attr-defined]
    return copy


_tensor = torch.tensor


def _made(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    made = _tensor(data, **kwargs)
    return made.to(device) if _is_device(device) else made


def _synchronize(*_: object) -> None:
    _counts.waits[f"synchronize at {_line()}"] += 1


@cache
def register() -> torch.library.Library:
    """Make the device known to torch; once for a process, and before its first backward pass."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # computes in float32
    return library


@contextmanager
def accelerator() -> Iterator[tuple[torch.device, Counts]]:
    """Yield the pretend accelerator, and what it counts."""
    register()
    _counts.clear()
    replaced: dict[str, Callable[..., Any]] = {
        "torch.Tensor.pin_memory": _pinned,
        "torch.tensor": _made,
        "torch.nn.functional.scaled_dot_product_attention": _attend,
        "torch.accelerator.synchronize": _synchronize,
    }
    patches = [patch(name, function) for name, function in replaced.items()]
    for one in patches:
        one.start()
    try:
        with _Mode():  # type: ignore[no-untyped-call]
            yield torch.device(NAME, 0), _counts
    finally:
        for one in patches:
            one.stop()
