"""Higher-order operators inside compiled graphs, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from torch_tpu.dynamo.compiler import compile_graph
from torch_tpu.dynamo.options import CompileOptions


def compiled(fn):
    return torch.compile(fn, backend="tpu", fullgraph=True)


def test_cond(counted):
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() - 1, (x,))

    g = compiled(f)
    x = torch.rand(8) + 0.1
    g(x.to("tpu"))
    counted()
    for value in (x, -x):
        torch.testing.assert_close(g(value.to("tpu")).cpu(), f(value))
    gained = counted()
    assert (gained["compiles"], gained["fallbacks"]) == (0, 0)


def test_cond_backward():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() * x, lambda x: x.cos(), (x,)).sum()

    g = compiled(f)
    for sign in (1.0, -1.0):
        host = (torch.rand(4) * sign).requires_grad_()
        device = host.detach().to("tpu").requires_grad_()
        f(host).backward()
        g(device).backward()
        torch.testing.assert_close(device.grad.cpu(), host.grad)


def test_while_loop():
    from torch._higher_order_ops.while_loop import while_loop

    def f(x, n):
        return while_loop(
            lambda i, y: i < n, lambda i, y: (i + 1, y * 2 + x), (torch.zeros_like(n), x.clone())
        )

    g = compiled(f)
    for n in (0, 3, 7):
        x = torch.ones(4)
        want, got = f(x, torch.tensor(n)), g(x.to("tpu"), torch.tensor(n, device="tpu"))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.cpu(), b)


def test_scan_and_its_gradient():
    from torch._higher_order_ops.scan import scan

    def step(carry, x):
        carry = carry * 0.5 + torch.tanh(x)
        return carry, carry * 2

    def f(init, xs):
        last, rows = scan(step, init, xs)
        return last.sum() + rows.pow(2).sum()

    init, xs = torch.randn(3), torch.randn(6, 3)
    results = []
    for device, run in (("cpu", f), ("tpu", compiled(f))):
        a, b = (t.detach().to(device).requires_grad_() for t in (init, xs))
        out = run(a, b)
        out.backward()
        results.append([out.detach().cpu(), a.grad.cpu(), b.grad.cpu()])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_associative_scan(n):
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    def f(a, b):
        return associative_scan(combine, (a, b), dim=0, combine_mode="generic")

    a, b = torch.rand(n, 3), torch.rand(n, 3)
    h = torch.zeros(3)
    want = []
    for i in range(n):
        h = h * a[i] + b[i]
        want.append(h)

    def operator(a, b):
        step = make_fx(lambda *v: combine(v[:2], v[2:]))(a[0], b[0], a[0], b[0])
        return torch.ops.higher_order.associative_scan(step, (a, b), ())

    runs = [compiled(f)]
    if n > 1:
        graph = make_fx(operator, tracing_mode="fake")(a, b)
        native = compile_graph(graph, "scan", CompileOptions(), strict=True)
        runs.append(lambda *inputs: native(list(inputs)))
    for run in runs:
        got = run(a.to("tpu"), b.to("tpu"))
        torch.testing.assert_close(got[0].cpu(), a.cumprod(0))
        torch.testing.assert_close(got[1].cpu(), torch.stack(want))


def test_flex_attention_with_a_score_function_and_a_mask():
    def bias(score, b, h, q, k):
        return score + (q - k) * 0.1

    def causal(b, h, q, k):
        return q >= k

    torch.manual_seed(0)
    data = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    results = []
    for device in ("cpu", "tpu"):
        q, k, v = (t.detach().to(device).requires_grad_() for t in data)
        mask = create_block_mask(causal, None, None, 16, 16, device=device, BLOCK_SIZE=16)

        def f(q, k, v, mask=mask):
            return flex_attention(q, k, v, score_mod=bias, block_mask=mask)

        out = compiled(f)(q, k, v) if device == "tpu" else _attention(q, k, v)
        out.sum().backward()
        results.append([t.detach().cpu() for t in (out, q.grad, k.grad, v.grad)])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _attention(q, k, v):
    """The same attention written out."""
    place = torch.arange(16)
    distance = place[:, None] - place[None, :]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + distance * 0.1
    return scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ v


def test_random_numbers_in_a_loop_differ():
    from torch._higher_order_ops.scan import scan

    def f(init, xs):
        return scan(lambda c, x: (c + 1, torch.rand_like(x) + x), init, xs)[1]

    rows = compiled(f)(torch.zeros((), device="tpu"), torch.zeros(5, 64, device="tpu")).cpu()
    assert len({tuple(row.tolist()) for row in rows}) == 5


def test_checkpointed_dropout_is_recomputed_with_the_same_numbers():
    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh()).to("tpu")

    def plain(x):
        return layer(x).sum()

    def saving(x):
        return checkpoint(layer, x, use_reentrant=False).sum()

    grads = []
    for f in (plain, compiled(plain), compiled(saving)):
        x = torch.ones(4, 16, device="tpu", requires_grad=True)
        torch.manual_seed(5)
        f(x).backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])
    assert grads[0].abs().sum() > 0
