"""Random numbers of a program: counter-based bits, uniform and normal numbers.

The generator's (seed, offset) are operands; the same pair gives the same numbers in every mode.
"""

# A mixin of Builder, whose methods mypy cannot see from here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.types import LoweringError, Operand, Value

_GILES_CENTRAL = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_GILES_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


class RandomMixin:
    """Draws of one program never overlap: each starts at its own counter range."""

    def random_start(self) -> Value:
        """A fresh generator state, ui32[3] (key, key, counter), that no other draw overlaps.

        The key is Threefry of the generator's offset under its seed; each draw of one program
        starts at its own counter range. Loops carry the state and call :meth:`random_step`.
        """
        if self.rng_state is None:
            raise LoweringError("this program has no random state")
        self.rng_used = True
        seed, offset = (self.bitcast(v, torch.uint32) for v in self.rng_state)
        words = [self.index_dim(v, 0, i) for v in (seed, offset) for i in (0, 1)]
        draw = self.constant(self._rng_draws << 20, torch.uint32)
        self._rng_draws += 1
        return self.stack([*self._threefry(*words), draw], 0)

    def random_step(
        self, state: Value, shape: Sequence[int], dtype: torch.dtype = torch.uint32
    ) -> tuple[Value, Value]:
        """The next state and uniform random bits (ui8/16/32/64) of ``shape``.

        Element i is a function of the key, the counter and i alone, so the bits fuse into their
        consumer (``rng_bit_generator`` does not, and is 20 to 40 times slower on XLA:CPU).
        """
        numel = math.prod(shape)
        if numel >= 1 << 32:
            raise NotImplementedError(
                f"random: {numel} elements in one draw; the limit is 2**32 - 1"
            )
        k0, k1, counter = (
            self.broadcast_to(self.index_dim(state, 0, i), (numel,)) for i in range(3)
        )
        a, c = self._threefry(k0, k1, counter, self.iota((numel,), 0, torch.uint32))
        if dtype is torch.uint64:
            high = self.shift_left(self._raw_convert(a, dtype), 32)
            bits = self.or_(high, self._raw_convert(c, dtype))
        else:
            bits = self.xor(a, c)
            if dtype is not torch.uint32:
                bits = self._raw_convert(
                    self.shift_right_logical(bits, 32 - dtype.itemsize * 8), dtype
                )
        step = self.constant_array([0, 0, 1], torch.uint32)
        return self.add(state, step), self.reshape(bits, shape)

    def _threefry(self, k0: Value, k1: Value, x0: Value, x1: Value) -> tuple[Value, Value]:
        """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers", 2011)."""
        keys = [k0, k1, self.xor(self.xor(k0, k1), 0x1BD11BDA)]
        x0, x1 = self.add(x0, k0), self.add(x1, k1)
        for group in range(5):
            for r in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                x0 = self.add(x0, x1)
                turned = self.or_(self.shift_left(x1, r), self.shift_right_logical(x1, 32 - r))
                x1 = self.xor(turned, x0)
            x0 = self.add(x0, keys[(group + 1) % 3])
            x1 = self.add(x1, self.add(keys[(group + 2) % 3], group + 1))
        return x0, x1

    def random_bits(self, shape: Sequence[int], dtype: torch.dtype = torch.uint32) -> Value:
        """Uniform random bits (ui8/16/32/64) of a draw of their own."""
        return self.random_step(self.random_start(), shape, dtype)[1]

    def uniform_from_bits(
        self, bits: Value, dtype: torch.dtype, digits: int | None = None
    ) -> Value:
        """Bits (ui32 for float32, ui64 for float64) as numbers in [0, 1) on a grid of
        2**-digits (default: the full mantissa)."""
        digits = digits or (53 if dtype is torch.float64 else 24)
        bits = self.shift_right_logical(bits, bits.dtype.itemsize * 8 - digits)
        return self.mul(self._raw_convert(bits, dtype), 2.0**-digits)

    def open_uniform_from_bits(self, bits: Value, dtype: torch.dtype) -> Value:
        """Bits as numbers in (0, 1): odd multiples of 2**-24 (float64: 2**-53), so that neither
        the number nor its complement rounds to 0."""
        digits = 53 if dtype is torch.float64 else 24
        odd = self.or_(self.shift_right_logical(bits, bits.dtype.itemsize * 8 - digits), 1)
        return self.mul(self._raw_convert(odd, dtype), 2.0**-digits)

    def normal_from_bits(self, bits: Value, dtype: torch.dtype) -> Value:
        """Bits as standard normal numbers: sqrt(2) * erf_inv of a uniform number in (-1, 1)."""
        wide = dtype is torch.float64
        width, digits = (64, 53) if wide else (32, 24)
        odd = self.or_(self.shift_right_logical(bits, width - digits - 1), 1)
        signed = self.sub(self._raw_convert(odd, torch.int64 if wide else torch.int32), 1 << digits)
        # Odd multiples of 2**-digits strictly inside (-1, 1): erf_inv is finite on all of them.
        symmetric = self.mul(self._raw_convert(signed, dtype), 2.0**-digits)
        inverse = self.erf_inv(symmetric) if wide else self._erf_inv_f32(symmetric)
        return self.mul(inverse, math.sqrt(2.0))

    def _erf_inv_f32(self, x: Value) -> Value:
        """erf_inv on (-1, 1) by Giles, "Approximating the erfinv function" (2012), in float32.

        chlo's form takes log1p(-x*x), which costs twice as much as a logarithm of the product.
        """
        w = self.neg(self.log(self.mul(self.sub(1.0, x), self.add(x, 1.0))))
        central = self._horner(_GILES_CENTRAL, self.sub(w, 2.5))
        tail = self._horner(_GILES_TAIL, self.sub(self.sqrt(w), 3.0))
        return self.mul(x, self.select(self.lt(w, 5.0), central, tail))

    def _horner(self, coefficients: Sequence[float], x: Value) -> Value:
        value: Operand = coefficients[0]
        for c in coefficients[1:]:
            value = self.add(self.mul(x, value), c)
        return self.as_value(value, x.dtype)

    def bits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The width of random bits behind one number of a float dtype."""
        return torch.uint64 if dtype is torch.float64 else torch.uint32

    def random_uniform(
        self, shape: Sequence[int], dtype: torch.dtype, digits: int | None = None
    ) -> Value:
        """Uniform in [0, 1) in ``dtype`` (float32 or float64), see :meth:`uniform_from_bits`."""
        return self.uniform_from_bits(
            self.random_bits(shape, self.bits_dtype(dtype)), dtype, digits
        )

    def random_open_uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Uniform in (0, 1), both ends excluded."""
        return self.open_uniform_from_bits(self.random_bits(shape, self.bits_dtype(dtype)), dtype)

    def random_normal(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Standard normal in ``dtype`` (float32 or float64)."""
        return self.normal_from_bits(self.random_bits(shape, self.bits_dtype(dtype)), dtype)
