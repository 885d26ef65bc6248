"""Chains of equal layers in a captured graph become loops (see :mod:`torch_tpu.aot.layers`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_tpu.aot.layers import LAYER, LOOP, MIN_LAYERS, Bodies, Plan
from torch_tpu.aot.tracing import Spec


def fold(module: torch.fx.GraphModule, bodies: Bodies) -> int:
    """Replace chains of layer nodes by loops, in place; returns how many loops there are."""
    graph = module.graph
    chains = _chains(graph)
    plans = [c for c in (_ChainPlan.make(chain) for chain in chains) if c is not None]
    for plan in plans:
        plan.find_saved(plans)
    for plan in plans:
        plan.insert(graph, bodies, plans)
    if plans:
        _sort(graph)
        graph.eliminate_dead_code()
        module.recompile()
    return len(plans)


def _item(node: Any) -> tuple[torch.fx.Node, int] | None:
    """(node, i) for a node that is item i of a node's result."""
    if isinstance(node, torch.fx.Node) and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None


def _chains(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Runs of nodes of one body, each fed by the one before."""
    chains: list[list[torch.fx.Node]] = []
    last: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.target is not LAYER:
            continue
        body = node.args[1]
        chain = last.get(body)
        fed = chain is not None and any(
            (item := _item(v)) is not None and item[0] is chain[-1] for v in node.args[0]
        )
        if chain is None or not fed:
            chain = []
            chains.append(chain)
            last[body] = chain
        chain.append(node)
    return [c for c in chains if len(c) >= MIN_LAYERS]


@dataclass(eq=False)
class _ChainPlan:
    chain: list[torch.fx.Node]
    slots: list[tuple[str, int]]
    carries: list[torch.fx.Node]
    carried: list[int]
    shared: list[torch.fx.Node]
    series: list[list[torch.fx.Node]]
    carry_ins: list[list[torch.fx.Node]]
    saved: list[tuple[str, int, bool]] = field(default_factory=list)
    loop: torch.fx.Node | None = None

    @staticmethod
    def make(chain: list[torch.fx.Node]) -> _ChainPlan | None:
        """None if the chain is no loop: an input depends on it in some other way."""
        plan = _ChainPlan(chain, [], [], [], [], [], [])
        after = _dependents(chain[0])
        for values in zip(*(n.args[0] for n in chain), strict=True):  # type: ignore[arg-type]
            items = [_item(v) for v in values[1:]]
            if all(v is values[0] for v in values):
                if values[0] in after:
                    return None
                plan.slots.append(("shared", len(plan.shared)))
                plan.shared.append(values[0])
            elif all(
                item is not None and item[0] is before and item[1] == items[0][1]  # type: ignore[index]
                for item, before in zip(items, chain, strict=False)
            ):
                plan.slots.append(("carry", len(plan.carries)))
                plan.carries.append(values[0])
                plan.carry_ins.append(list(values))
                plan.carried.append(items[0][1])  # type: ignore[index]
            else:
                if any(v in after for v in values):
                    return None
                plan.slots.append(("stacked", len(plan.series)))
                plan.series.append(list(values))
        return plan

    def find_saved(self, plans: Sequence[_ChainPlan]) -> None:
        """Which values of each iteration others read."""
        mine = set(self.chain)
        for other in plans:
            for series in other.series:
                for i, ins in enumerate(self.carry_ins):
                    if series in (ins, ins[::-1]):
                        self._save("in", i, False)
        outputs: dict[int, list[torch.fx.Node | None]] = {}
        for t, node in enumerate(self.chain):
            for user in node.users:
                item = _item(user)
                if item is not None:
                    outputs.setdefault(item[1], [None] * len(self.chain))[t] = user
        for out, items in outputs.items():
            stacked = _stack_of(items)
            if stacked is not None:
                self._save("out", out, stacked.args[0] == items[::-1])
                continue
            for t, item in enumerate(items):
                final = t == len(items) - 1 and out in self.carried
                if item is None or final:
                    continue
                outside = [u for u in item.users if u not in mine]
                if any(not self._covered(item, u, plans) for u in outside):
                    self._save("out", out, False)
                    break

    def _covered(
        self, item: torch.fx.Node, user: torch.fx.Node, plans: Sequence[_ChainPlan]
    ) -> bool:
        """Whether a use is another loop's, which reads the stacked carries instead."""
        for other in plans:
            if user in other.chain:
                return any(
                    item in series and any(series in (c, c[::-1]) for c in self.carry_ins)
                    for series in other.series
                )
        return False

    def _save(self, kind: str, index: int, reverse: bool) -> None:
        if all(s[:2] != (kind, index) for s in self.saved):
            self.saved.append((kind, index, reverse))

    def place(self, kind: str, index: int) -> tuple[int, bool] | None:
        """Result of the loop that holds a saved series, and whether it is reversed."""
        for i, (k, n, reverse) in enumerate(self.saved):
            if (k, n) == (kind, index):
                return len(self.carries) + i, reverse
        return None

    # -- rewriting -------------------------------------------------------------------------

    def insert(self, graph: torch.fx.Graph, bodies: Bodies, plans: Sequence[_ChainPlan]) -> None:
        length = len(self.chain)
        reverse: list[bool] = []
        stacked: list[torch.fx.Node] = []
        with graph.inserting_before(self.chain[-1]):
            for series in self.series:
                source, backwards = self._stacked(graph, series, plans)
                stacked.append(source)
                reverse.append(backwards)
            plan = Plan(
                length, tuple(self.slots), tuple(reverse), tuple(self.carried), tuple(self.saved)
            )
            bodies.plans.append(plan)
            number = self.chain[0].args[1]
            arguments = (self.carries, self.shared, stacked, number, len(bodies.plans) - 1)
            loop = graph.call_function(LOOP, arguments)
            body = bodies.bodies[number]  # type: ignore[index]
            first = [v.meta["val"] for v in self.chain[0].args[0]]  # type: ignore[union-attr]
            specs = [body.outputs[q] for q in self.carried]
            for kind, index, _ in self.saved:
                if kind == "out":
                    one = body.outputs[index]
                else:
                    value = first[self.slots.index(("carry", index))]
                    one = Spec(tuple(value.shape), tuple(value.stride()), value.dtype)
                specs.append(Spec((length, *one.shape), (), one.dtype))
            loop.meta.update(self.chain[0].meta)
            with _fake_mode_of(first):
                loop.meta["val"] = [
                    torch.empty(s.shape, dtype=s.dtype, device=first[0].device) for s in specs
                ]
            self.loop = loop
            self._replace_outputs(graph, loop)

    def _stacked(
        self, graph: torch.fx.Graph, series: list[torch.fx.Node], plans: Sequence[_ChainPlan]
    ) -> tuple[torch.fx.Node, bool]:
        """One tensor with the values of all iterations, and whether it is in reverse order."""
        for other in plans:
            for i, ins in enumerate(other.carry_ins):
                place = other.place("in", i)
                if series in (ins, ins[::-1]) and place is not None and other.loop is not None:
                    item = _get(graph, other.loop, place[0])
                    return item, (series == ins[::-1]) != place[1]
        items = [_item(v) for v in series]
        if all(i is not None and i[0] is items[0][0] for i in items):  # type: ignore[index]
            source = items[0][0]  # type: ignore[index]
            order = [i[1] for i in items]  # type: ignore[index]
            ascending = list(range(len(order)))
            whole = source.target is torch.ops.aten.unbind.int and not (
                source.args[1:] and source.args[1]
            )
            if whole and source.args[0].meta["val"].shape[0] == len(order):  # type: ignore[union-attr]
                if order == ascending:
                    return source.args[0], False  # type: ignore[return-value]
                if order == ascending[::-1]:
                    return source.args[0], True  # type: ignore[return-value]
        joined = graph.call_function(torch.ops.aten.stack.default, (list(series), 0))
        values = [v.meta["val"] for v in series]
        with _fake_mode_of(values):
            joined.meta["val"] = torch.empty(
                (len(values), *values[0].shape), dtype=values[0].dtype, device=values[0].device
            )
        return joined, False

    def _replace_outputs(self, graph: torch.fx.Graph, loop: torch.fx.Node) -> None:
        length = len(self.chain)
        for t, node in enumerate(self.chain):
            for user in list(node.users):
                item = _item(user)
                if item is None:
                    continue
                out = item[1]
                if t == length - 1 and out in self.carried:
                    user.replace_all_uses_with(_get(graph, loop, self.carried.index(out)))
                    continue
                place = self.place("out", out)
                if place is None:
                    continue  # only the next iteration reads it, or a loop that reads the carries
                whole = _get(graph, loop, place[0])
                for stack in [u for u in user.users if _is_stack(u)]:
                    parts = list(stack.args[0])  # type: ignore[arg-type]
                    mine = [_item(p) for p in parts]
                    nodes = [m[0] for m in mine if m is not None and m[1] == out]
                    if nodes in (self.chain, self.chain[::-1]) and len(nodes) == len(parts):
                        stored = self.chain[::-1] if place[1] else self.chain
                        if nodes == stored:
                            stack.replace_all_uses_with(whole)
                index = length - 1 - t if place[1] else t
                select = graph.call_function(torch.ops.aten.select.int, (whole, 0, index))
                select.meta.update(user.meta)
                user.replace_all_uses_with(select)


def _is_stack(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.stack.default and (len(node.args) < 2 or node.args[1] == 0)


def _stack_of(items: list[torch.fx.Node | None]) -> torch.fx.Node | None:
    """The ``stack`` of all iterations' items, in either order, if there is one."""
    if any(i is None for i in items):
        return None
    for user in items[0].users:  # type: ignore[union-attr]
        if _is_stack(user) and user.args[0] in (items, items[::-1]):
            return user
    return None


def _get(graph: torch.fx.Graph, node: torch.fx.Node, index: int) -> torch.fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def _fake_mode_of(values: Sequence[Any]) -> Any:
    return values[0].fake_mode


def _dependents(root: torch.fx.Node) -> set[torch.fx.Node]:
    seen: set[torch.fx.Node] = set()
    work = [root]
    while work:
        for user in work.pop().users:
            if user not in seen:
                seen.add(user)
                work.append(user)
    return seen


def _sort(graph: torch.fx.Graph) -> None:
    """Put nodes after what they read, otherwise in the order they are in."""
    done: set[torch.fx.Node] = set()
    order: list[torch.fx.Node] = []
    for root in list(graph.nodes):
        work = [(root, False)]
        while work:
            node, ready = work.pop()
            if node in done:
                continue
            if ready:
                done.add(node)
                order.append(node)
                continue
            work.append((node, True))
            work += [(i, False) for i in reversed(node.all_input_nodes) if i not in done]
    at = next(iter(order))
    for node in order[1:]:
        at.append(node)
        at = node
