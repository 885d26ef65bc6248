"""torch._grouped_mm against one product a group, for groups of all kinds of sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

ENDS = {
    "even": [4, 8, 12, 16],
    "within_a_tile": [1, 3, 4, 40],
    "one_has_all": [0, 200, 200, 200],
    "last_has_all": [0, 0, 0, 72],
    "rows_of_none": [5, 5, 20, 33],
    "more_groups_than_rows": [0, 0, 1, 1, 2, 2, 3, 4, 4, 4, 4, 4],
}
ROWS = {"rows_of_none": 48}  # else the last end
INNER, COLUMNS = 8, 12
QUICK = ("within_a_tile", "rows_of_none", "more_groups_than_rows")
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in ENDS]


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _parts(ends: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def _on_tpu(x: torch.Tensor, y: torch.Tensor, ends: list[int]) -> torch.Tensor:
    offs = torch.tensor(ends, dtype=torch.int32)
    return torch._grouped_mm(x.to("tpu"), y.to("tpu"), offs.to("tpu")).cpu()


@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows_and_columns(name: str) -> None:
    ends, rows = ENDS[name], ROWS.get(name, ENDS[name][-1])
    x, y = _rows(rows, INNER), _rows(len(ends), INNER, COLUMNS)
    want = torch.zeros(rows, COLUMNS)
    for g, part in enumerate(_parts(ends)):
        want[part] = x[part] @ y[g]
    torch.testing.assert_close(_on_tpu(x, y, ends), want, rtol=1e-4, atol=1e-5)
    turned = _on_tpu(y.transpose(1, 2).contiguous(), x.T.contiguous(), ends)
    torch.testing.assert_close(turned, want.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_contraction(name: str) -> None:
    ends, rows = ENDS[name], ROWS.get(name, ENDS[name][-1])
    x, z = _rows(rows, INNER), _rows(rows, COLUMNS)
    want = torch.stack([x[part].T @ z[part] for part in _parts(ends)])
    got = _on_tpu(x.T.contiguous(), z, ends)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_an_infinity_stays_in_its_group() -> None:
    x, z = _rows(16, INNER), _rows(16, COLUMNS)
    x[2, 3], z[2, 1] = float("inf"), float("nan")
    ends = [4, 16]
    got = _on_tpu(x.T.contiguous(), z, ends)
    torch.testing.assert_close(got[1], x[4:].T @ z[4:], rtol=1e-4, atol=1e-5)
    y = _rows(2, INNER, COLUMNS)
    assert _on_tpu(x, y, ends)[4:].isfinite().all()


def test_bfloat16_adds_up_in_float32() -> None:
    """512 ones and then many small numbers: a sum kept in bfloat16 would stay at 512."""
    x = torch.ones(8, 1024, dtype=torch.bfloat16)
    x[:, 512:] = 1 / 64
    y = torch.ones(1024, 8, dtype=torch.bfloat16)
    got = _on_tpu(x, y, [1024, 1024])
    assert torch.equal(got[0].float(), torch.full((8, 8), 520.0))
    assert not got[1].any()


def test_gradients() -> None:
    offs = torch.tensor([3, 3, 10, 16], dtype=torch.int32)
    found = []
    for device in ("cpu", "tpu"):
        x = _rows(16, 8).to(device).requires_grad_()
        y = _rows(4, 8, 12).to(device).requires_grad_()
        F.grouped_mm(x, y, offs=offs.to(device)).sin().sum().backward()
        found.append([x.grad.cpu(), y.grad.cpu()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "x, y, ends, words",
    [
        ((4, 8), (2, 6, 8), [2, 4], "contraction size|contraction dimension"),
        ((4, 8), (2, 8, 8), None, "offs"),
    ],
)
def test_errors(x: tuple[int, ...], y: tuple[int, ...], ends: list[int] | None, words: str) -> None:
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="tpu")
    with pytest.raises(RuntimeError, match=words):
        torch._grouped_mm(torch.zeros(x, device="tpu"), torch.zeros(y, device="tpu"), offs)
