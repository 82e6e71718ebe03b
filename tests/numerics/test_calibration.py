"""Calibration by itself: the matrices do what they are for, files come back as they were, and watching changes nothing.

Shape letters: T tokens, H heads, G kv heads, D head dim, N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from halfbyte.config import EngineOptions
from halfbyte.engine.build import absent_backends, resolve_all
from halfbyte.engine.kv_calibration import calibrate, new_manager, plain_runner
from halfbyte.errors import ModelFileError
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kernels.cpu.library import KernelsMissing, load
from halfbyte.kvcache.formats import get_format
from halfbyte.model_runner.calibration import (
    VERSION,
    Calibration,
    HeadMoments,
    LayerStatistics,
    balancing,
    load_calibration,
    spreading,
    statistics_of,
)
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.head_taps import tap_heads
from halfbyte.model_runner.runner import ModelRunner, load_runner
from halfbyte.model_runner.scoring import score, steps
from halfbyte.model_runner.source import locate
from halfbyte.platform import detect_platform

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, head_dim_v=64, scale=0.125)
K_RIDGE, Q_RIDGE = 1e-2, 1e-3  # of `calibration`
TOKENS = [(7 * i * i + 3 * i) % 50 for i in range(90)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices here are too small to share out."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def covariance(dim: int, seed: int) -> Tensor:
    """Symmetric and positive, its directions of very different weight, with the ridge that calibration adds."""
    generator = torch.Generator().manual_seed(seed)
    directions_DD, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    weights_D = torch.logspace(-2, 2, dim, dtype=torch.float64)
    matrix_DD = (directions_DD * weights_D) @ directions_DD.mT
    return matrix_DD + K_RIDGE * matrix_DD.diagonal().mean() * torch.eye(dim, dtype=torch.float64)


def without_ridge(matrix_DD: Tensor, ridge: float) -> Tensor:
    """What becomes `matrix_DD` with the ridge."""
    mean = matrix_DD.diagonal().mean() / (1 + ridge)
    return matrix_DD - ridge * mean * torch.eye(matrix_DD.shape[0], dtype=matrix_DD.dtype)


def noise(turn_DD: Tensor, kk_DD: Tensor, qq_DD: Tensor) -> float:
    """tr(T S_K T') tr(T^-T S_Q T^-1): what a quantiser of like noise in all directions brings into the logits, up to a factor."""
    inverse_DD = torch.linalg.inv(turn_DD)
    return float((turn_DD @ kk_DD @ turn_DD.mT).trace() * (inverse_DD.mT @ qq_DD @ inverse_DD).trace())


@pytest.mark.parametrize("dim", [16, 80])
def test_the_matrix_makes_keys_and_queries_alike(dim: int) -> None:
    kk_DD, qq_DD = covariance(dim, 0), 3.0 * covariance(dim, 1)
    turn_DD = balancing(without_ridge(kk_DD, K_RIDGE), without_ridge(qq_DD, Q_RIDGE))
    inverse_DD = torch.linalg.inv(turn_DD)
    keys_DD, queries_DD = turn_DD @ kk_DD @ turn_DD.mT, inverse_DD.mT @ qq_DD @ inverse_DD
    torch.testing.assert_close(keys_DD, queries_DD, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(turn_DD, turn_DD.mT, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_no_other_matrix_brings_less_noise(seed: int) -> None:
    kk_DD, qq_DD = covariance(24, seed), covariance(24, seed + 10)
    best_DD = balancing(without_ridge(kk_DD, K_RIDGE), without_ridge(qq_DD, Q_RIDGE))
    least = noise(best_DD, kk_DD, qq_DD)
    # its value in closed form: the square of the sum of the roots of the eigenvalues of S_K S_Q
    assert least == pytest.approx(float(torch.linalg.eigvals(kk_DD @ qq_DD).real.sqrt().sum() ** 2), rel=1e-9)
    generator = torch.Generator().manual_seed(seed)
    for size in (0.01, 0.1, 1.0):
        for _ in range(10):
            change_DD = size * torch.randn(24, 24, generator=generator, dtype=torch.float64) / 24**0.5
            assert noise(best_DD + best_DD @ change_DD, kk_DD, qq_DD) > least
    assert noise(torch.eye(24, dtype=torch.float64), kk_DD, qq_DD) > 1.5 * least


@pytest.mark.parametrize("dim", [1, 2, 64, 80, 96, 128])
def test_spreading_is_orthonormal_and_flat(dim: int) -> None:
    matrix_DD = spreading(dim)
    torch.testing.assert_close(matrix_DD @ matrix_DD.mT, torch.eye(dim), rtol=0.0, atol=1e-5)
    assert float(matrix_DD.abs().max()) <= (2 / dim) ** 0.5 + 1e-6 or dim == 1


def heads(spec: AttentionSpec, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with directions of their own per head, and keys that are not centred."""
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads: int, dim: int) -> Tensor:
        mix_HDD = torch.randn(num_heads, dim, dim, generator=generator) * torch.logspace(-1, 1, dim)
        return torch.einsum("thd,hed->the", torch.randn(num_tokens, num_heads, dim, generator=generator), mix_HDD) / dim**0.5

    k_TGD = draw(spec.num_kv_heads, spec.head_dim) + 5 * torch.randn(spec.num_kv_heads, spec.head_dim, generator=generator)
    return draw(spec.num_heads, spec.head_dim), k_TGD, draw(spec.num_kv_heads, spec.head_dim_v)


def measured(spec: AttentionSpec, seen: tuple[Tensor, Tensor, Tensor], num_parts: int = 3) -> LayerStatistics:
    moments = HeadMoments(spec)
    for part in zip(*(tensor.chunk(num_parts) for tensor in seen), strict=True):
        moments.add(*part)
    return statistics_of(moments)


@pytest.mark.parametrize("dim", [64, 80, 96])
def test_turned_heads_are_balanced_and_of_size_one(dim: int) -> None:
    spec = replace(SPEC, head_dim=dim, head_dim_v=dim)
    seen = heads(spec, 3000)
    q_THD, k_TGD, v_TGD = measured(spec, seen).turns().turn(*seen)
    assert torch.equal(v_TGD, seen[2])
    k_GTD = k_TGD.transpose(0, 1)
    q_GMD = q_THD.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
    assert float(k_GTD.mean(1).abs().max()) < 1e-3
    keys_GDD, queries_GDD = k_GTD.mT @ k_GTD / k_GTD.shape[1], q_GMD.mT @ q_GMD / q_GMD.shape[1]
    for head in range(spec.num_kv_heads):
        keys_D, queries_D = keys_GDD[head].diagonal(), queries_GDD[head].diagonal()
        assert float(keys_D.mean()) == pytest.approx(1.0, abs=1e-4)
        # all directions alike: before, they differed by a factor of 100; the ridge costs the weak ones a little
        torch.testing.assert_close(keys_D / keys_D.mean(), queries_D / queries_D.mean(), rtol=0.3, atol=0.0)


def scores(q_THD: Tensor, k_TGD: Tensor) -> Tensor:
    """[H, queries, keys] in float64."""
    num_groups = k_TGD.shape[1]
    q_TGND = q_THD.double().unflatten(1, (num_groups, -1))
    return torch.einsum("tgnd,sgd->gnts", q_TGND, k_TGD.double()).flatten(0, 1)


def differences(spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Turned scores minus those before, of a calibration on other tokens, and the greatest of those before."""
    statistics = measured(spec, heads(spec, 500))
    seen = heads(spec, 40, seed=1)
    q_THD, k_TGD, _ = statistics.turns().turn(*seen)
    before = scores(*seen[:2])
    return scores(q_THD, k_TGD) - before, before.abs().max()


def test_scores_change_by_a_constant_per_query() -> None:
    change_HTT, greatest = differences(SPEC)
    assert float((change_HTT - change_HTT[..., :1]).abs().max() / greatest) < 1e-5
    assert float(change_HTT.abs().max() / greatest) > 0.01, "keys are centred"


@pytest.mark.parametrize("change", [{"soft_cap": 30.0}, {"sinks": True}])
def test_where_the_constant_matters_keys_are_not_centred(change: dict[str, Any]) -> None:
    spec = replace(SPEC, **change)
    assert not measured(spec, heads(spec, 500)).k_mean_GD.any()
    change_HTT, greatest = differences(spec)
    assert float(change_HTT.abs().max() / greatest) < 1e-5


def test_moments_do_not_depend_on_how_tokens_come() -> None:
    seen = heads(SPEC, 300)
    whole, parts = (measured(SPEC, seen, num_parts) for num_parts in (1, 7))
    for name in LayerStatistics.__slots__:
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-3, atol=1e-3)


def test_scales_put_the_greatest_number_seen_at_the_greatest_code() -> None:
    seen = heads(SPEC, 200)
    statistics = measured(SPEC, seen)
    k_most_G, v_most_G = (tensor.abs().amax((0, 2)) for tensor in seen[1:])
    fp8, nvfp4, kv4 = (get_format(name).sides for name in ("fp8_e4m3", "nvfp4", "kv4"))
    assert fp8 is not None and nvfp4 is not None and kv4 is not None
    found = statistics.scales(*fp8)
    assert found.calibrated
    torch.testing.assert_close(found.k_G * 448, k_most_G)
    torch.testing.assert_close(found.v_G * 448, v_most_G)
    found = statistics.scales(kv4[0], nvfp4[1])
    assert torch.equal(found.k_G, torch.ones(2)), "turned keys are of size one"
    torch.testing.assert_close(found.v_G * 448 * 6 / 32, v_most_G)


@pytest.fixture
def calibration() -> Calibration:
    layers = tuple(measured(SPEC, heads(SPEC, 200, seed)) for seed in range(2))
    return Calibration(layers, "f" * 64, 400)


def assert_equal(one: Calibration, other: Calibration) -> None:
    assert (one.fingerprint, one.num_tokens, len(one.layers)) == (other.fingerprint, other.num_tokens, len(other.layers))
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in LayerStatistics.__slots__)
    assert one.digest == other.digest


def test_a_file_comes_back_as_it_was(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kv.safetensors"
    calibration.save(path)
    assert_equal(load_calibration(path, [SPEC, SPEC]), calibration)
    assert [file.name for file in path.parent.iterdir()] == ["kv.safetensors"]
    changed = replace(calibration, layers=calibration.layers[::-1])
    changed.save(path)
    assert_equal(load_calibration(path, [SPEC, SPEC]), changed)
    assert changed.digest != calibration.digest != replace(calibration, fingerprint="e" * 64).digest


def test_a_file_that_cannot_be_written_leaves_the_old_one(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    calibration.save(path)
    (tmp_path / "kv.safetensors.partial").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace(calibration, num_tokens=1).save(path)
    assert_equal(load_calibration(path, [SPEC, SPEC]), calibration)


Edit = Callable[[dict[str, Tensor]], Any]
MEAN = "layers.1.k_mean_GD"
DAMAGES: dict[str, tuple[Edit, str]] = {
    "another shape": (lambda t: t.update({MEAN: torch.zeros(2, 32)}), rf"{MEAN} must be finite float32 \[2, 64\], got \[2, 32\]"),
    "another type": (lambda t: t.update({MEAN: t[MEAN].double()}), f"{MEAN} must be finite float32"),
    "not a number": (lambda t: t[MEAN].fill_(torch.nan), f"{MEAN} must be finite float32"),
    "a layer too few": (lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.1.")], "layers.1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_of_another_model_or_damaged_inside(damage: str, calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    calibration.save(path)
    edit, message = DAMAGES[damage]
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"halfbyte_kv_calibration": VERSION, "fingerprint": "f" * 64, "num_tokens": "400"})
    with pytest.raises(ModelFileError, match=message) as caught:
        load_calibration(path, [SPEC, SPEC])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("metadata", [None, {"halfbyte_kv_calibration": "0"}])
def test_a_file_of_another_version_or_of_something_else(
    metadata: dict[str, str] | None, calibration: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "kv.safetensors"
    calibration.save(path)
    save_file(load_file(path), path, metadata)
    with pytest.raises(ModelFileError, match=f"{path} is no KV calibration of this version; make one with halfbyte calibrate"):
        load_calibration(path, [SPEC, SPEC])


@pytest.mark.parametrize("length", [0, 7, 200, -1])
def test_a_file_that_is_cut_off(length: int, calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    calibration.save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelFileError, match=f"cannot read the KV calibration {path}: ") as caught:
        load_calibration(path, [SPEC, SPEC])
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelFileError, match="cannot read the KV calibration .*nothing"):
        load_calibration(tmp_path / "nothing", [SPEC, SPEC])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer checkpoint with norms on queries and keys."""
    path = tmp_path_factory.mktemp("tiny-qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def has_kernels() -> bool:
    try:
        load()
    except KernelsMissing:
        return False
    return True


@pytest.fixture(scope="module")
def runners(folder: Path) -> Iterator[dict[str, ModelRunner]]:
    """The same weights on the torch laws and, where they are, on the compiled kernels."""
    names = ("cpu", "reference") if has_kernels() else ("reference",)
    files, platform = locate(str(folder)), detect_platform("cpu")
    decoder = config_from_files(files, {})
    made = {}
    for name in names:
        options = EngineOptions(model=str(folder), dtype="float32", attention_backend=name, num_threads=1, block_size=4)
        config = resolve_all(options, files, decoder, platform, absent_backends(platform))
        made[name] = load_runner(config, files, decoder, platform)
    yield made
    for runner in made.values():
        runner.close()


def tapped(runner: ModelRunner, step_tokens: int) -> list[list[Tensor]]:
    """Queries, keys and values of all tokens, layer by layer."""
    plain = plain_runner(runner.config, runner, len(TOKENS))
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in runner.model.attention_specs()]
    with tap_heads(runner.model, step_tokens) as last_heads:
        for _, num_tokens in steps(plain, new_manager(plain), TOKENS, step_tokens):
            for layer, seen in zip(parts, last_heads(num_tokens), strict=True):
                layer.append(tuple(tensor.clone() for tensor in seen))
    return [[torch.cat(column) for column in zip(*layer, strict=True)] for layer in parts]


def test_both_back_ends_see_the_same_heads(runners: dict[str, ModelRunner]) -> None:
    found = {name: tapped(runner, 32) for name, runner in runners.items()}
    for layers in found.values():
        assert [[tuple(t.shape) for t in layer] for layer in layers] == [[(90, 4, 32), (90, 2, 32), (90, 2, 32)]] * 2
        for ours, theirs in zip(layers, found["reference"], strict=True):
            for ours_THD, theirs_THD in zip(ours, theirs, strict=True):
                torch.testing.assert_close(ours_THD, theirs_THD, rtol=1e-4, atol=1e-4)


def test_what_is_seen_does_not_depend_on_the_steps(runners: dict[str, ModelRunner]) -> None:
    for runner in runners.values():
        for whole, pieces in zip(tapped(runner, 90), tapped(runner, 7), strict=True):
            for one_THD, other_THD in zip(whole, pieces, strict=True):
                torch.testing.assert_close(one_THD, other_THD, rtol=1e-4, atol=1e-4)


def test_watching_changes_nothing(runners: dict[str, ModelRunner]) -> None:
    for runner in runners.values():

        def logits(runner: ModelRunner = runner) -> Tensor:
            plain = plain_runner(runner.config, runner, len(TOKENS))
            return torch.cat(list(score(plain, new_manager(plain), TOKENS, 32)))

        before_NV = logits()
        with tap_heads(runner.model, 32):
            during_NV = logits()
        assert torch.equal(during_NV, before_NV) and torch.equal(logits(), before_NV)


def test_both_back_ends_are_calibrated_alike(runners: dict[str, ModelRunner], folder: Path) -> None:
    heard: list[str] = []
    windows = [TOKENS[:60], TOKENS[20:]]
    found = {name: calibrate(r.config, locate(str(folder)), r, windows, heard.append) for name, r in runners.items()}
    assert heard[:2] == [f"calibrating the KV cache: {done}% of 130 tokens" for done in (0, 46)]
    for one in found.values():
        assert (one.num_tokens, one.fingerprint) == (130 - 2 * 16, found["reference"].fingerprint)
        for ours, theirs in zip(one.layers, found["reference"].layers, strict=True):
            for name in LayerStatistics.__slots__:
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-3, atol=1e-3)
