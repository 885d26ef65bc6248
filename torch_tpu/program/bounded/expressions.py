"""Sizes as polynomials of the sizes that change, found by looking at several samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

# A product of symbols, by number, in order; () is the constant term.
Monomial = tuple[int, ...]


@dataclass(frozen=True)
class Expression:
    """A polynomial with integer coefficients over numbered symbols; no term has coefficient 0."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    @staticmethod
    def of(terms: dict[Monomial, int]) -> Expression:
        return Expression(tuple(sorted((m, c) for m, c in terms.items() if c)))

    @staticmethod
    def constant(value: int) -> Expression:
        return Expression.of({(): value})

    @staticmethod
    def symbol(number: int) -> Expression:
        return Expression.of({(number,): 1})

    @property
    def is_constant(self) -> bool:
        return all(m == () for m, _ in self.terms)

    @property
    def grows(self) -> bool:
        """Whether a larger symbol never makes it smaller."""
        return all(c > 0 for m, c in self.terms if m)

    @property
    def multiple_of_one(self) -> tuple[int, int] | None:
        """(symbol, factor) if it is a multiple of one symbol."""
        if len(self.terms) == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0], self.terms[0][1]
        return None

    def at(self, values: Sequence[int]) -> int:
        total = 0
        for monomial, coefficient in self.terms:
            for symbol in monomial:
                coefficient *= values[symbol]
            total += coefficient
        return total

    def __add__(self, other: Expression) -> Expression:
        terms = dict(self.terms)
        for m, c in other.terms:
            terms[m] = terms.get(m, 0) + c
        return Expression.of(terms)

    def __sub__(self, other: Expression) -> Expression:
        return self + other * Expression.constant(-1)

    def __mul__(self, other: Expression) -> Expression:
        terms: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in other.terms:
                key = tuple(sorted(m + n))
                terms[key] = terms.get(key, 0) + c * d
        return Expression.of(terms)

    def divided_by(self, number: int) -> Expression | None:
        """The quotient if every coefficient is a multiple of ``number``."""
        if number == 0 or any(c % number for _, c in self.terms):
            return None
        return Expression.of({m: c // number for m, c in self.terms})

    def __str__(self) -> str:
        parts = [
            "*".join([str(c)] * (c != 1 or not m) + [f"n{s}" for s in m]) for m, c in self.terms
        ]
        return " + ".join(parts) or "0"


def product(factors: Sequence[Expression]) -> Expression:
    result = Expression.constant(1)
    for factor in factors:
        result = result * factor
    return result


def fit(values: Sequence[int], points: Sequence[Sequence[int]]) -> Expression | None:
    """The simplest expression that takes ``values`` at ``points`` (values of all symbols).

    Tried are constants, one symbol plus a constant, products with a factor, and affine
    combinations. Each has fewer unknowns than there are points, so that a wrong guess shows. None
    if nothing fits.
    """
    first = values[0]
    if all(v == first for v in values):
        return Expression.constant(first)
    count = len(points[0])
    for degree in (1, 2, 3):
        for monomial in combinations_with_replacement(range(count), degree):
            at = Expression.of({monomial: 1})
            base = at.at(points[0])
            if base and first % base == 0:
                guess = Expression.of({monomial: first // base})
                if _takes(guess, values, points):
                    return guess
    return _affine(values, points, count)


def _affine(
    values: Sequence[int], points: Sequence[Sequence[int]], count: int
) -> Expression | None:
    """Slopes are read off pairs of points that differ in one symbol."""
    slopes: dict[int, int] = {}
    for symbol in range(count):
        for i, p in enumerate(points):
            for j, q in enumerate(points[:i]):
                apart = [s for s in range(count) if p[s] != q[s]]
                if apart != [symbol]:
                    continue
                rise, run = values[i] - values[j], p[symbol] - q[symbol]
                if rise % run:
                    return None
                slopes[symbol] = rise // run
    if len(slopes) < count:
        return None
    offset = values[0] - sum(slope * points[0][s] for s, slope in slopes.items())
    guess = Expression.of({(): offset, **{(s,): slope for s, slope in slopes.items()}})
    return guess if _takes(guess, values, points) else None


def _takes(guess: Expression, values: Sequence[int], points: Sequence[Sequence[int]]) -> bool:
    return all(guess.at(p) == v for p, v in zip(points, values, strict=True))
