"""torch.compile(backend="tpu"): values, gradients, mutation, aliasing, random numbers, counters."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_tpu  # noqa: F401
from torch_tpu import _C


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="tpu", fullgraph=True, **kwargs)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def test_two_ops_are_one_program_and_hits_compile_nothing(counted):
    f = compiled(lambda a, b: (a + b) * 2)
    a, b = torch.randn(16, device="tpu"), torch.randn(16, device="tpu")
    counted()
    f(a, b)
    first = counted()
    assert (first["compiles"], first["executions"]) == (1, 1)
    got = f(a, b)
    again = counted()
    assert (again["compiles"], again["misses"], again["executions"]) == (0, 0, 1)
    torch.testing.assert_close(got.cpu(), (a.cpu() + b.cpu()) * 2)


def test_training_matches_the_cpu(counted):
    host = net()
    device = copy.deepcopy(host).to("tpu")
    step = compiled(device)
    x = torch.randn(4, 8)
    counted()
    for _ in range(3):
        want, got = host(x), step(x.to("tpu"))
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
        want.square().sum().backward()
        got.square().sum().backward()
    gained = counted()
    assert gained["fallbacks"] == 0
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_contexts(context):
    model = net().to("tpu").eval()
    f = compiled(model)
    x = torch.randn(4, 8, device="tpu")
    with context():
        torch.testing.assert_close(f(x).cpu(), model(x).cpu(), rtol=1e-5, atol=1e-5)


def test_buffers_are_updated():
    host = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    device = copy.deepcopy(host).to("tpu")
    f = compiled(device)
    for _ in range(2):
        x = torch.randn(2, 3, 6, 6)
        torch.testing.assert_close(f(x.to("tpu")).cpu(), host(x), rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(host.named_buffers(), device.buffers(), strict=True):
        torch.testing.assert_close(q.cpu(), p, msg=name)


def test_a_written_input_keeps_its_storage_and_is_donated():
    def f(cache, x):
        cache.mul_(2)
        cache[1:3] += x
        return cache.sum()

    cache = torch.ones(64, 1024, device="tpu")
    alias = cache[0]
    want = torch.ones(64, 1024)
    step = compiled(f)
    for i in range(3):
        x = torch.full((2, 1024), float(i))
        got = step(cache, x.to("tpu"))
        torch.testing.assert_close(got.cpu(), f(want, x))
        if i == 1:
            torch.tpu.synchronize()
            torch.tpu.reset_peak_memory_stats()
            before = torch.tpu.memory_allocated()
    torch.testing.assert_close(cache.cpu(), want)
    torch.testing.assert_close(alias.cpu(), want[0])
    torch.tpu.synchronize()
    assert torch.tpu.max_memory_allocated() - before < cache.nbytes // 2


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[2:6, 1::2],
        lambda t: t.t(),
        lambda t: t[:, 3],
        lambda t: t.as_strided((3, 2), (7, 5), 4),
        lambda t: t[3:4].expand(5, 8),
    ],
)
def test_inputs_are_read_through_views(view, counted):
    base = torch.randn(8, 8)
    f = compiled(lambda x: torch.tanh(x) + x)
    device = base.to("tpu")
    counted()
    got = f(view(device))
    assert counted()["executions"] == 1
    torch.testing.assert_close(got.cpu(), torch.tanh(view(base)) + view(base))


def test_a_view_is_written_through():
    def f(x):
        x.add_(1)
        return x * 2

    host, device = torch.arange(12.0).view(3, 4), torch.arange(12.0, device="tpu").view(3, 4)
    got = compiled(f)(device[:, 1:3])
    torch.testing.assert_close(got.cpu(), f(host[:, 1:3]))
    torch.testing.assert_close(device.cpu(), host)


def test_offsets_of_a_view_are_operands(counted):
    host = torch.randn(16, 8)
    rows = host.to("tpu")
    f = compiled(lambda x: x * 2 + 1)
    f(rows[0])
    counted()
    for i in range(1, 16):
        torch.testing.assert_close(f(rows[i]).cpu(), host[i] * 2 + 1)
    assert counted()["compiles"] == 0


def test_outputs_alias_inputs_and_each_other():
    def f(x):
        y = x * 2
        return x, x.t(), y, y[1], y.view(-1)

    x = torch.randn(3, 4, device="tpu")
    a, b, y, row, flat = compiled(f)(x)
    assert a is x
    assert b.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    y.zero_()
    assert row.cpu().abs().sum() == 0
    assert flat.cpu().abs().sum() == 0


def test_random_numbers_are_those_of_eager_execution():
    def f(x):
        return F.dropout(x, 0.5), torch.rand_like(x), torch.randn_like(x)

    x = torch.ones(1000, device="tpu")
    torch.manual_seed(3)
    want = [*f(x), torch.rand(4, device="tpu")]
    torch.manual_seed(3)
    got = [*compiled(f)(x), torch.rand(4, device="tpu")]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_the_random_state_is_saved_and_restored_between_graphs():
    def f(x):
        state = torch.tpu.get_rng_state()
        a = torch.rand_like(x)
        torch.tpu.set_rng_state(state)
        b = torch.rand_like(x)
        with torch.random.fork_rng(device_type="tpu", devices=[0]):
            c = torch.rand_like(x)
        return a, b, c, torch.rand_like(x), torch.tpu.memory_allocated()

    x = torch.ones(8, device="tpu")
    torch.manual_seed(5)
    want = f(x)
    torch.manual_seed(5)
    *got, allocated = torch.compile(f, backend="tpu")(x)
    for a, b in zip(got, want, strict=False):
        assert torch.equal(a.cpu(), b.cpu())
    assert torch.equal(got[0].cpu(), got[1].cpu()) and torch.equal(got[2].cpu(), got[3].cpu())
    assert allocated > 0


def test_lowerings_are_not_traced():
    """An op that is first met between two graphs is lowered under Dynamo's eyes."""
    from torch_tpu.lowering.builder import Builder
    from torch_tpu.lowering.emit import emit_op

    def f(x):
        with torch.random.fork_rng(device_type="tpu", devices=[0]):  # Dynamo skips this frame
            return torch.linalg.svd(x).S.sum() + torch.erfinv(x).sum()

    _C.clear_programs()
    before = _C.stats()["misses"]
    torch.compile(f, backend="tpu")(torch.full((3, 5), 0.25, device="tpu"))
    assert _C.stats()["misses"] > before + 1
    traced = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    for fn in (emit_op, Builder.constant, Builder.emit):
        assert not traced(fn.__code__)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("AdamW", {"lr": 0.01}),
        ("Adam", {"lr": 0.01, "capturable": True}),
    ],
)
def test_an_optimizer_step_is_one_program(name, arguments, counted):
    host = nn.Linear(8, 8)
    device = copy.deepcopy(host).to("tpu")
    make = getattr(torch.optim, name)
    plain = {k: v for k, v in arguments.items() if k != "capturable"}
    a, b = make(host.parameters(), **plain), make(device.parameters(), **arguments)
    step = torch.compile(b.step, backend="tpu")
    for i in range(4):
        x = torch.randn(4, 8)
        for model, data in ((host, x), (device, x.to("tpu"))):
            model.zero_grad()
            model(data).square().sum().backward()
        a.step()
        counted()
        step()
        if i == 3:
            gained = counted()
            assert (gained["executions"], gained["compiles"], gained["fallbacks"]) == (1, 0, 0)
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5)


