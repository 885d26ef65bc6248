"""Captured graphs compute what the model computes, with layers folded or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.aot.conftest import TinyGpt
from torch_tpu import aot
from torch_tpu.aot import layers
from torch_tpu.aot.capture import Captured, capture
from torch_tpu.aot.program import write

LAYERS = 4


def state_of(model: nn.Module, captured: Captured) -> dict[str, torch.Tensor]:
    """The model's tensors under the program's names, equal layers stacked."""
    plain = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    out = {}
    for i in captured.inputs:
        if i.role not in ("parameter", "buffer"):
            continue
        if i.layers:
            parts = [plain[i.name.replace("*", str(n), 1)] for n in range(i.layers)]
            out[i.name] = torch.stack([p.detach() for p in parts])
        else:
            out[i.name] = plain[i.name].detach()
    return out


ATTENTION = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
ATTENTION_BACKWARD = (
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default
)


class Ops(torch.fx.Interpreter):
    """Runs a graph op by op on the device at hand; attention, an op for graphs only, by formula."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ATTENTION:
            query, key, value, bias, dropout, causal = (
                *args,
                *(None, 0.0, False)[len(args) - 3 :],
            )[:6]
            assert dropout == 0.0
            how = {"is_causal": causal, "enable_gqa": True, "scale": kwargs.get("scale")}
            out = F.scaled_dot_product_attention(query, key, value, bias, **how)
            out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as PyTorch's meta kernel says
            return [out, out, None, None, 0, 0, out, out, None]
        if target is ATTENTION_BACKWARD:
            grad, leaves, causal = (
                args[0],
                [t.detach().requires_grad_() for t in args[1:4]],
                args[13],
            )
            with torch.enable_grad():
                out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
                return [*torch.autograd.grad(out, leaves, grad), None]
        return super().call_function(target, args, kwargs)


class Evaluator(Ops):
    """Runs a captured graph, layer nodes and loops included."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.graph)
        self.bodies = captured.bodies

    def body(self, number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return Ops(self.bodies.bodies[number].graph).run(*inputs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is layers.LAYER:
            return self.body(args[1], args[0])
        if target is layers.LOOP:
            return self.loop(*args)
        return super().call_function(target, args, kwargs)

    def loop(self, carries: Any, shared: Any, stacked: Any, number: int, plan_number: int) -> Any:
        plan = self.bodies.plans[plan_number]
        saved: list[list[Any]] = [[None] * plan.length for _ in plan.saved]
        for t in range(plan.length):
            now = {"carry": carries, "shared": shared}
            now["stacked"] = [
                s[plan.length - 1 - t if r else t]
                for s, r in zip(stacked, plan.reverse, strict=True)
            ]
            outs = self.body(number, [now[kind][i] for kind, i in plan.slots])
            for rows, (kind, index, reverse) in zip(saved, plan.saved, strict=True):
                value = outs[index] if kind == "out" else carries[index]
                rows[plan.length - 1 - t if reverse else t] = value
            carries = [outs[q] for q in plan.carried]
        return [*carries, *(torch.stack(rows) for rows in saved)]


def evaluate(captured: Captured, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results on the CPU; ``values`` that the program writes to are written to."""
    device = [v.to("tpu") for v in values]
    out = Evaluator(captured).run(*device)
    for value, new in zip(values, device, strict=True):
        value.copy_(new)
    return [x.cpu() for x in out]


@pytest.mark.parametrize("fold", [True, False], ids=["loop", "unrolled"])
def test_inference_computes_the_model(fold: bool) -> None:
    torch.manual_seed(0)
    model = TinyGpt(LAYERS).eval()
    tokens = torch.randint(61, (2, 8))
    captured = capture(model, (tokens,), fold_layers=fold)
    assert captured.loops == int(fold)
    state = state_of(model, captured)
    (out,) = evaluate(captured, [*state.values(), tokens])
    torch.testing.assert_close(out, model(tokens), rtol=1e-5, atol=1e-5)


def test_equal_layers_become_one_loop_forward_and_one_backward() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    shallow, deep = (
        capture(TinyGpt(n), (tokens, tokens), train=True) for n in (LAYERS, 4 * LAYERS)
    )
    for captured in (shallow, deep):
        assert captured.loops == 2
        assert len(captured.bodies.bodies) == 2
        assert not [n for n in captured.graph.graph.nodes if n.target is layers.LAYER]
    lengths = [len(write(c).text.splitlines()) for c in (shallow, deep)]
    assert lengths[0] == lengths[1], "the program's size does not depend on the depth"


def test_unequal_layers_are_not_folded() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            for i, layer in enumerate(self.layers):
                layer.slope = 0.1 * i

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = F.leaky_relu(F.linear(x, layer.weight, layer.bias), layer.slope)
            return x

    model = Uneven()
    x = torch.randn(2, 4)
    captured = capture(model, (x,))
    assert captured.loops == 0
    (out,) = evaluate(captured, [*state_of(model, captured).values(), x])
    torch.testing.assert_close(out, model(x))


