"""A model, or a whole training step, as one functional graph, without any of its numbers.

Everything is traced with fake tensors on the ``tpu`` device: parameters and inputs may be real, on
the meta device or fake; only their layout is looked at, and no weight is ever materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torch_tpu import _C
from torch_tpu.aot import layers
from torch_tpu.aot.folding import fold
from torch_tpu.aot.layers import Bodies
from torch_tpu.aot.tracing import (
    DEVICE,
    backward_places,
    fake_like,
    graph_flops,
    module_paths,
    trace,
)

Role = Literal["parameter", "buffer", "optimizer", "input"]
OptimizerFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

# One value of the result depends on the same element of the operands alone, so that the parameters
# of equal layers may be stacked before the update.
ELEMENTWISE_OPTIMIZERS = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"}
    | {"RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"}
)


@dataclass(frozen=True)
class Input:
    """One input of the captured program.

    name   "layers.*.weight" for the stacked parameters of equal layers, "exp_avg(…)" for optimizer
           state, "args[0]" for an argument
    parameter   for parameters and their optimizer state: the parameter's name
    layers      how many layers are stacked in dim 0; 0 if none
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: str = ""
    layers: int = 0


@dataclass
class Captured:
    """A captured program.

    graph        functional ATen graph; writes to inputs are ``copy_`` nodes at its end
    model_flops  FLOPs of the model's matmuls, without what is computed again to save memory
    loops        how many stacks of layers became loops
    """

    graph: torch.fx.GraphModule
    fakes: list[torch.Tensor]
    inputs: list[Input]
    bodies: Bodies
    model_flops: float
    loops: int
    train: bool
    name: str = "program"
    parameters: int = 0
    notes: list[str] = field(default_factory=list)
    donated: list[int] = field(default_factory=list)


def capture(
    fn: Callable[..., Any] | nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    train: bool = False,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: OptimizerFactory | None = None,
    autocast: torch.dtype | None = None,
    donate: Sequence[int] = (),
    fold_layers: bool = True,
) -> Captured:
    """Capture a call of ``fn``, or a training step of the module ``fn``.

    args, kwargs  example arguments; tensors may be real, meta or fake
    train         forward, backward and the optimizer's update as one program
    loss          from the module's output (and the arguments, if it takes them) to a scalar;
                  default: the output itself, or its ``loss``
    optimizer     from parameters to an optimizer; default ``torch.optim.AdamW``
    autocast      dtype of ``torch.autocast`` around the forward pass
    donate        positions of tensor arguments whose memory the results may take
    fold_layers   trace equal layers once and run them as a loop over stacked parameters

    Raises TypeError for arguments of the wrong kind, and what tracing the model raises.
    """
    if not callable(fn):
        raise TypeError(f"aot: got {type(fn).__name__}; expected a module or a function")
    module = fn if isinstance(fn, nn.Module) else None
    if train and module is None:
        raise TypeError("aot: train=True needs an nn.Module; got a function")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    bodies = Bodies()
    found = _Capture(mode, bodies, fn, module, args, kwargs or {}, autocast, fold_layers).run(
        train, loss, optimizer
    )
    names = [f"args[{n}]" for n in donate]
    found.donated = [n for n, i in enumerate(found.inputs) if i.role == "input" and i.name in names]
    if len(found.donated) != len(names):
        raise ValueError(f"aot: donate={tuple(donate)}; expected positions of tensor arguments")
    return found


@contextmanager
def _attention_as_one_op() -> Iterator[None]:
    """Scaled dot product attention is one node inside, its gradient computes the scores again."""
    before = _C.exchange_one_op_attention(True)
    try:
        yield
    finally:
        _C.exchange_one_op_attention(before)


