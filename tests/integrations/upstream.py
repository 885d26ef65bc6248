"""Runs test files that a library ships in its source distribution, on the device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# A plug-in of those runs, in their own folder: our `tests` must not be imported there.
_SHARE = """
def pytest_collection_modifyitems(items):
    items[:] = items[::{share}]
"""


def source_of(distribution: str, folder: Path) -> Path:
    """The unpacked source distribution of the installed version; skips where there is no index."""
    wanted = f"{distribution}=={metadata.version(distribution)}"
    flags = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-q", "-d", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *flags, wanted], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip cannot download the source of {wanted}: {done.stderr[-200:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    (source / "tests" / "__init__.py").touch()
    return source


def run(source: Path, files: Sequence[str], known: Sequence[str], share: int = 1) -> int:
    """How many tests passed; fails where one did that is not in ``known`` (names that fail).

    What is known to fail has to be there: a name that no failure bears is an error too.
    """
    (source / "upstream_share.py").write_text(_SHARE.format(share=share))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TORCH_TPU_NUM_DEVICES": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "-o", "addopts=", "-p", "no:cacheprovider"]
        + ["-p", "upstream_share", "--tb=line", *(f"tests/{f}" for f in files)],
        cwd=source,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    failed = {name.split("::")[-1] for name in re.findall(r"^FAILED (\S+)", done.stdout, re.M)}
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and " error" not in done.stdout[-200:], (done.stdout + done.stderr)[-3000:]
    assert failed == set(known), done.stdout[-3000:]
    return int(passed[1])
