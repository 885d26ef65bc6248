"""The TPU compiler in a worker process that is started again when a program kills it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = "v6e:1x1"
LIMIT_SECONDS = 240


class TpuCompiler:
    """Compiles programs for ``target``, each distinct text once."""

    def __init__(self, target: str = TARGET) -> None:
        self.target = target
        self._worker: subprocess.Popen[str] | None = None
        # What the compiler says while it dies.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._errors: dict[str, str | None] = {}

    def compile(self, text: str) -> str | None:
        """None, or why ``text`` does not compile."""
        if text not in self._errors:
            self._errors[text] = self._ask(text)
        return self._errors[text]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _start(self) -> subprocess.Popen[str]:
        root = Path(__file__).parents[2]
        self._log.truncate(0)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.tpu_compile.worker", self.target],
            cwd=root,
            env={**os.environ, "TPU_MIN_LOG_LEVEL": "2", "TPU_STDERR_LOG_LEVEL": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def _ask(self, text: str) -> str | None:
        if self._worker is None:
            self._worker = self._start()
        worker = self._worker
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps({"text": text}) + "\n")
            worker.stdin.flush()
            ready, _, _ = select.select([worker.stdout], [], [], LIMIT_SECONDS)
            line = worker.stdout.readline() if ready else ""
        except BrokenPipeError:
            line, ready = "", [worker.stdout]
        if line:
            error: str | None = json.loads(line)["error"]
            return error
        if ready:
            why = f"CRASH: the compiler ended its process ({worker.wait()}): {self._last_words()}"
        else:
            why = f"TIMEOUT: no answer within {LIMIT_SECONDS} s"
        self.close()
        return why

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        marked = [line for line in lines if "check failure" in line.lower() or line[:1] == "F"]
        return " ".join((marked or lines)[:3])[:600]
