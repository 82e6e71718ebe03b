"""Triton's interpreter, made faithful: kernels run on a CPU, with the bits that a GPU would give.

As it is (3.7), it keeps bfloat16 as uint16 and computes with the raw bits, cuts off where a GPU rounds, and looks up all of
triton.language anew for each call of a device function. `interpreted` imports modules such that their kernels are interpreted in
this process, whether or not triton was imported before; the environment stays as it was. Not modelled: races, layouts, tf32, the
order of sums inside of a product.

On a machine with a GPU kernels are compiled instead, unless TRITON_INTERPRET is 1: the same tests, whose tensors are copied to
the device and back around each launch.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
import triton.experimental.gluon.language  # noqa: F401  # asks that triton.language is not interpreted yet
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, ReduceOps, TensorHandle
from triton.runtime.jit import JITFunction

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"

_KINDS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


@cache
def jit(function: Any) -> Any:
    """`triton.jit` for the kernels of a test."""
    return JITFunction(function) if ON_GPU else InterpretedFunction(function)


def interpreted(*names: str) -> tuple[ModuleType, ...]:
    """The modules called `names`, not imported before; the kernels of these and of what they import run in the interpreter."""
    if ON_GPU:
        if JITFunction.run is not _run_on_gpu:
            JITFunction.run = _run_on_gpu
        return tuple(map(import_module, names))
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        _patch()
        modules = tuple(map(import_module, names))
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    for module in modules:
        assert not any(isinstance(value, JITFunction) for value in vars(module).values()), (
            f"{module} was imported before, compiled"
        )
    return modules


_run_compiled = JITFunction.run


def _run_on_gpu(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A launch whose tensors lie on the host: their memory is copied to the GPU as a whole, views stay views, and back."""
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            memory = value.untyped_storage()
            if memory.data_ptr() not in copies:
                host = torch.empty(0, dtype=torch.uint8).set_(memory)
                copies[memory.data_ptr()] = host, host.cuda()
            there = copies[memory.data_ptr()][1].untyped_storage()
            place = (value.storage_offset(), value.shape, value.stride())
            return torch.empty(0, dtype=value.dtype, device="cuda").set_(there, *place)
        if isinstance(value, tuple):
            return type(value)(*map(moved, value)) if hasattr(value, "_fields") else tuple(map(moved, value))
        return value

    found = _run_compiled(self, *map(moved, args), **{name: moved(value) for name, value in kwargs.items()})
    for host, device in copies.values():
        host.copy_(device)
    return found


def _patch() -> None:
    for module in (tl, tl.standard, tl.core):  # what triton compiles
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, jit(value.fn))
    if hasattr(InterpreterBuilder, "get_bf16"):  # done before
        return
    for owner, name, new in (
        (interpreter, "_convert_float", _convert_float),
        (interpreter, "_implicit_cvt", _convert_argument),
        (GridExecutor, "__call__", _launch),
        (InterpretedFunction, "__call__", _call_device_function),
        (InterpreterBuilder, "binary_op", _binary),
        (InterpreterBuilder, "create_dot", _dot),
        (InterpreterBuilder, "cast_impl", _cast),
        (ReduceOps, "sum", _sum),
    ):
        setattr(owner, name, _instead(new, getattr(owner, name)))
    InterpreterBuilder.get_bf16 = lambda self, value: _narrow(np.array([value], np.float32))
    # Checks of whole numbers for overflow, which nobody reads and which take half of the time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _instead(new: Any, original: Any) -> Any:
    """A function that hands `original` to `new`, before the other arguments."""
    return lambda *args, **kwargs: new(original, *args, **kwargs)


def _launch(launch: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Prepares also the module in which the device functions of triton.language look. A GPU does not warn of infinities."""
    scope = interpreter._patch_lang(tl.sum.fn)
    try:
        with np.errstate(all="ignore"):
            launch(self, *args, **kwargs)
    finally:
        scope.restore()


def _call_device_function(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The launch around it has prepared triton.language already."""
    return self.rewrite()(*args, **kwargs)


def _convert_argument(convert: Any, argument: Any) -> Any:
    """Constants in a tuple become as plain as a kernel's other constants."""
    return argument.value if isinstance(argument, tl.constexpr) else convert(argument)


def _binary(compute: Any, self: Any, left: Any, right: Any, op: Any) -> Any:
    if left.dtype.scalar != tl.bfloat16:
        return compute(self, left, right, op)
    found = op(_widen(left).data, _widen(right).data)
    return TensorHandle(found, tl.int1) if found.dtype == np.bool_ else _narrow(found)


def _dot(multiply: Any, self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """In float32, as the units of a GPU add up."""
    return multiply(self, _widen(a), _widen(b), *rest)


def _sum(add: Any, self: Any, numbers: Any) -> Any:
    """Rounded once; a GPU rounds each sum of two."""
    if numbers.dtype != tl.bfloat16:
        return add(self, numbers)
    total = np.sum(_widen(numbers.handle).data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(_narrow(total).data, tl.bfloat16)


def _cast(cast: Any, self: Any, source: Any, wanted: Any) -> Any:
    if wanted.scalar == tl.bfloat16:
        return _narrow(_widen(source).data.astype(np.float32))
    return cast(self, _widen(source), wanted)


def _widen(handle: Any) -> Any:
    """bfloat16 and fp8 as float32, all else as it is."""
    kind = handle.dtype.scalar
    if kind != tl.bfloat16 and not kind.is_fp8():
        return handle
    return TensorHandle(interpreter._convert_float(handle.data, kind, tl.float32, None).view(np.float32), tl.float32)


def _narrow(data: Any) -> Any:
    """float32 numbers as bfloat16."""
    return TensorHandle(interpreter._convert_float(data, tl.float32, tl.bfloat16, None), tl.bfloat16)


def _convert_float(original: Any, data: Any, source: Any, wanted: Any, rounding: Any) -> Any:
    """The bits of numbers of another type: nearest, ties to even; what is too great for fp8 saturates, as on a GPU."""
    if rounding == ir.ROUNDING_MODE.RTZ or not {source.name, wanted.name} <= set(_KINDS):
        return original(data, source, wanted, rounding)
    bits = torch.from_numpy(np.array(data)).view(getattr(torch, f"uint{source.primitive_bitwidth}"))
    numbers = bits.view(_KINDS[source.name])
    if wanted.is_fp8() and not source.is_fp8():
        most = torch.finfo(_KINDS[wanted.name]).max
        numbers = numbers.clamp(-most, most)
    return numbers.to(_KINDS[wanted.name]).view(getattr(torch, f"uint{wanted.primitive_bitwidth}")).numpy()