class _Capture:
    def __init__(
        self,
        mode: FakeTensorMode,
        bodies: Bodies,
        fn: Callable[..., Any],
        module: nn.Module | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None,
        fold_layers: bool,
    ) -> None:
        self.mode, self.bodies, self.fn, self.module = mode, bodies, fn, module
        self.autocast = autocast
        self.inputs: list[Input] = []
        self.fakes: list[torch.Tensor] = []
        self.notes: list[str] = []
        self.fold = fold_layers and module is not None
        self.stacks: dict[str, int] = {}
        if self.fold and module is not None:
            self.stacks = {n: len(c) for n, c in layers.stacks(module).items()}
        self.args, self.spec = pytree.tree_flatten((tuple(args), kwargs))

    # -- inputs ----------------------------------------------------------------------------

    def add(
        self, name: str, role: Role, fake: torch.Tensor, parameter: str = "", stacked: int = 0
    ) -> int:
        self.inputs.append(Input(name, role, tuple(fake.shape), fake.dtype, parameter, stacked))
        self.fakes.append(fake)
        return len(self.fakes) - 1

    def add_state(self, stack_parameters: bool) -> dict[str, tuple[int, int | None]]:
        """Inputs for parameters and buffers: name -> (input, layer in it or None)."""
        where: dict[str, tuple[int, int | None]] = {}
        if self.module is None:
            return where
        stacked: dict[str, int] = {}
        members: list[tuple[str, Role, torch.Tensor]] = [
            *((n, "parameter", t) for n, t in self.module.named_parameters()),
            *((n, "buffer", t) for n, t in self.module.named_buffers()),
        ]
        for name, role, tensor in members:
            group = self._stack_of(name) if stack_parameters else None
            if group is None:
                fake = fake_like(self.mode, tensor).detach()
                where[name] = (self.add(name, role, fake, name), None)
                continue
            common, layer, count = group
            if common not in stacked:
                with self.mode:
                    fake = torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=DEVICE)
                stacked[common] = self.add(common, role, fake, common, count)
            where[name] = (stacked[common], layer)
        return where

    def _stack_of(self, name: str) -> tuple[str, int, int] | None:
        """("layers.*.weight", layer, layers) of a member of a stack of equal layers."""
        for stack, count in self.stacks.items():
            if name.startswith(stack + "."):
                layer, _, rest = name[len(stack) + 1 :].partition(".")
                return f"{stack}.*.{rest}", int(layer), count
        return None

    def add_arguments(self) -> list[int | None]:
        """Inputs for the tensors among the arguments, by leaf."""
        out: list[int | None] = []
        paths = [
            pytree.keystr(path)
            for path, _ in pytree.tree_flatten_with_path(
                pytree.tree_unflatten(self.args, self.spec)
            )[0]
        ]
        for path, leaf in zip(paths, self.args, strict=True):
            if isinstance(leaf, torch.Tensor):
                name = path.replace("[0]", "args", 1) if path.startswith("[0]") else path[3:]
                out.append(self.add(name, "input", fake_like(self.mode, leaf).detach()))
            else:
                out.append(None)
        return out

    # -- running the model on traced tensors -------------------------------------------------

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        state: dict[str, torch.Tensor],
        arguments: Sequence[int | None],
    ) -> tuple[Any, tuple[Any, dict[str, Any]]]:
        leaves = [
            leaf if place is None else tensors[place]
            for leaf, place in zip(self.args, arguments, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(DEVICE, self.autocast))
            if self.module is None:
                out = self.fn(*args, **kwargs)
            else:
                out = torch.func.functional_call(self.module, state, args, kwargs)
        return out, (args, kwargs)

    @staticmethod
    def unstacked(
        tensors: Sequence[torch.Tensor], where: dict[str, tuple[int, int | None]]
    ) -> dict[str, torch.Tensor]:
        """The module's own names -> tensors, layers taken from their stack."""
        parts: dict[int, tuple[torch.Tensor, ...]] = {}
        out = {}
        for name, (place, layer) in where.items():
            if layer is None:
                out[name] = tensors[place]
            else:
                if place not in parts:
                    parts[place] = torch.unbind(tensors[place], 0)
                out[name] = parts[place][layer]
        return out

    # -- the programs ------------------------------------------------------------------------

    def run(
        self,
        train: bool,
        loss: Callable[..., torch.Tensor] | None,
        factory: OptimizerFactory | None,
    ) -> Captured:
        make = factory or (lambda parameters: torch.optim.AdamW(parameters))
        if train:
            kind = type(self._optimizer(make, [torch.zeros(1)])).__name__
            if self.stacks and kind not in ELEMENTWISE_OPTIMIZERS:
                self.notes.append(
                    f"{kind} may mix the elements of a parameter: layers are not stacked"
                )
                self.stacks = {}
        where = self.add_state(True)
        arguments = self.add_arguments()
        training = self.module.training if self.module is not None else False
        with ExitStack() as stack:
            stack.enter_context(layers.bodies_in_use(self.bodies))
            stack.enter_context(self.mode)
            stack.enter_context(_attention_as_one_op())
            stack.enter_context(module_paths(self.module, list(self.stacks)))
            if self.stacks and self.module is not None:
                stack.enter_context(layers.blocks_as_nodes(self.module))
            try:
                if train:
                    assert self.module is not None
                    self.module.train()
                    graph = self.train_step(where, arguments, loss, make)
                else:
                    graph = self.inference(where, arguments)
            finally:
                if self.module is not None:
                    self.module.train(training)
            flops = graph_flops(graph, lambda body: self.bodies.bodies[body].flops)
            loops = fold(graph, self.bodies)
        return Captured(
            graph=graph,
            fakes=self.fakes,
            inputs=self.inputs,
            bodies=self.bodies,
            model_flops=flops,
            loops=loops,
            train=train,
            name=type(self.fn).__name__ if self.module is not None else self.fn.__name__,
            parameters=sum(t.numel() for t, i in self._of_role("parameter")),
            notes=self.notes,
        )

    def _of_role(self, role: Role) -> list[tuple[torch.Tensor, Input]]:
        return [(t, i) for t, i in zip(self.fakes, self.inputs, strict=True) if i.role == role]

    def inference(
        self, where: dict[str, tuple[int, int | None]], arguments: Sequence[int | None]
    ) -> torch.fx.GraphModule:
        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            with torch.no_grad():
                out, _ = self.call(tensors, self.unstacked(tensors, where), arguments)
            return [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]

        return trace(run, self.fakes)

    def train_step(
        self,
        where: dict[str, tuple[int, int | None]],
        arguments: Sequence[int | None],
        loss: Callable[..., torch.Tensor] | None,
        make: OptimizerFactory,
    ) -> torch.fx.GraphModule:
        assert self.module is not None
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        places = [
            n
            for n, i in enumerate(self.inputs)
            if i.role == "parameter" and not any(where[f][0] == n for f in frozen)
        ]
        state = self._optimizer_state(make, places)

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            values = list(tensors)
            for n in places:
                values[n] = tensors[n].detach().requires_grad_(True)
            leaves = [values[n] for n in places]
            with torch.enable_grad():
                out, (args, kwargs) = self.call(values, self.unstacked(values, where), arguments)
                value = _loss_of(out, loss, args, kwargs)
            backward_places(value)
            with torch.autograd.set_multithreading_enabled(False):
                grads = torch.autograd.grad(value, leaves, allow_unused=True)
            with torch.no_grad():
                parameters = [tensors[n] for n in places]
                optimizer = self._optimizer(make, parameters)
                for p, g, slots in zip(parameters, grads, state, strict=True):
                    p.grad = torch.zeros_like(p) if g is None else g
                    optimizer.state[p] = {
                        k: tensors[v] if isinstance(v, int) else v[0] for k, v in slots.items()
                    }
                optimizer.step()
                for p in parameters:
                    p.grad = None
            return [value.detach()]

        return trace(run, self.fakes)

    def _optimizer(
        self, make: OptimizerFactory, parameters: list[torch.Tensor]
    ) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"aot: optimizer= gave {type(optimizer).__name__}; expected a torch.optim.Optimizer"
            )
        for group in optimizer.param_groups:
            # One program without a look at values: step counts live on the device.
            if "capturable" in group:
                group["capturable"] = True
            if group.get("foreach") is None and "foreach" in group:
                group["foreach"] = False
        return optimizer

    def _optimizer_state(
        self, make: OptimizerFactory, places: Sequence[int]
    ) -> list[dict[str, int | tuple[Any]]]:
        """State after a first step: for each parameter, name -> input, or (value,)."""
        with self.mode:
            parameters = [torch.empty_like(self.fakes[n]) for n in places]
            optimizer = self._optimizer(make, parameters)
            for p in parameters:
                p.grad = torch.empty_like(p)
            optimizer.step()
        out: list[dict[str, int | tuple[Any]]] = []
        for n, p in zip(places, parameters, strict=True):
            slots: dict[str, int | tuple[Any]] = {}
            name = self.inputs[n].name
            for key, value in optimizer.state[p].items():
                if isinstance(value, torch.Tensor):
                    fake = fake_like(self.mode, value)
                    same = value.shape == p.shape
                    stacked = self.inputs[n].layers if same else 0
                    slots[key] = self.add(f"{key}({name})", "optimizer", fake, name, stacked)
                else:
                    slots[key] = (value,)
            out.append(slots)
        return out


def _loss_of(
    out: Any, loss: Callable[..., torch.Tensor] | None, args: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    value = out
    if loss is not None:
        value = loss(out, *args, **kwargs) if _takes_arguments(loss) else loss(out)
    elif isinstance(getattr(out, "loss", None), torch.Tensor):
        value = out.loss
    elif isinstance(out, (tuple, list)) and out:
        value = out[0]
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"aot: the loss is {got}; expected a tensor with one element. Give loss=, a function "
            "of the module's output (and its arguments)"
        )
    return value.reshape(())


def _takes_arguments(loss: Callable[..., Any]) -> bool:
    import inspect

    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
        and p.default is p.empty
    ]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in positional)