def test_a_python_number_that_changes_compiles_once(counted):
    f = torch.compile(lambda x, rate: x * rate, backend="tpu")
    x = torch.ones(8, device="tpu")
    for i in range(3):  # Dynamo makes a float an input when it sees the second value
        f(x, 0.5 + i)
    counted()
    for i in range(5):
        torch.testing.assert_close(f(x, 10.5 + i).cpu(), torch.full((8,), 10.5 + i))
    assert counted()["compiles"] == 0


def test_without_a_backend_the_devices_graphs_come_to_us(counted):
    f = torch.compile(lambda x: x.sin() + 1, fullgraph=True)
    counted()
    got = f(torch.ones(4, device="tpu"))
    assert counted()["executions"] == 2  # ones, and the graph
    torch.testing.assert_close(got.cpu(), torch.ones(4).sin() + 1)


def test_cpu_graphs_stay_with_inductor(counted):
    torch._dynamo.utils.counters.clear()
    f = torch.compile(lambda x: x.sin() + 1, fullgraph=True, options={"max_autotune": False})
    counted()
    torch.testing.assert_close(f(torch.ones(4)), torch.ones(4).sin() + 1)
    gained = counted()
    assert (gained["executions"], gained["compiles"]) == (0, 0)
    assert torch._dynamo.utils.counters["inductor"]


