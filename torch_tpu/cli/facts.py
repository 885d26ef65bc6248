"""Collects what ``info`` prints: versions, extension, plug-in, devices, and what is wrong."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from torch_tpu.cli import cache
from torch_tpu.hardware import tpu_hardware
from torch_tpu.integrations import libraries

PACKAGE = Path(__file__).resolve().parent.parent
PROBE_SECONDS = 120
LIBTPU = "libtpu==0.0.52"
CPU_PLUGIN = "xla-cpu-pjrt==0.0.1"
REBUILD = "run `make build`, or `pip install --no-build-isolation -e .`, in the checkout"

# Variables that change which plug-in is loaded or what it does.
VARIABLE_PREFIXES = ("TORCH_TPU_", "TPU_", "LIBTPU_", "PJRT_", "XLA_")
VARIABLES = {"TORCH_DEVICE_BACKEND_AUTOLOAD", "ALLOW_MULTIPLE_LIBTPU_LOAD"}

# Runs in a child, so that an abort, a hang or a failing import is a finding and not our own end.
# One line of JSON a stage: the first stage missing is the one that failed.
PROBE = """
import json, time
def tell(**facts): print("@" + json.dumps(facts), flush=True)
def look():
    import torch
    tell(torch=str(torch.__version__))
    import torch_tpu
    from torch_tpu import _C
    tell(extension=_C.__file__)
    tell(plugin=_C.plugin_info())
    start = time.perf_counter()
    x = torch.arange(4.0).to("tpu")
    first = (x + x).cpu()
    middle = time.perf_counter()
    second = (x + x).cpu()
    end = time.perf_counter()
    tell(smoke={
        "right": first.tolist() == second.tolist() == [0.0, 2.0, 4.0, 6.0],
        "first_ms": round((middle - start) * 1e3, 2),
        "second_ms": round((end - middle) * 1e3, 2),
    })
    tell(stats={k: v for k, v in _C.stats().items() if isinstance(v, (int, float))})
try:
    look()
except Exception as error:
    # The first line says what is wrong; what follows is advice, which the doctor gives itself.
    tell(exception=type(error).__name__ + ": " + (str(error).strip().splitlines() or [""])[0])
"""
STAGES = {
    "torch": "torch cannot be imported",
    "extension": "the native core cannot be loaded",
    "plugin": "no PJRT plug-in could be started",
    "smoke": "adding two tensors on the device failed",
    "stats": "the counters of the device cannot be read",
}


def version(distribution: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def build_record(package: Path = PACKAGE) -> dict[str, Any] | None:
    """What the extension was built with, None where it was not built."""
    try:
        return json.loads((package / "_build_info.json").read_text())
    except (OSError, ValueError):
        return None


def autoloads() -> bool:
    """Whether ``import torch`` finds this package by its entry point."""
    entries = metadata.entry_points(group="torch.backends")
    return any(entry.name == "torch_tpu" for entry in entries)


def probe(code: str = PROBE, seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """Facts told by a child that loads the device, and ``error`` where it did not get to the end.

    ``error`` holds the stage that failed, what that means, and the child's last words.
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ending = ""
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        output, words = child.stdout, child.stderr
        if child.returncode < 0:
            ending = f"ended by {signal.Signals(-child.returncode).name}"
    except subprocess.TimeoutExpired as expired:
        output, words = (
            part.decode(errors="replace") if isinstance(part, bytes) else part or ""
            for part in (expired.stdout, expired.stderr)
        )
        ending = f"no answer within {seconds:.0f} s"
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("@"):
            facts.update(json.loads(line[1:]))
    missing = next((stage for stage in STAGES if stage not in facts), None)
    if missing:
        last = facts.pop("exception", None) or next(
            (line.strip() for line in reversed(words.splitlines()) if line.strip()), ""
        )
        facts["error"] = {
            "stage": missing,
            "what": STAGES[missing],
            "message": "; ".join(part for part in (ending, last) if part),
        }
    return facts


