"""`benchmarks/setup_peers`: what it installs, what it refuses to download, and how it makes an old C library do."""

from __future__ import annotations

import ctypes
import json
import shutil
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import tokenizers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_peers() -> Any:
    loader = SourceFileLoader("setup_peers", str(ROOT / "benchmarks" / "setup_peers"))
    spec = spec_from_loader("setup_peers", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("package", "version", "refused"),
    [("torch", "2.13.0+cpu", False), ("torch", "2.13.0", True), ("nvidia-cublas", "13.0", True), ("triton", "3.9.0", False)],
)
def test_torch_for_gpus_is_refused_before_it_is_downloaded(
    setup_peers: Any, monkeypatch: pytest.MonkeyPatch, package: str, version: str, refused: bool
) -> None:
    ran: list[tuple[str, ...]] = []

    def pip(python: Path, *words: str) -> None:
        ran.append(words)
        if "--report" in words:
            plan = {"install": [{"metadata": {"name": package, "version": version}}]}
            Path(words[words.index("--report") + 1]).write_text(json.dumps(plan))

    monkeypatch.setattr(setup_peers, "pip", pip)
    if refused:
        with pytest.raises(
            SystemExit, match=f"pip would install {package} {version}, which is for GPUs; set PIP_EXTRA_INDEX_URL="
        ):
            setup_peers.install(Path("python"), "x")
    else:
        setup_peers.install(Path("python"), "x")
        assert ran[1] == ("install", "--quiet", "x")
    assert "--dry-run" in ran[0] and len(ran) == (1 if refused else 2)


def test_vllm_without_what_would_replace_torch(setup_peers: Any, tmp_path: Path) -> None:
    lines = ["Name: x", "Requires-Dist: torch==2.13.0+cpu", "Requires-Dist: torchaudio; a", "Requires-Dist: numpy>=2"]
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("x.dist-info/METADATA", "\n".join([*lines, 'Requires-Dist: ray; extra == "ray"']))
    requirements = setup_peers.wheel_requirements(tmp_path / "x.whl")
    assert requirements == ["torch==2.13.0+cpu", "torchaudio; a", "numpy>=2"]
    assert [text for text in requirements if not setup_peers.VLLM_LEFT_OUT.match(text)] == ["numpy>=2"]


def test_needs_of_a_version_become_weak(setup_peers: Any, tmp_path: Path) -> None:
    """On a copy of a real library: one flag changes for each need, and it still loads."""
    library = tmp_path / "copy.so"
    shutil.copy(tokenizers.tokenizers.__file__, library)  # type: ignore[attr-defined]
    before = library.read_bytes()
    needs = [(offset, name) for offset, name in setup_peers.version_needs(bytearray(before)) if name.startswith("GLIBC_")]
    assert needs
    version = needs[-1][1]
    setup_peers.tolerate_missing_version(library, version)
    after = library.read_bytes()
    changed = [offset for offset in range(len(after)) if after[offset : offset + 1] != before[offset : offset + 1]]
    assert changed == sorted(offset for offset, name in needs if name == version)
    assert all(after[offset] == before[offset] | 2 for offset in changed)
    ctypes.CDLL(str(library))


def test_unknown_part(
    setup_peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["setup_peers", str(tmp_path), "sglang"])
    with pytest.raises(SystemExit):
        setup_peers.main()
    assert "there is no sglang; the parts are vllm, llama_cpp, models" in capsys.readouterr().err
