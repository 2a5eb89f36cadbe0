"""The rules, the twin of csrc/rules bit for bit: plain mul, add, sub, IEEE division and square root, nothing fused.

Everything works on a tile of any shape in the compute type (float64 for float64 parameters, else float32). Storage of
16 bits is loaded and stored as integers (see ``_chunk.py``), because the interpreter's own bf16 casts truncate.
"""

import triton
import triton.language as tl

# Codes of element types, as in csrc/abi.h; NONE: the rule has no such operand.
F32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
F16 = tl.constexpr(2)
F64 = tl.constexpr(3)
NONE = tl.constexpr(-1)


# -- portable.h -------------------------------------------------------------------------------------------------------


@triton.jit
def square_root(x):
    """IEEE square root; ``tl.sqrt_rn`` refuses float64, where plain ``sqrt`` is right."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def divide(x, y):
    """IEEE division; ``tl.div_rn`` refuses float64, where ``/`` is right."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def integer_power(base, n):
    """base**n by squaring, for every lane: the same products in the same order as integer_power of portable.h."""
    result = tl.full(base.shape, 1.0, tl.float64)
    while tl.max(n) > 0:
        result = tl.where((n & 1) != 0, result * base, result)
        base = base * base
        n = n >> 1
    return result


@triton.jit
def power_of_two(exponent):
    """2.0**exponent in float64 for -1022 <= exponent <= 1023; below that 0."""
    bits = (exponent.to(tl.int64) + 1023) << 52
    return tl.where(exponent < -1022, 0.0, bits.to(tl.float64, bitcast=True))


# -- narrow.h ---------------------------------------------------------------------------------------------------------


@triton.jit
def widen_bf16(bits):
    """bf16 as uint16 to float32, exactly."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def narrow_bf16(x):
    """float32 to bf16 as uint16, round to nearest even; denormals are kept and NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, (bits >> 16) | 0x40, rounded).to(tl.uint16)


@triton.jit
def widen(x, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """What ``_chunk.py`` loads of storage type DTYPE, in the compute type."""
    if DTYPE == BF16:
        x = widen_bf16(x)
    return x.to(COMPUTE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Compute type to what ``_chunk.py`` stores; float64 reaches 16 bits through float32, as in a cast of torch."""
    if DTYPE == BF16:
        x = narrow_bf16(x.to(tl.float32))
    elif DTYPE == F16:
        x = x.to(tl.float32).to(tl.float16)
    elif DTYPE == F32:
        x = x.to(tl.float32)
    else:
        x = x.to(tl.float64)
    return x


# -- adamw.h ----------------------------------------------------------------------------------------------------------


@triton.jit
def prepare_adamw(lr, beta1, beta2, weight_decay, decoupled, step):
    """Scalars of rows for one step, all float64: (inverse square root of bc2, step size, decoupled decay, L2 decay)."""
    bc1 = 1.0 - integer_power(beta1, step)
    bc2 = 1.0 - integer_power(beta2, step)
    decay = tl.where(decoupled != 0.0, lr * weight_decay, 0.0)
    l2 = tl.where(decoupled != 0.0, 0.0, weight_decay)
    return 1.0 / tl.sqrt(bc2), lr / bc1, decay, l2


@triton.jit
def apply_update(p, update):
    """An update of zero leaves p as it is, also the sign of -0.0: a step with lr = 0 changes no bit."""
    return tl.where(update == 0.0, p, p - update)


@triton.jit
def adamw_update(
    p, g, m, v, w, coef, beta1, rest1, beta2, rest2, eps, inv_sqrt_bc2, step_size, decay, l2, AMSGRAD: tl.constexpr
):
    """New (p, m, v, w) and the update. ``rest``: 1 - beta, rounded from float64. ``w``: AMSGrad's running maximum."""
    g = g * coef
    g = tl.where(l2 != 0.0, g + p * l2, g)
    # Interpolation from the nearer end, as rules/adamw.h: g - (g - m) * beta is g + (g - m) * -beta, exactly.
    old1, old2 = beta1 > 0.5, beta2 > 0.5
    m = tl.where(old1, m, g) + (g - m) * tl.where(old1, rest1, -beta1)
    square = g * g
    average = tl.where(old2, v, square) + (square - v) * tl.where(old2, rest2, -beta2)
    v = tl.where(v == float("inf"), v, average)  # an average that has overflown stays so, and the update 0
    second = v
    if AMSGRAD:
        w = tl.where((w > v) | (w != w), w, v)  # a NaN that is already there stays, as in torch.maximum
        second = w
    update = divide(m, square_root(second) * inv_sqrt_bc2 + eps) * step_size
    update = tl.where(decay != 0.0, update + p * decay, update)
    return apply_update(p, update), m, v, w, update


# -- sgd.h ------------------------------------------------------------------------------------------------------------


@triton.jit
def sgd_update(p, g, buf, coef, lr, momentum, rest, weight_decay, nesterov, fresh, MOMENTUM: tl.constexpr):
    """New (p, momentum buffer) and the update. ``rest``: 1 - dampening. ``fresh``: the buffer holds no value yet."""
    g = g * coef
    g = tl.where(weight_decay != 0.0, g + p * weight_decay, g)
    direction = g
    if MOMENTUM:
        buf = tl.where(fresh != 0, g, buf * momentum + g * rest)
        direction = tl.where(nesterov != 0, g + buf * momentum, buf)
    update = direction * lr
    return apply_update(p, update), buf, update


# -- grad_stats.h -----------------------------------------------------------------------------------------------------


@triton.jit
def magnitude_bits(x):
    """|x| as an integer that orders like it: finite < inf < NaN."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def infinity_bits(x):
    """magnitude_bits of infinity for tiles of x's type."""
    if x.dtype == tl.float64:
        return tl.full([], 0x7FF0000000000000, tl.int64)
    else:
        return tl.full([], 0x7F800000, tl.int32)


@triton.jit
def clip_coefficient(norm, max_norm):
    """min(1, max_norm / (norm + 1e-6)) in float64, as torch.nn.utils.clip_grad_norm_; NaN stays NaN."""
    coef = max_norm / (norm + 1e-6)
    return tl.where(coef > 1.0, 1.0, coef)


@triton.jit
def scaled_root(sumsq, exponent):
    """sqrt(sumsq * 2**exponent) for an even exponent of any size that a float64 gradient can have."""
    half = exponent >> 1
    first = half >> 1
    return tl.sqrt(sumsq) * power_of_two(first) * power_of_two(half - first)
