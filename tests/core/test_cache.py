"""Programs beyond the process: found again, never wrong, and never a reason not to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from torch_tpu.program import cache, identity
from torch_tpu.program.store import Description, encode

pytestmark = pytest.mark.strict_mode  # counts the programs of single ops


@pytest.fixture(scope="module")
def shares_programs() -> bool:
    return True  # each test has a directory of its own


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path / "cache"))
    cache.reload()
    yield tmp_path / "cache"
    cache.reload()


def entries(directory: Path) -> list[Path]:
    return [path for path in (directory / "programs").rglob("*") if path.is_file()]


COUNTERS = ("compiles", "disk_hits", "disk_misses", "remote_hits")


def afresh(factor: int = 3) -> dict[str, int]:
    """Counters of one op that is new to the process; checks its value."""
    x = torch.arange(6.0).to("tpu")
    torch.tpu._clear_cache()
    before = torch.tpu.stats()
    y = x * factor
    after = torch.tpu.stats()
    assert y.tolist() == [float(factor * i) for i in range(6)]
    return {name: after[name] - before[name] for name in COUNTERS if after[name] > before[name]}


COMPILED = {"compiles": 1, "disk_misses": 1}


def test_a_program_is_compiled_once_and_then_loaded(directory: Path) -> None:
    assert afresh() == COMPILED
    assert afresh() == {"disk_hits": 1}
    assert len(entries(directory)) == 1


def test_a_loaded_program_runs_on_every_device(directory: Path) -> None:
    afresh()
    torch.tpu._clear_cache()
    before = torch.tpu.stats()
    for device in ("tpu:0", "tpu:1"):
        assert (torch.arange(6.0).to(device) * 3).tolist() == [0, 3, 6, 9, 12, 15]
    after = torch.tpu.stats()
    assert after["compiles"] == before["compiles"]
    assert after["disk_hits"] == before["disk_hits"] + 1


def test_another_program_is_no_hit(directory: Path) -> None:
    afresh()
    torch.tpu._clear_cache()
    before = torch.tpu.stats()["compiles"]
    torch.arange(7.0).to("tpu") * 3
    assert torch.tpu.stats()["compiles"] == before + 1


def test_donated_storages_and_random_numbers_of_a_loaded_program(directory: Path) -> None:
    def draw() -> list[float]:
        torch.tpu._clear_cache()
        torch.manual_seed(3)
        x = torch.zeros(5, device="tpu")
        x += 1
        x += torch.randn(5, device="tpu")
        return x.tolist()

    assert draw() == draw()
    before = torch.tpu.stats()["compiles"]
    draw()
    assert torch.tpu.stats()["compiles"] == before


@pytest.mark.parametrize("change", ["plug-in", "options", "processor"])
def test_what_a_program_depends_on_is_in_its_key(directory, monkeypatch, change: str) -> None:
    afresh()
    if change == "plug-in":
        monkeypatch.setattr(identity, "file_identity", lambda *_: "sha256:of another build")
    elif change == "processor":
        monkeypatch.setattr(identity, "host_processor", lambda: "another")
    else:
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    cache.reload()
    assert afresh() == COMPILED


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def unloadable(path: Path) -> None:
    """A whole entry of the right key whose payload the plug-in refuses."""
    path.write_bytes(encode(Description(path.name, "x", "y", 0.0), b"not an executable"))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "flipped": flip,
    "foreign": lambda path: path.write_bytes(b"#!/bin/sh\n"),
    "world-writable": lambda path: path.chmod(0o666),
    "unloadable": unloadable,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_entry_is_compiled_anew_with_one_warning(directory: Path, kind: str) -> None:
    afresh(3)
    for path in entries(directory):
        DAMAGE[kind](path)
    with pytest.warns(RuntimeWarning, match="torch_tpu compile cache") as caught:
        assert afresh(3) == COMPILED
    assert len(caught) == 1
    assert afresh(3) == {"disk_hits": 1}  # it was replaced
    for path in entries(directory):
        DAMAGE[kind](path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert afresh(3) == COMPILED  # warned of once


def test_a_directory_that_everybody_may_write_to_is_not_used(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="may be written by everybody"):
        assert afresh() == {"compiles": 1}
    assert not entries(directory)


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cache.reload()
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert afresh() == {"compiles": 1}
    cache.reload()


def test_a_full_disk_costs_the_entry_only(directory, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            assert afresh() == COMPILED
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert afresh() == COMPILED
    assert not entries(directory)
    assert not list((directory / "temporary").iterdir())


def test_the_limit_holds(directory, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_TPU_CACHE_SIZE", "40K")
    cache.reload()
    for n in range(1, 12):
        torch.arange(float(n)).to("tpu") * 3
        assert sum(path.stat().st_size for path in entries(directory)) <= 40 << 10
    assert entries(directory)


def test_a_wrong_setting_is_an_error(directory, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_TPU_CACHE_SIZE", "plenty")
    cache.reload()
    with pytest.raises(ValueError, match="TORCH_TPU_CACHE_SIZE: got 'plenty'"):
        afresh()


def test_a_program_that_does_not_compile_gives_the_lock_back(directory: Path) -> None:
    ticket = cache.find("broken", "no program", b"")
    assert ticket.payload is None
    ticket.close()
    with ticket.tiers.store.lock(ticket.key, 0.05) as held:
        assert held


@pytest.fixture(params=["memory://", "file://"])
def remote(request, directory, tmp_path, monkeypatch) -> str:
    root = request.param + str(tmp_path / "remote")
    monkeypatch.setenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", root)
    cache.reload()
    return root


def test_a_remote_root_serves_another_host(remote, tmp_path, monkeypatch) -> None:
    assert afresh() == COMPILED
    assert cache.tiers().remote.flush(30)
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path / "another host"))
    cache.reload()
    assert afresh() == {"remote_hits": 1}
    assert afresh() == {"disk_hits": 1}  # it lies there now


def test_a_remote_root_without_a_directory(remote, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_TPU_TIER2_COMPILATION_CACHE", "disabled")
    cache.reload()
    assert afresh() == COMPILED
    assert cache.tiers().remote.flush(30)
    assert afresh() == {"remote_hits": 1}


def test_a_damaged_remote_entry(remote, tmp_path, monkeypatch) -> None:
    import fsspec

    afresh()
    assert cache.tiers().remote.flush(30)
    system, root = fsspec.core.url_to_fs(remote)
    (path,) = system.find(root)
    system.pipe_file(path, b"damaged")
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path / "another host"))
    cache.reload()
    with pytest.warns(RuntimeWarning, match="is no compiled program"):
        assert afresh() == COMPILED


@pytest.mark.parametrize("url", ["nosuchscheme://bucket/x", "file:///proc/nothing/here"])
def test_a_remote_root_that_cannot_be_used(directory, monkeypatch, url: str) -> None:
    monkeypatch.setenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", url)
    cache.reload()
    with pytest.warns(RuntimeWarning, match=url):
        assert afresh() == COMPILED
        if cache.tiers().remote is not None:
            assert cache.tiers().remote.flush(30)
    assert afresh() == {"disk_hits": 1}


def test_a_remote_directory_that_everybody_may_write_to(directory, tmp_path, monkeypatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", str(tmp_path / "shared"))
    cache.reload()
    with pytest.warns(RuntimeWarning, match="may be written by everybody"):
        assert afresh() == COMPILED
    assert not list((tmp_path / "shared").iterdir())


def test_private_names(directory: Path) -> None:
    held = torch.arange(6.0).to("tpu")
    torch.tpu._clear_cache()
    before = torch.tpu._get_cache_stats()
    # Compiled graphs that other tests hold stay.
    others = {entry.name for entry in before.per_entry_stats}
    assert not any(name.startswith("aten::") for name in others)
    for _ in range(3):
        held * 3
    torch.tpu.synchronize()
    after = torch.tpu._get_cache_stats()
    (made,) = (entry for entry in after.per_entry_stats if entry.name not in others)
    assert made.read_count == 3
    assert made.compilation_duration.total_seconds() > 0
    assert made.last_read.year > 2000
    assert after.num_cache_reqs - before.num_cache_reqs == 3
    assert after.num_cache_hits - before.num_cache_hits == 2
    assert torch.tpu._get_cache_requests() == after.num_cache_reqs
    assert torch.tpu._get_cache_hits() + torch.tpu._get_cache_misses() == after.num_cache_reqs


TRAINING = """
    import json, sys, torch, torch_tpu
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model.to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.randn(32, 8).to("tpu")
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
    print(json.dumps({"loss": loss.item(), **torch.tpu.stats()}))
