"""scripts/aot: machine code is read right, what is wrong fails, and the committed baseline is that of the kernels.

Snippets are cut out of what nvdisasm and LLVM print for kernels of Triton 3.7. Compilations run in processes of their own: the
tests beside these interpret the same kernels in theirs.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from scripts.gpu.baseline import Baseline, Line
from scripts.gpu.exceptions import EXCUSES, sort_out
from scripts.gpu.facts import Facts, Listing, read
from scripts.gpu.report import failures_text, table
from scripts.gpu.rules import Expect, Failure, check
from scripts.gpu.targets import TARGETS, occupancy

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = Expect(product_rows=16, has_wide_loads=True)

# A loop over tiles whose waiting part the assembler put behind the end; a smaller loop without products inside; padding.
SASS = """
        .global         att
att:
.text.att:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   LDG.E.U8 R2, desc[UR8][R4.64] ;
        /*0020*/                   BRA.U !UP1, `(.L_x_13) ;
.L_x_18:
        /*0030*/               @P6 LDGSTS.E.BYPASS.128 [R52+0x2000], desc[UR8][R4.64] ;
        /*0040*/              @!P5 LDG.E.64 R18, desc[UR8][R2.64] ;
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3 ;
        /*0060*/              @!P0 BRA `(.L_x_14) ;
.L_x_24:
        /*0070*/                   LDG.E R12, desc[UR8][R6.64] ;
.L_x_25:
        /*0080*/                   IADD3 R12, PT, PT, R12, 0x1, RZ ;
        /*0090*/               @P2 BRA `(.L_x_25) ;
        /*00a0*/                   HMMA.16816.F32.BF16 R32, R36.reuse, R40, RZ ;
        /*00b0*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;
        /*00c0*/                   BRA.U !UP1, `(.L_x_18) ;
.L_x_13:
        /*00d0*/                   STG.E.128 desc[UR8][R4.64], R8 ;
        /*00e0*/                   EXIT ;
.L_x_14:
        /*00f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3 ;
        /*0100*/              @!P0 BRA `(.L_x_14) ;
        /*0110*/                   BRA `(.L_x_24) ;
