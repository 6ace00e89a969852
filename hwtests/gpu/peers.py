#!/usr/bin/env python3
"""What torch and a plain read kernel reach on the GPU, at the shapes of the profiler, as JSON lines.

Every figure is the median of several runs timed by device events, after a warm-up; operands are random and
rotate through more memory than the last-level cache holds. Each line is written as soon as it is measured, the
machine's first. What torch has to compile comes last, since compiling may take minutes. Needs torch with CUDA;
the plain read needs cupy.
"""

import argparse
import json
import statistics
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as error:  # --plan needs none
    torch = error

RUNS = 20
ROTATED_BYTES = 512 << 20  # several times the largest last-level cache
GEMM_SHAPES = [  # (n, k) of public models: attention output, MLP up and down, a large MLP
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (28672, 8192),
]
GEMM_ROWS = [1, 8, 32, 128, 512, 2048, 8192]
ATTENTION = [  # name, batch, heads, queries, keys; 8 KV heads, of 128
    *(("attn_decode", batch, 64, 1, keys) for batch, keys in ((1, 16384), (32, 1024), (32, 16384), (64, 4096))),
    *(("attn_prefill", 1, 32, tokens, tokens) for tokens in (512, 2048, 8192)),
]
KV_HEADS, HEAD_DIM = 8, 128
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


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(torch.bfloat16)


def copies_of(size_bytes):
    return max(1, min(64, -(-ROTATED_BYTES // size_bytes)))


def gemm(n, k):
    """`torch.nn.functional.linear`: x [m, k] by weight [n, k]."""
    weights = [random(n, k) for _ in range(copies_of(n * k * 2))]
    for m in GEMM_ROWS:
        x = random(m, k)
        time = seconds(lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))
        yield {"name": "gemm", "dtype": "bfloat16", "m": m, "n": n, "k": k, **time, "flops": 2 * m * n * k}


def in_a_line(error):
    return (str(error).splitlines() or [repr(error)])[0][:200]


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


class Attention:
    """Operands of a shape, in more copies than the last-level cache holds."""

    def __init__(self, name, batch, heads, queries, keys):
        self.name, self.grouped, self.causal, self.queries = name, heads != KV_HEADS, queries > 1, queries
        size = 2 * batch * KV_HEADS * keys * HEAD_DIM * 2
        self.q = random(batch, heads, queries, HEAD_DIM)
        kv = lambda: random(batch, KV_HEADS, keys, HEAD_DIM)
        self.kv = [(kv(), kv()) for _ in range(min(copies_of(size), 8))]
        pairs = queries * (queries + 1) // 2 if self.causal else queries * keys
        self.facts = {"batch": batch, "heads": heads, "kv_heads": KV_HEADS, "queries": queries, "keys": keys,
                      "head_dim": HEAD_DIM, "flops": 4 * batch * heads * pairs * HEAD_DIM, "bytes": size}

    def point(self, peer, prepare):
        """The rate of `peer`, or its error message if it refuses the shape."""
        result = {"name": self.name, "peer": peer, **self.facts}
        try:
            return result | seconds(prepare(), len(self.kv))
        except Exception as error:
            return result | {"error": in_a_line(error)}


def sdpa(*shape):
    """Scaled dot product attention by every backend, with grouped heads."""
    a = Attention(*shape)
    run = lambda i: scaled_dot_product_attention(a.q, *a.kv[i], is_causal=a.causal, enable_gqa=a.grouped)
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            point = a.point(f"sdpa {backend.lower()}", lambda: run)
        yield point


def compiled(*shape):
    """Compiled flex attention: torch's own kernel for decoding with grouped heads."""
    a = Attention(*shape)

    def prepare():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        call, mask = torch.compile(flex_attention, dynamic=False), None
        if a.causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, a.queries, a.queries, device="cuda")
        return lambda i: call(a.q, *a.kv[i], block_mask=mask, enable_gqa=a.grouped)

    yield a.point("flex_attention", prepare)


def plan():
    """Every measurement, in order: a function and its arguments."""
    return [(plain_read, ()), *((gemm, shape) for shape in GEMM_SHAPES), *((sdpa, shape) for shape in ATTENTION),
            *((compiled, shape) for shape in ATTENTION)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="file to write; standard output otherwise")
    parser.add_argument("--plan", action="store_true", help="print the planned measurements, and exit")
    arguments = parser.parse_args()
    if arguments.plan:
        for measure, shape in plan():
            print(measure.__name__, *shape)
        return
    if isinstance(torch, ImportError):
        sys.exit(f"peers.py: {torch}")
    if not torch.cuda.is_available():
        sys.exit("peers.py: torch sees no GPU here")
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    with open(arguments.out, "w") if arguments.out else sys.stdout as file, torch.inference_mode():
        def say(line):
            print(json.dumps(line), file=file, flush=True)

        say({"schema": "mixfleet.gpu-peers/2", "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
             "cuda": torch.version.cuda})
        for measure, shape in plan():
            try:
                for point in measure(*shape):
                    say(point)
            except Exception as error:
                say({"name": measure.__name__, "shape": shape, "error": in_a_line(error)})


if __name__ == "__main__":
    main()