"""


def train_together(directory: Path, count: int) -> list[dict[str, Any]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", dedent(TRAINING)],
            env={**os.environ, "TORCH_TPU_CACHE_DIR": str(directory), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    results = [process.communicate(timeout=540) for process in processes]
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in results]


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.full)])
def test_processes_that_start_together_compile_each_program_once(tmp_path, count: int) -> None:
    together = train_together(tmp_path / "cache", count)
    programs = len(entries(tmp_path / "cache"))
    assert sum(each["compiles"] for each in together) == programs
    assert {each["disk_hits"] + each["compiles"] for each in together} == {programs}
    (later,) = train_together(tmp_path / "cache", 1)
    assert (later["compiles"], later["disk_hits"]) == (0, programs)
    assert {each["loss"] for each in [later, *together]} == {later["loss"]}


READ_ONLY = """
    import json, os, sys, warnings, torch, torch_tpu
    from torch_tpu.program import cache
    x = torch.arange(6.0).to("tpu")
    with cache.disabled():
        x + 1, x * 3  # everything is imported
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)  # nobody: the directory's modes hold for it
    torch.tpu._clear_cache()
    before = torch.tpu.stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.tpu._clear_cache()
            found, missed = (x * 3).tolist(), (x + 1).tolist()
    after = torch.tpu.stats()
    print(json.dumps({
        "warnings": [str(w.message) for w in caught], "found": found, "missed": missed,
        "compiles": after["compiles"] - before["compiles"],
        "disk_hits": after["disk_hits"] - before["disk_hits"],
    }))
"""


def test_a_read_only_directory_is_read(directory: Path) -> None:
    afresh()
    # pytest's own directories are private; the child may be another user.
    mine = [p for p in directory.parents if p.is_relative_to(tempfile.gettempdir())][:-1]
    modes = {path: path.stat().st_mode for path in [directory, *directory.rglob("*"), *mine]}
    for path, mode in modes.items():
        path.chmod(mode | 0o055 if path in mine else 0o555 if path.is_dir() else 0o444)
    run = subprocess.run(
        [sys.executable, "-c", dedent(READ_ONLY)], capture_output=True, text=True, timeout=300
    )
    for path, mode in modes.items():
        path.chmod(mode)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert (seen["found"], seen["missed"]) == ([0, 3, 6, 9, 12, 15], [1, 2, 3, 4, 5, 6])
    assert (seen["compiles"], seen["disk_hits"]) == (2, 2)
    assert len(seen["warnings"]) == 1
    assert "nothing more is stored" in seen["warnings"][0]
