"""The host's directory of compiled programs: damage, foreign files, limits and locks."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_tpu import cli
from torch_tpu.program import identity
from torch_tpu.program.cache_settings import parse_size, read_settings
from torch_tpu.program.store import Description, Refused, Store, decode, encode

KEY, OTHER = "ab" * 32, "cd" * 32


def entry(key: str = KEY, payload: bytes = b"code" * 100) -> bytes:
    return encode(Description(key, "aten::add.Tensor", "cpu 0.81", 0.25), payload)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", 1 << 20)


def test_an_entry_comes_back(store: Store) -> None:
    assert store.read(KEY) is None
    store.write(KEY, entry())
    description, payload = decode(store.read(KEY), KEY)
    assert payload == b"code" * 100
    assert description.program == "aten::add.Tensor"
    assert [e.key for e in store.entries()] == [KEY]


def test_everything_is_private_to_the_user(store: Store) -> None:
    store.write(KEY, entry())
    with store.lock(KEY, 1):
        pass
    for path in [store.root, *store.root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@given(st.data())
def test_damage_is_found(data: st.DataObject) -> None:
    good = entry()
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(Refused):
        decode(good[:cut], KEY)
    flipped = bytearray(good)
    flipped[cut] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refused):
        decode(bytes(flipped), KEY)
    with pytest.raises(Refused):
        decode(good + b"more", KEY)


def test_an_entry_of_another_key_is_refused() -> None:
    with pytest.raises(Refused, match="belongs to the key"):
        decode(entry(OTHER), KEY)


def give_to_somebody_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def test_an_entry_of_somebody_else_is_refused(store, monkeypatch) -> None:
    store.write(KEY, entry())
    give_to_somebody_else(store.path(KEY), monkeypatch)
    with pytest.raises(Refused, match="is owned by uid"):
        store.read(KEY)


def test_a_directory_of_somebody_else_is_refused(store, monkeypatch) -> None:
    give_to_somebody_else(store.root, monkeypatch)
    with pytest.raises(Refused, match="is owned by uid"):
        Store(store.root, 1)


def test_what_everybody_may_write_is_refused(store: Store) -> None:
    store.write(KEY, entry())
    store.path(KEY).chmod(0o666)
    with pytest.raises(Refused, match="may be written by everybody"):
        store.read(KEY)
    store.root.chmod(0o1777)
    with pytest.raises(Refused, match="may be written by everybody"):
        Store(store.root, 1)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused(store: Store, make) -> None:
    store.path(KEY).parent.mkdir(parents=True)
    make(store.path(KEY))
    with pytest.raises(Refused, match="is no file"):
        store.read(KEY)


def test_links_are_not_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(entry())
    store.path(KEY).parent.mkdir(parents=True)
    store.path(KEY).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        store.read(KEY)


def test_a_write_that_fails_leaves_nothing(store: Store) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError):
            store.write(KEY, entry())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert store.read(KEY) is None
    assert not list((store.root / "temporary").iterdir())


def keys(count: int) -> list[str]:
    return [f"{i:02x}" * 32 for i in range(count)]


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = len(entry())
    store = Store(tmp_path / "cache", 10 * size)
    for i, key in enumerate(keys(10)):
        store.write(key, entry(key))
        os.utime(store.path(key), (0, time.time() - 1e6 + i))
    store.read(keys(10)[0])  # now the most recent
    store.write(OTHER, entry(OTHER))
    left = {e.key for e in store.entries()}
    assert sum(e.size for e in store.entries()) <= 8 * size
    assert {OTHER, keys(10)[0]} <= left
    assert keys(10)[1] not in left


def test_a_time_in_the_future_does_not_keep_an_entry_for_ever(store: Store) -> None:
    for key, used in ((KEY, time.time() + 1e8), (OTHER, time.time() + 2e8)):
        store.write(key, entry(key))
        os.utime(store.path(key), (0, used))
    store.read(KEY)
    assert store.path(KEY).stat().st_mtime <= time.time()
    assert {e.used <= time.time() for e in store.entries()} == {True}


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"-5", b"\xff" * 40])
def test_a_damaged_size_is_counted_again(store: Store, damage: bytes) -> None:
    store.write(KEY, entry())
    (store.root / "size").write_bytes(damage)
    store.write(OTHER, entry(OTHER))
    assert int((store.root / "size").read_text()) == 2 * len(entry())


def test_what_killed_writers_left_is_removed(store: Store) -> None:
    store.write(KEY, entry())
    old, new = store.root / "temporary" / "old", store.root / "temporary" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - 1e5))
    store.evict(store.limit)
    assert not old.exists()
    assert new.exists()
    assert store.read(KEY) is not None


HOLDER = """
import sys, time
from pathlib import Path
from torch_tpu.program.store import Store
with Store(Path(sys.argv[1]), 1000).lock(sys.argv[2], 10) as held:
    print(held, flush=True)
    time.sleep(600)
