"""Builds ``torch_tpu._C`` from ``csrc/``; everything else is declared in pyproject.toml."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sysconfig
from pathlib import Path

# An installed torch_tpu would be loaded by `import torch` below, and building it is what is
# needed when it cannot be loaded.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        f"torch-tpu: building needs torch 2.13 installed first ({error}); run `pip install "
        "torch==2.13.0`, then `pip install --no-build-isolation -e .`"
    ) from None

ROOT = Path(__file__).resolve().parent
WARNINGS = ["-Wall", "-Wextra"]


def pjrt_include_dir() -> Path:
    """Directory of ``pjrt_c_api.h`` in the installed xla-cpu-pjrt wheel."""
    try:
        spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    except ModuleNotFoundError:
        spec = None
    for location in (spec.submodule_search_locations or []) if spec else []:
        include = Path(location) / "include"
        if (include / "pjrt_c_api.h").is_file():
            return include
    raise SystemExit(
        "torch-tpu: building needs pjrt_c_api.h, which comes with the xla-cpu-pjrt wheel; run "
        "`pip install xla-cpu-pjrt==0.0.1` first (build isolation has to be off)"
    )


def default_jobs() -> int:
    """One job per usable core, at most one per 2 GiB of memory: torch's headers are large."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores or 1, memory // (2 << 30)))


def compile_args() -> list[str]:
    """Flags of our own sources. Python's own build flags come before these and lose to them."""
    args = ["-std=c++20", "-fvisibility=hidden", *WARNINGS]
    # A compiler newer than the ones we know may warn about more: a way out without an edit.
    if os.environ.get("TORCH_TPU_WERROR", "1") != "0":
        args.append("-Werror")
    # Debug information of torch's headers makes objects 20 times larger and builds slower.
    args += ["-O0", "-g"] if os.environ.get("TORCH_TPU_DEBUG_BUILD") == "1" else ["-O2", "-g0"]
    # Also given with -I by CppExtension; as system headers they raise no warnings.
    torch_includes = cpp_extension.include_paths()
    kineto = str(Path(torch_includes[0]) / "kineto")
    for include in [*torch_includes, kineto, str(pjrt_include_dir())]:
        args += ["-isystem", include]
    return args


class BuildNative(cpp_extension.BuildExtension):
    """torch's BuildExtension with a lasting object directory and a record of the build."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # pip hands over a throw-away directory; a lasting one makes rebuilds incremental. ninja
        # does not track system headers, so each Python and torch gets its own.
        platform_tag = f"{sysconfig.get_platform()}-{sysconfig.get_python_version()}"
        self.build_temp = str(ROOT / "build" / f"native-{platform_tag}-torch{torch.__version__}")

    def run(self) -> None:
        super().run()
        for extension in self.extensions:
            package = Path(self.get_ext_fullpath(extension.name)).parent
            info = {
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "debug": os.environ.get("TORCH_TPU_DEBUG_BUILD") == "1",
            }
            (package / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")


def native_extension() -> object:
    os.environ.setdefault("MAX_JOBS", str(default_jobs()))
    csrc = ROOT / "csrc"
    sources = sorted(str(path.relative_to(ROOT)) for path in csrc.rglob("*.cpp"))
    if not sources:
        raise SystemExit(f"torch-tpu: no C++ sources below {csrc}")
    return cpp_extension.CppExtension(
        "torch_tpu._C",
        sources,
        include_dirs=[str(csrc)],
        depends=sorted(str(path.relative_to(ROOT)) for path in csrc.rglob("*.h")),
        extra_compile_args=compile_args(),
        libraries=["dl"],  # plug-ins are opened at run time
    )


setup(ext_modules=[native_extension()], cmdclass={"build_ext": BuildNative})
