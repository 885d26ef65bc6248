"""Compiler replies kept between runs, in the compile cache that programs for devices use."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch_tpu.aot.compiler import DEFAULT_TIMEOUT, compile_all, require_libtpu
from torch_tpu.aot.worker import Reply, Request
from torch_tpu.program import cache, identity
from torch_tpu.program.store import Description, encode


def key_of(request: Request, tiers: cache.Tiers) -> str:
    """Depends on the text, the compile options, the topology and the build of libtpu."""
    memory = tiers.settings.directory / "plugins.json" if tiers.settings.directory else None
    compiler = identity.file_identity(Path(require_libtpu()), memory)
    what = (
        "aot 1",
        compiler,
        request.topology,
        request.partitions,
        sorted(request.options.items()),
    )
    return tiers.key(request.text, repr(what).encode())


def compile_cached(
    requests: Sequence[Request],
    *,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    done: Callable[[int, Reply], None] | None = None,
) -> list[Reply]:
    """:func:`compile_all` for what no earlier run has compiled.

    Replies with an error are kept only if they are about the program: too large, or refused.
    """
    require_libtpu()
    tiers = cache.tiers()
    replies: list[Reply | None] = [None] * len(requests)
    keys = [key_of(r, tiers) if tiers is not None else "" for r in requests]
    if tiers is not None:
        for i, key in enumerate(keys):
            payload = tiers.read(key) or tiers.fetch(key)
            if payload is not None:
                reply: Reply = replace(pickle.loads(payload), cached=True)
                replies[i] = reply
                if done is not None:
                    done(i, reply)
    missing = [i for i, r in enumerate(replies) if r is None]

    def ready(index: int, reply: Reply) -> None:
        if done is not None:
            done(missing[index], reply)

    fresh = compile_all([requests[i] for i in missing], jobs=jobs, timeout=timeout, done=ready)
    for i, reply in zip(missing, fresh, strict=True):
        replies[i] = reply
        if tiers is not None and reply.code not in ("CRASH", "TIMEOUT"):
            about = Description(keys[i], "aot", f"libtpu {requests[i].topology}", reply.seconds)
            tiers.write(keys[i], encode(about, pickle.dumps(reply)))
    return [r for r in replies if r is not None]