"""


def test_a_lock_ends_with_its_holder(store: Store) -> None:
    command = [sys.executable, "-c", HOLDER, str(store.root), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline().strip() == "True"
        with store.lock(KEY, 0.05) as held:
            assert not held
        with store.lock(OTHER, 0.05) as held:
            assert held
        holder.send_signal(signal.SIGKILL)
        with store.lock(KEY, 60) as held:
            assert held


def test_threads_of_one_process_exclude_each_other(store: Store) -> None:
    with store.lock(KEY, 1) as first, store.lock(KEY, 0.05) as second:
        assert (first, second) == (True, False)


def test_build_ids_and_hashes_tell_plugins_apart(tmp_path: Path) -> None:
    library, memory = tmp_path / "plugin.so", tmp_path / "plugins.json"
    library.write_bytes(b"one")
    first = identity.file_identity(library, memory)
    assert identity.file_identity(library, memory) == first
    assert json.loads(memory.read_text())
    library.write_bytes(b"two")
    os.utime(library, (0, 12345))
    assert identity.file_identity(library, memory) != first
    memory.write_text("[damaged")
    assert identity.file_identity(library, memory).startswith("sha256:")
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if "/libc" in line)
    found = identity.build_id(Path(libc))
    assert found is None or len(found) >= 16  # distributions strip it rarely


def test_settings() -> None:
    home = {"XDG_CACHE_HOME": "/x"}
    assert str(read_settings(home).directory) == "/x/torch_tpu"
    assert read_settings({"TORCH_TPU_CACHE_DIR": "/c"}).directory == Path("/c")
    named = {**home, "TORCH_TPU_INTERNAL_TIER2_COMPILATION_CACHE": "mine"}
    assert str(read_settings(named).directory) == "/x/torch_tpu/mine"
    off = {"TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled"}
    assert not read_settings(off).enabled
    remote = {**off, "TORCH_TPU_INTERNAL_TIER3_COMPILATION_CACHE_ROOT": "memory://x"}
    assert read_settings(remote).remote == "memory://x"
    assert read_settings({"TORCH_TPU_CACHE_SIZE": "1.5M"}).limit == 3 << 19
    assert parse_size("10 KiB", "x") == 10240


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_TPU_CACHE_SIZE", "a lot"),
        ("TORCH_TPU_CACHE_SIZE", "0"),
        ("TORCH_TPU_TIER2_COMPILATION_CACHE", "../x"),
    ],
)
def test_settings_without_meaning_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        read_settings({name: value})


@pytest.fixture
def command(store, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(store.root))

    def run(*words: str) -> tuple[int, dict]:
        code = cli.main(["cache", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_command_line(command, store: Store) -> None:
    for key in (KEY, OTHER):
        store.write(key, entry(key))
    os.utime(store.path(KEY), (0, time.time() - 30 * 86400))
    code, stats = command("stats")
    assert (code, stats["programs"], stats["bytes"]) == (0, 2, 2 * len(entry()))
    assert stats["plugins"]["cpu 0.81"]["compile_seconds"] == 0.5
    assert [row["key"] for row in command("list")[1]] == [KEY, OTHER]
    assert command("prune")[1]["removed"] == []
    assert command("prune", "--days", "7")[1]["removed"] == [KEY]
    assert command("prune", "--size", "1K")[1]["removed"] == []
    assert command("clear")[1]["removed"] == [OTHER]
    assert command("stats")[1]["programs"] == 0


def test_command_line_verifies(command, store: Store) -> None:
    store.write(KEY, entry())
    store.write(OTHER, entry(OTHER))
    assert command("verify") == (0, {"programs": 2, "bad": {}})
    with open(store.path(OTHER), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    code, found = command("verify", "--remove")
    assert code == 1
    assert list(found["bad"]) == [str(store.path(OTHER))]
    assert store.read(OTHER) is None
    assert command("verify")[0] == 0


def test_command_line_speaks_to_people(store, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(store.root))
    store.write(KEY, entry())
    for action in ("stats", "list", "verify", "prune", "clear"):
        assert cli.main(["cache", action]) == 0
    assert "1, " in capsys.readouterr().out
    store.root.chmod(0o777)
    assert cli.main(["cache", "stats"]) == 1
    assert "may be written by everybody" in capsys.readouterr().err
