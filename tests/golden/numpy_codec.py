"""The wire format in plain NumPy, slow and simple.

It follows docs/wire-format.md and shares no code with the package, so that each checks the other. A codec is a dict of
its settings, {"codec": "MaxMin", "bits": 4, ...}. A leaf is (name of the dtype, bits of its elements), because NumPy
has no bfloat16. Numbers are float32.
"""

import math

import numpy as np

META = {"MaxMin": 2, "ByteGrad": 2, "AbsMax": 1, "Float8": 1, "Sign": 1, "Micro": 0, "Eden": 2}
BITS = {"float32": np.dtype("<u4"), "bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2")}
# mantissa bits, exponent bias, largest code, largest number
FLOAT8 = {"e4m3": (3, 7, 0x7E, 448), "e5m2": (2, 15, 0x7B, 57344), "e2m1": (1, 1, 0x7, 6)}
# format of elements, bits of an element, elements of a block
MICRO = {"nvfp4": ("e2m1", 4, 16), "mxfp4": ("e2m1", 4, 32), "mxfp8": ("e4m3", 8, 32)}
NAN = np.uint32(0x7FC00000).view(np.float32)
f32 = np.float32


def ieee(function):
    """Turns off NumPy's warnings. Overflows and NaNs are part of the format."""
    return np.errstate(all="ignore")(function)


def power(n):
    return f32(2.0**n)


# conversions


@ieee
def widen(dtype, bits):
    if dtype == "float32":
        return bits.view("<f4")
    if dtype == "float16":
        return bits.view("<f2").astype(f32)
    return (bits.astype("<u4") << 16).view("<f4")


@ieee
def narrow(dtype, x, noise=None):
    bits = x.astype("<f4").view("<u4")
    if dtype == "float32":
        return bits
    m, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    if dtype == "bfloat16":
        up = 0x7FFF + ((m >> 16) & 1) if noise is None else noise
        small = (m + up) >> 16
    elif noise is None:
        small = np.abs(x).astype("<f2").view("<u2")
    else:
        normal = np.minimum(((m + (noise >> 3)) >> 13).astype(np.int64) - (112 << 10), 0x7C00)
        tiny = np.abs(x) < power(-14)
        denormal = (np.rint(np.where(tiny, np.abs(x), 0) * power(40)).astype(np.int64) + noise) >> 16
        small = np.where(tiny, denormal, normal)
    small = np.where(m == 0x7F800000, 0x7F80 if dtype == "bfloat16" else 0x7C00, small)
    return np.where(np.isnan(x), 0x7FC0 if dtype == "bfloat16" else 0x7E00, small | sign).astype("<u2")


# random bits


