"""The package build: pyproject.toml says what is in the package; this adds the compiled CPU kernels.

A wheel holds the shared object when there is a compiler, and is then one for this platform, of any Python: it has a plain C
interface. Without one the build succeeds all the same, and so do editable installs, which compile at the first start.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def load_build() -> ModuleType:
    """`halfbyte.kernels.cpu.build` by its path: what the package needs is not installed while it is built."""
    spec = importlib.util.spec_from_file_location("cpu_build", Path(__file__).resolve().parent / "kernels/cpu/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Python files, then the shared object beside them."""

    has_library = False

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        build = load_build()
        target = Path(self.build_lib, "halfbyte", "kernels", "cpu", build.LIBRARY_NAME)
        target.unlink(missing_ok=True)  # of an earlier build in the same folder
        compiler = build.find_compiler()
        try:
            if compiler is None:
                raise build.BuildError(f"none of {', '.join(build.COMPILERS)} is on PATH")
            build.compile_library(target, compiler=compiler)
            self.has_library = True
        except build.BuildError as error:
            self.warn(f"without compiled CPU kernels, which are compiled at the first start if there is a compiler then: {error}")


class PlatformWheel(bdist_wheel):
    """py3-none-<platform> when the shared object is inside, else py3-none-any."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not self.get_finalized_command("build_py").has_library
        return (self.python_tag, "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
