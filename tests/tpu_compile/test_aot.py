"""torch_tpu.aot: topologies and compiled programs, and what loading libtpu leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torch_tpu import _C, aot, plugin
from torch_tpu.aot.sharding import Mesh, SpecLike

needs_libtpu = pytest.mark.skipif(
    plugin.libtpu_path() is None,
    reason="the TPU compiler, libtpu, is not installed (pip install 'torch-tpu[tpu]')",
)

SQUARE = """module { func.func @main(%a: tensor<NxNxf32>) -> tensor<NxNxf32> {
  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] :
       (tensor<NxNxf32>, tensor<NxNxf32>) -> tensor<NxNxf32>
  return %0 : tensor<NxNxf32> } }"""

# In a process of its own: prints what a compilation did to the environment.
SCRIPT = f"""
import ctypes, os
from torch_tpu import aot
os.environ["TPU_WORKER_HOSTNAMES"] = "mine"
before = dict(os.environ)
stats = aot.compile_stablehlo({SQUARE.replace("N", "128")!r}).memory_stats()
assert stats["argument"] == stats["output"] == 4 * 128 * 128, stats
assert dict(os.environ) == before, set(os.environ) ^ set(before)
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
assert libc.getenv(b"TPU_SKIP_MDS_QUERY") is None
assert libc.getenv(b"TPU_WORKER_HOSTNAMES") == b"mine"
print("unchanged")
"""


@needs_libtpu
@pytest.mark.tpu_compile
def test_loading_leaves_the_environment_alone() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "ALLOW_MULTIPLE"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("unchanged")


@needs_libtpu
@pytest.mark.tpu_compile
def test_topology_and_program() -> None:
    topology = aot.topology("v6e:2x2")
    assert topology.device_count == len(topology.devices) == 4
    assert topology.attributes["device_memory_bytes_limit"] > 30e9
    program = aot.compile_stablehlo(SQUARE.replace("N", "256"))
    assert program.num_outputs == 1
    assert program.cost_analysis()["flops"] == pytest.approx(2 * 256**3, rel=0.01)
    kind, hlo = program.optimized_program()
    assert kind == "hlo_with_config" and b"main" in hlo
    assert program.serialize() and program.fingerprint()


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "text, target, code, words",
    [
        ("module { nonsense }", "v6e:1x1", "UNKNOWN", "nonsense"),
        (SQUARE.replace("N", "8"), "v99:1x1", "INVALID_ARGUMENT", "v99"),
        (SQUARE.replace("N", "131072"), "v6e:1x1", "RESOURCE_EXHAUSTED", "memory"),
    ],
    ids=["text", "target", "memory"],
)
def test_errors(text: str, target: str, code: str, words: str) -> None:
    with pytest.raises(aot.TpuCompileError, match=words) as caught:
        aot.compile_stablehlo(text, target)
    assert caught.value.code == code


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2}, {"fsdp": 2, "data": 2}])
@pytest.mark.parametrize("dims", [("data", "fsdp"), (("data", "fsdp"),), (None, "data")])
def test_the_compiler_reads_each_annotation(axes: dict[str, int], dims: SpecLike) -> None:
    """It drops what it cannot read, and each device would then hold the whole."""
    mesh = Mesh.of(axes)
    mark = f'mhlo.sharding = "{mesh.annotation(dims, (512, 512))}"'
    text = (
        f"module attributes {{mhlo.num_partitions = {mesh.size} : i32}} {{ func.func @main("
        f"%a: tensor<512x512xf32> {{{mark}}}) -> (tensor<512x512xf32> {{{mark}}}) {{\n"
        f"%0 = stablehlo.custom_call @Sharding(%a) {{{mark}}} : (tensor<512x512xf32>) -> "
        "tensor<512x512xf32>\n%1 = stablehlo.add %0, %0 : tensor<512x512xf32>\n"
        "return %1 : tensor<512x512xf32> } }"
    )
    topology = aot.topology("v6e:2x2")
    options = _C.compile_options({}, [d["id"] for d in topology.devices])
    stats = topology.compile(text, options).memory_stats()
    rows, columns = mesh.local_shape(dims, (512, 512))
    assert stats["argument"] == stats["output"] == 4 * rows * columns < 4 * 512 * 512


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "libtpu_path", lambda: None)
    with pytest.raises(aot.CompilerNotFoundError, match=r"pip install 'torch-tpu\[tpu\]'"):
        aot.compile_stablehlo(SQUARE.replace("N", "8"))
