"""What PyTorch lets one do around a compiled function: autocast, hooks, checkpoints, stances."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_tpu  # noqa: F401


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="tpu", fullgraph=True, **kwargs)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return [g.cpu() for g in torch.autograd.grad(loss, list(model.parameters()))]


def same(a, b, **kwargs):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **kwargs)


@pytest.mark.parametrize("outside", [True, False], ids=["around", "inside"])
def test_autocast(outside, counted):
    """The same dtypes and numbers as eager execution under autocast."""
    model = net().to("tpu")
    x = torch.randn(4, 8, device="tpu")

    def inner(x):
        with torch.autocast("tpu", torch.bfloat16):
            h = model(x)
            return h, h.float().square().mean()

    def plain(x):
        h = model(x)
        return h, h.float().square().mean()

    def run(fn):
        with torch.autocast("tpu", torch.bfloat16, enabled=outside):
            return fn(x)

    fn = plain if outside else inner
    want, want_loss = run(fn)
    step = compiled(fn)
    run(step)
    torch.tpu.synchronize()
    counted()
    got, loss = run(step)
    assert counted()["executions"] == 1
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=2e-2, atol=2e-2)
    same(gradients(model, loss), gradients(model, want_loss), rtol=5e-2, atol=1e-2)


def test_module_hooks():
    seen = []

    def watch(module, args, output):
        seen.append(tuple(output.shape))
        return output * 2

    host = net()
    device = copy.deepcopy(host).to("tpu")
    for model in (host, device):
        model[1].register_forward_hook(watch)
        model[3].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    x = torch.randn(4, 8)
    want, got = host(x), torch.compile(device, backend="tpu")(x.to("tpu"))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
    assert seen == [(4, 16)] * 2
    same(
        gradients(device, got.square().sum()),
        gradients(host, want.square().sum()),
        rtol=1e-4,
        atol=1e-4,
    )


def test_hooks_on_tensors():
    """On an input, on a value inside, and on a parameter after its gradient is summed."""

    def f(x, w):
        h = x * w
        h.register_hook(lambda g: g * 3)
        return h.sin().sum()

    log = []
    x, w = torch.randn(4), torch.randn(4)
    results = []
    for device, fn in (("cpu", f), ("tpu", torch.compile(f, backend="tpu"))):
        a, b = (t.clone().to(device).requires_grad_() for t in (x, w))
        a.register_hook(lambda g: g + 1)
        b.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.cpu()))
        fn(a, b).backward()
        results.append([a.grad.cpu(), b.grad.cpu()])
    same(*results)
    same([log[0]], [log[1]])


def test_a_full_backward_hook():
    host = nn.Linear(4, 3)
    device = copy.deepcopy(host).to("tpu")
    seen = []
    for model in (host, device):
        model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].cpu()))
    x = torch.randn(2, 4)
    host(x.clone().requires_grad_()).square().sum().backward()
    model = torch.compile(device, backend="tpu")
    model(x.to("tpu").requires_grad_()).square().sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(device.weight.grad.cpu(), host.weight.grad)


def test_stances():
    def f(x):
        return x.sin() + 1

    x = torch.ones(4, device="tpu")
    stages = []
    note = {"debug_callback": lambda stage, artifact: stages.append(stage)}
    step = compiled(f, dynamic=False, options=note)
    with torch.compiler.set_stance("force_eager"):
        step(x)
    assert not stages
    step(x)
    assert stages.count("graph") == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(step(x).cpu(), f(torch.ones(4)))
        with pytest.raises(RuntimeError, match="recompile"):
            step(torch.ones(5, device="tpu"))
    with torch.compiler.set_stance("eager_on_recompile"):
        assert step(torch.ones(5, device="tpu")).shape == (5,)
    assert stages.count("graph") == 1


def test_a_program_is_built_in_the_background(counted):
    texts = []

    def note(stage, artifact):
        if stage == "forward_text":
            texts.append(artifact)

    f = compiled(
        lambda x: (x @ x).softmax(-1), options={"async_compile": True, "debug_callback": note}
    )
    x = torch.randn(8, 8)
    counted()
    torch.testing.assert_close(f(x.to("tpu")).cpu(), (x @ x).softmax(-1), rtol=1e-4, atol=1e-5)
    gained = counted()
    assert (gained["compiles"], gained["executions"], len(texts)) == (1, 1, 1)
    f(x.to("tpu"))
    assert counted()["compiles"] == 0


@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_activation_checkpointing(reentrant):
    """Recomputed values are the first ones, dropout's too; less is kept for the backward pass."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16))
        for _ in range(3)
    ).to("tpu")

    def run(x, saving):
        for block in blocks:
            x = x + (checkpoint(block, x, use_reentrant=reentrant) if saving else block(x))
        return x.square().mean()

    x = torch.randn(4, 16, device="tpu")
    results, kept = [], []
    for saving in (False, True):
        graphs = {}
        torch._dynamo.reset()
        step = torch.compile(
            lambda x, saving=saving: run(x, saving),
            backend="tpu",
            options={"debug_callback": graphs.__setitem__},
        )
        torch.manual_seed(7)
        inputs = x.clone().requires_grad_()
        loss = step(inputs)
        results.append([loss.detach().cpu(), *gradients(blocks, loss)])
        output = next(n for n in graphs["forward"].graph.nodes if n.op == "output")
        kept.append(len(output.args[0]))
    same(*results, rtol=1e-4, atol=1e-5)
    assert kept[1] < kept[0]