def advice(facts: dict[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
    """Problems, each with what to do, and hints that are no problem."""
    problems: list[dict[str, str]] = []
    hints: list[str] = []
    versions, extension = facts["versions"], facts["extension"]
    hardware, plugin, error = facts["hardware"], facts["plugin"], facts["error"]
    custom = facts["environment"].get("TORCH_TPU_PJRT_PLUGIN")

    def problem(what: str, do: str) -> None:
        problems.append({"what": what, "do": do})

    if error and error["stage"] == "torch":
        problem(f"{error['what']}: {error['message']}", "run `pip install torch==2.13.0`")
    elif extension["built_for_torch"] is None:
        problem("the native core is not built", REBUILD)
    elif not extension["matches"]:
        built = extension["built_for_torch"]
        problem(f"the native core is built for torch {built}, not {versions['torch']}", REBUILD)
    elif error and error["stage"] == "extension":
        problem(f"{error['what']}: {error['message']}", REBUILD)
    elif error and custom:
        problem(
            f"{error['what']}: {error['message']}",
            f"check TORCH_TPU_PJRT_PLUGIN={custom}, or unset it to use the default plug-in",
        )
    elif error and error["stage"] == "plugin" and not hardware["chips"]:
        again = "--force-reinstall " if versions["xla_cpu_pjrt"] else ""
        problem(f"{error['what']}: {error['message']}", f"run `pip install {again}{CPU_PLUGIN}`")
    elif error and error["stage"] == "plugin":
        problem(
            f"{error['what']}: {error['message']}",
            "see whether another process holds the chip and whether this user may open "
            f"{', '.join(hardware['device_nodes']) or '/dev/accel* and /dev/vfio'}",
        )
    elif error:
        problem(f"{error['what']}: {error['message']}", "run `make test` and report what fails")
    elif not facts["smoke"]["right"]:
        problem("adding two tensors on the device gives a wrong result", "run `make test`")

    if facts["cache"]["problem"]:
        hints.append(
            f"compiled programs are not kept on this host: {facts['cache']['problem']}; set "
            "TORCH_TPU_CACHE_DIR to a directory of your own"
        )
    if not facts["autoload"]:
        hints.append("`import torch` does not find torch_tpu: install it with `pip install -e .`")
    elif facts["environment"].get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        hints.append("TORCH_DEVICE_BACKEND_AUTOLOAD=0: programs need their own `import torch_tpu`")
    if hardware["chips"] and versions["libtpu"] is None:
        problem("there is a TPU here but libtpu is not installed", f"run `pip install {LIBTPU}`")
    elif hardware["chips"] and plugin and plugin["kind"] == "cpu":
        hints.append("there is a TPU here but the CPU plug-in was chosen")
    elif not hardware["chips"]:
        hints.append("no TPU here: device tpu runs on XLA's CPU plug-in")
        if versions["libtpu"] is None:
            hints.append(f"`pip install {LIBTPU}` adds the TPU compiler, which needs no chip")
    return problems, hints


def collect() -> dict[str, Any]:
    """All facts, JSON-serialisable; ``ok`` is True where the device works."""
    probed = probe()
    built = build_record()
    built_for = built["torch"] if built else None
    torch_version = probed.get("torch") or version("torch")
    facts: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch_version,
            "torch_tpu": version("torch-tpu"),
            "xla_cpu_pjrt": version("xla-cpu-pjrt"),
            "libtpu": version("libtpu"),
        },
        "extension": {
            "path": probed.get("extension"),
            "built_for_torch": built_for,
            "matches": built_for is not None and built_for == torch_version,
        },
        "autoload": autoloads(),
        "plugin": probed.get("plugin"),
        "smoke": probed.get("smoke"),
        "hardware": tpu_hardware(),
        "cache": {**cache.facts(), "counters": probed.get("stats")},
        "libraries": libraries.report(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
        },
        "error": probed.get("error"),
    }
    facts["problems"], facts["hints"] = advice(facts)
    facts["ok"] = not facts["problems"]
    return facts
