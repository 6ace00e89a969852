"""Writes a bf16 checkpoint again with int4 weights in compressed-tensors' packed form: symmetric, scales of groups in bf16.

    python make_int4.py CHECKPOINT_DIR OUT_DIR [--group 32] [--ignore lm_head]

Every matrix but the embedding and those named becomes codes of four bits, each the nearest to its weight, as in Q4_0, whose
scales are in f16. Needs `numpy`; the checkpoint is one `model.safetensors`.
"""

import argparse
import json
import pathlib
import shutil
import struct

import numpy

LEVELS = 8  # codes are -8 to 7, stored with 8 added


def to_f32(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def to_bf16(values):
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def packed(bits, group):
    """Codes, eight to a 32-bit integer from the lowest bits up, and bf16 scales, of a matrix of bf16 patterns."""
    rows, columns = bits.shape
    weights = to_f32(bits).reshape(rows, columns // group, group)
    scales = to_bf16(numpy.abs(weights).max(axis=2) / (LEVELS - 1))
    steps = to_f32(scales)[:, :, None]
    steps = numpy.where(steps == 0, 1, steps)
    codes = (numpy.clip(numpy.rint(weights / steps), -LEVELS, LEVELS - 1) + LEVELS).astype(numpy.uint32)
    words = (codes.reshape(rows, columns // 8, 8) << (4 * numpy.arange(8, dtype=numpy.uint32))).sum(axis=2, dtype=numpy.uint32)
    return words, scales


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--group", type=int, default=32, help="weights with one scale")
    parser.add_argument("--ignore", nargs="*", default=[], help="modules that stay in bf16")
    options = parser.parse_args()
    file = options.checkpoint / "model.safetensors"
    if not file.is_file():
        parser.error(f"there is no {file}; give the directory of a bf16 checkpoint of one file")
    if options.group < 8 or options.group % 8:
        parser.error(f"--group {options.group}: give a multiple of 8")
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    data = numpy.memmap(file, mode="r", offset=8 + length)

    options.out.mkdir(parents=True, exist_ok=True)
    places, arrays, at = {}, [], 0
    names = {numpy.dtype("uint16"): "BF16", numpy.dtype("uint32"): "I32", numpy.dtype("int64"): "I64"}

    def put(name, array):
        nonlocal at
        places[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        arrays.append(array)
        at += array.nbytes

    for name, place in header.items():
        start, end = place["data_offsets"]
        if place["dtype"] != "BF16":
            parser.error(f"{name} is {place['dtype']}; give a checkpoint in BF16")
        if len(place["shape"]) > 1 and place["shape"][-1] % options.group:
            parser.error(f"{name} has {place['shape'][-1]} columns; give a --group that divides them")
        bits = data[start:end].view(numpy.uint16).reshape(place["shape"])
        module = name.removesuffix(".weight")
        if bits.ndim == 1 or "embed_tokens" in name or module in options.ignore:
            put(name, bits)
            continue
        words, scales = packed(bits, options.group)
        put(f"{module}.weight_packed", words)
        put(f"{module}.weight_scale", scales)
        put(f"{module}.weight_shape", numpy.array(bits.shape, numpy.int64))
    said = json.dumps(places).encode()
    said += b" " * (-len(said) % 8)
    with open(options.out / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(said)) + said)
        for array in arrays:
            array.tofile(out)

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": options.group}
    config = json.loads((options.checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": options.ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (options.out / "config.json").write_text(json.dumps(config, indent=1))
    for extra in ("tokenizer.json", "tokenizer_config.json"):
        if (options.checkpoint / extra).exists():
            shutil.copy(options.checkpoint / extra, options.out)


if __name__ == "__main__":
    main()
