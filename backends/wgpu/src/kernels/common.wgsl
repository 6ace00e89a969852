// Bindings, element types and stores. In front of this text stand the constants of a specialisation:
// D0 .. D5 and OUT (dtypes of the inputs and of out0), GROUP (threads of a group), and the kernel's own.
//
// Every buffer is an array of 32-bit words. A 16-bit dtype has two elements in a word, the lower one first;
// an operand begins with a word. bf16 is the upper half of an f32, and unpack2x16float is the conversion of
// f16 that needs no feature. Arithmetic is f32.
//
// Writing half a word would race with the thread that writes the other half, so one thread owns whole words
// of a 16-bit output. What lies beside an operand in its last word stays.

const F32 = 0u;
const BF16 = 1u;
const F16 = 2u;
// of eight bits: codes, with a scale for each head
const F8E4M3 = 3u;
const I8 = 4u;

// Where each operand begins in its binding, in elements; then the kernel's own numbers.
struct Params {
    at0: u32, at1: u32, at2: u32, at3: u32, at4: u32, at5: u32, to0: u32, to1: u32, to2: u32, to3: u32,
    s: Shape,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> b0: array<u32>;
@group(0) @binding(1) var<storage, read> b1: array<u32>;
@group(0) @binding(2) var<storage, read> b2: array<u32>;
@group(0) @binding(3) var<storage, read> b3: array<u32>;
@group(0) @binding(4) var<storage, read> b4: array<u32>;
@group(0) @binding(5) var<storage, read> b5: array<u32>;
// the same buffers again, for loads of 16 bytes
@group(0) @binding(8) var<storage, read> v0: array<vec4<u32>>;
@group(0) @binding(9) var<storage, read> v1: array<vec4<u32>>;
@group(0) @binding(12) var<storage, read> v4: array<vec4<u32>>;
@group(0) @binding(16) var<storage, read_write> out0: array<u32>;
@group(0) @binding(17) var<storage, read_write> out1: array<u32>;
@group(0) @binding(18) var<storage, read_write> out2: array<u32>;
@group(0) @binding(19) var<storage, read_write> out3: array<u32>;

// Number of a group in a grid that is folded because a dimension has at most 65535.
fn group_of(thread: Thread) -> u32 { return thread.group.x + thread.group.y * thread.groups.x; }

fn is_scaled(dtype: u32) -> bool { return dtype >= F8E4M3; }

fn word_of(dtype: u32, i: u32) -> u32 {
    if is_scaled(dtype) { return i >> 2u; }
    return select(i >> 1u, i, dtype == F32);
}

fn kv_code(dtype: u32, code: u32) -> f32 {
    if dtype == I8 { return f32(bitcast<i32>(code << 24u) >> 24u); }
    let size = code & 0x7Fu;
    let v = select(bitcast<f32>((size << 20u) + 0x3C000000u), f32(size) * 0.001953125, size < 8u);
    return select(v, -v, (code & 0x80u) != 0u);
}

fn number(dtype: u32, word: u32, i: u32) -> f32 {
    if dtype == F32 { return bitcast<f32>(word); }
    if is_scaled(dtype) { return kv_code(dtype, (word >> ((i & 3u) * 8u)) & 0xFFu); }
    let half = (word >> ((i & 1u) * 16u)) & 0xFFFFu;
    if dtype == BF16 { return bitcast<f32>(half << 16u); }
    return unpack2x16float(half).x;
}

// Both elements of a word of a 16-bit dtype.
fn halves(dtype: u32, word: u32) -> vec2<f32> {
    if dtype == BF16 { return vec2(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xFFFF0000u)); }
    return unpack2x16float(word);
}

// Element i of an input.
fn in0(i: u32) -> f32 { return number(D0, b0[word_of(D0, p.at0 + i)], p.at0 + i); }
fn in1(i: u32) -> f32 { return number(D1, b1[word_of(D1, p.at1 + i)], p.at1 + i); }
fn in2(i: u32) -> f32 { return number(D2, b2[word_of(D2, p.at2 + i)], p.at2 + i); }
fn in4(i: u32) -> f32 { return number(D4, b4[word_of(D4, p.at4 + i)], p.at4 + i); }
fn in5(i: u32) -> f32 { return number(D5, b5[word_of(D5, p.at5 + i)], p.at5 + i); }

// Eight elements in a row.
struct Octet { lo: vec4<f32>, hi: vec4<f32> }

fn octet(dtype: u32, word: vec4<u32>) -> Octet {
    let a = halves(dtype, word.x);
    let b = halves(dtype, word.y);
    let c = halves(dtype, word.z);
    let d = halves(dtype, word.w);
    return Octet(vec4(a, b), vec4(c, d));
}

fn dot8(a: Octet, b: Octet) -> f32 { return dot(a.lo, b.lo) + dot(a.hi, b.hi); }

// Round to nearest, ties to even; a NaN stays one. (pack2x16float may round either way.)
fn bf16_of(v: f32) -> u32 {
    let bits = bitcast<u32>(v);
    if (bits & 0x7FFFFFFFu) > 0x7F800000u { return (bits | 0x400000u) >> 16u; }
    return (bits + 0x7FFFu + ((bits >> 16u) & 1u)) >> 16u;
}

fn f16_of(v: f32) -> u32 {
    let bits = bitcast<u32>(v);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7FFFFFFFu;
    if size > 0x7F800000u { return sign | 0x7E00u; }
    if size >= 0x47800000u { return sign | 0x7C00u; } // 2^16
    if size >= 0x38800000u { // 2^-14, the least normal
        return sign | (((size + 0xFFFu + ((size >> 13u) & 1u)) >> 13u) - (112u << 10u));
    }
    if size <= 0x33000000u { return sign; } // 2^-25, half of the least subnormal
    let fraction = (size & 0x7FFFFFu) | 0x800000u;
    let shift = 126u - (size >> 23u);
    return sign | ((fraction + (1u << (shift - 1u)) - 1u + ((fraction >> shift) & 1u)) >> shift);
}

fn half_of(v: f32) -> u32 {
    if OUT == BF16 { return bf16_of(v); }
    return f16_of(v);
}

// Elements of out0 in a word.
const PER_WORD = select(2u, 1u, OUT == F32);

// Element i of out0.
fn old(i: u32) -> f32 { return number(OUT, out0[word_of(OUT, p.to0 + i)], p.to0 + i); }

// Element i of out0; of a 16-bit dtype only for the thread that owns the word.
fn put(i: u32, v: f32) {
    let at = p.to0 + i;
    if OUT == F32 {
        out0[at] = bitcast<u32>(v);
    } else {
        let shift = (at & 1u) * 16u;
        out0[at >> 1u] = (out0[at >> 1u] & (0xFFFF0000u >> shift)) | (half_of(v) << shift);
    }
}

// Elements i and i + 1 of out0; i is even where OUT has 16 bits.
fn put2(i: u32, a: f32, b: f32) {
    if OUT == F32 {
        put(i, a);
        put(i + 1u, b);
    } else {
        out0[(p.to0 + i) >> 1u] = half_of(a) | (half_of(b) << 16u);
    }
}

// The elements of one word of out0 from element i on, those that are wanted.
fn put_word(i: u32, a: f32, want_a: bool, b: f32, want_b: bool) {
    if PER_WORD == 2u && want_a && want_b {
        put2(i, a, b);
    } else {
        if want_a { put(i, a); }
        if PER_WORD == 2u && want_b { put(i + 1u, b); }
    }
}
