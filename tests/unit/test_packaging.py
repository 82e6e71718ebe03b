"""What pip makes of the tree: the same packages, importable from anywhere, with requirements that can be met together."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import halfbyte
from halfbyte.config import ServerConfig
from halfbyte.entrypoints.page.files import page_files
from halfbyte.kernels.cpu.build import LIBRARY_NAME, SOURCES

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("halfbyte", "kvcache", "kernels", "model_runner", "engine", "entrypoints")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
PAGE_FILES = {name for package, name in page_files(ServerConfig()).values() if package == "halfbyte.entrypoints.page"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def test_package_list_is_the_tree() -> None:
    folders = {path.parent.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}
    names = {
        ".".join(("halfbyte", *folder.parts)) if folder.parts[0] != "halfbyte" else ".".join(folder.parts) for folder in folders
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(names)


def test_package_folders() -> None:
    expected = {"halfbyte": "halfbyte"} | {f"halfbyte.{floor}": floor for floor in FLOORS[1:]}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == expected


def test_kernel_sources_are_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["halfbyte.kernels.cpu"]
    folder = ROOT / "kernels/cpu"
    assert {path for pattern in patterns for path in folder.glob(pattern)} == set(SOURCES.iterdir())


def test_pages_are_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["halfbyte.entrypoints.page"]
    folder = ROOT / "entrypoints/page"
    assert {path.name for pattern in patterns for path in folder.glob(pattern)} == PAGE_FILES


def test_subfolders_are_packages() -> None:
    for name in PROJECT["tool"]["setuptools"]["packages"]:
        parts = name.split(".")[1:]
        if len(parts) > 1:
            assert ROOT.joinpath(*parts, "__init__.py").is_file(), f"{name} has no __init__.py"


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == halfbyte.__version__


def test_makefile_installs_the_same_torch() -> None:
    assert f'"torch{REQUIREMENTS["torch"].specifier}"' in _sorted_specifier((ROOT / "Makefile").read_text())


def _sorted_specifier(text: str) -> str:
    """`>=a,<=b` in the order in which packaging prints it."""
    return re.sub(r'"torch[^"]*"', lambda match: f'"{Requirement(match.group().strip(chr(34)))}"', text)


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("torch", ("2.11.0", "2.13.0", "2.13.0+cpu"), ("2.10.9", "2.13.1", "2.14.0")),
        ("transformers", ("5.16.1", "5.17.0", "5.19.0"), ("5.16.0", "5.20.0")),
        ("tokenizers", ("0.23.2", "0.23.3"), ("0.23.1",)),
        ("jinja2", ("3.1.6",), ("3.1.5",)),
    ],
)
def test_pinned_ranges(name: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    specifier = REQUIREMENTS[name].specifier
    assert all(version in specifier for version in inside) and not any(version in specifier for version in outside)


def test_plain_install_needs_no_gpu_packages_and_no_compiler() -> None:
    assert not {"triton", "flashinfer-python", "nvidia-cuda-nvcc", "ninja", "vllm"} & set(REQUIREMENTS)
    assert set(EXTRAS) == {"gpu", "dev", "bench", "calibrate"}


def test_every_requirement_has_its_reason() -> None:
    """A comment stands above each dependency, or above the first of those that share it."""
    lines = (ROOT / "pyproject.toml").read_text().split("dependencies = [", 1)[1].split("]", 1)[0].splitlines()
    uncommented = [
        line.strip()
        for before, line in zip(lines, lines[1:], strict=False)
        if line.strip().startswith('"') and not before.strip().startswith("#")
    ]
    assert [Requirement(line.rstrip(",").strip('"')).name for line in uncommented] == ["uvicorn", "pydantic", "uvloop", "pyzmq"]


def test_console_script() -> None:
    assert PROJECT["project"]["scripts"] == {"halfbyte": "halfbyte.entrypoints.cli:main"}


def test_make_rerun_installs_nothing(tmp_path: Path) -> None:
    """The stamp is newer than pyproject.toml: make has nothing to do but the command itself."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("bin/python", ".installed", ".installed-dev"):
        (venv / name).touch()
    done = _run(["make", "--dry-run", "serve", "test", f"VENV={venv}"], ROOT)
    assert "-m pip" not in done.stdout and "halfbyte serve" in done.stdout and "pytest" in done.stdout
    os.utime(venv / ".installed", (0, 0))
    assert "-e ." in _run(["make", "--dry-run", "serve", f"VENV={venv}"], ROOT).stdout


def test_ci_calls_the_tests_then_the_checks() -> None:
    script = ROOT / ".ci/run"
    lines = [line for line in script.read_text().splitlines() if line.startswith("make")]
    assert lines == ["make test", "make check", "make check-gpu"]
    assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()


