"""Which numbers of a call are sizes that change: guesses; the first that lifts is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch_tpu.lowering import views
from torch_tpu.program.bounded.description import Call
from torch_tpu.program.bounded.expressions import Expression
from torch_tpu.program.bounded.patterns import Known
from torch_tpu.program.emitter import contiguous_strides, stride_order
from torch_tpu.program.plan import TensorArg

MAX_SYMBOLS = 3


def from_difference(before: Sequence[int], now: Sequence[int]) -> list[Expression] | None:
    """Numbers that differ are symbols, or products of symbols with each other and constants."""
    symbols: list[tuple[int, int]] = []
    found: dict[tuple[int, int], Expression] = {}
    for a, c in sorted({(a, c) for a, c in zip(before, now, strict=True) if a != c}, key=_by_new):
        expression = _explained(a, c, symbols)
        if expression is None:
            expression = Expression.symbol(len(symbols))
            symbols.append((a, c))
        found[(a, c)] = expression
    if len(symbols) > MAX_SYMBOLS or any(min(pair) < 2 for pair in symbols):
        return None
    return [
        Expression.constant(c) if a == c else found[(a, c)]
        for a, c in zip(before, now, strict=True)
    ]


def _by_new(pair: tuple[int, int]) -> int:
    return pair[1]


def _explained(a: int, c: int, symbols: Sequence[tuple[int, int]]) -> Expression | None:
    products = [(Expression.symbol(k), x, y) for k, (x, y) in enumerate(symbols)]
    products += [
        (Expression.symbol(i) * Expression.symbol(j), x * u, y * v)
        for i, (x, y) in enumerate(symbols)
        for j, (u, v) in enumerate(symbols[: i + 1])
    ]
    for expression, x, y in products:
        if a % x == 0 and c % y == 0 and a // x == c // y:
            return expression * Expression.constant(a // x)
    return None


def _symbols_of(values: Iterable[int]) -> tuple[list[int], dict[int, Expression]]:
    """Symbols for sizes that change, smallest first, and each size as an expression of them."""
    symbols: list[int] = []
    known: dict[int, Expression] = {}
    for n in sorted(set(values)):
        before = [(Expression.symbol(k), v) for k, v in enumerate(symbols)]
        products = [e * f for e, a in before for f, c in before if a * c == n and a >= 8]
        if len(symbols) == MAX_SYMBOLS:
            products += [e * Expression.constant(n // v) for e, v in before if n % v == 0]
        if products:
            known[n] = products[0]
        else:
            known[n] = Expression.symbol(len(symbols))
            symbols.append(n)
    return symbols, known


def from_padding(call: Call, numbers: tuple[int, ...]) -> Iterator[list[Expression]]:
    """Symbols are the sizes of padded dims; equal sizes are one symbol.

    A number of a view or a static argument is taken for a size if it is one of them, or the product
    of neighbouring dims of which one is. One that only happens to be equal makes a pattern of its
    own, no harm. First the dims of operands that are not padded are taken as they are, a weight's
    above all; then those too may be sizes.
    """
    symbols, known = _symbols_of(
        n
        for spec in call.storages
        for n, padded in zip(spec.dims, spec.padded or (), strict=False)
        if padded and n >= 2
    )
    if not symbols or len(symbols) > MAX_SYMBOLS:
        return
    for spec in call.storages:
        if spec.padded:
            dims = [
                known[n] if padded and n in known else Expression.constant(n)
                for n, padded in zip(spec.dims, spec.padded, strict=True)
            ]
            _add_products(known, dims, symbols)
    for k, size in enumerate(symbols):
        for apart in (-1, 1, -2, 2, -3, 3) if size >= 8 else ():  # x[:-1] and its like
            known.setdefault(size + apart, Expression.symbol(k) + Expression.constant(apart))
    all_of_them = [known.get(n, Expression.constant(n)) for n in numbers]
    owners = _owners(call)
    bases: list[list[Expression]] = []
    for spec, places in zip(call.storages, call.storage_places(), strict=True):
        for n, place, padded in zip(spec.dims, places, spec.padded or (), strict=False):
            if not padded:
                all_of_them[place] = Expression.constant(n)
        bases.append([all_of_them[place] for place in places])
    for arg, storage, at in call.tensors():
        if call.storages[storage].padded:
            for k, expression in _lying_in(arg, call.storages[storage].dims, bases[storage]):
                all_of_them[at + k] = expression
    strict = list(all_of_them)
    for place, storage in owners.items():
        if not call.storages[storage].padded:
            strict[place] = Expression.constant(numbers[place])
    yield strict
    if strict != all_of_them:
        yield all_of_them
    yield from _factored(symbols, numbers, all_of_them)


def _factored(
    symbols: Sequence[int], numbers: Sequence[int], expressions: Sequence[Expression]
) -> Iterator[list[Expression]]:
    """For a dim that was merged before and is split here: its size is a multiple of a number."""
    for k, size in enumerate(symbols):
        for n in sorted({n for n in numbers if 2 <= n < size and size % n == 0}, reverse=True):
            factor = size // n
            if n < factor or factor not in numbers:
                continue
            yield [
                Expression.symbol(k)
                if number == n
                else Expression.of({m: c * factor ** m.count(k) for m, c in e.terms})
                for number, e in zip(numbers, expressions, strict=True)
            ]
            break


def _lying_in(
    arg: TensorArg, dims: Sequence[int], base: Sequence[Expression]
) -> Iterator[tuple[int, Expression]]:
    """(place, expression) of the sizes and strides of a tensor that are told by where it lies."""
    rank = len(arg.sizes)
    if arg.view in (views.WHOLE, views.RESHAPE):
        mine = [d for d in range(rank) if arg.sizes[d] != 1]
        theirs = [j for j in range(len(dims)) if dims[j] != 1]
        if [arg.sizes[d] for d in mine] == [dims[j] for j in theirs]:
            for d, j in zip(mine, theirs, strict=True):
                yield d, base[j]
        return
    steps = [Expression.constant(1)]
    for size in reversed(base[1:]):
        steps.insert(0, steps[0] * size)
    strides = contiguous_strides(dims)
    taken: set[int] = set()
    for d in range(rank):
        for j in range(len(dims)):
            if (
                dims[j] != 1
                and j not in taken
                and strides[j] == arg.strides[d]
                and arg.sizes[d] > 1
            ):
                taken.add(j)
                yield rank + d, steps[j]
                if arg.sizes[d] == dims[j]:
                    yield d, base[j]
                break


def _add_products(
    known: dict[int, Expression], dims: Sequence[Expression], symbols: Sequence[int]
) -> None:
    for i in range(len(dims)):
        size = Expression.constant(1)
        for j in range(i, len(dims)):
            size = size * dims[j]
            if not size.is_constant:
                known.setdefault(size.at(symbols), size)


def _owners(call: Call) -> dict[int, int]:
    """The storage that a number belongs to, for the numbers of tensors and bases."""
    owners: dict[int, int] = {}
    for place, storage in call.tensor_places():
        owners[place] = storage
    for storage, places in enumerate(call.storage_places()):
        owners.update(dict.fromkeys(places, storage))
    return owners


def from_known(call: Call, numbers: tuple[int, ...], known: Known) -> Iterator[list[Expression]]:
    """What the tracer knows; the dims of bases follow from the tensors that lie in them."""
    guess: list[Expression | None] = [*known.numbers, *[None] * (len(numbers) - len(known.numbers))]
    lying = {storage: (arg, at) for arg, storage, at in call.tensors()}
    for storage, (spec, places) in enumerate(
        zip(call.storages, call.storage_places(), strict=True)
    ):
        if storage not in lying:
            continue
        arg, at = lying[storage]
        sizes = known.numbers[at : at + len(arg.sizes)]
        order = stride_order(arg.sizes, arg.strides)
        if order is not None and tuple(arg.sizes[d] for d in order) == spec.dims:
            found = [sizes[d] for d in order]
        else:  # dims that were merged, or a part of a base
            by_value = {e.at(known.values): e for e in (*_products(sizes), *sizes)}
            found = [by_value.get(n, Expression.constant(n)) for n in spec.dims]
        for place, expression, padded in zip(
            places, found, spec.padded or (1,) * len(found), strict=True
        ):
            guess[place] = expression if padded else None
    yield [
        Expression.constant(n) if e is None or e.at(known.values) != n else e
        for e, n in zip(guess, numbers, strict=True)
    ]


def _products(expressions: Sequence[Expression]) -> list[Expression]:
    return [a * c for k, a in enumerate(expressions) for c in expressions[: k + 1]]
