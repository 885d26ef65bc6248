"""Values whose dims are longer than what they hold: which places are real, and moving them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.lowering.builder import Builder
from torch_tpu.lowering.types import Operand, Value
from torch_tpu.program.bounded.expressions import Expression, product


class Unbounded(Exception):
    """A program that cannot be written for several sizes; the message says why."""


@dataclass(frozen=True)
class Factor:
    """An axis of ``bound`` places, of which the first ``size`` are real."""

    bound: int
    size: Expression

    @property
    def padded(self) -> bool:
        return not self.size.is_constant


@dataclass(frozen=True)
class Dim:
    """One dim of a value: axes from the outermost to the innermost, each padded on its own.

    ``uniform``: all places hold the same, so that the dim has any arrangement one likes.
    """

    factors: tuple[Factor, ...]
    uniform: bool = False

    @property
    def bound(self) -> int:
        return math.prod(f.bound for f in self.factors)

    @property
    def size(self) -> Expression:
        return product([f.size for f in self.factors])

    @property
    def padded(self) -> bool:
        return any(f.padded for f in self.factors)

    @property
    def is_prefix(self) -> bool:
        """Whether the real places are the first ones, without gaps."""
        return not any(f.padded for f in self.factors[1:])

    def as_prefix(self) -> Dim:
        return Dim((Factor(self.bound, self.size),), self.uniform)


def fixed(size: int) -> Dim:
    return Dim((Factor(size, Expression.constant(size)),))


@dataclass(frozen=True)
class Padded:
    """A value in the bounded program."""

    value: Value
    dims: tuple[Dim, ...]

    @property
    def padded(self) -> bool:
        return any(d.padded for d in self.dims)

    @property
    def sizes(self) -> tuple[Expression, ...]:
        return tuple(d.size for d in self.dims)


class Sizes:
    """The symbols' bounds, and their values at run time."""

    def __init__(self, b: Builder, bounds: Sequence[int], operands: Sequence[Value]) -> None:
        self.b = b
        self.bounds = tuple(bounds)
        self._operands = operands
        self._known: dict[Expression, Operand] = {}

    def bound(self, size: Expression) -> int:
        if not size.grows:
            raise Unbounded(f"a size that shrinks as others grow: {size}")
        value = size.at(self.bounds)
        if value < 0:
            raise Unbounded(f"a negative size: {size}")
        return value

    def dim(self, size: Expression) -> Dim:
        """A dim whose real places are the first ones."""
        return Dim((Factor(self.bound(size), size),))

    def real(self, size: Expression) -> Operand:
        """The size at run time: an i64 scalar, or a number if it never changes."""
        if size.is_constant:
            return size.at(())
        if size not in self._known:
            total: Operand = 0
            for monomial, coefficient in size.terms:
                term: Operand = coefficient
                for symbol in monomial:
                    term = self.b.mul(self._operands[symbol], term)
                total = term if isinstance(total, int) and total == 0 else self.b.add(term, total)
            self._known[size] = total
        return self._known[size]

    # -- where the real places are -----------------------------------------------------------

    def positions(self, dim: Dim) -> list[Value]:
        """For each factor, its coordinate at every place of the dim (i64, one-dimensional)."""
        b, out, rest = self.b, [], dim.bound
        place = b.iota((dim.bound,), 0)
        for factor in dim.factors:
            rest //= factor.bound
            at = b.div(place, rest) if rest > 1 else place
            out.append(b.remainder(at, factor.bound) if factor is not dim.factors[0] else at)
        return out

    def valid(self, dim: Dim) -> Value:
        """i1, one-dimensional: whether a place is real."""
        result: Value | None = None
        for factor, at in zip(dim.factors, self.positions(dim), strict=True):
            if factor.padded:
                inside = self.b.lt(at, self.real(factor.size))
                result = inside if result is None else self.b.and_(result, inside)
        assert result is not None
        return result

    def masked(self, x: Padded, dims: Sequence[int], fill: Operand) -> Value:
        """``x`` with ``fill`` at the places that are not real in ``dims``."""
        value = x.value
        for d in dims:
            if x.dims[d].padded:
                inside = self.b.broadcast_in_dim(self.valid(x.dims[d]), value.shape, [d])
                value = self.b.select(inside, value, self.b.as_value(fill, value.dtype))
        return value

    # -- moving real places ------------------------------------------------------------------

    def arranged(self, x: Padded, d: int, wanted: Dim) -> Padded:
        """``x`` with its dim ``d`` arranged as ``wanted``, which has the same size."""
        have = x.dims[d]
        dims = (*x.dims[:d], wanted, *x.dims[d + 1 :])
        if have.factors == wanted.factors or have.uniform:
            return Padded(x.value, dims)
        if have.bound == wanted.bound and have.is_prefix and wanted.is_prefix:
            return Padded(x.value, dims)
        b = self.b
        rest: Value | None = None
        for factor, at in zip(wanted.factors, self.positions(wanted), strict=True):
            rest = at if rest is None else b.add(at, b.mul(self.real(factor.size), rest))
        assert rest is not None
        source: Value | None = None
        # Innermost first: the remainder by its real size is the coordinate.
        scale = 1
        for factor in reversed(have.factors):
            size = self.real(factor.size)
            outermost = factor is have.factors[0]
            at = rest if outermost else b.remainder(rest, size)
            at = b.mul(at, scale) if scale > 1 else at
            source = at if source is None else b.add(source, at)
            if not outermost:
                rest = b.div(rest, size)
            scale *= factor.bound
        assert source is not None
        index = b.clamp(source, 0, have.bound - 1)
        order = [d, *(k for k in range(x.value.rank) if k != d)]
        rows = b.take_rows(b.transpose(x.value, order), index)
        back = [order.index(k) for k in range(x.value.rank)]
        return Padded(b.transpose(rows, back), dims)

    def as_value(self, x: Operand) -> Value:
        return x if isinstance(x, Value) else self.b.constant(x, torch.int64)

    def resized(self, x: Padded, d: int, bound: int) -> Padded:
        """``x`` with ``bound`` places in its dim ``d``, whose real places come first."""
        dim = x.dims[d]
        if not dim.is_prefix:
            x = self.arranged(x, d, dim.as_prefix())
        if dim.bound == bound:
            return x
        n = x.value.shape[d]
        value = (
            self.b.slice_dim(x.value, d, 0, bound)
            if bound < n
            else self.b.pad_dim(x.value, d, False if x.value.is_bool else 0, 0, bound - n)
        )
        dims = (*x.dims[:d], Dim((Factor(bound, dim.size),)), *x.dims[d + 1 :])
        return Padded(value, dims)

    # -- reshape -----------------------------------------------------------------------------

    def reshaped(self, x: Padded, sizes: Sequence[Expression]) -> Padded:
        """Dims of ``sizes`` over the same elements in the same order."""
        x, groups = self._grouped(x, list(sizes))
        dims: list[Dim] = []
        for old, new in groups:
            dims += self._regrouped([x.dims[d] for d in old], new)
        shape = [d.bound for d in dims]
        return Padded(self.b.reshape(x.value, shape), tuple(dims))

    def _grouped(
        self, x: Padded, sizes: list[Expression]
    ) -> tuple[Padded, list[tuple[list[int], list[Expression]]]]:
        """Runs of old dims and new sizes with the same product, as short as they can be."""
        groups: list[tuple[list[int], list[Expression]]] = []
        old_sizes = [d.size for d in x.dims]
        # Products that are equal at such numbers are the same expression.
        primes = (1_000_003, 1_000_033, 1_000_037, 1_000_039)
        i = j = 0
        while i < len(old_sizes) and j < len(sizes):
            old, have = [i], old_sizes[i]
            new, want = [sizes[j]], sizes[j]
            i, j = i + 1, j + 1
            while have != want:
                if have.at(primes) < want.at(primes):
                    if i == len(old_sizes):
                        raise Unbounded("a reshape whose sizes do not match")
                    old.append(i)
                    have = have * old_sizes[i]
                    i += 1
                else:
                    if j == len(sizes):
                        raise Unbounded("a reshape whose sizes do not match")
                    new.append(sizes[j])
                    want = want * sizes[j]
                    j += 1
            groups.append((old, new))
        rest = (list(range(i, len(old_sizes))), sizes[j:])
        if rest[0] or rest[1]:  # dims of size 1
            last = groups.pop() if groups else ([], [])
            groups.append((last[0] + rest[0], last[1] + rest[1]))
        for old, new in groups:
            x = self._prepared(x, old, new)
        return x, groups

    def _prepared(self, x: Padded, old: list[int], new: list[Expression]) -> Padded:
        """Rearranges one old dim that is to be split where its padding does not allow it."""
        if len(old) != 1 or not x.dims[old[0]].padded or x.dims[old[0]].uniform:
            return x
        dim = x.dims[old[0]]
        try:
            self._regrouped([dim], new)
        except Unbounded:
            wanted = Dim(
                tuple(Factor(self.bound(s), s) for s in new if s != Expression.constant(1))
            )
            return self.arranged(x, old[0], wanted)
        return x

    def _regrouped(self, old: list[Dim], new: list[Expression]) -> list[Dim]:
        uniform = bool(old) and all(d.uniform or d.bound == 1 for d in old)
        if uniform:
            return [Dim(self.dim(s).factors, True) for s in new]
        one = Expression.constant(1)
        queue = [f for d in old for f in d.factors if f.size != one]
        out: list[Dim] = []
        for size in new:
            taken: list[Factor] = []
            left = size
            while left != one:
                if not queue:
                    raise Unbounded("a reshape across padding")
                factor = queue.pop(0)
                if factor.size == left:
                    taken.append(factor)
                    left = one
                    continue
                rest = _quotient(left, factor.size)
                if rest is not None:
                    taken.append(factor)
                    left = rest
                    continue
                # The factor is split: its inner part has to be without padding.
                inner = _quotient(factor.size, left)
                if inner is None or not inner.is_constant:
                    raise Unbounded("a reshape across padding")
                n = inner.at(())
                if factor.bound % n:
                    raise Unbounded("a reshape across padding")
                taken.append(Factor(factor.bound // n, left))
                queue.insert(0, Factor(n, inner))
                left = one
            out.append(Dim(tuple(taken) or fixed(1).factors))
        if queue:
            raise Unbounded("a reshape across padding")
        return [_simplified(d) for d in out]


def _simplified(dim: Dim) -> Dim:
    """Axes without padding inside of a padded outermost one: the real places come first."""
    if len(dim.factors) > 1 and dim.is_prefix:
        return dim.as_prefix()
    return dim


def _quotient(a: Expression, c: Expression) -> Expression | None:
    """``a / c`` where ``c`` is one term that divides all of ``a``'s."""
    if len(c.terms) != 1:
        return Expression.constant(1) if a == c else None
    monomial, coefficient = c.terms[0]
    out = {}
    for m, k in a.terms:
        rest = list(m)
        for symbol in monomial:
            if symbol not in rest:
                return None
            rest.remove(symbol)
        if k % coefficient:
            return None
        out[tuple(rest)] = k // coefficient
    return Expression.of(out)