def _run(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs: building in the checkout would leave folders behind."""
    copy = tmp_path_factory.mktemp("source")
    for name in FLOORS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("LICENSE*"), ROOT / "setup.py"):
        shutil.copy(path, copy)
    return copy


def build_wheel(source: Path, folder: Path, **environ: str) -> Path:
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "."]
    shutil.rmtree(source / "build", ignore_errors=True)
    _run(command, source, **environ)
    [wheel] = folder.glob("halfbyte-*.whl")
    return wheel


def kernel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name.removeprefix("halfbyte/kernels/cpu/") for name in archive.namelist() if name.startswith("halfbyte/kernels/cpu/")
        }


@pytest.mark.slow
def test_wheel_works_from_another_directory(source: Path, tmp_path: Path) -> None:
    """Installed, away from the checkout: every module is there, the kernels load, the command answers, a generation runs."""
    wheel = build_wheel(source, tmp_path)
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl"), "the library has no Python's ABI"
    assert {LIBRARY_NAME, *(f"csrc/{path.name}" for path in SOURCES.iterdir())} <= kernel_files(wheel)
    assert {f"halfbyte/entrypoints/page/{name}" for name in PAGE_FILES} <= set(zipfile.ZipFile(wheel).namelist())
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    _run([*PIP, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], tmp_path)
    modules = sorted(
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
    )
    names = [name if name.startswith("halfbyte.") else f"halfbyte.{name}" for name in modules if not name.endswith("__main__")]
    code = (
        "import importlib, halfbyte\n"
        f"assert halfbyte.__file__.startswith({str(site)!r}), halfbyte.__file__\n"
        f"for name in {names!r}:\n"
        f"    file = importlib.import_module(name.removesuffix('.__init__')).__file__\n"
        f"    assert file.startswith({str(site)!r}), file\n"
    )
    _run([sys.executable, "-c", code], elsewhere, PYTHONPATH=str(site))
    code = "from halfbyte.kernels.cpu import library; print(library.load()._name)"
    loaded = _run([sys.executable, "-c", code], elsewhere, PYTHONPATH=str(site), XDG_CACHE_HOME=str(tmp_path / "cache")).stdout
    assert loaded.strip() == str(site / "halfbyte/kernels/cpu" / LIBRARY_NAME) and not (tmp_path / "cache").exists()
    halfbyte_command = [sys.executable, "-m", "halfbyte"]
    assert "serve" in _run([*halfbyte_command, "--help"], elsewhere, PYTHONPATH=str(site)).stdout
    words = ["generate", "The capital of France is", "--max-tokens", "4"]
    assert "Paris" in _run([*halfbyte_command, *words], elsewhere, PYTHONPATH=str(site)).stdout


@pytest.mark.slow
def test_wheel_without_a_compiler(source: Path, tmp_path: Path) -> None:
    """The build succeeds, for any platform, with the sources of the kernels inside."""
    (tmp_path / "bin").mkdir()
    wheel = build_wheel(source, tmp_path, PATH=str(tmp_path / "bin"))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY_NAME not in kernel_files(wheel) and "csrc/api.cpp" in kernel_files(wheel)


@pytest.mark.slow
def test_source_distribution_holds_what_a_build_needs(source: Path, tmp_path: Path) -> None:
    _run([sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)], source)
    [archive] = tmp_path.glob("halfbyte-*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {
        "setup.py",
        "pyproject.toml",
        "kernels/cpu/build.py",
        *(f"kernels/cpu/csrc/{path.name}" for path in SOURCES.iterdir()),
    } <= names


@pytest.mark.slow
def test_editable_install_works_from_another_directory(source: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    _run([sys.executable, "-m", "venv", str(venv)], tmp_path)
    _run([str(venv / "bin/pip"), "install", "--quiet", "--no-deps", "-e", str(source)], tmp_path)
    code = "import halfbyte.entrypoints.flags as flags, halfbyte.kvcache.spec as spec; print(flags.__file__, spec.__file__)"
    files = _run([str(venv / "bin/python"), "-c", code], tmp_path).stdout.split()
    assert files == [str(source / "entrypoints/flags.py"), str(source / "kvcache/spec.py")]
    assert "usage: halfbyte COMMAND" in _run([str(venv / "bin/halfbyte"), "--help"], tmp_path).stdout


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pip that reads the metadata of wheels without downloading them (older ones fetch even in a dry run)."""
    venv = tmp_path_factory.mktemp("resolver") / "venv"
    _run([sys.executable, "-m", "venv", str(venv)], ROOT)
    _run([str(venv / "bin/pip"), "install", "--quiet", "--upgrade", "pip"], ROOT)
    return [str(venv / "bin/pip"), "install", "--quiet", "--dry-run", "--use-feature=fast-deps", "--ignore-installed"]


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", *sorted(EXTRAS)])
def test_requirements_resolve(extra: str, resolver: list[str], source: Path, tmp_path: Path) -> None:
    """The index has a set of releases that meets the requirements together; nothing is installed."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.13.0\n")
    report = tmp_path / "report.json"
    target = f"{source}[{extra}]" if extra else str(source)
    _run([*resolver, "--constraint", str(constraints), "--report", str(report), target], tmp_path)
    items = json.loads(report.read_text())["install"]
    found = {item["metadata"]["name"].lower().replace("_", "-"): Version(item["metadata"]["version"]) for item in items}
    wanted = [*REQUIREMENTS.values(), *map(Requirement, EXTRAS.get(extra, ()))]
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate():
            assert found[requirement.name.lower().replace("_", "-")] in requirement.specifier
    if extra == "calibrate":
        assert found["transformers"] <= Version("5.17.0")
