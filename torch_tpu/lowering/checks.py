"""What a program finds wrong with values while it runs: indices out of range, failed assertions.

A check is an i64 scalar, 0 while all is well. Else its low 16 bits are one more than the position
of a label in ``check_labels``, and the bits above are a detail for the error text. A program
returns the first of its checks that is not 0; the host raises for it at the next synchronisation
(csrc/core/checks.cpp). So checks leave branches and loops as one number.
"""

# A mixin of Builder, whose methods mypy cannot see from here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from torch_tpu.lowering.types import LoweringError, Value

Kind = Literal["index", "assertion", "linalg"]
# (kind, text). "index": the op, for IndexError; "assertion": the words of a RuntimeError;
# "linalg": the function, for the error that PyTorch has for a factorisation's info.
Label = tuple[Kind, str]

_LABEL_BITS = 16


class CheckMixin:
    """Methods of the builder."""

    checks: list[Value]
    check_labels: list[Label]
    # The op that indices belong to, in the words of an error; "" is the program's own name.
    describe_op: Callable[[], str]

    def note_bad_index(self, bad: Value) -> None:
        """Record an i1 tensor whose True elements mean an index out of range."""
        if bad.numel:
            self._note(self.reduce(bad, "or", range(bad.rank)), ("index", self.describe_op()))

    def note_assertion(self, failed: Value | bool, text: str) -> None:
        """Record that RuntimeError(text) is due if ``failed`` (an i1 scalar)."""
        flag = self.constant(failed, torch.bool) if isinstance(failed, bool) else failed
        self._note(flag, ("assertion", text))

    def note_info(self, info: Value, function: str, is_matrix: bool) -> None:
        """Record LAPACK's ``info`` (int32 [...]; 0 is success) of ``function``, such as
        "linalg.cholesky"; ``is_matrix`` if its argument was no batch."""
        flat = self.convert(self.reshape(info, (info.numel,)), torch.int64)
        if not flat.numel:
            return
        failed = self.ne(flat, 0)
        rows = self.iota((info.numel,), 0)
        first = self.reduce(self.select(failed, rows, info.numel), "min", [0])
        any_failed = self.lt(first, info.numel)
        row = self.select(any_failed, first, 0)
        value = self.reshape(self.dynamic_slice(flat, [row], [1]), ())
        # 24 bits each for the place in the batch and the value.
        detail = self.or_(self.shift_left(row, 24), self.and_(value, (1 << 24) - 1))
        text = f"{function}|{'matrix' if is_matrix else 'batch'}"
        self._note(any_failed, ("linalg", text), detail)

    def first_failure(self, checks: Sequence[Value]) -> Value:
        """The first check that is not 0, or 0."""
        if not checks:
            return self.constant(0, torch.int64)
        found = checks[0]
        for check in checks[1:]:
            found = self.select(self.ne(found, 0), found, check)
        return found

    def _note(self, failed: Value, label: Label, detail: Value | None = None) -> None:
        if label not in self.check_labels:
            self.check_labels.append(label)
        number = self.check_labels.index(label) + 1
        if number >> _LABEL_BITS:
            raise LoweringError(f"a program with {number} different checks")
        code: Value | int = number
        if detail is not None:
            code = self.or_(self.shift_left(detail, _LABEL_BITS), number)
        self.checks.append(self.select(failed, code, self.constant(0, torch.int64)))