def philox(counter, key):
    c, k, low = [np.asarray(w, np.uint64) for w in counter], [int(w) for w in key], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[2] * np.uint64(0xCD9E8D57), c[0] * np.uint64(0xD2511F53)
        c = [
            (a >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            a & low,
            (b >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            b & low,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def noise_of(key, leaf_id, e):
    """The 16 random bits of the elements with indices e."""
    row, j = e % 128 // 16, 16 * (e // 128) + e % 16
    words = np.stack(philox((j % 2**32, j // 2**32, e * 0 + leaf_id, e * 0), key)).astype(np.int64)
    word = words[row // 2, np.arange(len(e))]
    return np.where(row % 2 == 0, word & 0xFFFF, word >> 16)


# codes to bytes and back


def meta_of(codec):
    """Returns the number of metadata floats of a bucket."""
    return 1 if codec.get("format") == "nvfp4" else META.get(codec["codec"], 0)


def width(codec):
    if codec["codec"] == "Micro":
        return MICRO[codec["format"]][1]
    return {"Sign": 1, "Float8": 8, "ByteGrad": 8}.get(codec["codec"]) or codec["bits"]


def fields(b):
    """Returns the (first bit, bits) of each field of a code."""
    at = 0
    for k in (8, 4, 2, 1):
        if b & k:
            yield at, k
            at += k


def blocks(n):
    """Returns the (first element, elements, lanes) of each block of a bucket."""
    for first in range(0, n, 128):
        size = min(128, n - first)
        yield first, size, -(-size // 8)


def pack(codes, b):
    out = b""
    for first, size, lanes in blocks(len(codes)):
        block = np.zeros(8 * lanes, np.uint64)
        block[:size] = codes[first : first + size]
        for at, k in fields(b):
            field = (block.reshape(8, lanes) >> np.uint64(at)) & np.uint64(2**k - 1)
            word = sum(field[r] << np.uint64(k * r) for r in range(8))
            if k == 8:
                out += (word & np.uint64(0xFFFFFFFF)).astype("<u4").tobytes() + (word >> np.uint64(32)).astype(
                    "<u4"
                ).tobytes()
            else:
                out += word.astype(f"<u{k}").tobytes()
    return out


def unpack(data, n, b):
    codes, at_byte = np.zeros(n, np.int64), 0
    for first, size, lanes in blocks(n):
        block = np.zeros((8, lanes), np.int64)
        for at, k in fields(b):
            for rows in [range(4), range(4, 8)] if k == 8 else [range(8)]:
                size_of_word = len(rows) * k // 8
                word = np.frombuffer(data, f"<u{size_of_word}", lanes, at_byte).astype(np.int64)
                at_byte += lanes * size_of_word
                for i, r in enumerate(rows):
                    block[r] |= ((word >> (k * i)) & (2**k - 1)) << at
        codes[first : first + size] = block.reshape(-1)[:size]
    return codes


# rotations


def rotated(codec):
    return codec["codec"] == "Eden" or codec.get("rotate", False)


def bucket_size(codec):
    return codec.get("block") or codec.get("bucket_size")


def padded(n):
    return 0 if n == 0 else max(128, 2 ** math.ceil(math.log2(n)))


def signs(seed, n):
    e = np.arange(n)
    row, lane = e // 16, e % 16
    words = np.stack(philox((16 * (row // 128) + lane, 0 * e, 0 * e, 0 * e), (seed, 0))).astype(np.int64)
    bit = words[row // 32 % 4, e] >> (31 - row % 32) & 1
    return (1 - 2 * bit).astype(f32)


def hadamard(x):
    apart = len(x) // 2
    while apart:
        pairs = x.reshape(-1, 2, apart)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        apart //= 2
    return x


def halves(size):
    """Returns the powers of two in the metadata and in the values."""
    k = int(math.log2(size))
    return k - k // 2, k // 2


def rotate(x, seed):
    """Returns the rotated bucket, and a function that converts its metadata to that of the wire."""
    size, largest = padded(len(x)), np.abs(x).max()
    scale = power(-40) if largest >= power(100) else power(80) if 0 < largest < power(-60) else f32(1)
    exponent = int((largest * scale).view(np.uint32)) >> 23
    y = np.zeros(size, f32)
    y[: len(x)] = x * scale * np.uint32((254 - exponent) << 23).view(f32)
    y[np.abs(y) < power(-30)] = 0
    up = np.uint32(exponent << 23).view(f32)
    return hadamard(y * signs(seed, size)), lambda m: m * power(-halves(size)[0]) * up * (f32(1) / scale) + f32(0)


@ieee
def rotate_back(value, seed, unit, base, n):
    down, up = halves(len(value))
    small = power(80) if abs(unit) < power(-60) else f32(1)
    room = power(-40) if abs(base) >= power(100) else f32(1)
    sums = hadamard(value) * power(-up)
    x = unit * small * sums / small
    x[0] = (unit * small * room * sums[0] / small + base * room * power(down)) / room
    return (x * signs(seed, len(x)))[:n] + f32(0)


LEVELS = {
    1: [409],
    2: [232, 773],
    3: [125, 387, 688, 1102],
    4: [66, 199, 336, 482, 643, 828, 1059, 1399],
    5: [34, 101, 170, 239, 310, 383, 458, 537, 620, 710, 807, 915, 1039, 1187, 1378, 1669],
    6: [17, 51, 86, 120, 155, 190, 225, 260, 296, 333, 370, 407, 446, 485, 525, 567]
    + [609, 653, 699, 747, 797, 849, 905, 965, 1029, 1099, 1177, 1265, 1368, 1494, 1659, 1917],
}


def sum_in_order(terms):
    terms = (terms.view(np.uint32) & np.uint32(0xFFFFFF00)).view(f32).reshape(-1, 8, 16)
    lanes = terms[:, 0]
    for row in range(1, 8):
        lanes = lanes + terms[:, row]
    while len(lanes) > 1:
        lanes = lanes[::2] + lanes[1::2]
    lanes = lanes[0]
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


@ieee
def encode_eden(codec, x, noise):
    levels, nothing = f32(LEVELS[codec["bits"]]) / f32(512), ([NAN] * 2, np.zeros(padded(len(x)), np.int64))
    if not np.isfinite(x).all():
        return nothing
    seed = int(noise[0]) | (int(noise[min(1, len(x) - 1)]) & 0x7F) << 16
    y, as_sent = rotate(x, seed)
    square = sum_in_order(y * y)
    bounds = (levels[1:] + levels[:-1]) / f32(2)
    i = (y * y > (bounds * bounds * (square / f32(len(y))))[:, None]).sum(0)
    unit = as_sent(square / sum_in_order(np.abs(y) * levels[i]) if square > 0 else f32(0))
    codes = np.where(np.signbit(y), len(levels) - 1 - i, len(levels) + i)
    return ([unit, np.uint32(0x3F800000 | seed).view(f32)], codes) if np.isfinite(unit) else nothing


def encode_rotated(codec, x, noise):
    nothing = [NAN] * META[codec["codec"]], np.zeros(padded(len(x)), np.int64)
    if not np.isfinite(x).all():
        return nothing
    y, as_sent = rotate(x, 0)
    meta, codes = encode_bucket({**codec, "rotate": False}, y, None if noise is None else np.resize(noise, len(y)))
    meta = [as_sent(m) for m in meta]
    return (meta, codes) if np.isfinite(meta).all() else nothing


def decode_rotated(codec, meta, data, n):
    codes = unpack(data, padded(n), width(codec))
    if codec["codec"] == "Eden":
        levels = f32(LEVELS[codec["bits"]]) / f32(512)
        value_of = np.concatenate([-levels[::-1], levels])[codes]
        return rotate_back(value_of, int(meta[1:].view(np.uint32)[0]) & 0x7FFFFF, meta[0], f32(0), n)
    return rotate_back(value(codec, codes), 0, meta[0], meta[1] if len(meta) == 2 else f32(0), n)


# the arithmetic of a bucket


def scaled_step(span, n, scale):
    u = np.uint32((int(f32(span / f32(n)).view(np.uint32)) + 0xFF) & 0xFFFFFF00).view(f32)
    if scale > 1 and u < power(-53):
        u = np.ceil(u * power(69)) * power(-69)
    return u


def sum_of_magnitudes(x):
    total = f32(0)
    for group in range(0, len(x), 32768):
        of_group = f32(0)
        part = np.abs(x[group : group + 32768])
        for first, size, lanes in blocks(len(part)):
            block = np.zeros(8 * lanes, f32)
            block[:size] = part[first : first + size]
            lane = np.zeros(16, f32)
            for row in block.reshape(8, lanes):
                lane[:lanes] += row
            for half in (8, 4, 2, 1):
                lane = lane[:half] + lane[half : 2 * half]
            of_group = of_group + lane[0]
        total = total + of_group
    return total


def scale_of(largest):
    return power(-40) if largest >= power(100) else power(80) if 0 < largest < power(-60) else f32(1)


@ieee
def encode_bucket(codec, x, noise):
    """Returns (metadata, codes)."""
    if rotated(codec):
        return (encode_eden if codec["codec"] == "Eden" else encode_rotated)(codec, x, noise)
    kind, b = codec["codec"], width(codec)
    nothing = [NAN] * META[kind], np.zeros(len(x), np.int64)
    if not np.isfinite(x).all():
        return nothing
    lo, hi = x.min(), x.max()
    largest = max(abs(lo), abs(hi))
    scale = scale_of(largest)
    xs, constant = x * scale, lo == hi
    if kind in ("MaxMin", "ByteGrad"):
        n, span = 2**b - 1, hi * scale - lo * scale
        if codec.get("compatible"):
            span = span + f32(1e-7) * scale
        u = scaled_step(span, n, scale) if span > 0 else f32(0)
    else:
        n = 1 if constant or kind == "Sign" else FLOAT8[codec["format"]][3] if kind == "Float8" else 2 ** (b - 1) - 1
        if constant:
            u = largest * scale
        elif kind == "Sign":
            u = scaled_step(sum_of_magnitudes(xs), len(x), scale)
        else:
            u = scaled_step(largest * scale, n, scale)
    inv = f32(1) / u if u > 0 else f32(0)
    step = u * (f32(1) / scale)
    if not np.isfinite(step * f32(n)):
        return nothing
    base = lo
    if kind == "MaxMin":
        level = xs - lo * scale
        if codec["rounding"] == "nearest":
            codes = np.rint(level * inv).astype(np.int64)
        else:
            codes = np.minimum((np.rint(level * (inv * f32(65536))).astype(np.int64) + noise) >> 16, n)
    elif kind == "ByteGrad":
        origin = np.rint(hi * scale * inv) - f32(255)
        if u > 0:
            base = origin * u * (f32(1) / scale)
        codes = np.clip(np.rint(xs * inv) - origin, 0, 255).astype(np.int64)
    elif kind == "AbsMax":
        codes = np.rint(xs * inv).astype(np.int64) + 2 ** (b - 1) - 1
    elif kind == "Float8":
        codes = to_float8(codec["format"], xs * inv)
    else:
        codes = 1 - np.signbit(x).astype(np.int64)
    if META[kind] == 2 and not np.isfinite(base + step * f32(n)):
        return nothing
    return [step, base + f32(0)][: META[kind]], codes


def to_float8(name, y):
    d, bias, largest, _ = FLOAT8[name]
    # Round to a multiple of the last place of |y|'s binade, or of the denormals. A carry goes to the next binade.
    exponent = np.maximum(np.frexp(np.abs(y))[1] - 1, 1 - bias)
    whole = np.rint(np.ldexp(np.abs(y), d - exponent)).astype(np.int64)
    code = np.where(whole < 2**d, whole, whole + ((exponent + bias - 1) << d))
    return np.minimum(code, largest) | np.signbit(y).astype(np.int64) << largest.bit_length()


def of_float8(name, codes):
    d, bias, largest, _ = FLOAT8[name]
    sign = 1 << largest.bit_length()
    exponent, mantissa = (codes & sign - 1) >> d, codes % 2**d
    normal = np.ldexp(1 + mantissa * 2.0**-d, exponent - bias)
    magnitude = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias - d), normal)
    return np.where(codes & sign, -magnitude, magnitude)


@ieee
def encode_micro(codec, x):
    """Returns (metadata, bytes)."""
    elements, bits, size = MICRO[codec["format"]]
    blocks = np.append(x, np.zeros(-len(x) % 128, f32)).reshape(-1, size)
    if codec["format"] == "nvfp4":
        nothing = [NAN], bytes(code_bytes(codec, len(x), None))
        largest = np.abs(x).max()
        scale = scale_of(largest)
        u = scaled_step(largest * scale, 2688, scale)
        step = u * (f32(1) / scale)
        if not np.isfinite(x).all() or not np.isfinite(step * f32(2688)):
            return nothing
        y, meta = blocks * scale * (f32(1) / u if u > 0 else f32(0)), [step]
        scales = to_float8("e4m3", np.abs(y).max(1) / f32(6))
        value = of_float8("e4m3", scales).astype(f32)
        y = y * np.where(value > 0, f32(1) / value, f32(0))[:, None]
    else:
        finite, meta = np.isfinite(blocks).all(1), []
        blocks = np.where(finite[:, None], blocks, f32(0))
        top = np.abs(blocks).max(1)
        exponent = np.frexp(top)[1] - 1 - (8 if elements == "e4m3" else 2)
        exponent = np.where(top > 0, np.maximum(exponent, -127), -127)
        scales, y = np.where(finite, exponent + 127, 255), np.ldexp(blocks, -exponent[:, None])
    codes = to_float8(elements, y).reshape(-1, 128)
    scales = scales.astype(np.uint8).reshape(len(codes), -1)
    return meta, b"".join(pack(c, bits) + s.tobytes() for c, s in zip(codes, scales))


def decode_micro(codec, meta, data, n):
    elements, bits, size = MICRO[codec["format"]]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 16 * bits + 128 // size)
    codes = np.stack([unpack(block.tobytes(), 128, bits) for block in blocks[:, : 16 * bits].copy()])
    scales = blocks[:, 16 * bits :].reshape(-1, 1).astype(np.int64)
    values = of_float8(elements, codes).astype(f32).reshape(-1, size)
    if codec["format"] == "nvfp4":
        values = meta[0] * (values * of_float8("e4m3", scales).astype(f32))
    else:
        values = values * np.where(scales == 255, NAN, np.ldexp(f32(1), scales - 127))
    return values.astype(f32).reshape(-1)[:n]


def value(codec, codes):
    kind = codec["codec"]
    if kind == "AbsMax":
        codes = codes - (2 ** (codec["bits"] - 1) - 1)
    if kind == "Sign":
        codes = 2 * codes - 1
    if kind == "Float8":
        codes = of_float8(codec["format"], codes)
    return codes.astype(f32)


# messages


def code_bytes(codec, n, dtype):
    if codec["codec"] == "Raw":
        return n * BITS[dtype].itemsize
    if codec["codec"] == "Micro":
        _, bits, size = MICRO[codec["format"]]
        return -(-n // 128) * (16 * bits + 128 // size)
    return 2 * n if codec["codec"] == "Cast" else width(codec) * -(-(padded(n) if rotated(codec) else n) // 8)


# Lossless

EXPONENT = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}  # {dtype: (exponent bits, mantissa bits)}


def most_bytes(dtype, n):
    size = (EXPONENT[dtype][0] - 2) * -(-n // 8)
    return size + size % 2


def plane_bytes(dtype, n):
    return 2 * -(-n // 8) + {"float32": 3 * n, "bfloat16": n, "float16": n + 3 * -(-n // 8)}[dtype]


def lossless_bytes(dtype, n):
    sizes = [min(512, n - at) for at in range(0, n, 512)]
    return 2 * len(sizes) + -2 * len(sizes) % 16 + sum(plane_bytes(dtype, size) for size in sizes)


def overflow_bytes(dtype, n):
    return sum(most_bytes(dtype, min(512, n - at)) for at in range(0, n, 512))


def digits_of(e, c):
    """Returns the digits of an exponent, one for each level."""
    if e == 0 and c > 0:
        return [3, 3, 2]
    if e <= c:
        return [3] * ((c - e) // 2) + [(c - e) % 2]
    return [3] * (e - c - 1 if e - c <= 2 else e - c) + [2]


def encode_block(dtype, bits):
    """Returns (head, planes, overflow)."""
    e_bits, m_bits = EXPONENT[dtype]
    bits = bits.astype(np.int64)
    exponents = (bits >> m_bits) & (2**e_bits - 1)
    rests = (bits & (2**m_bits - 1)) | (bits >> (m_bits + e_bits)) << m_bits
    others = exponents[exponents > 0]
    c = min(int(others.sum()) // len(others) + 1, 2**e_bits - 1) if len(others) else 0
    digits = [digits_of(int(e), c) for e in exponents]
    overflow, level = b"", 1
    while of_level := [d[level] for d in digits if len(d) > level]:
        overflow += pack(np.array(of_level), 2)
        level += 1
    first = np.array([d[0] for d in digits])
    most = most_bytes(dtype, len(bits))
    if len(overflow) >= most:
        first = exponents & 3
        overflow = pack(exponents >> 2, e_bits - 2)
        overflow += bytes(most - len(overflow))
    planes = pack(first, 2)
    if dtype == "float32":
        planes += (rests & 0xFFFF).astype("<u2").tobytes()
        rests >>= 16
    planes += (rests & 0xFF).astype("u1").tobytes()
    if dtype == "float16":
        planes += pack(rests >> 8, 3)
    return bytes([c, len(overflow) // 2]), planes, overflow


def decode_block(dtype, n, head, planes, overflow):
    """Returns the bits of the elements."""
    (e_bits, m_bits), packed = EXPONENT[dtype], 2 * -(-n // 8)
    c, digits = head[0], unpack(planes[:packed], n, 2)
    if len(overflow) == most_bytes(dtype, n):
        exponents = digits | unpack(overflow, n, e_bits - 2) << 2
    else:
        level, last, open_ = np.zeros(n, np.int64), digits.copy(), np.flatnonzero(digits == 3)
        while len(open_):
            size = 2 * -(-len(open_) // 8)
            last[open_] = unpack(overflow[:size] + bytes(size), len(open_), 2)
            overflow = overflow[size:]
            level[open_] += 1
            open_ = open_[last[open_] == 3]
        above = np.where(level < 2, c + level + 1, np.where(level == 2, 0, c + level))
        exponents = np.where(last == 2, above, c - 2 * level - last) & (2**e_bits - 1)
    rests = np.frombuffer(planes, "u1", n, packed).astype(np.int64)
    if dtype == "float32":
        rests = (
            np.frombuffer(planes, "<u2", n, packed) | np.frombuffer(planes, "u1", n, packed + 2 * n).astype(int) << 16
        )
    elif dtype == "float16":
        rests |= unpack(planes[packed + n :], n, 3) << 8
    signs = (rests >> m_bits) << (m_bits + e_bits)
    return (signs | exponents << m_bits | (rests & (2**m_bits - 1))).astype(BITS[dtype])


def encode_lossless(pieces, dtypes, bits):
    bodies, overflow, most = b"", b"", 0
    for leaf, at, sizes, _ in pieces:
        for n in sizes:
            blocks = [encode_block(dtypes[leaf], bits[leaf][i : min(i + 512, at + n)]) for i in range(at, at + n, 512)]
            bodies += pad16(b"".join(head for head, _, _ in blocks))
            bodies = pad16(bodies + b"".join(planes for _, planes, _ in blocks))
            overflow += b"".join(more for _, _, more in blocks)
            most += overflow_bytes(dtypes[leaf], n)
    return pad16(bodies + overflow + bytes(most - len(overflow)))


def read_lossless(pieces, dtypes, chunk):
    at_byte, sizes_of = 0, [(leaf, at, n) for leaf, at, sizes, _ in pieces for n in sizes]
    lengths = [lossless_bytes(dtypes[leaf], n) for leaf, _, n in sizes_of]
    overflow = chunk[sum(length + -length % 16 for length in lengths) :]
    for (leaf, at, n), length in zip(sizes_of, lengths):
        dtype, number = dtypes[leaf], -(-n // 512)
        planes = chunk[at_byte + 2 * number + -2 * number % 16 :]
        found = []
        for i in range(number):
            head = chunk[at_byte + 2 * i :][:2]
            size = min(512, n - 512 * i)
            used = min(2 * head[1], most_bytes(dtype, size))
            found.append(decode_block(dtype, size, head, planes[: plane_bytes(dtype, size)], overflow[:used]))
            planes, overflow = planes[plane_bytes(dtype, size) :], overflow[used:]
        yield leaf, at, None, widen(dtype, np.concatenate(found))
        at_byte += length + -length % 16


# TopK


def capacity(codec, n):
    return min(n, codec["lists"] * math.ceil(codec["ratio"] * n))


def row_bytes(bits):
    return -(-bits // 32) * 4


def form_of(n, k):
    """Returns (split, low bits of an index, bits of the row)."""
    b = (n // k).bit_length() - 1
    high = (n >> b) + k
    split = row_bytes(high) + b // 8 * k + -(-k // 8) * (b % 8) < row_bytes(n)
    return split, b, high if split else n


def list_indices(indices, n):
    k = len(indices)
    if k in (0, n):
        return b""
    split, b, bits = form_of(n, k)
    row = np.zeros(8 * row_bytes(bits), np.uint8)
    if not split:
        row[indices[indices < n]] = 1
        return np.packbits(row, bitorder="little").tobytes()
    row[(indices >> b) + np.arange(k)] = 1
    low = [(indices >> 8 * i & 255).astype(np.uint8).tobytes() for i in range(b // 8)]
    return (
        np.packbits(row, bitorder="little").tobytes()
        + b"".join(low)
        + pack(indices >> b // 8 * 8 & 2 ** (b % 8) - 1, b % 8)
    )


def listed(data, n, k):
    """Returns (indices, their places in the list, number of bytes of the list)."""
    if k in (0, n):
        return np.arange(k), np.arange(k), 0
    split, b, bits = form_of(n, k)
    at = row_bytes(bits)
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8, at), bitorder="little")[:bits])[:k]
    if not split:
        return ones, np.arange(len(ones)), at
    low = np.zeros(k, np.int64)
    for i in range(b // 8):
        low |= np.frombuffer(data, np.uint8, k, at).astype(np.int64) << 8 * i
        at += k
    low |= unpack(data[at:], k, b % 8) << b // 8 * 8
    found, last = [], -1
    for j, p in enumerate(ones):
        index = (int(p) - j) << b | int(low[j])
        if last < index < n:
            found.append((index, j))
        last = max(last, index)
    indices, places = np.array(found, np.int64).reshape(-1, 2).T
    return indices, places, at + -(-k // 8) * (b % 8)


@ieee
def threshold(how, m, k, random):
    """Returns the threshold of a selection. `m` has the bits of the magnitudes."""
    n = len(m)
    c = min(n, max(math.ceil(how["share"] * n), -(-2 * n // k)))
    s = n // c
    sample = m[(int(random) * s >> 16) + s * np.arange(c)]
    largest = np.uint32(0x7F7FFFFF)
    as_float = lambda bits: np.minimum(bits, largest).astype("<u4").view("<f4")
    if how["estimate"] == "quantile":
        t = as_float(np.sort(sample)[::-1][-(-k * c // n) - 1 :][:1])[0]
    else:
        x = as_float(sample)
        top = x.max()
        up = power(-40) if top >= power(100) else power(80) if 0 < top < power(-60) else f32(1)
        x = x * up
        x[x < power(-126)] = 0
        t, w = f32(0), k
        while True:
            last = 4 * w >= n
            above = np.ones(c, bool) if w == k else x > t
            excess = sum_of_magnitudes(np.where(above, x - t, f32(0)))
            t = t + excess * f32(math.log(n / w if last else 4)) / f32(max(1, above.sum()))
            if last:
                break
            w *= 4
        t = as_float((t / up).reshape(1).view("<u4"))[0]
    for _ in range(how["refinements"]):
        if (m >= t.view("<u4")).sum() >= math.ceil(how["lower"] * k):
            break
        small = power(80) if t < power(-60) else f32(1)
        t = t * small * f32(how["lower"]) / small
    return t.view("<u4")


def encode_topk(codec, x, start, key, leaf_id):
    n, k = len(x), capacity(codec, len(x))
    m = np.minimum(x.view("<u4") & 0x7FFFFFFF, np.uint32(0x7F800001))
    x = np.where(np.isnan(x), f32(np.nan), x)
    indices = np.argsort(-m.astype(np.int64), kind="stable")[:k]
    if codec["select"] != "exact" and 0 < k < n:
        indices = indices[
            m[indices]
            >= threshold(codec["select"], m, k, noise_of(key, leaf_id, np.arange(start + n - 1, start + n))[0])
        ]
    indices = np.concatenate([np.sort(indices), np.full(k - len(indices), n)]).astype(np.int64)
    values = np.concatenate(
        [np.zeros(start, f32), np.append(x, f32(0))[indices]]
    )  # the padding makes them draw the noise from `start` on
    pieces = [(0, start + at, sizes, raw) for _, at, sizes, raw in pieces_of(codec["values"], [("float32", k)], 1)[0]]
    return pad16(list_indices(indices, n)) + encode_chunk(
        codec["values"], pieces, ["float32"], [values], [values.view("<u4")], key, [leaf_id]
    )


def topk_bytes(codec, n):
    """Returns the number of bytes of a piece. It encodes zeros, which draw no noise."""
    values = {**codec["values"], "rounding": "nearest"}
    return len(encode_topk({**codec, "select": "exact", "values": values}, np.zeros(n, f32), 0, None, 0))


def decode_topk(codec, data, n):
    k = capacity(codec, n)
    indices, places, length = listed(data, n, k)
    (values,) = decode_float32(codec["values"], [("float32", k)], [data[length + -length % 16 :]])
    out = np.zeros(n, f32)
    out[indices] = values[places]
    return out


def pieces_of(codec, leaves, chunks):
    """Returns the pieces of each chunk: [(leaf, first element, sizes of buckets or stretches, raw elements)].

    `leaves` is [(dtype, size)].
    """
    unit = bucket_size(codec) or 512
    weight_of = (lambda _, n, __: n) if codec["codec"] == "TopK" else code_bytes
    if codec["codec"] == "Lossless":
        codec = {"codec": "Raw"}
    meta = 4 * meta_of(codec) if bucket_size(codec) else 0
    skip = codec.get("skip_incomplete", False)
    rows, before = [], 0
    for dtype, size in leaves:
        full, rest = divmod(size, unit)
        weight = meta + weight_of(codec, unit, dtype)
        short = 0 if rest == 0 else rest * BITS[dtype].itemsize if skip else meta + weight_of(codec, rest, dtype)
        rows.append((full, full + (rest > 0), weight, before))
        before += full * weight + short

    def cut(c, full, count, weight, so_far):
        target = -(-c * before // chunks)
        if c == chunks:
            return count
        if target <= so_far:
            return 0
        k = -((so_far - target) // weight)
        return k if k <= full else count

    result = []
    for c in range(chunks):
        pieces = []
        for i, (_, size) in enumerate(leaves):
            first, last = cut(c, *rows[i]), cut(c + 1, *rows[i])
            if first < last:
                start, end = first * unit, min(last * unit, size)
                raw = end % unit if skip else 0
                coded = end - start - raw
                bucket = bucket_size(codec) or coded
                pieces.append(
                    (i, start, [min(bucket, coded - at) for at in range(0, coded, bucket)] if coded else [], raw)
                )
        result.append(pieces)
    return result


def pad16(data):
    return data + bytes(-len(data) % 16)


def encode_chunk(codec, pieces, dtypes, numbers, bits, key, ids):
    """Encodes a chunk. `numbers` has each leaf in float32, `bits` each leaf as its raw elements travel."""
    metas, bodies = b"", b""
    if codec["codec"] == "Lossless":
        return encode_lossless(pieces, dtypes, bits)
    for leaf, at, sizes, raw in pieces:
        body = b""
        for n in sizes:
            part = slice(at, at + n)
            stochastic = codec.get("rounding") == "stochastic" or codec["codec"] == "Eden"
            noise = noise_of(key, ids[leaf], np.arange(at, at + n)) if stochastic else None
            if codec["codec"] == "Raw":
                body += bits[leaf][part].tobytes()
            elif codec["codec"] == "TopK":
                body += encode_topk(codec, numbers[leaf][part], at, key, ids[leaf])
            elif codec["codec"] == "Cast":
                body += narrow(codec["dtype"], numbers[leaf][part], noise).tobytes()
            elif codec["codec"] == "Micro":
                meta, codes = encode_micro(codec, numbers[leaf][part])
                metas += np.array(meta, "<f4").tobytes()
                body += codes
            else:
                meta, codes = encode_bucket(codec, numbers[leaf][part], noise)
                metas += np.array(meta, "<f4").tobytes()
                body += pack(codes, width(codec))
            at += n
        bodies += pad16(body) + pad16(bits[leaf][at : at + raw].tobytes())
    return pad16(metas) + bodies


def read_chunk(codec, pieces, dtypes, chunk):
    """Yields the stretches of a chunk: (leaf, first element, base or None, terms). They decode to base + terms."""
    if codec["codec"] == "Lossless":
        yield from read_lossless(pieces, dtypes, chunk)
        return
    metas = 4 * sum(len(sizes) for _, _, sizes, _ in pieces) * meta_of(codec)
    meta_at, at_byte = 0, metas + -metas % 16
    for leaf, at, sizes, raw in pieces:
        dtype = dtypes[leaf]
        for n in sizes:
            length = topk_bytes(codec, n) if codec["codec"] == "TopK" else code_bytes(codec, n, dtype)
            data = chunk[at_byte : at_byte + length]
            at_byte += length
            if codec["codec"] in META:
                meta = np.frombuffer(chunk, "<f4", meta_of(codec), meta_at)
                meta_at += meta.nbytes
                if rotated(codec):
                    yield leaf, at, f32(0), decode_rotated(codec, meta, data, n)
                    at += n
                    continue
                with np.errstate(all="ignore"):
                    if codec["codec"] == "Micro":
                        terms = decode_micro(codec, meta, data, n)
                    else:
                        terms = meta[0] * value(codec, unpack(data, n, width(codec)))
                    yield leaf, at, meta[1] if len(meta) == 2 else f32(0), terms
            elif codec["codec"] == "TopK":
                yield leaf, at, f32(0), decode_topk(codec, data, n)
            else:
                travels = codec["dtype"] if codec["codec"] == "Cast" else dtype
                yield leaf, at, None, widen(travels, np.frombuffer(data, BITS[travels]))
            at += n
        at_byte += -at_byte % 16
        if raw:
            yield leaf, at, None, widen(dtype, np.frombuffer(chunk, BITS[dtype], raw, at_byte))
            at_byte += raw * BITS[dtype].itemsize
        at_byte += -at_byte % 16


@ieee
def encode(codec, leaves, chunks=1, key=None, ids=None, residuals=None):
    """Returns the bytes of the chunks, and with residuals also the new residuals."""
    dtypes, bits = [d for d, _ in leaves], [b for _, b in leaves]
    numbers = [widen(*leaf) for leaf in leaves]
    if residuals is not None:
        numbers = [x + r for x, r in zip(numbers, residuals)]
        bits = [narrow(d, x) for d, x in zip(dtypes, numbers)]
    shapes = [(d, len(b)) for d, b in leaves]
    ids = range(len(leaves)) if ids is None else ids
    out = [encode_chunk(codec, p, dtypes, numbers, bits, key, ids) for p in pieces_of(codec, shapes, chunks)]
    longest = max(map(len, out))
    payload = [chunk + bytes(longest - len(chunk)) for chunk in out]
    if residuals is None:
        return payload
    lost = [x - d for x, d in zip(numbers, decode_float32(codec, shapes, payload))]
    return payload, [np.where(np.isfinite(new), new, old) for new, old in zip(lost, residuals)]


@ieee
def decode_float32(codec, leaves, payload):
    """Returns the leaves in float32. `leaves` is [(dtype, size)]."""
    out = [np.zeros(size, f32) for _, size in leaves]
    for pieces, chunk in zip(pieces_of(codec, leaves, len(payload)), payload):
        for leaf, at, base, terms in read_chunk(codec, pieces, [d for d, _ in leaves], chunk):
            out[leaf][at : at + len(terms)] = terms if base is None or codec["codec"] == "TopK" else base + terms
    return out


def decode(codec, leaves, payload):
    """Returns the bits of the leaves."""
    return [narrow(d, x) for (d, _), x in zip(leaves, decode_float32(codec, leaves, payload))]


@ieee
def reduce(codec, leaves, payloads, chunks=1, chunk=0, own=None, rank=None, divisor=1.0, key=None, ids=None):
    """Returns the sums of one chunk's payloads in float32, and the sums encoded again.

    The leaves in `own` replace the payload of `rank`.
    """
    dtypes, all_pieces = [d for d, _ in leaves], pieces_of(codec, leaves, chunks)
    pieces = all_pieces[chunk]
    sums = [np.zeros(size, f32) for _, size in leaves]
    for stretch in zip(*(read_chunk(codec, pieces, dtypes, p) for p in payloads)):
        leaf, at, base, terms = stretch[0]
        part = slice(at, at + len(terms))
        total = None
        if base is not None:
            total = np.zeros(len(terms), f32)
            for r, (_, _, base, _) in enumerate(stretch):
                if r != rank:
                    total = total + base
        for r, (_, _, _, terms) in enumerate(stretch):
            term = widen(*own[leaf])[part] if r == rank else terms
            total = term if total is None else total + term
        sums[leaf][part] = total if divisor == 1 else total / f32(divisor)
    bits = [narrow(d, x) for d, x in zip(dtypes, sums)]
    if codec["codec"] == "TopK" and codec["pull"] == "all":
        codec = {**codec, "select": "exact", "values": {"codec": "Raw"}, "lists": codec["lists"] * len(payloads)}
    ids = range(len(leaves)) if ids is None else ids
    longest = (
        max(sum(topk_bytes(codec, n) for _, _, sizes, _ in p for n in sizes) for p in all_pieces)
        if codec["codec"] == "TopK"
        else len(payloads[0])
    )
    again = encode_chunk(codec, pieces, dtypes, sums, bits, key, ids)
    return sums, again + bytes(longest - len(again))
