"""Sums over the columns of the statistics, in an order that depends on the number of chunks alone."""

import triton
import triton.language as tl

from . import _chunk as t
from ._rules import power_of_two


@triton.jit
def column_tile(stats, name, n_chunks, index):
    return tl.load(t.column(stats, name, n_chunks) + index, mask=index < n_chunks, other=0.0)


@triton.jit
def larger(a, b):
    """Maximum of magnitudes in which a NaN stays: as integers they order finite < inf < NaN."""
    bits = tl.maximum(a.to(tl.int64, bitcast=True), b.to(tl.int64, bitcast=True))
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def scaled(x, exponent):
    """x * 2**exponent for exponents <= 0: in two steps, because a sum of 1e308 still counts beside one of 2**1030."""
    first = exponent >> 1
    return x * power_of_two(first) * power_of_two(exponent - first)


@triton.jit
def gradient_totals(stats, n_chunks, extras, n_extras, TILE: tl.constexpr):
    """(sum of squares of what is clipped, its power of two, largest magnitude, non-finite and zero elements).

    ``extras``: address of records of five float64 with the same fields, from gradients that other devices hold.
    """
    none = tl.full([], -(1 << 20), tl.int64)  # smaller than any exponent
    exponent = none
    for i in range(0, n_chunks, TILE):
        index = i + tl.arange(0, TILE)
        counted = (column_tile(stats, t.SUMSQ, n_chunks, index) != 0.0) & (
            column_tile(stats, t.CLIPS, n_chunks, index) != 0.0
        )
        e = column_tile(stats, t.EXPONENT, n_chunks, index).to(tl.int64)
        exponent = tl.maximum(exponent, tl.max(tl.where(counted, e, none)))
    for k in range(n_extras):
        record = t.doubles(extras) + k * 5
        exponent = tl.maximum(exponent, tl.where(tl.load(record) != 0.0, tl.load(record + 1).to(tl.int64), none))
    exponent = tl.where(exponent == none, 0, exponent)

    sums = tl.zeros((TILE,), tl.float64)
    largest = tl.zeros((TILE,), tl.float64)
    nonfinite = tl.zeros((TILE,), tl.float64)
    zeros = tl.zeros((TILE,), tl.float64)
    for i in range(0, n_chunks, TILE):
        index = i + tl.arange(0, TILE)
        s = column_tile(stats, t.SUMSQ, n_chunks, index)
        e = column_tile(stats, t.EXPONENT, n_chunks, index).to(tl.int64)
        clips = column_tile(stats, t.CLIPS, n_chunks, index)
        sums += tl.where(clips != 0.0, scaled(s, e - exponent), 0.0)
        largest = larger(largest, column_tile(stats, t.AMAX, n_chunks, index))
        nonfinite += column_tile(stats, t.NONFINITES, n_chunks, index)
        zeros += column_tile(stats, t.ZERO_COUNT, n_chunks, index)
    total = tl.sum(sums)
    amax = tl.max(largest.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
    nonfinites = tl.sum(nonfinite)
    zero_count = tl.sum(zeros)
    for k in range(n_extras):
        record = t.doubles(extras) + k * 5
        total += scaled(tl.load(record), tl.load(record + 1).to(tl.int64) - exponent)
        amax = larger(amax, tl.load(record + 2))
        nonfinites += tl.load(record + 3)
        zero_count += tl.load(record + 4)
    return total, exponent, amax, nonfinites, zero_count
