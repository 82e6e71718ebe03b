"""Adapters beside a product: the law against a loop over tokens, the C++ operation and the Triton twins against the law."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.cpu.abi import RowType, WeightKind
from halfbyte.kernels.cpu.library import CpuEngine, KernelsMissing, instruction_sets
from halfbyte.kernels.cpu.lora import PackedLora
from halfbyte.kernels.cpu.program import INPUT, OUTPUT, Program
from halfbyte.kernels.cpu.weights import PackedMatrix, WeightMemory, pack_dense, pack_rows, quantize_int8
from halfbyte.kernels.lora import LoraPart, StackedLora, add_lora
from tests.kernels.triton_interpreter import interpreted

(triton_lora,) = interpreted("halfbyte.kernels.triton.lora")

OUTPUTS, NUM_INPUTS, MAX_RANK = (72, 24, 40), 608, 20
NUM_TOKENS = 45
# In runs and alone, with and without an adapter.
SEATS = torch.tensor([0, 1, 1, 1, 3, 0, 0, 2, 2, 1] * 3 + [2] * 15, dtype=torch.int32)
# Of a row beside the same rows as floats, which whole numbers of 16 bits stand for.
ROUNDED = 2e-4


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def adapters() -> list[list[LoraPart | None]]:
    """Of three seats: all parts, some, and with the highest rank."""

    def part(index: int, rank: int, scale: float, seed: int) -> LoraPart:
        a, b = numbers(rank, NUM_INPUTS, seed=seed), numbers(OUTPUTS[index], rank, seed=seed + 1)
        return LoraPart(a / NUM_INPUTS**0.5, b / rank**0.5, scale)

    return [
        [part(0, 8, 2.0, 10), part(1, 8, 2.0, 20), part(2, 3, 0.5, 30)],
        [None, part(1, 16, 1.0, 40), None],
        [part(index, MAX_RANK, 1.5, 50 + 10 * index) for index in range(3)],
    ]


def stacked(dtype: torch.dtype = torch.float32) -> StackedLora:
    lora = StackedLora(OUTPUTS, NUM_INPUTS, 3, MAX_RANK, dtype, torch.device("cpu"))
    for seat, parts in enumerate(adapters(), 1):
        lora.put(seat, adapters()[0])  # what sat there before leaves nothing
        lora.put(seat, parts)
    return lora


def test_the_law_is_a_sum_per_token() -> None:
    x_TE, y_TO = numbers(NUM_TOKENS, NUM_INPUTS), numbers(NUM_TOKENS, sum(OUTPUTS), seed=1)
    expected = y_TO.double()
    for token, seat in enumerate(SEATS.tolist()):
        if seat:
            for part, columns in zip(adapters()[seat - 1], expected[token].split(OUTPUTS), strict=True):
                if part is not None:
                    columns += part.scale * part.b_OR.double() @ (part.a_RE.double() @ x_TE[token].double())
    found = add_lora(y_TO, x_TE, stacked(), SEATS)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[SEATS == 0], y_TO[SEATS == 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_is_the_law(dtype: torch.dtype) -> None:
    x_TE, y_TO = numbers(NUM_TOKENS, NUM_INPUTS).to(dtype), numbers(NUM_TOKENS, sum(OUTPUTS), seed=1).to(dtype)
    expected = add_lora(y_TO, x_TE, stacked(dtype), SEATS)
    found = triton_lora.add_lora(y_TO.clone(), x_TE, stacked(dtype), SEATS)
    assert torch.equal(found[SEATS == 0], y_TO[SEATS == 0])
    # bfloat16: the sum of the ranks may round to a neighbour, which shows as one unit of the result's last place.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-6}
    torch.testing.assert_close(found, expected, **tolerance)
    others = SEATS.clone()  # the same bits beside others
    others[torch.arange(NUM_TOKENS) % 4 != 0] = torch.arange(NUM_TOKENS)[torch.arange(NUM_TOKENS) % 4 != 0].int() % 3
    beside = triton_lora.add_lora(y_TO.clone(), x_TE, stacked(dtype), others)
    assert torch.equal(beside[::4], found[::4]) and not torch.equal(beside, found)
    nobody = triton_lora.add_lora(y_TO.clone(), x_TE, stacked(dtype), torch.zeros_like(SEATS))
    assert torch.equal(nobody, y_TO)


def packed(engine: CpuEngine, rows: RowType, dtype: torch.dtype) -> PackedLora:
    lora = PackedLora(engine, OUTPUTS, NUM_INPUTS, 3, MAX_RANK, dtype, rows, WeightMemory())
    for seat, parts in enumerate(adapters(), 1):
        lora.put(seat, adapters()[2])
        lora.put(seat, parts)
    return lora


def base(engine: CpuEngine, rows: RowType, dtype: torch.dtype) -> tuple[list[PackedMatrix], Tensor]:
    """A product's matrices, as such rows want them, and what they are as numbers."""
    weights = [numbers(size, NUM_INPUTS, seed=70 + index, scale=0.05) for index, size in enumerate(OUTPUTS)]
    if rows in (RowType.INT8, RowType.INT16):
        made = [quantize_int8(engine, weight) for weight in weights]
        return [pack_rows(engine, WeightKind.Q8_0, one, NUM_INPUTS) for one in made], torch.cat(weights)
    pairs = rows is RowType.BF16
    return [pack_dense(engine, weight.to(dtype), pairs=pairs) for weight in weights], torch.cat(weights).to(dtype).float()


def run(
    engine: CpuEngine, rows: RowType, x_TE: Tensor, matrices: Sequence[PackedMatrix], lora: PackedLora, seat_T: Tensor
) -> Tensor:
    program = Program(engine, rows)
    program.linear(program.rounded(INPUT, NUM_INPUTS), OUTPUT, matrices, lora=lora)
    return program.run(len(x_TE), input_TE=x_TE, seat_T=seat_T)


try:
    ISAS = instruction_sets()
except KernelsMissing:
    ISAS = []
ROWS = [
    (RowType.FLOATS, torch.float32),
    (RowType.FLOATS, torch.bfloat16),
    (RowType.FLOATS, torch.float16),
    (RowType.BF16, torch.bfloat16),
    (RowType.INT8, torch.bfloat16),
    (RowType.INT16, torch.float32),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "dtype"), ROWS, ids=str)
def test_the_operation_is_the_law(isa: str, rows: RowType, dtype: torch.dtype) -> None:
    with_pairs = rows is RowType.BF16
    engine = CpuEngine(2, isa)
    x_TE = numbers(NUM_TOKENS, NUM_INPUTS)
    matrices, _ = base(engine, rows, dtype)
    lora = packed(engine, rows, dtype)
    plain = run(engine, rows, x_TE, matrices, lora, torch.zeros_like(SEATS))
    found = run(engine, rows, x_TE, matrices, lora, SEATS)
    exact = stacked(torch.float32)
    for tensor in (exact.a_SNE, exact.b_SOR):
        tensor.copy_(tensor.to(dtype).float())
    seen = x_TE.bfloat16().float() if with_pairs else x_TE
    expected = add_lora(plain, seen, exact, SEATS)
    tolerance = {RowType.INT8: 0.05, RowType.INT16: ROUNDED}.get(rows, 2e-5)
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance
    assert torch.equal(found[SEATS == 0], plain[SEATS == 0])
    assert (found[SEATS > 0] != plain[SEATS > 0]).any(1).all()
    for token in (1, 4, 8, 44):  # alone: the same bits
        one = slice(token, token + 1)
        assert torch.equal(run(engine, rows, x_TE[one], matrices, lora, SEATS[one])[0], found[token])
    engine.close()
