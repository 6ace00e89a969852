#!/usr/bin/env python3
"""The client of overlap.sh: sends a request, shapes the link by its prefill time, and sends another. Times come from the router's metrics."""
import http.client, json, os, pathlib, random, subprocess, sys, time

model, tokens, chunk = pathlib.Path(os.environ["model"]), int(os.environ["tokens"]), int(os.environ["chunk"])
factor, rounds = float(os.environ["factor"]), int(os.environ["rounds"])
config = json.loads((model / "config.json").read_text())
layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
head_dim = config.get("head_dim") or config["hidden_size"] // heads
KV_BYTES = 2  # bf16, as overlap.sh says
layer_token_bytes = 2 * (config.get("num_key_value_heads") or heads) * head_dim * KV_BYTES
kv_bytes = tokens * layers * layer_token_bytes
sent = pathlib.Path("/sys/class/net/wire/statistics/tx_bytes")
draw = random.Random(1)


def call(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=1800)
    connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    if answer.status != 200:
        raise RuntimeError(text)
    return text


def ask(length):
    """Two tokens to a prompt that no cache knows."""
    prompt = [draw.randrange(5, 250) for _ in range(length)]
    body = dict(model=model.resolve().name, prompt=prompt, max_tokens=2, temperature=0, ignore_eos=True)
    call("POST", "/v1/completions", body)


def measure(name):
    """Seconds to the first token, between the first two, and from the first token to the KV's arrival."""
    def seen():
        lines = dict(line.rsplit(" ", 1) for line in call("GET", "/metrics").splitlines() if not line.startswith("#"))
        what = ("time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum", "kv_exposed_seconds_sum",
                "kv_exposed_seconds_count")
        return [float(lines[f"mixfleet_{key}"]) for key in what], int(sent.read_text())

    before, bytes_before = seen()
    ask(tokens)
    after, bytes_after = seen()
    prefill_s, second_s, exposed_s, handed_off = (b - a for a, b in zip(before, after))
    if handed_off != 1:
        raise RuntimeError("the request was not handed off")
    print(f"{name}: prefill {prefill_s:.2f} s, KV {exposed_s:.3f} s after it, second token {second_s:.3f} s after the first, "
          f"{(bytes_after - bytes_before) / 1e6:.1f} MB on the wire", flush=True)
    return prefill_s, exposed_s


def shape(bits_per_s):
    words = f"tc qdisc replace dev wire root tbf rate {int(bits_per_s)}bit burst 64kb latency 20ms"
    subprocess.run(words.split(), check=True)


def wait_until_served():
    begun = time.monotonic()
    while True:
        try:
            return ask(16)
        except (RuntimeError, OSError) as error:
            if time.monotonic() - begun > 300:
                print(f"SKIPPED: overlap: nothing is served: {error}", file=sys.stderr)
                sys.exit(3)
            time.sleep(0.2)


wait_until_served()
print(f"{tokens} tokens in chunks of {chunk}, {layers} layers: {kv_bytes / 1e6:.1f} MB of KV; load {os.getloadavg()[0]:.1f}")
failed = False
for turn in range(rounds):
    shape(1e9)
    prefill_s, _ = measure("1 Gbit/s")
    rate = factor * kv_bytes / prefill_s
    shape(8 * rate)
    shaped_s, exposed_s = measure(f"{8 * rate / 1e6:.1f} Mbit/s")
    serial_s, last_s = kv_bytes / rate, min(chunk, tokens) * layer_token_bytes / rate
    bound_s = 0.1 * serial_s + last_s
    failed |= exposed_s > bound_s
    print(f"  serial {serial_s:.2f} s, last layer {last_s:.3f} s, wanted {bound_s:.3f} s, exposed {exposed_s:.3f} s = "
          f"{exposed_s / serial_s:.1%} of serial; the link carries {rate * shaped_s / kv_bytes:.2f} of what this prompt made: "
          f"{'ok' if exposed_s <= bound_s else 'TOO MUCH'}", flush=True)
sys.exit(failed)
