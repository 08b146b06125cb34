"""Maps the repository's layout to the installed package's, and compiles ops ahead of time where asked to.

DS_BUILD_OPS=1 compiles every op that can be compiled and would work here; DS_BUILD_AIO=1 (or _GDS, _UTILS) that op, and
fails if it cannot be (gds needs torch and cuFile to work, but not to be compiled: pip's build environment has no torch); =0
leaves one out. By default nothing is compiled: ops are at first use. The rest is in pyproject.toml.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build front end need not run this from a path that imports see

from op_builder import ALL_OPS, jit  # noqa: E402


def switch(name: str) -> bool | None:
    """The environment variable ``name``: 1 is True, 0 is False, unset is None."""
    value = os.environ.get(name)
    if value not in (None, "", "0", "1"):
        raise SystemExit(f"{name} must be 0 or 1, got {value!r}")
    return value == "1" if value else None


def extensions() -> list[Extension]:
    chosen = []
    for op in ALL_OPS.values():
        wanted = switch(op.BUILD_VAR)
        if wanted is None:
            wanted = bool(switch("DS_BUILD_OPS")) and op.is_compatible(verbose=True)
        elif wanted and not op.is_compatible(verbose=True) and op.obstacles():
            raise SystemExit(f"{op.BUILD_VAR}=1, but {op.name} {'; '.join(op.obstacles())}")
        if wanted and op.sources():
            chosen.append(op.builder())
    return chosen


class BuildOps(build_ext):
    """Compiles the files that are compiled at first use, which each include many sources: in a third of the time."""

    def build_extension(self, ext: Extension) -> None:
        units = Path(self.build_temp, "units", ext.name)
        units.mkdir(parents=True, exist_ok=True)
        (op,) = (op for op in ALL_OPS.values() if op.absolute_name() == ext.name)
        sources = tuple(ROOT / source for source in ext.sources)
        ext.sources = [str(unit) for unit in jit.write_units(sources, tuple(op.runtime_sources()), units)]
        super().build_extension(ext)


MAPPED = {"deepnvme.ops.op_builder": "op_builder", "deepnvme.ops.csrc": "csrc"}

extensions_to_build = extensions()

setup(
    packages=[*find_packages(include=["deepnvme", "deepnvme.*"], exclude=[f"{name}*" for name in MAPPED]), *MAPPED],
    package_dir=MAPPED,
    package_data={
        "deepnvme": ["py.typed", "**/*.pyi", "tools/tune/*.html", "tools/tune/*.txt"],
        "deepnvme.ops.csrc": ["**/*.cpp", "**/*.h"],
    },
    include_package_data=False,
    scripts=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "bin").iterdir()),
    ext_modules=extensions_to_build,
    cmdclass={"build_ext": BuildOps},
    # One wheel for Python 3.12 and all later ones.
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if any(ext.py_limited_api for ext in extensions_to_build) else {},
)
