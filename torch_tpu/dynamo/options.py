"""The options of ``torch.compile(backend="tpu", mode=..., options={...})``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch_tpu.program.bounded import policy

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompileOptions:
    """What a user may ask of the compiler.

    async_compile        build the executable in the background; the first call waits for it
    num_dynamic_buckets  how many sizes (1 to 8) a dynamic dimension is rounded up to
    bucket_size          the step between those sizes, in elements
    debug_callback       called as ``debug_callback(stage, artifact)`` with "graph" (Dynamo's
                         GraphModule), "forward"/"backward" (AOTAutograd's GraphModules) and
                         "forward_text"/"backward_text" (StableHLO)
    name                 names the programs in errors, reports and profiles
    """

    async_compile: bool = False
    num_dynamic_buckets: int = 1
    bucket_size: int = 128
    debug_callback: Callable[[str, Any], None] | None = None
    name: str = "compiled"

    def bucket(self, limit: int | None) -> policy.Bucket:
        """What a dynamic size is rounded up to.

        With an upper limit there are ``num_dynamic_buckets`` sizes up to it, evenly spaced and
        multiples of ``bucket_size`` but for the last; without one, powers of two.
        """
        if limit is None:
            # Every size of a graph may be dynamic, batches of 2 included.
            return lambda size: policy.bucket(size, smallest=4)
        count, step = self.num_dynamic_buckets, self.bucket_size

        def bound(size: int) -> int:
            for k in range(1, count):
                share = -(-limit * k // count)
                end = min(-(-share // step) * step, limit)
                if size <= end:
                    return end
            return limit

        return bound

    @classmethod
    def parse(cls, mode: str | None, options: dict[str, Any] | None) -> CompileOptions:
        """Check what ``torch.compile`` passes on. Raises ValueError, TypeError for a wrong type."""
        if mode is not None and mode not in MODES:
            raise ValueError(f"mode: got {mode!r}; expected one of {', '.join(MODES)}")
        known = {f.name: f for f in fields(cls)}
        for name, value in (options or {}).items():
            if name not in known:
                raise ValueError(f"options: got {name!r}; the backend tpu takes {', '.join(known)}")
            _check(name, value)
        return cls(**(options or {}))


def _check(name: str, value: Any) -> None:
    expected: str | None = None
    if name == "async_compile" and not isinstance(value, bool):
        expected = "a bool"
    elif name == "debug_callback" and value is not None and not callable(value):
        expected = "a function"
    elif name == "name" and not isinstance(value, str):
        expected = "a string"
    elif name in ("num_dynamic_buckets", "bucket_size"):
        if not isinstance(value, int) or isinstance(value, bool):
            expected = "an int"
        elif value < 1 or (name == "num_dynamic_buckets" and value > 8):
            limit = "1 to 8" if name == "num_dynamic_buckets" else "at least 1"
            raise ValueError(f"options: {name}={value}; expected {limit}")
    if expected is not None:
        raise TypeError(f"options: {name}={value!r}; expected {expected}")
