"""The KV cache's memory: one zeroed byte tensor per cache position, and each layer's typed views of it.

Layers at the same position of different groups share a tensor: the block pool hands a block id to one group at a time.
Knows formats and the layout; knows nothing of requests. Made by the runner, read and written by attention back ends.

Shape letters: B blocks, S block size, G kv heads, D head dim.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.formats.base import KVFormat
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout
from halfbyte.platform import huge_pages

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's view of the cache. planes: plane name -> [B, *plane shape], strided (K and V of a block lie together)."""

    planes: dict[str, Tensor]
    format: KVFormat
    spec: KVCacheSpec


class KVTensors:
    """Allocates the whole cache: `num_positions` tensors of [num_blocks, page_bytes]. All zero, block 0 for ever."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str) -> None:
        self._pages = [_zeroed(num_blocks, layout.page_bytes, torch.device(device)) for _ in range(layout.num_positions)]
        self._layers: dict[int, LayerCache] = {}
        for group in layout.groups:
            for position, layer in enumerate(group.layers):
                self._layers[layer] = view_layer(self._pages[position], group.spec)

    def populate(self, num_bytes: int = 512 << 20) -> None:
        """Have the system back the first blocks, up to `num_bytes`, before a request waits for it: in a thread, on a CPU only.

        A page that is touched for the first time costs the step that touches it milliseconds where memory comes from a
        hypervisor. Blocks are handed out from the lowest on.
        """
        pages = [page for page in self._pages if page.device.type == "cpu"]
        if pages:
            share = min(pages[0].nbytes, num_bytes // len(pages))
            threading.Thread(target=_populate, args=(pages, share), name="populate", daemon=True).start()

    def layer(self, index: int) -> LayerCache:
        """The cache of layer `index` of the model."""
        return self._layers[index]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated; equals the capacity's `num_bytes`."""
        return sum(page.numel() for page in self._pages)


def _zeroed(num_blocks: int, page_bytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes. On a CPU the system zeroes pages on first use: a large cache costs no time at start and no memory until it
    fills."""
    if device.type == "cpu":
        return torch.frombuffer(huge_pages(num_blocks * page_bytes), dtype=torch.uint8).view(num_blocks, page_bytes)
    return torch.zeros(num_blocks, page_bytes, dtype=torch.uint8, device=device)


def _populate(pages: Sequence[Tensor], num_bytes: int) -> None:
    """Changes no content: requests may write meanwhile. Systems that do not know the advice refuse it, and nothing is lost."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in pages:
        madvise(page.data_ptr(), num_bytes, _POPULATE_WRITE)


def view_layer(pages: Tensor, spec: KVCacheSpec) -> LayerCache:
    """Typed views of `pages` (uint8 [B, page_bytes]) as the planes of `spec.format`, in their order from the page's start."""
    kv_format = get_format(spec.format)
    planes: dict[str, Tensor] = {}
    offset = 0
    for plane in kv_format.planes(spec):
        size = plane.bytes
        assert size == prod(plane.shape) * getattr(torch, plane.dtype).itemsize
        planes[plane.name] = pages[:, offset : offset + size].view(getattr(torch, plane.dtype)).unflatten(1, plane.shape)
        offset += size
    assert offset <= pages.shape[1], "a layer's planes must fit its page"
    return LayerCache(planes, kv_format, spec)
