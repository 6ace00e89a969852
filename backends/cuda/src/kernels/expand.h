// Codes of codes.h as numbers, two to a register, in f16 where X is that and else in bf16, which are exact. CODE: u4, i8,
// e2m1 or e4m3.

#define NARROW (CODE != 3 && CODE != 5) // codes of 4 bits
// Of the eight columns, that of a pair's first or second.
#define COLUMN_OF(pair, second)                                                                                 \
    (NARROW ? (pair) + 4 * (second) : CODE == 5 ? (pair) / 2 * 4 + (pair) % 2 + 2 * (second) : 2 * (pair) + (second))

#define HALF_bf16 0
#define HALF_f32 0
#define HALF_f16 1
#define HALF CAT(HALF_, X)
#if HALF
#define MMA mma_f16
#define FMA2 fma_f16
#define UNPACK2 unpack_f16
#define ONES 0x3C003C00u
#else
#define MMA mma_bf16
#define FMA2 fma_bf16
#define UNPACK2 unpack_bf16
#define ONES 0x3F803F80u
#endif

// The numbers of 8 neighbours, whose words are `v`: four pairs in the order of COLUMN_OF, which is that of masks. They
// are less by FACTOR.
#if CODE == 0
// 128 + code in bf16, 1024 + code in f16
#define FACTOR 1.0f
DEVICE void expand(const uint* v, uint* to) {
    const uint one = HALF ? 0x64006400u : 0x43004300u;
    const uint less = HALF ? (ZERO ? 0xE400E400u : 0xE408E408u) : (ZERO ? 0xC300C300u : 0xC308C308u);
#pragma unroll
    for (uint i = 0; i < 4; ++i) to[i] = FMA2(masked_or(v[0] >> 4 * i, 0x000F000Fu, one), ONES, less);
}
#elif CODE == 4
// exponent and fraction where a bf16 or f16 has them, 2^126 or 2^14 too small
#define FACTOR (HALF ? 16384.0f : 1.0f)
DEVICE void expand(const uint* v, uint* to) {
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
        const uint sign = v[0] << (12 - 4 * i) & 0x80008000u;
#if HALF
        to[i] = sign | ((i < 3 ? v[0] << (i < 3 ? 9 - 4 * i : 0) : v[0] >> 3) & 0x0E000E00u);
#else
        const uint rest = i < 2 ? v[0] << (i < 2 ? 6 - 4 * i : 0) : v[0] >> (i < 2 ? 0 : 4 * i - 6);
        to[i] = FMA2(sign | (rest & 0x01C001C0u), 0x7E807E80u, 0x80008000u);
#endif
    }
}
#elif CODE == 3
#define FACTOR 1.0f
DEVICE void expand(const uint* v, uint* to) {
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
        const uint word = v[i / 2] ^ 0x80808080u;
#if HALF
        to[i] = FMA2(select_bytes(word, 0x64646464u, i % 2 ? 0x4342u : 0x4140u), ONES, 0xE480E480u);
#else
        float pair[2];
        for (uint j = 0; j < 2; ++j)
            pair[j] = bits_to_float(select_bytes(word, 0x4B000000u, 0x7440u + 2 * (i % 2) + j)) - 8388736.0f;
        to[i] = pack_bf16(pair[0], pair[1]);
#endif
    }
}
#else
// exponent and fraction where a bf16 or f16 has them, 2^120 or 2^8 too small
#define FACTOR (HALF ? 256.0f : 1.0f)
DEVICE void expand(const uint* v, uint* to) {
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
        const uint word = v[i / 2], odd = i % 2;
        const uint sign = (odd ? word : word << 8) & 0x80008000u;
#if HALF
        to[i] = sign | ((odd ? word >> 1 : word << 7) & 0x3F803F80u);
#else
        to[i] = FMA2(sign | ((odd ? word >> 4 : word << 4) & 0x07F007F0u), 0x7B807B80u, 0x80008000u);
#endif
    }
}
#endif
