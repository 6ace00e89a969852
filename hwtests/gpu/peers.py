#!/usr/bin/env python3
"""What torch and a plain read kernel reach on the GPU, at the shapes of the profiler, as JSON.

Every figure is the median of several runs timed by device events, after a warm-up; operands are random and
rotate through more memory than the last-level cache holds. Needs torch with CUDA; the plain read needs cupy.
"""

import argparse
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

RUNS = 20
ROTATED_BYTES = 512 << 20  # several times the largest last-level cache
GEMM_SHAPES = [  # (n, k) of public models: attention output, MLP up and down, a large MLP
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (28672, 8192),
]
GEMM_ROWS = [1, 8, 32, 128, 512, 2048, 8192]
READ = r"""
extern "C" __global__ void read(const uint4* from, unsigned* out, unsigned long long count) {
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        sum.x += a.x ^ b.x ^ c.x ^ d.x; sum.y += a.y ^ b.y ^ c.y ^ d.y;
        sum.z += a.z ^ b.z ^ c.z ^ d.z; sum.w += a.w ^ b.w ^ c.w ^ d.w;
    }
    for (; i < count; i += step) { uint4 a = from[i]; sum.x += a.x ^ a.y ^ a.z ^ a.w; }
    unsigned total = sum.x + sum.y + sum.z + sum.w;
    if (total == 0x12345678u) out[0] = total;  // keeps the loads alive
}
"""


def seconds(run, copies=1):
    """Median time of `run(i)`, i rotating through `copies`, with p5 and p95."""
    for i in range(3):
        run(i % copies)
    torch.cuda.synchronize()
    samples = []
    for i in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(i % copies)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    samples.sort()
    return {"median_s": statistics.median(samples), "p5_s": samples[1], "p95_s": samples[-2]}


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def copies_of(size_bytes):
    return max(1, min(64, -(-ROTATED_BYTES // size_bytes)))


def gemm(dtype):
    """`torch.nn.functional.linear`: x [m, k] by weight [n, k]."""
    for n, k in GEMM_SHAPES:
        weights = [random(n, k, dtype=dtype) for _ in range(copies_of(n * k * dtype.itemsize))]
        for m in GEMM_ROWS:
            x = random(m, k, dtype=dtype)
            time = seconds(lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))
            yield {"name": "gemm", "dtype": str(dtype)[6:], "m": m, "n": n, "k": k, **time,
                   "flops": 2 * m * n * k}


def plain_read():
    """Reads 8 GiB with 16-byte loads and keeps nothing."""
    try:
        import cupy
    except ImportError:
        yield {"name": "plain_read", "error": "cupy is not installed"}
        return
    kernel = cupy.RawKernel(READ, "read")
    for size in (1 << 30, 8 << 30):
        data = torch.randint(0, 255, (size,), device="cuda", dtype=torch.uint8)
        view, out = cupy.from_dlpack(data), cupy.zeros(1, dtype=cupy.uint32)
        blocks = torch.cuda.get_device_properties(0).multi_processor_count * 16
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

        def run(_):
            with stream:
                kernel((blocks,), (256,), (view, out, cupy.uint64(size // 16)))

        yield {"name": "plain_read", "size_bytes": size, **seconds(run), "bytes": size}
        del data, view


BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(name, batch, heads, kv_heads, queries, keys, causal, head_dim=128):
    """Scaled dot product attention by every backend that takes the shape, with grouped and with repeated heads."""
    size = 2 * batch * kv_heads * keys * head_dim * 2
    count = min(copies_of(size), 8)
    q = random(batch, heads, queries, head_dim)
    kv = [(random(batch, kv_heads, keys, head_dim), random(batch, kv_heads, keys, head_dim)) for _ in range(count)]
    pairs = queries * (queries + 1) // 2 if causal else queries * keys
    facts = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys,
             "head_dim": head_dim, "flops": 4 * batch * heads * pairs * head_dim, "bytes": size}
    for backend in BACKENDS:
        result = {"name": name, "peer": f"sdpa {backend.name.lower()}", **facts}
        try:
            with sdpa_kernel(backend):
                yield result | seconds(
                    lambda i: scaled_dot_product_attention(q, *kv[i], is_causal=causal, enable_gqa=heads != kv_heads),
                    count)
        except Exception as error:  # a backend that refuses the shape says so in its own words
            yield result | {"error": str(error).splitlines()[0][:200]}
    yield from flex(name, facts, q, kv, causal)


def flex(name, facts, q, kv, causal):
    """Compiled flex attention: torch's own kernel for decoding with grouped heads."""
    result = {"name": name, "peer": "flex_attention", **facts}
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        compiled = torch.compile(flex_attention, dynamic=False)
        mask = None
        if causal:
            size = facts["queries"]
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device="cuda")
        grouped = facts["heads"] != facts["kv_heads"]
        yield result | seconds(lambda i: compiled(q, *kv[i], block_mask=mask, enable_gqa=grouped), len(kv))
    except Exception as error:
        yield result | {"error": str(error).splitlines()[0][:200]}


def points():
    yield from plain_read()
    yield from gemm(torch.bfloat16)
    for batch, keys in ((1, 16384), (32, 1024), (32, 16384), (64, 4096)):
        yield from attention("attn_decode", batch, 64, 8, 1, keys, causal=False)
    for tokens in (512, 2048, 8192):
        yield from attention("attn_prefill", 1, 32, 8, tokens, tokens, causal=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="file to write; standard output otherwise")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peers.py: torch sees no GPU here")
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        found = []
        for point in points():
            print(json.dumps(point), file=sys.stderr)
            found.append(point)
    document = {
        "schema": "mixfleet.gpu-peers/1",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "points": found,
    }
    text = json.dumps(document, indent=1)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
