"""Measured cuts in the kernels: they are used, change nothing but the order of sums, and only cuts that do so are timed.

Kernels run in the interpreter (on a GPU where there is one), so that times mean nothing here; what is measured is tested in
tests/unit/test_attention_tiles.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from halfbyte.kernels.triton.targets import Cut, Cuts
from halfbyte.kernels.triton.tiles import LayerKind, Tiles
from halfbyte.kernels.triton.tuning import Load
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache
from tests.kernels.paged_attention import Case, run
from tests.kernels.triton_interpreter import ON_GPU, interpreted

attention, layer_timer, launches = interpreted(
    "halfbyte.kernels.triton.attention", "halfbyte.kernels.triton.layer_timer", "halfbyte.kernels.triton.launch"
)

from halfbyte.kernels.attention.triton import TritonBackend  # noqa: E402

BFLOAT16 = {"rtol": 2e-2, "atol": 2e-2}  # as in test_triton_attention.py: queries and weights of 8 bits
SPEC = AttentionSpec(6, 2, 64, 64, 0.125)
TUNED = Cuts(Cut(16, 64, 2, 1), Cut(32, 64, 4, 1))
LOAD = Load(requests=2, context=70, queries=20, prompt_context=50, longest=128)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def tuned_backend(kv_format: str, cuts: Cuts = TUNED) -> TritonBackend:
    kind = LayerKind.of(SPEC, kv_format, torch.bfloat16)
    return TritonBackend(tiles=Tiles(Path("tiles.json"), "2026-11-30", {kind: cuts}))


def make_timer(kv_format: str, spec: AttentionSpec = SPEC) -> Any:
    first_tokens = get_format(kv_format).first_tokens
    sizes = (spec.num_kv_heads, spec.head_dim, spec.head_dim_v, 16, spec.sliding_window)
    kv_spec = KVCacheSpec(*sizes, kv_format, first_tokens, first_format="bfloat16")
    return layer_timer.LayerTimer(spec, kv_spec, torch.bfloat16, LOAD, DEVICE)


@pytest.fixture
def cuts_of_launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """Rows, tile, stages and warps of the kernels that run, by name."""
    found: dict[str, tuple[int, ...]] = {}
    run_launch: Callable[[object], None] = launches.Launch.run

    def noted(launch: Any) -> None:
        name = launch.kernel.__name__
        if name in ("attend_parts", "attend_prompts"):
            at = len(launch.arguments) - (3 if name == "attend_parts" else 4)
            found[name] = (*launch.arguments[at : at + 3], launch.num_warps)
        run_launch(launch)

    monkeypatch.setattr(launches.Launch, "run", noted)
    return found


@pytest.mark.parametrize("name", ["bfloat16", "nvfp4"])
def test_measured_cuts_are_used(name: str, cuts_of_launches: dict[str, tuple[int, ...]]) -> None:
    case = Case(name, SPEC, requests=((1, 100), (20, 50)), dtype=torch.bfloat16)
    law, fast = run(case, get_backend("reference"), tuned_backend(name))
    assert cuts_of_launches == {"attend_parts": (16, 64, 1, 2), "attend_prompts": (32, 64, 1, 4)}
    assert all(torch.equal(x, y) for x, y in zip(law[0], fast[0], strict=True))
    torch.testing.assert_close(fast[1], law[1], **BFLOAT16)


def test_another_kind_of_layer_has_the_built_in_cuts(cuts_of_launches: dict[str, tuple[int, ...]]) -> None:
    case = Case("nvfp4", SPEC, requests=((1, 100), (20, 50)), dtype=torch.bfloat16)
    [(_, plain)] = run(case, TritonBackend())
    built_in = dict(cuts_of_launches)
    [(_, other)] = run(case, tuned_backend("bfloat16"))
    assert cuts_of_launches == built_in and torch.equal(plain, other)


class TwoLayers(TritonBackend):
    """A layer with measured cuts and one with the built-in ones, in one step: they share what was prepared."""

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        layers: list[AttentionBackend] = [tuned_backend("bfloat16"), TritonBackend()]
        made = [layer.forward(q_THD, k_TGD, v_TGD, cache, metadata, spec, sinks_H) for layer in layers]
        assert len(metadata.plan.batches) == 2
        return torch.stack(made)


def test_layers_of_one_step_may_have_tiles_of_different_heights() -> None:
    case = Case("bfloat16", SPEC, requests=((1, 100), (50, 90), (60, 60)), dtype=torch.bfloat16)
    law, both = run(case, get_backend("reference"), TwoLayers())
    for out_THD in both[1]:
        torch.testing.assert_close(out_THD, law[1], **BFLOAT16)


@pytest.mark.parametrize("name", ["bfloat16", "nvfp4", "kv4"])
def test_cuts_are_timed(name: str) -> None:
    """With first tokens and turns, where the format has them."""
    timer = make_timer(name)
    assert timer.decode_seconds(timer.built_in.decode) > 0
    assert timer.prompt_seconds(timer.built_in.prompt) > 0
    assert timer.decode_seconds(TUNED.decode) > 0
    assert timer.prompt_seconds(TUNED.prompt) > 0


def test_a_layer_with_a_window_and_sinks_is_timed() -> None:
    timer = make_timer("bfloat16", replace(SPEC, sliding_window=40, sinks=True))
    assert timer.decode_seconds(timer.built_in.decode) > 0 and timer.prompt_seconds(TUNED.prompt) > 0


def test_a_cut_with_other_outputs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = make_timer("bfloat16")
    assert timer.decode_seconds(timer.built_in.decode) > 0
    monkeypatch.setattr(layer_timer, "_WRITER", "merge_parts")  # which is then not run
    assert timer.decode_seconds(TUNED.decode) is None


@pytest.mark.parametrize("step", ["compile", "run"])
def test_a_cut_that_cannot_run_is_left_out(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = make_timer("bfloat16")
    error = (
        RuntimeError("PassManager::run failed") if step == "compile" else layer_timer.OutOfResources(300, 200, "shared memory")
    )

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(launches.Launch, step, fail)
    assert timer.prompt_seconds(timer.built_in.prompt) is None


def test_an_error_of_the_device_is_no_property_of_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = make_timer("bfloat16")

    def fail(_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(launches.Launch, "run", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        timer.prompt_seconds(timer.built_in.prompt)