def test_importing_the_package_does_not_import_dynamo():
    code = "import torch, torch_tpu, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_compiling_does_not_import_inductor():
    """Its import takes longer than compiling a small model."""
    code = (
        "import torch, torch_tpu, sys\n"
        "x = torch.ones(3, device='tpu', requires_grad=True)\n"
        "torch.compile(lambda x: (x * x).sum(), backend='tpu')(x).backward()\n"
        "assert x.grad.tolist() == [2, 2, 2]\n"
        "sys.exit('torch._inductor.lowering' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_mode_is_taken_and_bad_ones_are_listed():
    x = torch.ones(3, device="tpu")
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        assert compiled(lambda x: x + 1, mode=mode)(x).sum().item() == 6
    with pytest.raises(Exception, match=r"mode: got 'fast'.*default, reduce-overhead"):
        compiled(lambda x: x + 1, mode="fast")(x)


def test_options_are_checked():
    x = torch.ones(3, device="tpu")
    with pytest.raises(Exception, match=r"got 'fats'.*async_compile.*debug_callback"):
        compiled(lambda x: x + 1, options={"fats": 1})(x)
    with pytest.raises(Exception, match="num_dynamic_buckets=9; expected 1 to 8"):
        compiled(lambda x: x + 1, options={"num_dynamic_buckets": 9})(x)
    with pytest.raises(Exception, match="async_compile='yes'; expected a bool"):
        compiled(lambda x: x + 1, options={"async_compile": "yes"})(x)


def test_debug_callback_sees_each_stage():
    seen = {}
    x = torch.ones(3, device="tpu", requires_grad=True)
    f = compiled(
        lambda x: (x * x).sum(), options={"debug_callback": seen.__setitem__, "name": "sq"}
    )
    f(x).backward()
    assert list(seen) == ["graph", "forward", "forward_text", "backward", "backward_text"]
    assert "stablehlo.multiply" in seen["forward_text"]


def _unsupported(x):
    return torch.ops.compile_tests.opaque(x * 2) + 1


@pytest.fixture(scope="module", autouse=True)
def _opaque_op():
    with torch.library._scoped_library("compile_tests", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x + 1, "CPU")
        library.impl("opaque", lambda x: x + 1, "TPU")
        library.impl("opaque", torch.empty_like, "Meta")
        yield


def test_each_graph_is_lowered_once():
    """Also the backward pass, whose inputs are views of what the forward pass has saved."""
    stages = []
    note = {"debug_callback": lambda stage, artifact: stages.append(stage)}
    model = nn.MultiheadAttention(8, 2, batch_first=True).to("tpu")
    step = torch.compile(lambda x: model(x, x, x)[0].square().mean(), backend="tpu", options=note)
    for _ in range(2):
        step(torch.randn(2, 4, 8, device="tpu")).backward()
    assert stages == ["graph", "forward", "forward_text", "backward", "backward_text"]


def test_a_graph_that_cannot_be_compiled_runs_with_one_warning():
    f = torch.compile(_unsupported, backend="tpu")
    x = torch.ones(3, device="tpu")
    with pytest.warns(UserWarning, match=r"compile_tests.opaque.*test_backend.py:\d+"):
        assert f(x).sum().item() == 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f(x).sum().item() == 12


def test_a_lowering_that_fails_is_no_reason_to_stop(monkeypatch):
    from torch_tpu.lowering import registry

    def broken(b, x):
        raise TypeError("a mistake of ours")

    name = registry.overload_name(torch.ops.aten.digamma.default)
    x = torch.ones(3)
    want = torch.digamma(x) + 1
    device = x.to("tpu")
    torch.digamma(device)  # single calls know it from here on
    lowering = registry.find(torch.ops.aten.digamma.default)
    monkeypatch.setitem(registry._LOWERINGS, name, dataclasses.replace(lowering, fn=broken))
    with pytest.warns(UserWarning, match=r"digamma.*TypeError: a mistake of ours.*py:\d+") as seen:
        got = torch.compile(lambda x: torch.digamma(x) + 1, backend="tpu")(device)
    assert len([w for w in seen if "op by op" in str(w.message)]) == 1
    torch.testing.assert_close(got.cpu(), want)
    with pytest.raises(Exception, match="a mistake of ours"):
        compiled(lambda x: torch.digamma(x) + 2)(device)


def test_with_fullgraph_it_raises():
    with pytest.raises(Exception, match=r"compile_tests.opaque.*test_backend.py:\d+"):
        compiled(_unsupported)(torch.ones(3, device="tpu"))


def test_cpu_tensors_in_a_graph_of_the_device():
    x, host = torch.ones(4, device="tpu"), torch.arange(4.0)
    got, back = compiled(lambda x, h: (x * h.to("tpu"), (x + 1).cpu()))(x, host)
    torch.testing.assert_close(got.cpu(), host)
    assert back.device.type == "cpu"
    torch.testing.assert_close(back, torch.full((4,), 2.0))
