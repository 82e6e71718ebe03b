"""Machine code as text, taken apart: instructions, where they may go next, and the loops that follow from that.

Reads what `nvdisasm -c` prints and the AMD assembly that LLVM writes. Loops are found in the graph of jumps, not in the order of
the text: assemblers put the waiting part of a loop behind its end, and rotate what is left. Called by `facts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?\w+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);")
_SASS_LABEL = re.compile(r"^(?P<label>\.L_\w+):")
_SASS_TARGET = re.compile(r"`\((?P<label>\.L_\w+)\)")
_AMD = re.compile(r"^\s+(?P<opcode>[a-z]\w+)\s*(?P<operands>[^;]*)")
_AMD_LABEL = re.compile(r"^(?P<label>\.LBB\w+):")
_AMD_END = re.compile(r"^\.Lfunc_end", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Instruction:
    """successors: the indices of the instructions that may be next."""

    opcode: str
    successors: tuple[int, ...]


def parse_sass(text: str) -> list[Instruction]:
    """The instructions of a kernel and of the subroutines behind it. A call goes on behind itself."""
    lines: list[tuple[str, str | None, bool]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            labels[label["label"]] = len(lines)
        elif found := _SASS.match(line):
            opcode, operands = found["opcode"], found["operands"].strip()
            jump = _SASS_TARGET.search(operands) if opcode.split(".")[0] == "BRA" else None
            is_always = found["guard"] is None and (opcode != "BRA" or operands.startswith("`"))
            goes_on = not (is_always and (opcode in ("EXIT", "BRA") or opcode.startswith("RET.")))
            lines.append((opcode, jump["label"] if jump else None, goes_on))
    return _linked(lines, labels)


def parse_amd(text: str) -> list[Instruction]:
    """The instructions of the kernel that the text begins with."""
    lines: list[tuple[str, str | None, bool]] = []
    labels: dict[str, int] = {}
    for line in _AMD_END.split(text)[0].splitlines():
        if label := _AMD_LABEL.match(line):
            labels[label["label"]] = len(lines)
        elif found := _AMD.match(line):
            opcode = found["opcode"]
            jump = found["operands"].split()[0] if opcode.startswith(("s_branch", "s_cbranch")) else None
            lines.append((opcode, jump, opcode not in ("s_branch", "s_endpgm", "s_setpc_b64")))
    return _linked(lines, labels)


def _linked(lines: Sequence[tuple[str, str | None, bool]], labels: dict[str, int]) -> list[Instruction]:
    found = []
    for index, (opcode, jump, goes_on) in enumerate(lines):
        ways = ((index + 1) if goes_on else None, labels[jump] if jump else None)
        found.append(Instruction(opcode, tuple(way for way in ways if way is not None and way < len(lines))))
    return found


def innermost_loops(code: Sequence[Instruction], is_marked: Callable[[str], bool]) -> list[set[int]]:
    """The loops that hold a marked opcode and no smaller such loop, each as the indices of its instructions."""
    return list(
        _innermost(code, set(range(len(code))), {i for i, instruction in enumerate(code) if is_marked(instruction.opcode)})
    )


def _innermost(code: Sequence[Instruction], nodes: set[int], marked: set[int]) -> Iterator[set[int]]:
    if not nodes & marked:
        return
    for loop in _components(code, nodes):
        if not loop & marked:
            continue
        heads = {way for node in range(len(code)) if node not in loop for way in code[node].successors if way in loop}
        yield from list(_innermost(code, loop - {min(heads or loop)}, marked)) or [loop]


def _components(code: Sequence[Instruction], nodes: set[int]) -> Iterator[set[int]]:
    """Strongly connected components of the jumps among `nodes` that are loops (Tarjan's algorithm, with a stack of its own)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    open_nodes: list[int] = []
    is_open: set[int] = set()
    for root in sorted(nodes):
        if root in order:
            continue
        work = [(root, iter(code[root].successors))]
        order[root] = low[root] = len(order)
        open_nodes.append(root)
        is_open.add(root)
        while work:
            node, ways = work[-1]
            for way in ways:
                if way not in nodes:
                    continue
                if way not in order:
                    order[way] = low[way] = len(order)
                    open_nodes.append(way)
                    is_open.add(way)
                    work.append((way, iter(code[way].successors)))
                    break
                if way in is_open:
                    low[node] = min(low[node], order[way])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    component = {open_nodes.pop()}
                    while node not in component:
                        component.add(open_nodes.pop())
                    is_open -= component
                    if len(component) > 1 or node in code[node].successors:
                        yield component
