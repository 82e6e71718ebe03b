"""How many blocks the cache has and what they hold: pure integer arithmetic that prints itself.

Knows the layout and byte counts; knows no devices, tensors or requests. Called once at start (the engine's build), and by
the manager to say what could ever fit. Block 0 is the null block: it takes memory and holds no tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from halfbyte.errors import CapacityError
from halfbyte.kvcache.spec import KVGroup, KVLayout

UNBOUNDED_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The cache that gets allocated. num_blocks counts the null block; num_bytes = num_blocks * layout.block_bytes.

    blocks_per_request: what one request of max_model_len tokens needs. max_concurrency: how many of those fit at once;
    num_tokens = floor(max_concurrency * max_model_len), in integers.
    """

    layout: KVLayout
    num_blocks: int
    num_bytes: int
    max_model_len: int
    blocks_per_request: int
    num_tokens: int
    max_concurrency: float

    def lines(self) -> list[str]:
        """The arithmetic in words; every equation holds exactly (quotients are cut, not rounded up)."""
        layout, usable = self.layout, self.num_blocks - 1
        hundredths = usable * 100 // self.blocks_per_request
        return [
            f"KV block: {_describe_positions(layout)} = {layout.block_bytes:,} bytes; groups: {_describe_groups(layout)}",
            f"KV cache: {self.num_blocks:,} blocks x {layout.block_bytes:,} bytes = {self.num_bytes:,} bytes;"
            f" block 0 holds no tokens",
            f"KV capacity: {usable:,} blocks / {self.blocks_per_request:,} blocks per request of {self.max_model_len:,} tokens"
            f" = {hundredths // 100:,}.{hundredths % 100:02d} requests at once;"
            f" {usable:,} x {self.max_model_len:,} / {self.blocks_per_request:,} = {self.num_tokens:,} tokens",
        ]


def blocks_for_group(group: KVGroup, num_tokens: int, max_num_batched_tokens: int) -> int:
    """The most blocks that a request of `num_tokens` ever holds at once in one group.

    With a window w and a step of at most n tokens, the positions still needed are w - 1 before the step and n in it; they
    may begin and end inside a block: ceil((w - 1 + n) / block_size) + 1, and more where the first tokens take more blocks.
    """
    blocks = group.num_entries(num_tokens)
    if group.sliding_window is None:
        return blocks
    return min(blocks, -(-(group.sliding_window - 1 + max_num_batched_tokens) // group.block_size) + 1 + group.entry_shift)


def blocks_for_request(layout: KVLayout, num_tokens: int, max_num_batched_tokens: int) -> int:
    """The most blocks that a request of `num_tokens` ever holds at once, over all groups."""
    return sum(blocks_for_group(group, num_tokens, max_num_batched_tokens) for group in layout.groups)


def longest_request(layout: KVLayout, num_blocks: int, max_num_batched_tokens: int, at_most: int = UNBOUNDED_TOKENS) -> int:
    """The largest token count, up to `at_most`, of which one request fits into `num_blocks` (null block included); 0 if none."""
    fits, too_long = 0, at_most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if blocks_for_request(layout, middle, max_num_batched_tokens) <= num_blocks - 1:
            fits = middle
        else:
            too_long = middle
    return fits


def size_cache(
    layout: KVLayout,
    available_bytes: int,
    max_model_len: int,
    checkpoint_max_len: int,
    max_num_batched_tokens: int,
    num_blocks_override: int | None = None,
) -> KVCapacity:
    """Turn bytes into blocks. max_model_len -1 means: the longest up to `checkpoint_max_len` that fits once.

    `num_blocks_override` wins over what the bytes would give, but may not exceed them. Raises CapacityError when one
    request of max_model_len tokens does not fit.
    """
    num_blocks = available_bytes // layout.block_bytes
    if num_blocks_override is not None:
        if num_blocks_override > num_blocks:
            raise CapacityError(
                f"--num-gpu-blocks-override {num_blocks_override} needs {num_blocks_override} blocks x {layout.block_bytes} bytes"
                f" = {num_blocks_override * layout.block_bytes} bytes of KV cache, {max(available_bytes, 0)} bytes are available;"
                f" at most {max(num_blocks, 0)} blocks fit; lower it or raise --kv-cache-memory-bytes"
            )
        num_blocks = num_blocks_override
    fit_len = longest_request(layout, num_blocks, max_num_batched_tokens, checkpoint_max_len)
    wanted_len = max_model_len if max_model_len != -1 else max(fit_len, 1)
    blocks_per_request = blocks_for_request(layout, wanted_len, max_num_batched_tokens)
    if blocks_per_request > num_blocks - 1:
        have_bytes = max(num_blocks * layout.block_bytes if num_blocks_override is not None else available_bytes, 0)
        raise CapacityError(
            f"one request of {wanted_len} tokens needs {blocks_per_request + 1} blocks x {layout.block_bytes} bytes"
            f" = {(blocks_per_request + 1) * layout.block_bytes} bytes of KV cache, {have_bytes} bytes are available;"
            f" the estimated largest --max-model-len is {fit_len}; lower --max-model-len, or raise --kv-cache-memory-bytes"
            f" or --num-gpu-blocks-override"
        )
    usable = num_blocks - 1
    return KVCapacity(
        layout=layout,
        num_blocks=num_blocks,
        num_bytes=num_blocks * layout.block_bytes,
        max_model_len=wanted_len,
        blocks_per_request=blocks_per_request,
        num_tokens=usable * wanted_len // blocks_per_request,
        max_concurrency=usable / blocks_per_request,
    )


def _describe_positions(layout: KVLayout) -> str:
    """ "30 layers x 6,144 bytes", or a sum of such."""
    kinds = Counter(layout.position_bytes)
    return " + ".join(f"{n:,} layers x {num_bytes:,} bytes" for num_bytes, n in kinds.items())


def _describe_groups(layout: KVLayout) -> str:
    """ "1 of full attention with 16 tokens to a block, 5 of window 512 with 16": what one request's block tables are."""
    kinds = Counter((group.sliding_window, group.block_size) for group in layout.groups)
    words = [
        f"{n} of {'full attention' if window is None else f'window {window}'} with {size} tokens to a block"
        for (window, size), n in kinds.items()
    ]
    if group := next((group for group in layout.groups if group.first_tokens), None):
        words.append(f"the first {group.first_tokens} tokens of a sequence in {layout.specs[0].first_format}")
    return ", ".join(words)
