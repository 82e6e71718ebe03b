"""The KV cache's memory: one zeroed byte tensor per cache position, and each layer's typed views of it.

Layers at the same position of different groups share a tensor: the block pool hands a block id to one group at a time.
Knows formats and the layout; knows nothing of requests. Made by the runner, read and written by attention back ends.

Shape letters: B blocks, S block size, G kv heads, D head dim.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod

import torch
from torch import Tensor

from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.formats.base import KVFormat
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec, KVGroup, KVLayout
from halfbyte.kvcache.turns import LayerTurns, all_turns
from halfbyte.platform import huge_pages

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's view of the cache. planes: plane name -> [B, *plane shape], strided (K and V of a block lie together).

    scales: the format's static ones. turns: what K, V and queries are multiplied with on their way; None where nothing is.
    first: the same memory as a cache of the sequences' first tokens, fewer to a block; None where these are kept like others.
    """

    planes: dict[str, Tensor]
    format: KVFormat
    spec: KVCacheSpec
    scales: LayerScales
    turns: LayerTurns | None
    first: LayerCache | None = None

    def places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Of slots of any shape, the block and the token within it."""
        block = torch.div(slots, self.spec.block_size, rounding_mode="floor")
        return block, slots - block * self.spec.block_size


LayerParts = tuple[LayerScales | None, LayerTurns | None]


class KVTensors:
    """Allocates the whole cache: for each position a tensor [num_blocks, its bytes]. All zero, block 0 for ever.

    parts: of each layer, its scales and turns; None for what formats have by themselves.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str, parts: Sequence[LayerParts] | None = None
    ) -> None:
        self._pages = [_zeroed(num_blocks, num_bytes, torch.device(device)) for num_bytes in layout.position_bytes]
        self._populating: threading.Thread | None = None
        self._is_wanted = True
        self._layers: dict[int, LayerCache] = {}
        for group in layout.groups:
            for position, layer in enumerate(group.layers):
                scales, turns = (None, None) if parts is None else parts[layer]
                cache = view_layer(self._pages[position], layout.specs[layer], scales, turns)
                self._layers[layer] = replace(cache, first=_view_first(self._pages[position], layout.specs[layer], group))

    def populate(self, num_bytes: int = 512 << 20) -> None:
        """Have the system back the first blocks, up to `num_bytes`, before a request waits for it: in a thread, on a CPU only.

        A page that is touched for the first time costs the step that touches it milliseconds where memory comes from a
        hypervisor. Blocks are handed out from the lowest on.
        """
        pages = [page for page in self._pages if page.device.type == "cpu"]
        if pages:
            arguments = (pages, num_bytes / self.num_bytes, lambda: self._is_wanted)
            self._populating = threading.Thread(target=_populate, args=arguments, name="populate", daemon=True)
            self._populating.start()

    def give_up(self) -> None:
        """Let go of the memory, as far as this object has it: what is being populated would outlive it. Not to be used again."""
        self._is_wanted = False
        if self._populating is not None:
            self._populating.join()
        self._pages.clear()
        self._layers.clear()

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


def _populate(pages: Sequence[Tensor], share: float, is_wanted: Callable[[], bool]) -> None:
    """Changes no content: requests may write meanwhile. Systems that do not know the advice refuse it, and nothing is lost."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in takewhile(lambda page: is_wanted(), pages):
        madvise(page.data_ptr(), int(page.nbytes * min(share, 1.0)), _POPULATE_WRITE)


def view_layer(
    pages: Tensor, spec: KVCacheSpec, scales: LayerScales | None = None, turns: LayerTurns | None = None
) -> LayerCache:
    """Typed views of `pages` (uint8 [B, page_bytes]) as the planes of `spec.format`, in their order from the page's start.

    scales: 1 when left out. turns: those of a calibration; the fixed ones of the format come beside them.
    """
    kv_format = get_format(spec.format)
    planes: dict[str, Tensor] = {}
    offset = 0
    for plane in kv_format.planes(spec):
        size = plane.bytes
        assert size == prod(plane.shape) * getattr(torch, plane.dtype).itemsize
        planes[plane.name] = pages[:, offset : offset + size].view(getattr(torch, plane.dtype)).unflatten(1, plane.shape)
        offset += size
    assert offset <= pages.shape[1], "a layer's planes must fit its page"
    scales = (scales or LayerScales.ones(spec.num_kv_heads)).to(pages.device)
    all_of_them = all_turns(turns, kv_format.rotations, spec)
    return LayerCache(planes, kv_format, spec, scales, None if all_of_them is None else all_of_them.to(pages.device))


def _view_first(pages: Tensor, spec: KVCacheSpec, group: KVGroup) -> LayerCache | None:
    if not group.first_tokens:
        return None
    return view_layer(pages, replace(spec, format=spec.first_format, block_size=group.first_block_size, first_tokens=0))