.L_x_26:
        /*0120*/                   BRA `(.L_x_26);
        /*0130*/                   NOP;
"""
RESOURCES = " Function att:\n  REG:96 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:960 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
PTX = ".target sm_80\nfma.rn.f32 \t%f1, %f2, %f3, %f4;\nmul.ftz.f32 \t%f1, %f2, %f3;\nadd.f32 \t%f1, %f2, %f3;\n"

AMD = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
att:                                    ; @att
	s_load_dwordx4 s[12:15], s[0:1], 0x28
	s_cbranch_scc1 .LBB0_21
	s_branch .LBB0_13
.LBB0_12:                               ;   in Loop: Header=BB0_13 Depth=1
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_scc0 .LBB0_21
.LBB0_13:                               ; =>This Inner Loop Header: Depth=1
	.loc	1 20 54 is_stmt 1               ; gemm.py:20:54
	global_load_dwordx4 v[8:11], v[4:5], off
	s_cbranch_execz .LBB0_12
	buffer_load_dwordx2 v[8:9], v1, s[8:11], 0 offen
	global_load_ushort v12, v[4:5], off
	s_branch .LBB0_12
.LBB0_21:
	s_endpgm
.Lfunc_end0:
		.amdhsa_float_denorm_mode_32 3
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 0
    .vgpr_count:     148
    .vgpr_spill_count: 0
"""


def nvidia(assembly: str = SASS) -> Facts:
    return read(Listing(assembly, RESOURCES, PTX, shared_bytes=38912, num_warps=4, tensor_columns=0))


def amd(assembly: str = AMD) -> Facts:
    return read(Listing(assembly, "", "", shared_bytes=16384, num_warps=4, tensor_columns=0))


def figures(facts: Facts, expect: Expect = ATTENTION, target: str = "sm80") -> list[str]:
    return [failure.figure for failure in check("case / kernel", TARGETS[target], facts, expect)]


def test_nvidia_code_is_read() -> None:
    facts = nvidia()
    assert (facts.registers, facts.instructions, facts.loop_instructions) == (96, 19, 13)
    assert facts.loads == {8: 1, 32: 1, 64: 1, 128: 1} and facts.loop_loads == {32: 1, 64: 1, 128: 1}
    assert facts.matrix == {"mma": 1}
    assert (facts.num_fused, facts.num_flushed) == (1, 1)
    assert figures(facts) == []


def test_amd_code_is_read() -> None:
    facts = amd()
    assert (facts.registers, facts.instructions, facts.loop_instructions) == (148, 11, 7)
    assert facts.loads == facts.loop_loads == {16: 1, 64: 1, 128: 1}
    assert facts.matrix == {"mfma": 1}
    assert (facts.num_fused, facts.num_flushed) == (None, 0)
    assert figures(facts, target="gfx942") == []
    assert amd(AMD.replace("denorm_mode_32 3", "denorm_mode_32 0")).num_flushed == 1


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA.16816.F32.BF16", "mma"),
        ("QMMA.16832.F32.E4M3.E4M3", "mma"),
        ("HGMMA.64x64x16.F32.BF16", "wgmma"),
        ("UTCHMMA", "tcgen05"),
        ("UTCQMMA.2CTA", "tcgen05"),
    ],
)
def test_products_are_told_apart(opcode: str, kind: str) -> None:
    assert nvidia(SASS.replace("HMMA.16816.F32.BF16", opcode)).matrix == {kind: 1}


def test_spills_fail() -> None:
    spilled = SASS.replace("STG.E.128 desc[UR8][R4.64], R8", "STL.64 [R1+0x7f0], R10")
    assert figures(nvidia(spilled)) == ["local_instructions"]
    assert figures(amd(AMD.replace("vgpr_spill_count: 0", "vgpr_spill_count: 3")), target="gfx942") == ["vgpr_spills"]
    assert figures(amd(AMD.replace("segment_fixed_size: 0", "segment_fixed_size: 64")), target="gfx942") == ["private_bytes"]


def test_what_lies_in_no_memory_is_no_spill() -> None:
    facts = nvidia()
    assert figures(replace(facts, spills={**facts.spills, "stack_bytes": 16})) == []
    assert figures(amd(AMD.replace("sgpr_spill_count: 0", "sgpr_spill_count: 11")), target="gfx942") == []


def test_a_byte_load_in_the_loop_fails() -> None:
    assert figures(nvidia(SASS.replace("LDG.E R12", "LDG.E.U8 R12"))) == ["8-bit loads in the loop"]
    assert figures(amd(AMD.replace("load_ushort", "load_ubyte")), target="gfx942") == ["8-bit loads in the loop"]


def test_narrow_loads_fail() -> None:
    assert figures(nvidia(SASS.replace("LDGSTS.E.BYPASS.128", "LDGSTS.E"))) == ["128-bit loads in the loop"]
    assert figures(nvidia(SASS.replace("LDGSTS.E.BYPASS.128", "UTMALDG.2D"))) == [], "a bulk copy is wide"


def test_missing_products_fail() -> None:
    without = SASS.replace("HMMA.16816.F32.BF16 R32, R36.reuse, R40, RZ", "FFMA R32, R36, R40, RZ")
    assert figures(nvidia(without), Expect(product_rows=16)) == ["products of matrices"]
    tall = Expect(product_rows=128)
    assert figures(nvidia(), tall, "sm80") == figures(nvidia(), tall, "sm120") == []
    assert figures(nvidia(), tall, "sm90") == figures(nvidia(), tall, "sm100") == ["products of matrices"]
    assert figures(replace(nvidia(), matrix={"wgmma": 1}), tall, "sm90") == []
    assert figures(replace(nvidia(), matrix={"tcgen05": 1}), tall, "sm103") == []


def test_shared_memory_has_a_limit() -> None:
    facts = replace(nvidia(), shared_bytes=100 << 10)
    assert figures(facts, target="sm89") == ["shared bytes"]
    assert figures(facts, target="sm80") == []


def test_exact_kernels_fuse_and_flush_nothing() -> None:
    assert figures(nvidia(), Expect(is_exact=True)) == ["fused multiply-adds", "instructions that flush denormals"]


def test_excuses_have_a_limit() -> None:
    one = EXCUSES[0]
    kernel = one.kernels.replace("*", "any")
    within, beyond = (Failure(kernel, one.targets[0], one.figure, str(value), "0") for value in (one.most, one.most + 1))
    elsewhere = replace(within, kernel="layers norm / norm_rows")
    assert sort_out([within, beyond, elsewhere]) == ([beyond, elsewhere], {one})


def test_growth_beyond_a_tenth_fails() -> None:
    facts = replace(nvidia(), registers=100, instructions=1000, loop_instructions=200)
    known = Baseline("3.7.1", {"case / kernel": Line("0" * 12, {"sm80": [100, 1000, 200]})})

    def grown(**changes: int) -> list[str]:
        return [failure.figure for failure in known.check("case / kernel", "sm80", replace(facts, **changes))]

    assert grown() == grown(registers=110, instructions=1100, loop_instructions=220) == grown(registers=50) == []
    assert grown(registers=111) == ["registers"]
    assert grown(instructions=1110) == ["instructions"]
    assert grown(loop_instructions=222) == ["instructions of the loop"]
    [missing] = known.check("case / kernel", "sm90", facts)
    assert "--update" in failures_text([missing])


def test_baseline_has_a_line_per_kernel() -> None:
    lines = {f"case / kernel#{i}": Line("0" * 12, {"sm80": [i, i, i], "sm90": [i, i, i]}) for i in range(3)}
    text = Baseline("3.7.1", lines).text()
    assert len(text.splitlines()) == 3 + 2
    assert Baseline.parse(text) == Baseline("3.7.1", lines)
    assert Baseline.parse(text).fits("3.7.9") and not Baseline.parse(text).fits("3.8.0")


def test_occupancy() -> None:
    """128 registers of 65536 let 4 blocks of 4 warps live, of 64 warps; 100 KiB of 228 let 2."""
    assert occupancy(TARGETS["sm90"], 128, 0, 4) == 16 / 64
    assert occupancy(TARGETS["sm90"], 128, 100 << 10, 4) == 8 / 64
    assert occupancy(TARGETS["sm100"], 32, 0, 4, tensor_columns=256) == 8 / 64
    assert occupancy(TARGETS["sm86"], 32, 99 << 10, 4) == 4 / 48
    assert occupancy(TARGETS["gfx942"], 148, 0, 4) == 3 / 8, "3 waves of 8 for each of 4 schedulers"
    assert occupancy(TARGETS["gfx942"], 32, 96 << 10, 4) == 0


def test_table_has_a_row_per_kernel() -> None:
    text = table({"decode nvfp4 D128 / attend": {"sm80": nvidia()}, "layers norm / norm": {"gfx942": amd()}}, "3.7.1")
    assert "Triton 3.7.1" in text and "## decode" in text and "## layers" in text
    [row] = [line for line in text.splitlines() if line.startswith("| nvfp4 D128")]
    assert row.split(" | ")[1] == "96 · 38 · 19 · 13 · 25%" and row.count("|") == 2 + len(TARGETS)


def test_committed_baseline_covers_all_targets() -> None:
    known = Baseline.read()
    assert known is not None and known.lines
    for name, line in known.lines.items():
        assert list(line.figures) == list(TARGETS), name


def test_every_kernel_has_a_case() -> None:
    """Whatever kernels/triton launches stands in the baseline."""
    launched = {
        node.args[1].id
        for path in (ROOT / "kernels/triton").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Launch" and isinstance(node.args[1], ast.Name)
    }
    baseline = Baseline.read()
    assert baseline is not None
    known = {re.split(" / |#", name)[1] for name in baseline.lines}
    assert len(launched) > 20 and launched <= known, launched - known


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(*command: str, cache: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | environ
    environ |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, env=environ)


def aot(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return run(str(ROOT / "scripts/aot"), *arguments, cache=cache)


@needs_triton
def test_a_case_meets_its_baseline_and_is_compiled_once(tmp_path: Path) -> None:
    command = ("--cases", "kv_write nvfp4 D128", "--targets", "sm90,gfx942", "--workers", "1")
    first = aot(*command, cache=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.match(r"2 programs of 1 kernels, 2 compiled now", first.stdout)
    again = aot(*command, cache=tmp_path)
    assert again.returncode == 0 and re.match(r"2 programs of 1 kernels, 0 compiled now", again.stdout)


@needs_triton
def test_wrong_questions_are_refused(tmp_path: Path) -> None:
    for arguments, answer in (
        (("--targets", "sm70"), "--targets must be some of sm80,"),
        (("--cases", "nothing of the kind"), "is in no name of"),
        (("--shard", "3/2"), "1 <= I <= N"),
        (("--update", "--targets", "sm90"), "leave out --targets"),
    ):
        asked = aot(*arguments, cache=tmp_path)
        assert asked.returncode == 2 and answer in asked.stderr, asked.stderr


KERNELS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr({factor})

@triton.jit
def scaled(x):
    {comment}
    return x * {expression}

@triton.jit
def kernel(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, scaled(tl.load(x + i)))

@triton.jit
def broken(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), "text")
"""
QUESTIONS = """
import importlib.util, sys, torch
from scripts.gpu import compiler, matrix
from scripts.gpu.cases.case import Case

def module(path):
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found

def launches(path, name, size):
    return lambda platform: getattr(module(path), name)[(1,)](torch.empty(size, device="meta"), size, num_warps=1)

print(*(compiler.programs(lambda: launches(path, "kernel", 64)(None), "sm90")[0].digest for path in sys.argv[1:]))
print(*(compiler.programs(lambda: launches(sys.argv[1], "kernel", size)(None), "sm90")[0].digest for size in (64, 128)))
cases = {name: Case(name, launches(sys.argv[1], name, 64)) for name in ("kernel", "broken")}
matrix.all_cases = lambda: cases
print(matrix.compile_missing(matrix.plan(cases.values()), ["gfx942"], 1))
"""


@needs_triton
def test_digests_follow_the_code_and_errors_are_told(tmp_path: Path) -> None:
    """A comment changes nothing; a constant and a function that the kernel calls do. What does not compile is named."""
    variants = {
        "plain": {"factor": 2, "comment": '"""Says one thing."""', "expression": "FACTOR"},
        "comment": {"factor": 2, "comment": '"""Says another."""  # and more', "expression": "FACTOR"},
        "constant": {"factor": 3, "comment": "", "expression": "FACTOR"},
        "code": {"factor": 2, "comment": "", "expression": "(FACTOR + 1)"},
    }
    for name, parts in variants.items():
        (tmp_path / f"{name}.py").write_text(dedent(KERNELS).format(**parts))
    paths = (str(tmp_path / f"{name}.py") for name in variants)
    done = run("-c", QUESTIONS, *paths, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    digests, sizes, compiled = done.stdout.splitlines()
    plain, comment, constant, code = digests.split()
    assert plain == comment and len({plain, constant, code}) == 3
    assert len(set(sizes.split())) == 2
    assert compiled.startswith("(1, {('broken / broken', 'gfx942'):"), compiled


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_kernel_on_every_target() -> None:
    """With the cache of whoever runs it: what was compiled before is not compiled again."""
    done = subprocess.run([sys.executable, str(ROOT / "scripts/aot")], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
