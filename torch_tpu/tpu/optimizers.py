"""``torch.tpu.optimizers``: optimizers made for compiled steps, and whole steps as one program.

An :class:`Optimizer` here keeps nothing itself. ``init_param_group`` makes the state next to the
parameters it belongs to, and ``step`` writes both in place, so that a step can be traced together
with the model's forward and backward pass (:class:`SingleTraceTrainer`). They also work in eager
mode. For everything else ``torch.optim`` is the place; its steps compile too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["AdamW", "Muon", "Optimizer", "ParamGroup", "Sgd", "SingleTraceTrainer"]


@dataclass
class ParamGroup:
    """Parameters by name and what the optimizer keeps for them.

    params  name → parameter
    state   name → kind of state ("exp_avg", "momentum") → tensor of the parameter's shape
    step    int64 scalar on the parameters' device: steps taken
    """

    params: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    step: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Everything that a step reads and writes, in a fixed order."""
        states = [t for kinds in self.state.values() for t in kinds.values()]
        return [*self.params.values(), *states, *([] if self.step is None else [self.step])]

    def with_tensors(self, tensors: Iterable[Tensor]) -> ParamGroup:
        """The same group over other tensors, in the order of :meth:`tensors`."""
        feed = iter(tensors)
        params = {name: next(feed) for name in self.params}
        state = {name: {kind: next(feed) for kind in kinds} for name, kinds in self.state.items()}
        return ParamGroup(params, state, None if self.step is None else next(feed))


Params = Mapping[str, Tensor] | Iterable[Tensor]


class Optimizer(ABC):
    """An update rule. ``defaults`` holds its hyperparameters, which a compiled step takes as
    constants."""

    def __init__(self, **defaults: Any) -> None:
        self.defaults = defaults

    def init_param_group(self, params: Params) -> ParamGroup:
        """A group with zero state for parameters given by name or in order."""
        named = dict(params) if isinstance(params, Mapping) else dict(_numbered(params))
        if not named:
            raise ValueError("optimizer got an empty parameter list")
        device = next(iter(named.values())).device
        state = {name: self._init_state(name, p) for name, p in named.items()}
        return ParamGroup(named, state, torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def step(self, param_group: ParamGroup, grads: Mapping[str, Tensor] | Iterable[Tensor]) -> None:
        """Update parameters and state in place. ``grads`` by name or in the parameters' order."""
        if not isinstance(grads, Mapping):
            grads = dict(zip(param_group.params, grads, strict=True))
        assert param_group.step is not None
        param_group.step.add_(1)
        count = param_group.step.to(torch.float32)
        for name, p in param_group.params.items():
            grad = grads.get(name)
            if grad is not None:
                self._update(p, grad, param_group.state[name], count)

    @abstractmethod
    def _init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        """The state of one parameter."""

    @abstractmethod
    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor) -> None:
        """Update one parameter; ``count`` is the number of this step, a float32 scalar."""


def _numbered(params: Iterable[Tensor]) -> Iterable[tuple[str, Tensor]]:
    return ((str(i), p) for i, p in enumerate(params))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"Invalid {name}: got {value}; expected a number >= 0")


