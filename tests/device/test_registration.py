"""What importing does to PyTorch, and what it does not."""

from __future__ import annotations

import torch


def test_importing_is_quiet_and_light(run_python) -> None:
    code = """
        import sys, torch, torch_tpu
        heavy = {"torch._dynamo", "torch._inductor", "jax"} & set(sys.modules)
        assert not heavy, heavy
    """
    assert run_python(code, PYTHONWARNINGS="error::UserWarning:torch_tpu") == ""


def test_registering_twice_changes_nothing() -> None:
    from torch_tpu import registration

    module = torch.tpu
    registration.register()
    assert torch.tpu is module


def test_nothing_of_pytorch_is_replaced(run_python) -> None:
    # What a backend may add through PyTorch's own functions is named "tpu"; all else must be as is.
    code = """
        import torch
        targets = [torch, torch.Tensor, torch.nn.Module, torch.autograd, torch.optim.Optimizer,
                   torch.cuda, torch.random, torch.serialization, torch.storage.UntypedStorage,
                   torch.nn.functional, torch.compile, torch.Generator]
        before = [dict(vars(t)) for t in targets]
        import torch_tpu
        for target, old in zip(targets, before):
            changed = {k for k, v in vars(target).items() if k not in old or old[k] is not v}
            extra = {k for k in changed if "tpu" not in k and not k.startswith("__")}
            assert not extra, (target, extra)
        a = torch.randn(3, 3, requires_grad=True)
        (a @ a).sum().backward()
        assert a.grad.device.type == "cpu" and torch.get_default_device().type == "cpu"
    """
    run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_dynamo_uses_our_interface(run_python) -> None:
    code = """
        import torch, torch_tpu
        from torch._dynamo.device_interface import get_interface_for_device
        interface = get_interface_for_device("tpu")
        assert interface.__module__.startswith("torch_tpu"), interface
        assert get_interface_for_device("tpu:1") is interface
        assert interface.current_device() == 0 and interface.device_count() == 2
        with interface.device(1):
            assert interface.current_device() == 1
        assert interface.is_dtype_supported(torch.float64)
        assert not interface.is_dtype_supported(torch.complex32)
        assert interface.Worker.get_device_properties("tpu:1").multi_processor_count == 1
        assert issubclass(interface.Stream, torch.Stream)
        assert issubclass(interface.Event, torch.Event)
        import importlib, torch._dynamo.device_interface as module
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    """
    run_python(code)


def test_dynamo_imported_first(run_python) -> None:
    code = """
        import torch, torch._dynamo
        import torch_tpu
        from torch._dynamo.device_interface import get_interface_for_device
        assert get_interface_for_device("tpu").__module__.startswith("torch_tpu")
    """
    run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_another_backend_in_the_slot_is_a_clear_error(run_python) -> None:
    code = """
        import torch
        torch.utils.rename_privateuse1_backend("other")
        try:
            import torch_tpu
        except RuntimeError as error:
            print("renam" in str(error) or "privateuse1" in str(error).lower())
    """
    assert run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").strip() == "True"


def test_profiler_names_the_device() -> None:
    assert torch.profiler.ProfilerActivity.PrivateUse1 == torch.profiler.ProfilerActivity.TPU
