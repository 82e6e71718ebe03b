"""A device that is none: it computes on the CPU and is as strict as a GPU is. Load through a fixture.

Inside a step nothing may read a tensor: every way to do so raises. What is uploaded is a copy, and the array is locked. What is
downloaded arrives when it is waited for, as it was when it was sent. A capture records operations and computes nothing; a replay
runs exactly these, on the same tensors: numbers of the host that were baked in show as wrong results. All that a graph has
left behind is poison as soon as another one runs, since graphs share memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfbyte.model_runner.device import DeviceMemory

READERS = {
    *(getattr(Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")),
    *(getattr(Tensor, name) for name in ("__index__", "__array__", "__contains__", "masked_select", "unique")),
    *(torch.nonzero, torch.masked_select, torch.unique, torch.tensor, torch.as_tensor, torch.equal, torch.allclose),
}
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal", "unique_dim"}


class Synchronised(AssertionError):
    """A step waited for the device, or went to it by another door."""


def _is_mask(index: object) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(index))


class _Functions(TorchFunctionMode):
    """What a step calls by name."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.device.is_open:
            name = getattr(func, "__name__", str(func))
            moves = func is Tensor.to and any(isinstance(arg, str | torch.device) for arg in (*args, *kwargs.values()))
            masks = func in (Tensor.__getitem__, Tensor.__setitem__) and _is_mask(args[1])
            stores_number = func is Tensor.__setitem__ and not isinstance(args[2], Tensor)
            repeats = func in (torch.repeat_interleave, Tensor.repeat_interleave) and isinstance((*args, *args)[1], Tensor)
            counts = repeats and "output_size" not in kwargs
            if func in READERS or moves or masks or stores_number or counts or (func is torch.where and len(args) == 1):
                raise Synchronised(f"{name} in a step")
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """The same for what others call on its behalf."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and _is_mask(args[1])
        if not self.device.is_open and (name in SYNCHRONISING or masks):
            raise Synchronised(f"aten.{name} in a step")
        return func(*args, **(kwargs or {}))


@contextmanager
def _guarded_from_numpy(device: FakeDevice) -> Iterator[None]:
    """The door that modes do not see."""
    plain = torch.from_numpy

    def guarded(array: np.ndarray) -> Tensor:
        if not device.is_open:
            raise Synchronised("torch.from_numpy in a step")
        return plain(array)

    with patch("torch.from_numpy", guarded):
        yield


@dataclass
class _Call:
    func: Any
    args: Any
    kwargs: Any
    fresh: list[Tensor | None]  # what it made, None for views and what it wrote in place

    def run(self) -> None:
        made = tree_leaves(self.func(*self.args, **self.kwargs))
        for tensor, new in zip(self.fresh, made, strict=True):
            if tensor is not None:
                tensor.copy_(new)

    def poison(self) -> None:
        for tensor in self.fresh:
            if tensor is None:
                continue
            is_whole = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
            tensor.fill_(torch.iinfo(tensor.dtype).min // 2 if is_whole else True if tensor.dtype == torch.bool else torch.nan)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [
            leaf if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known else None
            for leaf in tree_leaves(made)
        ]
        if func._schema.is_mutable or any(tensor is not None for tensor in fresh):
            self.calls.append(_Call(func, args, kwargs, fresh))
        return made


@dataclass
class FakeGraph:
    device: FakeDevice
    family: int
    calls: list[_Call]

    def replay(self) -> None:
        self.device.count["replays"] += 1
        with self.device.open(), torch.inference_mode():
            if self.device.last_family != self.family:
                self.device.poison(except_family=self.family)
                self.device.last_family = self.family
            for call in self.calls:
                call.poison()
            for call in self.calls:
                call.run()


@dataclass
class FakeCopy:
    device: FakeDevice
    tensors: list[Tensor]

    def wait(self) -> list[np.ndarray]:
        if self.device.in_step:
            raise Synchronised("waiting for a copy in a step")
        return [tensor.numpy() for tensor in self.tensors]


@dataclass
class FakeDevice:
    """An `Accelerator`. count: uploads, downloads, captures, graphs, replays. memory_now: what `memory` reports."""

    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_host: bool = False
    count: Counter[str] = field(default_factory=Counter)
    in_step: bool = False
    is_open: bool = True
    memory_now: DeviceMemory = field(default_factory=lambda: DeviceMemory(0, 0, 0, 0, 0))
    graphs: list[FakeGraph] = field(default_factory=list)
    last_family: int = 0  # whose graphs ran last

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        self.count["uploads"] += 1
        with self.open():
            tensor = torch.from_numpy(array.copy())
            array.flags.writeable = False  # given away: whoever changes it now raises
            return tensor if out is None else out.copy_(tensor)

    def download(self, tensors: Sequence[Tensor]) -> FakeCopy:
        self.count["downloads"] += 1
        with self.open():
            return FakeCopy(self, [tensor.clone() for tensor in tensors])

    def capture(self, run: Callable[[Callable[[], None]], None]) -> list[FakeGraph]:
        self.count["captures"] += 1
        family, graphs, recorder = self.count["captures"], [], _Recorder()

        def cut() -> None:
            graphs.append(FakeGraph(self, family, recorder.calls))
            recorder.calls = []

        with self.step(), recorder:
            run(cut)
        cut()
        self.graphs += graphs
        self.count["graphs"] += len(graphs)
        self.poison(except_family=0)
        self.last_family = 0
        return graphs

    def poison(self, *, except_family: int) -> None:
        for graph in self.graphs:
            if graph.family != except_family:
                for call in graph.calls:
                    call.poison()

    def memory(self) -> DeviceMemory:
        return self.memory_now

    def reset_peak(self) -> None:
        self.count["resets"] += 1

    def trim(self) -> None:
        self.count["trims"] += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, only `upload` and `download` meet the host."""
        was = self.in_step, self.is_open
        self.in_step, self.is_open = True, False
        try:
            with _guarded_from_numpy(self), _Functions(self), _Operations(self):
                yield
        finally:
            self.in_step, self.is_open = was

    @contextmanager
    def open(self) -> Iterator[None]:
        was, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = was