def test_blocks_that_differ_in_an_attribute_keep_their_own_code() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    model = nn.Sequential(*[Scaled(1.0 + (i % 2)) for i in range(6)]).eval()
    x = torch.randn(2, 4)
    captured = capture(model, (x,))
    assert captured.loops == 0 and len(captured.bodies.bodies) == 2
    (out,) = evaluate(captured, [*state_of(model, captured).values(), x])
    torch.testing.assert_close(out, model(x))


def test_a_numbering_attribute_does_not_split_the_loop() -> None:
    class Numbered(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.layer_idx = index
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    captured = capture(nn.Sequential(*[Numbered(i) for i in range(5)]), (torch.randn(2, 4),))
    assert captured.loops == 1 and len(captured.bodies.bodies) == 1


@pytest.mark.parametrize("given", ["meta", "fake", "real"])
def test_no_number_is_looked_at(given: str) -> None:
    if given == "fake":
        with FakeTensorMode():
            model, tokens = TinyGpt(3), torch.zeros(2, 8, dtype=torch.long)
    else:
        with torch.device("meta" if given == "meta" else "cpu"):
            model, tokens = TinyGpt(3), torch.zeros(2, 8, dtype=torch.long)
    captured = capture(model, (tokens,))
    assert captured.parameters == sum(p.numel() for p in model.parameters())
    assert captured.graph.graph.nodes


def test_huge_models_need_no_memory() -> None:
    with torch.device("meta"):
        model = TinyGpt(80, width=8192, heads=64, words=128_256)
        tokens = torch.zeros(1, 16, dtype=torch.long)
    captured = capture(model, (tokens, tokens), train=True)
    assert captured.parameters > 60e9
    assert captured.loops == 2


@pytest.mark.parametrize("fold", [True, False], ids=["loop", "unrolled"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    ],
    ids=["AdamW", "SGD"],
)
def test_training_step(fold: bool, make: Any) -> None:
    """The captured step does what forward, backward and the optimizer do in PyTorch."""
    torch.manual_seed(0)
    model = TinyGpt(LAYERS)
    reference = copy.deepcopy(model)
    tokens, wanted = torch.randint(61, (2, 2, 8)).unbind(0)
    captured = capture(model, (tokens, wanted), train=True, optimizer=make, fold_layers=fold)
    assert captured.loops == (2 if fold else 0)

    optimizer = make(list(reference.parameters()))
    losses = []
    for _ in range(2):  # the second one has state
        optimizer.zero_grad()
        loss = reference(tokens, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    values = [v.clone() for v in state_of(model, captured).values()]
    for i in captured.inputs[len(values) :]:
        if i.role == "optimizer":
            values.append(torch.zeros(i.shape, dtype=i.dtype))
        else:
            values.append(tokens if i.name == "args[0]" else wanted)
    for expected in losses:
        (value,) = evaluate(captured, values)  # writes to the values, as the program does
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    for name, expected_tensor in state_of(reference, captured).items():
        place = next(n for n, i in enumerate(captured.inputs) if i.name == name)
        torch.testing.assert_close(values[place], expected_tensor, rtol=1e-3, atol=1e-4)


def test_flops_are_the_models() -> None:
    """6 N tokens and the attention of a causal transformer, rematerialisation not counted."""
    width, words, length, batch = 64, 128, 32, 2
    tokens = torch.zeros(batch, length, dtype=torch.long)
    model = TinyGpt(LAYERS, width=width, words=words)
    matmuls = LAYERS * 12 * width * width + width * words
    scores = LAYERS * 2 * length * length / 2 * width * 2  # two products of half the scores
    forward = 2 * matmuls * batch * length + batch * scores
    assert capture(model, (tokens,)).model_flops == pytest.approx(forward, rel=1e-6)
    folded, plain = (
        capture(model, (tokens, tokens), train=True, fold_layers=f).model_flops
        for f in (True, False)
    )
    assert folded == pytest.approx(3 * forward, rel=0.02)
    assert plain == pytest.approx(folded, rel=0.02)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: aot.capture("model", ()), "expected a module or a function"),
        (lambda: aot.capture(torch.sin, (torch.zeros(2),), train=True), "needs an nn.Module"),
        (
            lambda: aot.capture(nn.Linear(2, 2), (torch.zeros(3, 2),), train=True),
            r"the loss is \(3, 2\); expected a tensor with one element",
        ),
        (
            lambda: aot.capture(
                nn.Linear(2, 1), (torch.zeros(1, 2),), train=True, optimizer=lambda p: None
            ),
            "expected a torch.optim.Optimizer",
        ),
    ],
)
def test_errors(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()