def test_compiling_a_module_in_place(counted):
    # PyTorch's own containers are not compiled when they are the outermost module.
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net()

        def forward(self, x):
            return self.layers(x)

    model = Net().to("tpu")
    x = torch.randn(4, 8, device="tpu")
    want = model(x)
    names = list(model.state_dict())
    model.compile(backend="tpu", fullgraph=True)
    model(x)
    torch.tpu.synchronize()
    counted()
    got = model(x)
    assert counted()["executions"] == 1
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    # Without a backend the device's graphs come to us here, too.
    other = Net().to("tpu")
    other.compile(fullgraph=True)
    torch.testing.assert_close(other(x).cpu(), want.cpu(), rtol=1e-5, atol=1e-5)


def test_inference_mode_and_tensors_made_in_it(counted):
    model = net().to("tpu").eval()
    step = compiled(model)
    x = torch.randn(4, 8, device="tpu")
    with torch.inference_mode():
        made_inside = x * 1
        got = step(made_inside)
        torch.tpu.synchronize()
        counted()
        again = step(made_inside)
        assert counted()["executions"] == 1
    assert got.is_inference() and again.is_inference()
    torch.testing.assert_close(again.cpu(), model(x).detach().cpu(), rtol=1e-5, atol=1e-5)


def test_a_graph_break_leaves_two_programs(counted):
    def f(x):
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y.cos() * 2

    step = torch.compile(f, backend="tpu")
    x = torch.ones(4, device="tpu")
    step(x)
    torch.tpu.synchronize()
    counted()
    got = step(x)
    gained = counted()
    assert (gained["executions"], gained["compiles"]) == (2, 0)
    torch.testing.assert_close(got.cpu(), f(torch.ones(4)))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(f)(x)


def test_compiled_functions_call_each_other(counted):
    inner = torch.compile(lambda x: x * 2, backend="tpu")
    step = compiled(lambda x: inner(x) + 1)
    x = torch.ones(4, device="tpu")
    step(x)
    torch.tpu.synchronize()
    counted()
    got = step(x)
    assert counted()["executions"] == 1
    assert got.sum().item() == 12


class Decoder(nn.Module):
    """One attention layer over a cache of fixed size."""

    def __init__(self, length: int, heads: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(heads * size, 3 * heads * size)
        self.heads = heads
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, size))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, 3, self.heads, 1, -1).unbind(1)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = (torch.arange(self.keys.shape[2], device=x.device) <= position)[None, None, None]
        out = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return out.reshape(1, -1)


@pytest.mark.parametrize("marked", [False, True], ids=["buffers", "mark_static_address"])
def test_decoding_with_a_static_cache(marked, counted):
    """One program for all positions, and the caches are written where they are."""
    length, heads, size = 2048, 4, 32
    host = Decoder(length, heads, size)
    device = copy.deepcopy(host).to("tpu")
    if marked:
        for cache in (device.keys, device.values):
            torch._dynamo.mark_static_address(cache)
    step = compiled(device)
    xs = torch.randn(12, 1, heads * size)
    on_device, positions = xs.to("tpu"), torch.arange(12, device="tpu")
    with torch.no_grad():
        step(on_device[0], positions[0:1])
        torch.tpu.synchronize()
        counted()
        torch.tpu.reset_peak_memory_stats()
        before = torch.tpu.memory_allocated()
        outs = [step(on_device[i], positions[i : i + 1]) for i in range(1, 12)]
        torch.tpu.synchronize()
        gained = counted()
        peak = torch.tpu.max_memory_allocated() - before
        wants = [host(xs[i], torch.tensor([i])) for i in range(12)]
    assert (gained["compiles"], gained["misses"], gained["executions"]) == (0, 0, 11)
    assert peak < device.keys.nbytes // 4
    same([o.cpu() for o in outs], wants[1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(device.keys.cpu(), host.keys, rtol=1e-4, atol=1e-5)


def test_nothing_warns():
    """Of the features above none makes the compiler fall back."""
    model = net().to("tpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*op by op.*")
        torch.compile(model, backend="tpu")(torch.randn(4, 8, device="tpu")).sum().backward()
