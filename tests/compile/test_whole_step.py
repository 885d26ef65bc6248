"""Forward, backward and optimizer as one program."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.tpu import optimizers

import torch_tpu  # noqa: F401


def net() -> nn.Module:
    torch.manual_seed(0)
    # A bias before a normalisation has no gradient but rounding errors, which Adam magnifies.
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4)
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda: optimizers.AdamW(lr=1e-2, state_dtype=None),
            lambda p: torch.optim.AdamW(p, lr=1e-2),
        ),
        (
            lambda: optimizers.Sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
    ],
    ids=["AdamW", "Sgd"],
)
def test_a_trainers_step_is_one_donating_program(ours, theirs, counted):
    host = net()
    device = copy.deepcopy(host).to("tpu")
    optimizer = theirs(host.parameters())
    trainer = optimizers.SingleTraceTrainer(device, ours(), compute_loss_fn=F.cross_entropy)
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    before = {n: p.detach().cpu() for n, p in device.named_parameters()}
    step = trainer.make_compiled_train_step(x.to("tpu"), y.to("tpu"))
    for n, p in device.named_parameters():
        assert torch.equal(p.cpu(), before[n])  # tracing changes nothing
    for i in range(4):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        optimizer.zero_grad()
        want = F.cross_entropy(host(x), y)
        want.backward()
        optimizer.step()
        xd, yd = x.to("tpu"), y.to("tpu")
        counted()
        got = step(xd, yd)
        gained = counted()
        if i:
            assert (gained["executions"], gained["compiles"], gained["fallbacks"]) == (1, 0, 0)
        torch.testing.assert_close(got.cpu(), want.detach(), rtol=1e-4, atol=1e-5)
    for (n, p), q in zip(host.named_parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-3, atol=1e-4, msg=n)
    for (n, p), q in zip(host.named_buffers(), device.buffers(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5, msg=n)


def test_state_is_donated():
    model = nn.Linear(512, 512).to("tpu")
    trainer = optimizers.SingleTraceTrainer(
        model, optimizers.AdamW(), compute_loss_fn=lambda out, _: out.square().mean()
    )
    x = torch.randn(4, 512, device="tpu")
    step = trainer.make_compiled_train_step(x)
    for _ in range(2):
        step(x)
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    step(x)
    torch.tpu.synchronize()
    assert torch.tpu.max_memory_allocated() - before < model.weight.nbytes // 2


def test_other_inputs_are_refused():
    model = nn.Linear(4, 4).to("tpu")
    trainer = optimizers.SingleTraceTrainer(
        model, optimizers.Sgd(), compute_loss_fn=lambda out, _: out.sum()
    )
    step = trainer.make_compiled_train_step(torch.ones(2, 4, device="tpu"))
    with pytest.raises(ValueError, match=r"got \[\(\(3, 4\), torch.float32\)\]"):
        step(torch.ones(3, 4, device="tpu"))


def test_adamw_keeps_moments_in_bfloat16_by_default():
    group = optimizers.AdamW().init_param_group([torch.ones(3, device="tpu")])
    assert group.state["0"]["exp_avg"].dtype is torch.bfloat16


def test_muon_orthogonalises():
    torch.manual_seed(0)
    x = torch.randn(32, 16, device="tpu")
    values = torch.linalg.svdvals(optimizers.Muon.orthogonalised(x).cpu())
    assert values.min() > 0.5 and values.max() < 1.3


def test_muon_trains():
    model = net().to("tpu")
    trainer = optimizers.SingleTraceTrainer(
        model, optimizers.Muon(), compute_loss_fn=F.cross_entropy
    )
    x, y = torch.randn(32, 8, device="tpu"), torch.randint(0, 4, (32,), device="tpu")
    step = trainer.make_compiled_train_step(x, y)
    losses = [step(x, y).item() for _ in range(40)]
    assert losses[-1] < 0.7 * losses[0]


def test_dynamo_traces_backward_and_step_into_one_graph(counted):
    """PyTorch's own switch for ``backward()`` inside a compiled function."""
    host = net()
    device = copy.deepcopy(host).to("tpu")

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    plain = make(host)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        whole = torch.compile(make(device), backend="tpu")
        for _ in range(4):
            x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
            xd, yd = x.to("tpu"), y.to("tpu")
            counted()
            got = whole(xd, yd)
            gained = counted()
            torch.testing.assert_close(got.cpu(), plain(x, y), rtol=1e-4, atol=1e-5)
    assert gained["compiles"] == 0
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-3, atol=1e-4)


def test_compiler_options_are_part_of_a_programs_key(counted):
    f = torch.compile(lambda x: x.exp() * 3, backend="tpu")
    x = torch.ones(5, device="tpu")
    f(x)
    counted()
    for _ in range(2):
        with torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "O0"}):
            torch.testing.assert_close(f(x).cpu(), torch.ones(5).exp() * 3)
    assert counted()["misses"] == 1
    bad = torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "fast"})
    with pytest.raises(ValueError, match="expected O0, O1, O2 or O3"):
        bad.__enter__()
