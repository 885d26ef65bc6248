"""The joint graph of forward and backward, cut in two where the least has to be saved.

PyTorch's partitioner; its elimination of common subexpressions alone is done here. PyTorch's knows
mutated graphs, which these are not, through Inductor's pattern matcher, whose import takes longer
than compiling a small model.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["eliminate_common_subexpressions", "partition"]


def partition(module: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """A ``partition_fn`` of AOTAutograd."""
    if not config.cse:
        return min_cut_rematerialization_partition(module, *args, **kwargs)
    module.graph.eliminate_dead_code()
    eliminate_common_subexpressions(module.graph)
    with config.patch(cse=False):
        return min_cut_rematerialization_partition(module, *args, **kwargs)


def eliminate_common_subexpressions(graph: torch.fx.Graph) -> None:
    """Replace each call by an earlier one of the same op with the same arguments.

    Random ops and writes stay, and what shares memory with an output, so that tensors that eager
    execution returns apart stay apart.
    """
    (output,) = graph.find_nodes(op="output")
    returned = {_storage(node) for node in output.all_input_nodes} - {None}
    known: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            continue
        if target.overloadpacket is torch.ops.aten.empty or node.is_impure():
            continue
        if _storage(node) in returned:
            continue
        try:
            key = (target, _key(node.args), _key(node.kwargs))
            earlier = known.setdefault(key, node)
        except TypeError:  # an argument without a hash: a size that varies
            continue
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _key(value: Any) -> Hashable:
    """Equal for arguments that mean the same: 1, 1.0 and True do not, nor do 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", *((k, _key(v)) for k, v in sorted(value.items())))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a size that varies")
    return (type(value), value)


def _storage(node: Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return StorageWeakRef(value.untyped_storage())
    except NotImplementedError:
        return None
