"""The backend ``tpu`` of ``torch.compile``, and what happens when no backend is named.

Light on purpose: it is imported as soon as Dynamo's table of backends is, by CPU users too. The
compiler itself is imported for the first graph that has to do with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["DefaultBackend", "install", "tpu"]


def tpu(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo for the device; forward and backward become one program each.

    mode     any of PyTorch's names; the device has one way to compile, so they all mean the same
    options  see :class:`torch_tpu.dynamo.options.CompileOptions`

    Raises ValueError for a mode or an option that does not exist, with the list of those that do.
    """
    from torch_tpu.dynamo.compiler import compile_module
    from torch_tpu.dynamo.options import CompileOptions

    return compile_module(module, example_inputs, CompileOptions.parse(mode, options))


class DefaultBackend:
    """What ``torch.compile`` uses without ``backend=``: this device's compiler for graphs that
    have to do with it, PyTorch's own default (Inductor) for all others, exactly as without us."""

    __name__ = "inductor"  # how Dynamo calls it in messages and logs

    def __call__(
        self,
        module: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if uses_device(module, example_inputs):
            return tpu(module, example_inputs, mode=mode, options=options)
        return torch._TorchCompileInductorWrapper(mode, options, None)(module, example_inputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultBackend)

    def __hash__(self) -> int:
        return hash(DefaultBackend)

    def __repr__(self) -> str:
        return "inductor"


def uses_device(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a tensor of the device goes in or comes up in the graph."""

    def ours(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.device.type == "tpu"
        return isinstance(value, (list, tuple)) and any(map(ours, value))

    if any(map(ours, example_inputs)):
        return True
    return any(
        ours(node.meta.get("example_value", node.meta.get("val"))) for node in module.graph.nodes
    )


def install() -> None:
    """Register the backend and make it the choice for the device's graphs.

    Both through PyTorch's own tables; a default that the user has set stays.
    """
    from torch._dynamo.backends import registry

    if "tpu" not in registry._COMPILER_FNS:
        registry.register_backend(tpu, name="tpu")
    if registry.get_default_backend() == "inductor":
        registry.set_default_backend(DefaultBackend())
