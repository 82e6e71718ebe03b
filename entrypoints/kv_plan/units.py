"""Amounts as people write them: `40GiB`, `512 MiB`, `3.35TB/s`. Knows no flag; called by `halfbyte kv-plan`."""

from __future__ import annotations

import re
from decimal import Decimal

from halfbyte.entrypoints.flags import parse_size

_FACTORS = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]i?B|B)")


def parse_bytes(text: str) -> int:
    """`40GiB` (2^30), `40GB` (10^9), or what every size here may be: `4096`, `40G` (2^30). ValueError otherwise, and for 0."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        try:
            amount = parse_size(text)
        except ValueError:
            raise ValueError(f"{text!r} is not an amount of memory: write 40GiB, 40GB, 512MiB or bytes") from None
    else:
        number, unit = match.groups()
        amount = int(Decimal(number) * _FACTORS[unit.replace("KB", "kB")])
    if amount < 1:
        raise ValueError(f"{text!r} must be at least one byte")
    return amount


def parse_bytes_per_s(text: str) -> int:
    """`3.35TB/s`, `900GB/s`: the same with `/s` behind it, which may be left out."""
    try:
        return parse_bytes(text.strip().removesuffix("/s"))
    except ValueError:
        raise ValueError(f"{text!r} is not a bandwidth: write 3.35TB/s, 900GB/s or bytes per second") from None


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