class Sgd(Optimizer):
    """Stochastic gradient descent with PyTorch's momentum (Sutskever et al., 2013)."""

    def __init__(
        self,
        lr: float = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        _positive(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and momentum == 0:
            raise ValueError("Nesterov momentum requires a momentum")
        super().__init__(lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    def _init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        # The first step's momentum is the gradient: what zero times anything plus it gives.
        return {"momentum": torch.zeros_like(param)} if self.defaults["momentum"] else {}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor) -> None:
        d = self.defaults
        if d["weight_decay"]:
            grad = grad + d["weight_decay"] * p
        if d["momentum"]:
            buffer = state["momentum"].mul_(d["momentum"]).add_(grad)
            grad = grad + d["momentum"] * buffer if d["nesterov"] else buffer
        p.sub_(d["lr"] * grad)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    ``state_dtype``: dtype of the moments, bfloat16 by default to halve their memory; the update is
    computed in float32. None keeps the parameters' dtype.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state_dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        _positive(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= b < 1 for b in betas):
            raise ValueError(f"Invalid betas: got {betas}; expected two numbers in [0, 1)")
        super().__init__(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, state_dtype=state_dtype
        )

    def _init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        dtype = self.defaults["state_dtype"] or param.dtype
        return {
            "exp_avg": torch.zeros_like(param, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(param, dtype=dtype),
        }

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor) -> None:
        d = self.defaults
        (b1, b2), wide = d["betas"], torch.promote_types(p.dtype, torch.float32)
        grad = grad.to(wide)
        m = torch.lerp(state["exp_avg"].to(wide), grad, 1 - b1)
        v = state["exp_avg_sq"].to(wide) * b2 + grad * grad * (1 - b2)
        unbias1, unbias2 = 1 - b1**count, 1 - b2**count
        change = (m / unbias1) / (v.sqrt() / unbias2.sqrt() + d["eps"])
        p.copy_(p.to(wide) * (1 - d["lr"] * d["weight_decay"]) - d["lr"] * change)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)


class Muon(Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations (Jordan et al., 2024), for matrices.

    Parameters that are not 2-d are updated by AdamW with ``adamw_lr``. ``lr`` is scaled by
    sqrt(max(1, rows / columns)).
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(
        self,
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adamw_lr: float = 3e-4,
    ) -> None:
        _positive(lr=lr, momentum=momentum, weight_decay=weight_decay, adamw_lr=adamw_lr)
        if ns_steps < 1:
            raise ValueError(f"Invalid ns_steps: got {ns_steps}; expected at least 1")
        super().__init__(
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            ns_steps=ns_steps,
            adamw_lr=adamw_lr,
        )
        self._others = AdamW(lr=adamw_lr, weight_decay=weight_decay, state_dtype=None)

    def _init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        if param.dim() != 2:
            return self._others._init_state(name, param)
        return {"momentum": torch.zeros_like(param)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor) -> None:
        if p.dim() != 2:
            self._others._update(p, grad, state, count)
            return
        d = self.defaults
        buffer = state["momentum"].lerp_(grad, 1 - d["momentum"])
        update = torch.lerp(grad, buffer, d["momentum"]) if d["nesterov"] else buffer
        direction = self.orthogonalised(update, d["ns_steps"])
        rate = d["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1]))
        p.mul_(1 - d["lr"] * d["weight_decay"]).sub_((rate * direction).to(p.dtype))

    @classmethod
    def orthogonalised(cls, matrix: Tensor, steps: int = 5) -> Tensor:
        """Approximately U Vᵀ of the matrix's SVD, float32: singular values end near 1."""
        a, b, c = cls.COEFFICIENTS
        x = matrix.to(torch.float32)
        tall = x.shape[0] > x.shape[1]
        x = x.t() if tall else x
        x = x / (torch.linalg.vector_norm(x) + 1e-7)
        for _ in range(steps):
            gram = x @ x.t()
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.t() if tall else x


LossFn = Callable[[Any, Any], Tensor]
CompileFn = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


def _model_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss that a model computes itself (Transformers), or its output if it is a scalar."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Tensor) and outputs.dim() == 0:
        loss = outputs
    if loss is None:
        raise TypeError(
            f"SingleTraceTrainer: the model returns {type(outputs).__name__}, which is no loss; "
            "pass compute_loss_fn(outputs, targets)"
        )
    return loss


class SingleTraceTrainer:
    """Forward, backward and optimizer as one program, in which parameters and state are donated.

    model            its parameters and buffers are updated in place
    optimizer        one of this module's, or your own :class:`Optimizer`
    compile_fn       ``compile_fn(graph_module, inputs)`` gives the callable to run, as a backend of
                     Dynamo does; default: one program for the device
    compute_loss_fn  ``compute_loss_fn(outputs, targets)`` gives a scalar; default: the loss that
                     the model returns
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        compile_fn: CompileFn | None = None,
        compute_loss_fn: LossFn | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.compile_fn = compile_fn
        self.compute_loss_fn = compute_loss_fn or _model_loss
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.param_group = optimizer.init_param_group(trained)
        self._fixed = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._fixed |= dict(model.named_buffers())

    def make_compiled_train_step(
        self, example_inputs: Any, example_targets: Any = None
    ) -> Callable[..., Tensor]:
        """Trace a step for inputs of these shapes; nothing is computed or changed.

        example_inputs  a tensor, a tuple of positional or a mapping of keyword arguments
        Returns ``step(inputs, targets=None) -> loss``, which takes inputs of the same structure,
        shapes and dtypes (ValueError otherwise).
        """
        from torch_tpu.dynamo.capture import capture

        flat, structure = pytree.tree_flatten((example_inputs, example_targets))
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        examples = [flat[i] for i in places]
        names = list(self._fixed)
        state = [*self.param_group.tensors(), *self._fixed.values()]
        count = len(self.param_group.tensors())

        def step(*tensors: Tensor) -> list[Tensor]:
            group = self.param_group.with_tensors(tensors[:count])
            fixed = dict(zip(names, tensors[count : len(state)], strict=True))
            filled = list(flat)
            for i, t in zip(places, tensors[len(state) :], strict=True):
                filled[i] = t
            inputs, targets = pytree.tree_unflatten(filled, structure)
            leaves = {n: p.detach().requires_grad_() for n, p in group.params.items()}
            with torch.enable_grad():
                loss = self.compute_loss_fn(_call(self.model, leaves | fixed, inputs), targets)
                grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            named = {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}
            self.optimizer.step(group, named)
            return [loss.detach()]

        graph = capture(step, [*state, *examples])
        run = (self.compile_fn or _one_program)(graph, [*state, *examples])
        boxed = getattr(run, "_boxed_call", False)
        expected = [(t.shape, t.dtype) for t in examples]

        def compiled_step(inputs: Any, targets: Any = None) -> Tensor:
            given, found = pytree.tree_flatten((inputs, targets))
            tensors = [given[i] for i in places] if found == structure else []
            if [(t.shape, t.dtype) for t in tensors] != expected:
                raise ValueError(
                    "compiled train step: inputs differ from the example's structure, shapes or "
                    f"dtypes; got {[(tuple(t.shape), t.dtype) for t in tensors]}; expected "
                    f"{[(tuple(s), d) for s, d in expected]}"
                )
            values = [*self.param_group.tensors(), *self._fixed.values(), *tensors]
            with torch.no_grad():
                out = run(values) if boxed else run(*values)
            return out[0]

        return compiled_step


def _call(model: torch.nn.Module, tensors: dict[str, Tensor], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return torch.func.functional_call(model, tensors, (), dict(inputs))
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return torch.func.functional_call(model, tensors, args)


def _one_program(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    from torch_tpu.dynamo.compiler import compile_graph
    from torch_tpu.dynamo.options import CompileOptions

    return compile_graph(graph, "train_step", CompileOptions(), strict=True)
