"""Settings that must be made before torch is imported (which loads torch_tpu)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

# Two devices in one process, so that tests of copies and guards have somewhere to go.
os.environ.setdefault("TORCH_TPU_NUM_DEVICES", "2")

# The eager mode the suite runs in: "strict" (default), "debug" or "fused".
MODE = os.environ.get("TORCH_TPU_TEST_MODE", "strict")
# In the other modes `make test` takes each SHARE-th case of the big sweeps, `make test-full` all.
SHARE = 1 if MODE == "strict" or os.environ.get("TORCH_TPU_TEST_SHARE") == "1" else 8
os.environ["TORCH_TPU_LAUNCH_BLOCKING"] = "1" if MODE == "debug" else "0"
os.environ["TORCH_TPU_DEFER_AND_FUSE"] = "1" if MODE == "fused" else "0"

# Compiled programs go to a directory of this session, which its worker processes share; never to
# the user's. TORCH_TPU_TEST_CACHE_DIR keeps them for the next session.
_kept = os.environ.get("TORCH_TPU_TEST_CACHE_DIR")
_own = "PYTEST_XDIST_WORKER" not in os.environ
if _own:
    os.environ["TORCH_TPU_CACHE_DIR"] = _kept or tempfile.mkdtemp(prefix="torch_tpu-test-cache-")
    for tier in ("TIER2_COMPILATION_CACHE", "TIER3_COMPILATION_CACHE_ROOT"):
        for prefix in ("TORCH_TPU_", "TORCH_TPU_INTERNAL_"):
            os.environ.pop(prefix + tier, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MODE == "strict":
        return
    skip = pytest.mark.skip(reason=f"does not hold in the mode the suite runs in, {MODE}")
    for item in items:
        deferred = MODE == "debug" and item.get_closest_marker("not_debug") is not None
        if deferred or item.get_closest_marker("strict_mode") is not None:
            item.add_marker(skip)


def pytest_unconfigure() -> None:
    if _own and not _kept:
        shutil.rmtree(os.environ["TORCH_TPU_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="module")
def shares_programs() -> bool:
    """Whether a module's tests use programs that others compiled. Not where compiles are counted:
    folders of sweeps override this.
    """
    return False


@pytest.fixture(scope="module", autouse=True)
def cache_beyond_the_process(shares_programs: bool) -> Iterator[None]:
    from torch_tpu.program import cache

    with nullcontext() if shares_programs else cache.disabled():
        yield


@pytest.fixture(autouse=True)
def policies_begin_anew(shares_programs: bool) -> None:
    """What is compiled depends on what was seen: which sizes change, and in Fused mode how useful
    the last programs were. Where compiles are counted, other tests are not seen.
    """
    from torch_tpu import _C
    from torch_tpu.program.bounded import policy

    policy.clear()
    if MODE == "fused" and not shares_programs:
        _C.clear_fused_programs()
