"""``python -m torch_tpu cache``: looks at and tidies the host's directory of compiled programs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from typing import Any

from torch_tpu.program.cache_settings import Settings, parse_size, read_settings
from torch_tpu.program.store import Description, Entry, Refused, Store, decode, peek

_DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    stats = actions.add_parser("stats", help="where the cache is and what is in it")
    listing = actions.add_parser("list", help="every program, the least recently used first")
    prune = actions.add_parser("prune", help="remove what was used least recently")
    prune.add_argument("--size", default="", help="down to this size, such as 512M")
    prune.add_argument("--days", type=float, help="and what was not used for so many days")
    clear = actions.add_parser("clear", help="remove every program")
    verify = actions.add_parser("verify", help="check every program; exit code 1 if one is bad")
    verify.add_argument("--remove", action="store_true", help="remove the bad ones")
    for each in (stats, listing, prune, clear, verify):
        each.add_argument("--json", action="store_true", help="print JSON")


def readable(size: float) -> str:
    """Bytes for a person."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def ago(seconds: float) -> str:
    for unit, length in (("days", _DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


def _described(store: Store) -> list[tuple[Entry, Description | None]]:
    return [(entry, peek(entry.path)) for entry in store.entries()]


def _stats(settings: Settings, store: Store, options: argparse.Namespace) -> int:
    groups: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"programs": 0, "bytes": 0, "compile_seconds": 0.0}
    )
    described = _described(store)
    for entry, description in described:
        group = groups[description.plugin if description else "unreadable"]
        group["programs"] += 1
        group["bytes"] += entry.size
        group["compile_seconds"] += description.compile_seconds if description else 0.0
    total = sum(entry.size for entry, _ in described)
    if options.json:
        facts = {
            "directory": str(store.root),
            "limit_bytes": store.limit,
            "programs": len(described),
            "bytes": total,
            "remote": settings.remote,
            "plugins": groups,
        }
        print(json.dumps(facts, indent=2))
        return 0
    print(f"directory  {store.root}")
    print(f"programs   {len(described)}, {readable(total)} of {readable(store.limit)}")
    for plugin, group in groups.items():
        print(
            f"plug-in    {plugin}: {group['programs']} programs, {readable(group['bytes'])}, "
            f"{group['compile_seconds']:.1f} s of compilation"
        )
    if described:
        print(f"last used  {ago(time.time() - described[-1][0].used)}")
    print(f"remote     {settings.remote or 'none'}")
    return 0


def _list(settings: Settings, store: Store, options: argparse.Namespace) -> int:
    now = time.time()
    rows = []
    for entry, description in _described(store):
        about = vars(description) if description else {"program": "unreadable", "plugin": ""}
        rows.append({**about, "key": entry.key, "bytes": entry.size, "used": entry.used})
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        seconds = f"{row['compile_seconds']:8.3f} s" if "compile_seconds" in row else " " * 10
        print(
            f"{row['key'][:16]}  {readable(row['bytes']):>10}  {seconds}  "
            f"{ago(now - row['used']):>14}  {row['plugin']}  {row['program']}"
        )
    return 0


def _report_removed(removed: list[Entry], options: argparse.Namespace) -> int:
    size = sum(entry.size for entry in removed)
    if options.json:
        print(json.dumps({"removed": [entry.key for entry in removed], "bytes": size}, indent=2))
    else:
        print(f"removed {len(removed)} programs, {readable(size)}")
    return 0


def _prune(settings: Settings, store: Store, options: argparse.Namespace) -> int:
    limit = parse_size(options.size, "--size") if options.size else store.limit
    older_than = None if options.days is None else time.time() - options.days * _DAY
    return _report_removed(store.evict(limit, older_than), options)


def _clear(settings: Settings, store: Store, options: argparse.Namespace) -> int:
    return _report_removed(store.evict(0), options)


def _verify(settings: Settings, store: Store, options: argparse.Namespace) -> int:
    bad: dict[str, str] = {}
    entries = store.entries()
    for entry in entries:
        try:
            data = store.read(entry.key, touch=False)
            if data is not None:
                decode(data, entry.key)
        except (Refused, OSError) as reason:
            bad[str(entry.path)] = str(reason)
            if options.remove:
                entry.path.unlink(missing_ok=True)
    if options.json:
        print(json.dumps({"programs": len(entries), "bad": bad}, indent=2))
    else:
        for path, reason in bad.items():
            print(f"{path} {reason}{'; removed' if options.remove else ''}")
        print(f"{len(entries) - len(bad)} of {len(entries)} programs are good")
    return 1 if bad else 0


_ACTIONS = {"stats": _stats, "list": _list, "prune": _prune, "clear": _clear, "verify": _verify}


def run(options: argparse.Namespace) -> int:
    """Performs the action; exit code 1 where there is nothing to act on or something is wrong."""
    try:
        settings = read_settings()
        if settings.directory is None:
            print("the host's directory is turned off (TORCH_TPU_TIER2_COMPILATION_CACHE=disabled)")
            return 1
        if not settings.directory.exists() and not options.json:
            print(f"directory  {settings.directory}: does not exist yet")
            return 0
        store = Store(settings.directory, settings.limit)
        return _ACTIONS[options.action](settings, store, options)
    except Refused as reason:
        print(f"{settings.directory} is not used: it {reason}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"python -m torch_tpu cache: {error}", file=sys.stderr)
    return 1


def facts() -> dict[str, Any]:
    """What ``info`` and ``doctor`` say about the cache; ``problem`` where it cannot be used."""
    found: dict[str, Any] = {"directory": None, "remote": None, "problem": None}
    try:
        settings = read_settings()
        found["remote"], found["limit_bytes"] = settings.remote, settings.limit
        if settings.directory is None:
            return found
        found["directory"] = str(settings.directory)
        entries = []
        if settings.directory.exists():
            entries = Store(settings.directory, settings.limit).entries()
        found["programs"], found["bytes"] = len(entries), sum(entry.size for entry in entries)
    except Refused as reason:
        found["problem"] = f"{found['directory']} {reason}"
    except (OSError, ValueError) as error:
        found["problem"] = str(error)
    return found
