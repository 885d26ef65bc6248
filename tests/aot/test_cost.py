"""The reader of optimised programs and the costs it adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aot.conftest import needs_libtpu
from torch_tpu.aot import chips, compiler, hlo, store
from torch_tpu.aot.cost import cost_of, split_name
from torch_tpu.aot.worker import Request

MATMUL = """module @m { func.func @main(%a: tensor<4096x4096xbf16>, %w: tensor<4096x4096xbf16>)
    -> tensor<4096x4096xf32> {
  %0 = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] :
    (tensor<4096x4096xbf16>, tensor<4096x4096xbf16>) -> tensor<4096x4096xf32>
    loc("layers.0|mm"("model.py":12:3))
  return %0 : tensor<4096x4096xf32> } }"""

LOOP = """module { func.func @main(%x: tensor<1024x1024xbf16>, %w: tensor<N_x1024x1024xbf16>)
    -> tensor<1024x1024xbf16> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %r:3 = "stablehlo.while"(%zero, %x, %w) ({
  ^bb0(%i: tensor<i32>, %y: tensor<1024x1024xbf16>, %v: tensor<N_x1024x1024xbf16>):
    %n = stablehlo.constant dense<N_> : tensor<i32>
    %c = stablehlo.compare LT, %i, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }, {
  ^bb0(%i: tensor<i32>, %y: tensor<1024x1024xbf16>, %v: tensor<N_x1024x1024xbf16>):
    %z = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %s = stablehlo.dynamic_slice %v, %i, %z, %z, sizes = [1, 1024, 1024] :
      (tensor<N_x1024x1024xbf16>, tensor<i32>, tensor<i32>, tensor<i32>)
      -> tensor<1x1024x1024xbf16>
    %m = stablehlo.reshape %s : (tensor<1x1024x1024xbf16>) -> tensor<1024x1024xbf16>
    %p = stablehlo.dot_general %y, %m, contracting_dims = [1] x [0] :
      (tensor<1024x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
    %j = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %j, %p, %v : tensor<i32>, tensor<1024x1024xbf16>, tensor<N_x1024x1024xbf16>
  }) : (tensor<i32>, tensor<1024x1024xbf16>, tensor<N_x1024x1024xbf16>)
    -> (tensor<i32>, tensor<1024x1024xbf16>, tensor<N_x1024x1024xbf16>)
  return %r#1 : tensor<1024x1024xbf16> } }"""

SHARDED = """module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(
    %a: tensor<1024x1024xbf16> {mhlo.sharding = "{devices=[1,8]<=[8]}"},
    %w: tensor<1024x1024xbf16> {mhlo.sharding = "{devices=[8,1]<=[8]}"})
    -> (tensor<1024x1024xbf16> {mhlo.sharding = "{replicated}"}) {
  %0 = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] :
    (tensor<1024x1024xbf16>, tensor<1024x1024xbf16>) -> tensor<1024x1024xbf16>
  return %0 : tensor<1024x1024xbf16> } }"""


def compiled(text: str, topology: str, partitions: int = 1) -> hlo.Module:
    (reply,) = store.compile_cached([Request(text, topology, partitions)], timeout=300)
    assert not reply.code, reply.message
    return hlo.parse_module(reply.hlo, reply.hlo_kind)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(hlo.HloFormatError, match="not an HLO module"):
        hlo.parse_module(b"", "hlo")
    with pytest.raises(hlo.HloFormatError, match=r"ends inside|passes the end"):
        hlo.parse_module(b"\x0a\xff", "hlo")
    with pytest.raises(hlo.HloFormatError, match="expected 'hlo'"):
        hlo.parse_module(b"", "mlir")


def test_padding_follows_the_tile() -> None:
    shape = hlo.Shape("f32", 32, (3, 5, 64), (2, 1, 0), (8, 128))
    assert shape.bytes == 3 * 5 * 64 * 4
    assert shape.padded_bytes == 3 * 8 * 128 * 4
    pair = hlo.Shape("tuple", 0, parts=(shape, shape))
    assert pair.bytes == 2 * shape.bytes and str(pair) == "(f32[3,5,64], f32[3,5,64])"


def instruction(opcode: str, shape: hlo.Shape, groups: int = 0) -> hlo.Instruction:
    found = hlo.Instruction(name=opcode, opcode=opcode)
    found.__dict__["shape"] = shape
    found.__dict__["group_size"] = groups
    return found


def test_traffic_of_collectives() -> None:
    """Bytes that a ring algorithm sends from each device."""
    from torch_tpu.aot.cost import _Costing

    chip = chips.CHIPS["v6e"]
    costing = _Costing(hlo.Module("m", 0, {}, {}), chip, loops_once=False)
    part, whole = hlo.Shape("bf16", 16, (128, 64)), hlo.Shape("bf16", 16, (1024, 64))
    context = hlo.Shape("u32", 32)
    pair = hlo.Shape("tuple", 0, parts=(part, whole))
    size = 1024 * 64 * 2
    cases = [
        ("all-gather", whole, size * 7 / 8),
        ("all-gather-start", pair, size * 7 / 8),
        ("all-reduce", whole, 2 * size * 7 / 8),
        ("reduce-scatter", part, size * 7 / 8),
        ("all-to-all", whole, size * 7 / 8),
        ("collective-permute", whole, size),
        (
            "collective-permute-start",
            hlo.Shape("tuple", 0, parts=(whole, whole, context, context)),
            size,
        ),
    ]
    for opcode, shape, expected in cases:
        collective = instruction(opcode, shape, 8)
        assert costing.traffic(collective)[0] == expected, opcode
        permutes = opcode.startswith("collective-permute")
        assert costing.bandwidth(collective) == chip.ici_bandwidth / (2 if permutes else 1)


def test_names_of_modules_and_ops() -> None:
    assert split_name("layers.*.attn|mm") == ("layers.*.attn", "mm")
    assert split_name("jit(step)/dot_general") == ("", "jit(step)/dot_general")


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("target, share", [("v5e-1", 0.97), ("v6e-1", 0.87), ("tpu7x:1x1x1", 0.81)])
def test_a_large_matmul_is_near_the_peak(target: str, share: float) -> None:
    where = chips.resolve(target)
    report = cost_of(compiled(MATMUL, where.topology), where.chip)
    assert report.flops == 2 * 4096**3
    assert report.mfu(report.flops, where.chip.peak_bf16) == pytest.approx(share, abs=0.1)
    (row,) = [r for r in report.rows if r.kind == "matmul"]
    assert (row.module, row.op, row.file, row.line) == ("layers.0", "mm", "model.py", 12)
    assert row.bound == "MXU" and row.count == 1
    assert report.by_module() == {"layers.0": row.seconds}
    assert report.by_line() == {"model.py:12": row.seconds}


@needs_libtpu
@pytest.mark.tpu_compile
def test_loops_count_as_often_as_they_run() -> None:
    module = compiled(LOOP.replace("N_", "9"), "v6e:1x1")
    report = cost_of(module, chips.CHIPS["v6e"])
    assert report.unknown_trip_counts == 0
    assert report.flops == 9 * 2 * 1024**3
    once = cost_of(module, chips.CHIPS["v6e"], loops_once=True)
    assert once.flops == 2 * 1024**3
    body, rest = divmod(report.cycles - once.cycles, 8)
    assert rest == 0 and 0 < body <= once.cycles


@needs_libtpu
@pytest.mark.tpu_compile
def test_collectives_are_found_with_their_bytes() -> None:
    where = chips.resolve("v6e-8")
    report = cost_of(compiled(SHARDED, where.topology, 8), where.chip)
    assert report.collectives()
    result = 1024 * 1024 * 2
    # A sum over 8 devices: a ring sends 2 x 7/8 of it, in whatever pieces the compiler chose.
    sent = sum(r.bytes for r in report.collectives())
    assert 0.5 * result < sent < 4 * result
    least = sent / where.chip.ici_bandwidth
    assert least * 0.999 <= report.seconds_of["collective"] <= least * where.chip.rank * 1.001
    assert report.flops == pytest.approx(2 * 1024**3 / 8)
    assert report.low_seconds <= report.high_seconds


@needs_libtpu
@pytest.mark.tpu_compile
def test_agrees_with_a_sum_over_the_raw_program(tmp_path: Path) -> None:
    """Cycles as a plain scan of the bytes finds them, without any structure."""
    import re

    (reply,) = store.compile_cached([Request(MATMUL, "v6e:1x1")], timeout=300)
    cycles = sum(map(int, re.findall(rb'"estimated_cycles":"(\d+)"', reply.hlo)))
    module = hlo.parse_module(reply.hlo, reply.hlo_kind)
    assert cost_of(module, chips.CHIPS["v6e"]).cycles == pytest.approx(cycles, rel=0.01)


@needs_libtpu
@pytest.mark.tpu_compile
def test_failures_are_about_one_program() -> None:
    big = MATMUL.replace("4096", "262144")
    texts = ["module { nonsense }", big, MATMUL]
    bad, large, good = compiler.compile_all([Request(t, "v6e:1x1") for t in texts], timeout=300)
    assert "nonsense" in str(compiler.error_of(bad))
    error = compiler.error_of(large)
    assert isinstance(error, compiler.HbmExceededError) and error.code == "RESOURCE_EXHAUSTED"
    assert error.needed > error.available > 30e9
    assert compiler.error_of(good) is None and good.executable


@needs_libtpu
@pytest.mark.tpu_compile
def test_time_out_is_a_clear_error() -> None:
    compiler.close_workers()
    (late,) = compiler.compile_all([Request(MATMUL, "v6e:1x1")], timeout=0.01)
    assert late.code == "TIMEOUT" and "no answer within" in str(compiler.error_of(late))


@needs_libtpu
@pytest.mark.tpu_compile
def test_replies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_tpu.program import cache

    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path))
    cache.reload()
    try:
        request = Request(MATMUL.replace("4096", "256"), "v6e:1x1")
        first, second = (store.compile_cached([request], timeout=300)[0] for _ in range(2))
    finally:
        monkeypatch.undo()
        cache.reload()
    assert not first.cached and second.cached
    assert (first.hlo, first.executable) == (second.hlo, second.executable)


@needs_libtpu
def test_the_compiler_stays_out_of_this_process() -> None:
    script = (
        "import json, os, torch_tpu\nfrom torch_tpu import aot\n"
        "before = dict(os.environ)\n"
        "import torch\n"
        "c = aot.compile(torch.sin, torch.zeros(8, 128, device='meta'), target='v6e-1')\n"
        "os.environ.pop('TORCHINDUCTOR_CACHE_DIR', None)  # PyTorch's, when it traces\n"
        "before.pop('TORCHINDUCTOR_CACHE_DIR', None)\n"
        "print(json.dumps([dict(os.environ) == before, 'libtpu' in open('/proc/self/maps').read(),"
        " c.memory.arguments]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, False, 4096]
