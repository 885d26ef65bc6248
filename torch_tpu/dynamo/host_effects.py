"""Prints in a compiled graph: the program returns what is printed, the host prints it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.print import print as higher_order_print

__all__ = ["Effect", "run_after", "take_out"]

_ON_HOST = (higher_order_print, torch.ops.aten._print.default)

# What to call with which arguments; a _Place stands for an output of the graph.
Effect = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Place(int):
    """The position of an argument among the outputs that were added."""


def take_out(module: torch.fx.GraphModule) -> list[Effect]:
    """Remove the prints from a graph and append what they print to its outputs.

    A graph that prints anything but tensors and constants stays as it is.
    """
    graph = module.graph
    prints = [n for n in graph.nodes if n.target is with_effects and n.args[1] in _ON_HOST]
    if not all(map(_can_move, prints)):
        return []
    (output,) = (n for n in graph.nodes if n.op == "output")
    added: list[torch.fx.Node] = []
    effects: list[Effect] = []

    def place(node: torch.fx.Node) -> Any:
        if node not in added:
            added.append(node)
        return _Place(added.index(node))

    for node in prints:
        token, op, *args = node.args
        effects.append((op, *torch.fx.map_arg((tuple(args), dict(node.kwargs)), place)))
        for user in list(node.users):
            if user.args[1] == 0:
                user.replace_all_uses_with(token)
            else:
                output.args = (torch.fx.map_arg(output.args[0], _none_for(user)),)
            graph.erase_node(user)
        graph.erase_node(node)
    if effects:
        output.args = ([*output.args[0], *added],)
        module.recompile()
    return effects


def _can_move(node: torch.fx.Node) -> bool:
    printed = [n for n in node.all_input_nodes if n is not node.args[0]]
    tensors = all(isinstance(n.meta.get("val"), torch.Tensor) for n in printed)
    return tensors and all(user.target is operator.getitem for user in node.users)


def _none_for(node: torch.fx.Node) -> Callable[[torch.fx.Node], Any]:
    return lambda n: None if n is node else n


def run_after(run: Callable[[list[Any]], Sequence[Any]], effects: Sequence[Effect]) -> Any:
    """``run`` (boxed: it takes one list), then the effects, which see its last outputs."""
    count = 1 + max(
        (
            leaf
            for effect in effects
            for leaf in torch.utils._pytree.tree_leaves(effect[1:])
            if isinstance(leaf, _Place)
        ),
        default=-1,
    )

    def call(inputs: list[Any]) -> Sequence[Any]:
        outputs = run(inputs)
        values = outputs[len(outputs) - count :]
        for op, args, kwargs in effects:
            args, kwargs = torch.utils._pytree.tree_map_only(
                _Place, values.__getitem__, (args, kwargs)
            )
            op(*args, **kwargs)
        return outputs[: len(outputs) - count]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
