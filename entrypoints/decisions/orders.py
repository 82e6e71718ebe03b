"""In which orders the options of a question are listed, when its answer shall not depend on their order.

The orders follow from the options alone, never from how the client listed them: so the answer is the same whatever that was.
"""

from __future__ import annotations

from typing import Literal

from halfbyte.entrypoints.decisions.questions import Question
from halfbyte.errors import UserError

Order = Literal["given", "average"]
ORDERS: tuple[Order, ...] = ("given", "average")
MAX_ORDERS = 8


def check_order(order: str | None) -> Order:
    """None is "given"."""
    for known in ORDERS:
        if order in (known, None):
            return known
    raise UserError(f"order must be one of {', '.join(ORDERS)}, got {order!r}", param="order")


def listings(question: Question, order: Order) -> list[tuple[int, ...]]:
    """Each is a permutation of the options' indices.

    "average": a choice is rotated, so that each option stands at as many places as there are listings (evenly spread ones, where
    there are more options than MAX_ORDERS); yes and no, and levels, whose labels stay with them, are listed both ways.
    """
    given = tuple(range(len(question.options)))
    if order == "given" or len(given) == 1:
        return [given]
    if question.type != "choice":
        return [given, given[::-1]]
    sorted_ = tuple(sorted(given, key=lambda i: (question.options[i].name, question.options[i].description)))
    count = min(len(given), MAX_ORDERS)
    starts = [turn * len(given) // count for turn in range(count)]
    return [sorted_[start:] + sorted_[:start] for start in starts]
