// What device.h has, for AMD's compiler, but for tensor cores and asynchronous copies. Lanes are 32, as on RDNA.
#include <hip/hip_runtime.h>

// the headers have an `ulong` of their own
typedef unsigned char uchar;
typedef unsigned long long device_ulong;
#define ulong device_ulong

#define SHARED_BYTES(name) extern __shared__ __align__(16) uchar name[]
#define INTRINSIC __device__ __forceinline__
#define FOLLOW(p) // a kernel starts when the one before it is done

INTRINSIC float bits_to_float(uint bits) { return __uint_as_float(bits); }
INTRINSIC uint float_to_bits(float v) { return __float_as_uint(v); }

INTRINSIC float product(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}

INTRINSIC uint count_up(uint* count) { return atomicAdd(count, 1u); }

INTRINSIC float half_to_float(ushort bits) { return (float)__builtin_bit_cast(_Float16, bits); }

// Rounded to nearest even; a NaN stays one.
INTRINSIC uint bf16_of(float v) {
    const uint bits = float_to_bits(v);
    return (v != v ? bits | 0x400000u : bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
INTRINSIC uint f16_of(float v) { return __builtin_bit_cast(ushort, (_Float16)v); }
INTRINSIC uint pack_bf16(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }
INTRINSIC uint pack_f16(float low, float high) { return f16_of(low) | f16_of(high) << 16; }

INTRINSIC uint low_halves(uint a, uint b) { return (a & 0xFFFFu) | b << 16; }
INTRINSIC uint high_halves(uint a, uint b) { return a >> 16 | (b & 0xFFFF0000u); }

INTRINSIC float exp2_fast(float v) { return exp2f(v); }

INTRINSIC float shuffle_xor(float v, uint mask) { return __shfl_xor(v, (int)mask, 32); }
INTRINSIC float shuffle(float v, uint lane) { return __shfl(v, (int)lane, 32); }
INTRINSIC uint shuffle_uint(uint v, uint lane) { return __shfl(v, (int)lane, 32); }
INTRINSIC bool any_lane(bool v) { return __any(v); }
INTRINSIC void warp_barrier() { __builtin_amdgcn_wave_barrier(); }

INTRINSIC uint4 load_once16(const void* p) { return *(const uint4*)p; }
INTRINSIC uint2 load_once8(const void* p) { return *(const uint2*)p; }
