#!/bin/sh
# Makes the Python environment of this checkout ready: finds a Python, then lets setup_env.py work.
# usage: scripts/setup_env.sh run|dev       (run: what a user needs; dev: tests and checkers too)
#
# An active environment ($VIRTUAL_ENV, else $CONDA_PREFIX) that has torch is used as it is; in every
# other case .venv is created here. The interpreter's path ends up in build/env/python.
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "torch-tpu: $*" >&2
    exit 1
}

is_supported() {
    # Really runs it: a version manager's shim can be on PATH and stand for nothing.
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

has_torch() {
    "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' >/dev/null 2>&1
}

find_python() {
    # The environment of this checkout first, then 3.11, the version torch builds exist for longest.
    for candidate in ${PYTHON:-"$root/.venv/bin/python" python3.11 python3.12 python3.13 python3.14 \
        python3 python}; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
    fail "needs Python 3.11 or newer; none was found on PATH"
}

environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [ -n "$environment" ] && [ -x "$environment/bin/python" ] && has_torch "$environment/bin/python"
then
    is_supported "$environment/bin/python" ||
        fail "needs Python 3.11 or newer; the active environment $environment has an older one"
    exec "$environment/bin/python" "$root/scripts/setup_env.py" --in-place "$@"
fi

python=$(find_python)
exec "$python" "$root/scripts/setup_env.py" "$@"
