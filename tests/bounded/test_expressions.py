"""Numbers as expressions of the sizes that change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_tpu.program.bounded.expressions import Expression, fit, product

ONE = [(5,), (16,), (9,), (12,)]
TWO = [(5, 7), (16, 7), (5, 8), (16, 8), (9, 7), (5, 6), (9, 6)]


@pytest.mark.parametrize(
    ("rule", "points", "text"),
    [
        (lambda n: 4, ONE, "4"),
        (lambda n: n, ONE, "n0"),
        (lambda n: 3 * n, ONE, "3*n0"),
        (lambda n: n + 1, ONE, "1 + n0"),
        (lambda n: n * n, ONE, "n0*n0"),
        (lambda n: 2 * n - 3, ONE, "-3 + 2*n0"),
        (lambda a, c: a * c, TWO, "n0*n1"),
        (lambda a, c: 8 * c, TWO, "8*n1"),
        (lambda a, c: a + c, TWO, "n0 + n1"),
        (lambda a, c: a - c, TWO, "n0 + -1*n1"),
    ],
)
def test_fit(rule: Any, points: Any, text: str) -> None:
    found = fit([rule(*p) for p in points], points)
    assert str(found) == text


@pytest.mark.parametrize(
    "rule", [lambda n: min(n, 10), lambda n: n // 2, lambda n: 2**n, lambda n: n.bit_length()]
)
def test_what_follows_no_rule(rule: Any) -> None:
    assert fit([rule(*p) for p in ONE], ONE) is None


@given(
    st.dictionaries(
        st.sampled_from([(), (0,), (1,), (0, 1)]), st.integers(-4, 4), min_size=1, max_size=4
    ),
    st.tuples(st.integers(2, 99), st.integers(2, 99)),
)
def test_arithmetic_is_that_of_integers(terms: Any, values: tuple[int, int]) -> None:
    a = Expression.of(terms)
    c = Expression.symbol(1) + Expression.constant(3)
    assert (a + c).at(values) == a.at(values) + c.at(values)
    assert (a - c).at(values) == a.at(values) - c.at(values)
    assert product([a, c, a]).at(values) == a.at(values) ** 2 * c.at(values)


def test_shrinking_sizes_are_told() -> None:
    n = Expression.symbol(0)
    assert n.grows
    assert not (Expression.constant(128) - n).grows
