"""Where host and device meet: what a step sends, what it brings back, and graphs of what it launches.

A step has no other door: nothing in it reads a device tensor, so that the host never waits for the device. Knows memory and
streams; knows no rows and no models. Made by the runner; used by all that has rows on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[np.ndarray]:
        """Wait for them; raises what went wrong on the device."""
        ...


class Graph(Protocol):
    """Launches that were recorded once, to be launched again on the same memory."""

    def replay(self) -> None: ...


# Ends a graph and begins the next one.
Cut = Callable[[], None]


class Device(Protocol):
    """is_host: whether its tensors are the host's memory, so that reading one waits for nothing."""

    place: torch.device
    is_host: bool

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        """The array on the device, in `out` if that is given, in the order of the step's launches. The array is given away:
        whether the tensor shares its memory is the device's affair."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Begin to copy tensors that nobody changes any more."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes: of the device, free for anybody, held by torch's allocator, in tensors, in tensors at most since `reset_peak`."""

    total: int
    free: int
    reserved: int
    allocated: int
    peak: int


@runtime_checkable
class Accelerator(Device, Protocol):
    """A device with memory of its own, and graphs."""

    def capture(self, run: Callable[[Cut], None]) -> list[Graph]:
        """Record what `run` launches, without computing it: one graph, and one more for each cut. `run` has run before, so
        that nothing is loaded or compiled meanwhile. Graphs share memory: what one leaves is good until the next replay."""
        ...

    def memory(self) -> DeviceMemory:
        """After all launches have run."""
        ...

    def reset_peak(self) -> None: ...

    def trim(self) -> None:
        """Give memory that no tensor uses back to the device. Graphs of before and after this share none."""
        ...


@dataclass(frozen=True, slots=True)
class _Arrived:
    tensors: Sequence[Tensor]

    def wait(self) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self.tensors]


class HostDevice:
    """A CPU: both doors open on the same memory."""

    place = torch.device("cpu")
    is_host = True

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if out is None else out.copy_(tensor)

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        return _Arrived(tensors)


HOST = HostDevice()


@dataclass(frozen=True, slots=True)
class _GpuCopy:
    copies: Sequence[Tensor]
    done: torch.cuda.Event

    def wait(self) -> list[np.ndarray]:
        self.done.synchronize()
        return [copy.numpy() for copy in self.copies]


class GpuDevice:
    """CUDA, or ROCm by the same names. Launches go to the current stream, copies to the host to one of their own.

    Copies go through pinned memory of torch's allocator, which hands a buffer out again only when the copy from it is done: a
    ring as deep as there are steps in flight.
    """

    is_host = False

    def __init__(self) -> None:
        self.place = torch.device("cuda")
        self._copies = torch.cuda.Stream()
        self._captures = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        pinned = torch.from_numpy(array).pin_memory()
        return pinned.to(self.place, non_blocking=True) if out is None else out.copy_(pinned, non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        self._copies.wait_stream(torch.cuda.current_stream())
        copies = []
        with torch.cuda.stream(self._copies):
            for tensor in tensors:
                tensor.record_stream(self._copies)  # its memory is not handed out again before the copy is done
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(pinned.copy_(tensor, non_blocking=True))
            done = torch.cuda.Event()
            done.record(self._copies)
        return _GpuCopy(copies, done)

    def capture(self, run: Callable[[Cut], None]) -> list[Graph]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        self._captures.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._captures), _no_collection():
            begin()
            try:
                run(cut)
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._captures)
        return list(graphs)

    def memory(self) -> DeviceMemory:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return DeviceMemory(total, free, torch.cuda.memory_reserved(), allocated, peak)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def trim(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection amid a capture may free what another stream has used, which a capture does not allow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_device(name: str) -> Device:
    """The device called cpu, cuda or rocm."""
    return HOST if name == "cpu" else GpuDevice()
