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

LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42feep-1"))
LN2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))


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
def real_power(base, exponent):
    """base**exponent for base > 0, for every lane, with the bits of real_power of portable.h."""
    bits = base.to(tl.int64, bitcast=True)
    k = (bits >> 52) - 1023
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    k = tl.where(m > 1.4142135623730951, k + 1, k)
    m = tl.where(m > 1.4142135623730951, m * 0.5, m)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = tl.zeros_like(z) + 1.0 / 25.0
    for j in tl.static_range(12):
        series = series * z + 1.0 / (23.0 - 2.0 * j)
    scale = k.to(tl.float64)
    x = exponent * (scale * LN2_HIGH + (scale * LN2_LOW + (s + s) * series))
    n = (x * 1.4426950408889634 + tl.where(x < 0.0, -0.5, 0.5)).to(tl.int64)
    power = n.to(tl.float64)
    r = (x - power * LN2_HIGH) - power * LN2_LOW
    result = tl.zeros_like(r) + 1.0
    for j in tl.static_range(15):
        result = 1.0 + r * result / (15.0 - j)
    return result * ((n + 1023) << 52).to(tl.float64, bitcast=True)


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


# -- adafactor.h ------------------------------------------------------------------------------------------------------

# FactorFlag and StepKind of csrc/abi.h.
SCALE_PARAMETER = tl.constexpr(1)
EPS_ADDED = tl.constexpr(2)
DECAY_SCALED = tl.constexpr(4)
CAPPED = tl.constexpr(0)
RELATIVE = tl.constexpr(2)
WARM_UP = tl.constexpr(3)


@triton.jit
def spacing(dtype):
    """What torch.finfo(dtype).eps is, of dtype codes."""
    narrow = tl.where(dtype == BF16, power_of_two(dtype * 0 - 7), power_of_two(dtype * 0 - 10))
    wide = tl.where(dtype == F32, power_of_two(dtype * 0 - 23), power_of_two(dtype * 0 - 52))
    return tl.where((dtype == BF16) | (dtype == F16), narrow, wide)


@triton.jit
def larger_of(a, b):
    """a > b as Python's max: a NaN in b loses."""
    return tl.where(b > a, b, a)


@triton.jit
def prepare_adafactor(lr, beta2, eps, weight_decay, kind, flags, step, dtype):
    """Scalars of rows for one step, all float64: (relative step size, what a new square counts, what is added to it,
    least mean square, largest inverse root, decay). ``dtype``: code of the parameter's."""
    count = step.to(tl.float64)
    root = 1.0 / tl.sqrt(count)
    eps = tl.where(eps == eps, eps, spacing(dtype))
    cap = tl.where(kind == CAPPED, lr, tl.where(kind == RELATIVE, 1e-2, 1e-6 * count))
    capped = (kind == CAPPED) | (kind == RELATIVE) | (kind == WARM_UP)
    relative = tl.where(capped, tl.where(root < cap, root, cap), lr)
    rest = real_power(count, beta2)
    eps_added = (flags & EPS_ADDED) != 0
    added = tl.where(eps_added, eps, 0.0)
    floor = tl.where(eps_added, 0.0, eps)
    limit = tl.where(eps_added, float("inf"), 1.0 / eps)
    decay = tl.where((flags & DECAY_SCALED) != 0, weight_decay, lr * weight_decay)
    return relative, rest, added, floor, limit, decay


@triton.jit
def size_adafactor(relative, decay, flags, eps2, threshold, numel, update_sumsq, param_sumsq):
    """(step size, decay) when the sums over the whole parameter are known: squares of U and of the parameter."""
    scaled_by = larger_of(eps2, tl.sqrt(param_sumsq / numel))
    size = tl.where((flags & SCALE_PARAMETER) != 0, relative * scaled_by, relative)
    decay = tl.where((flags & DECAY_SCALED) != 0, decay * size, decay)
    return size / larger_of(1.0, tl.sqrt(update_sumsq / numel) / threshold), decay


@triton.jit
def toward(old, new, weight):
    """Interpolation from the nearer end, as torch.lerp."""
    return tl.where(weight < 0.5, old + (new - old) * weight, new - (new - old) * (1.0 - weight))


@triton.jit
def finite_limit(limit, P: tl.constexpr):
    """In the compute type and finite: an inverse root that is infinite must not meet a gradient of zero."""
    LARGEST: tl.constexpr = 1.7976931348623157e308 if P == F64 else 3.4028234663852886e38
    return tl.where(limit > LARGEST, LARGEST, limit).to(tl.float64 if P == F64 else tl.float32)


@triton.jit
def vector_moment(g, v, coef, rest, keep, added, from_old):
    """The second moment of elements of a vector. ``keep``: 1 - rest; ``from_old``: rest < 0.5, all from float64."""
    scaled_g = g * coef
    square = scaled_g * scaled_g + added
    # As in adamw_update: square - (square - v) * keep is square + (square - v) * -keep, exactly.
    return tl.where(from_old, v, square) + (square - v) * tl.where(from_old, rest, -keep)


@triton.jit
def inverse_root(v):
    return divide(tl.full(v.shape, 1.0, v.dtype), square_root(v))


@triton.jit
def factored_update(g, root, coef, limit):
    """U. ``root``: the product of the inverse roots of an element's row and column; of a vector that of the element."""
    return (g * coef) * tl.where(root > limit, limit, root)


@triton.jit
def adafactor_update(p, g, root, m, coef, limit, beta1, rest1, step, decay, MOMENTUM: tl.constexpr):
    """New (p, first moment) and the update. ``rest1``: 1 - beta1, rounded from float64."""
    update = factored_update(g, root, coef, limit) * step
    if MOMENTUM:
        old = beta1 > 0.5
        m = tl.where(old, m, update) + (update - m) * tl.where(old, rest1, -beta1)
        update = m
    update = tl.where(decay != 0.0, update + p * decay, update)
    return apply_update(p, update), m, update


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
