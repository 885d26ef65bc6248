"""The TPU compiler, asked for each distinct program once."""

from __future__ import annotations

from torch_tpu.aot.compiler import close_workers, compile_all
from torch_tpu.aot.worker import Request

TARGET = "v6e:1x1"
LIMIT_SECONDS = 240


class TpuCompiler:
    """Compiles programs for ``target`` in a process that a program may end."""

    def __init__(self, target: str = TARGET) -> None:
        self.target = target
        self._errors: dict[str, str | None] = {}

    def compile(self, text: str) -> str | None:
        """None, or why ``text`` does not compile."""
        if text not in self._errors:
            request = Request(text, self.target, verdict_only=True)
            (reply,) = compile_all([request], jobs=1, timeout=LIMIT_SECONDS)
            self._errors[text] = f"{reply.code}: {reply.message}" if reply.code else None
        return self._errors[text]

    def close(self) -> None:
        close_workers()
