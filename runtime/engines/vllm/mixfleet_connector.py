"""A KV connector of vLLM (0.32) for mixfleet: KV of prompts that mixfleet computed comes from it, and goes to it from
prompts that are computed here. How it is set up: docs/reference/external-engines.md, "KV exchange".

Where KV comes from, blocks are read and checked beside steps. What is missing or damaged is reported as not loaded, and
computed here. Where it goes to mixfleet, whole blocks are written at the end of the step that ends a prompt, before its
answer is there. What is beyond the last whole block, the other side computes.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA)
from vllm.logger import init_logger
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from mixfleet_kv import Client, KvError

# below vLLM's own, whose messages are shown
logger = init_logger("vllm.mixfleet_connector")

THREADS = 4
# after a write that did not arrive, so that no step waits for it again soon
REST_S = 10.0


@dataclass
class Move:
    """Blocks of a prompt that come, or that go."""

    request: str
    url: str
    tokens: list[int]
    # the first one in the prompt, and where they are here
    first: int
    blocks: list[int]
    salt: str | None


@dataclass
class Moves(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


class MixfleetConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.urls = extra.get("urls") or []
        if not self.urls:
            raise ValueError("kv_connector_extra_config needs 'urls': the mixfleet servers to exchange KV with")
        parallel = vllm_config.parallel_config
        if parallel.world_size != 1 or len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("KV is exchanged with one vLLM worker (no TP or PP) whose layers all keep the same KV")
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError("kv_load_failure_policy must be 'recompute': KV damaged in transfer is recomputed here")
        self.block_tokens = vllm_config.cache_config.block_size
        if role == KVConnectorRole.SCHEDULER:
            self.begin_to_schedule()
        else:
            self.begin_to_move(extra)

    # in the scheduler

    def begin_to_schedule(self):
        self.moves = Moves()
        self.saves, self.asked, self.local = {}, set(), {}

    def url(self, params):
        url = params.get("remote_url", self.urls[0])
        return url if url in self.urls else None

    def wants(self, request, what):
        """What a request says of its KV, if that is `what` and it has nothing but tokens."""
        params = request.kv_transfer_params or {}
        plain = request.prompt_token_ids and not request.mm_features and request.lora_request is None
        if not params.get(what) or not plain:
            return None
        if self.url(params) is None:
            logger.warning("KV is not exchanged with %r, which is not among 'urls'", params.get("remote_url"))
            return None
        return params

    def on_new_request(self, request):
        if self.wants(request, "do_remote_decode") is not None:
            self.saves[request.request_id] = request

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        params = self.wants(request, "do_remote_prefill")
        # blocks that could not be loaded are not tried again
        if params is None or request.request_id in self.asked:
            return 0, False
        told = params.get("remote_num_tokens")
        told = told if isinstance(told, int) else 0
        # one token at least must be computed
        until = min(told, request.num_prompt_tokens - 1) // self.block_tokens * self.block_tokens
        if until <= num_computed_tokens:
            return 0, False
        self.local[request.request_id] = num_computed_tokens
        return until - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens == 0:
            return
        self.asked.add(request.request_id)
        first = self.local.pop(request.request_id) // self.block_tokens
        (held,) = blocks.get_block_ids()
        held = held[first:first + num_external_tokens // self.block_tokens]
        params = request.kv_transfer_params
        tokens = list(request.prompt_token_ids)
        move = Move(request.request_id, self.url(params), tokens, first, held, params.get("cache_salt"))
        self.moves.loads.append(move)

    def build_connector_meta(self, scheduler_output):
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.saves.get(name)
            if request is None or request.num_computed_tokens + count < request.num_prompt_tokens:
                continue
            del self.saves[name]
            params, tokens = request.kv_transfer_params, list(request.prompt_token_ids)
            (held,) = self._kv_cache_manager.get_block_ids(name)
            held = held[:len(tokens) // self.block_tokens]
            self.moves.saves.append(Move(name, self.url(params), tokens, 0, held, params.get("cache_salt")))
        moves, self.moves = self.moves, Moves()
        return moves

    def request_finished_all_groups(self, request, block_ids):
        self.saves.pop(request.request_id, None)
        self.local.pop(request.request_id, None)
        self.asked.discard(request.request_id)
        params = self.wants(request, "do_remote_decode")
        if params is None:
            return False, None
        tokens = request.num_prompt_tokens // self.block_tokens * self.block_tokens
        told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_url": self.url(params),
                "remote_num_tokens": tokens}
        return False, told | ({"cache_salt": params["cache_salt"]} if params.get("cache_salt") else {})

    # in the worker

    def begin_to_move(self, extra):
        key = None
        if extra.get("key_file"):
            with open(extra["key_file"]) as file:
                key = file.read().strip()
        timeout_s = float(extra.get("timeout_s", 30.0))
        self.clients = {url: Client(url, key, timeout_s) for url in self.urls}
        # the number that frames must have, if the operator gives it
        self.namespace = extra.get("namespace")
        self.layouts, self.resting = {}, {}
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mixfleet-kv")
        self.lock, self.loaded, self.failed = threading.Lock(), set(), set()

    def register_kv_caches(self, kv_caches):
        names = sorted(kv_caches, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
        self.caches = [kv_caches[name] for name in names]
        shapes = {(tuple(cache.shape), cache.dtype) for cache in self.caches}
        if len(shapes) != 1:
            raise ValueError(f"layers keep unlike KV: {shapes}")
        ((_, self.kv_heads, tokens, width), dtype), = shapes
        self.head_dim, self.dtype = width // 2, dtype
        if tokens != self.block_tokens or self.caches[0].device.type != "cpu":
            raise ValueError(f"KV of {self.caches[0].device} in blocks of {tokens} tokens: only that of CPUs is known")
        self.check_layout()

    def check_layout(self):
        """Has vLLM write a block, and compares the values read back, so that no layout is mistaken for another."""
        shape = (self.block_tokens, self.kv_heads, self.head_dim)
        keys, values = torch.randn(shape).to(self.dtype), torch.randn(shape).to(self.dtype)
        cache = torch.zeros((1, *self.caches[0].shape[1:]), dtype=self.dtype)
        halves = cache.view((1, self.kv_heads, self.block_tokens * 2, -1)).chunk(2, dim=2)
        isa = _get_attn_isa(self.dtype, self.block_tokens, self.head_dim)
        slots = torch.arange(self.block_tokens, dtype=torch.int64)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, kv_cache_dtype="auto")
        read = self.views(cache, 0)
        if not (torch.equal(read[0], keys) and torch.equal(read[1], values)):
            raise ValueError(f"this vLLM lays KV of {self.dtype} out in a way ({isa}) that is not known here")

    def views(self, cache, block):
        """Keys and values of a block, `[tokens, kv_heads, head_dim]`: keys are kept transposed."""
        halves = cache[block].view(self.kv_heads, 2, self.block_tokens * self.head_dim)
        keys = halves[:, 0].view(self.kv_heads, self.head_dim, self.block_tokens)
        values = halves[:, 1].view(self.kv_heads, self.block_tokens, self.head_dim)
        return keys.permute(2, 0, 1), values.permute(1, 0, 2)

    def layout(self, url):
        layout = self.layouts.get(url)
        if layout is not None:
            return layout
        layout = self.clients[url].layout()
        own = {"layers": len(self.caches), "kv_heads": self.kv_heads, "head_dim": self.head_dim,
               "dtype": {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}.get(self.dtype)}
        if layout.shape() != own:
            raise KvError(f"{url} has KV of {layout.shape()}, and this engine of {own}")
        if self.block_tokens % layout.block_tokens:
            raise KvError(f"blocks of {self.block_tokens} tokens are no whole ones of {layout.block_tokens}")
        if self.namespace is not None and int(self.namespace, 16) != layout.namespace:
            raise KvError(f"{url} has the namespace {layout.namespace:016x} and not {self.namespace}")
        self.layouts[url] = layout
        return layout

    def parts(self, layout, block):
        """The slices of a block that mixfleet's blocks are, by layer: keys and values, each `[tokens, heads, dim]`."""
        for start in range(0, self.block_tokens, layout.block_tokens):
            part = slice(start, start + layout.block_tokens)
            yield [(keys[part], values[part]) for keys, values in (self.views(cache, block) for cache in self.caches)]

    def start_load_kv(self, forward_context, **kwargs):
        for move in self._get_connector_metadata().loads:
            self.threads.submit(self.load, move)

    def load(self, move):
        done, began, count = 0, time.perf_counter(), 0
        try:
            layout = self.layout(move.url)
            shape = (layout.layers, layout.block_tokens, 2, layout.kv_heads, layout.head_dim)
            each = self.block_tokens // layout.block_tokens
            payloads = self.clients[move.url].read(layout, move.tokens, move.first * each, move.salt)
            for block in move.blocks:
                for part in self.parts(layout, block):
                    payload = next(payloads, None)
                    if payload is None:
                        raise KvError("the rest is not there")
                    kv = torch.frombuffer(bytearray(payload), dtype=self.dtype).view(shape)
                    for (keys, values), layer in zip(part, kv):
                        keys.copy_(layer[:, 0])
                        values.copy_(layer[:, 1])
                    count += len(payload)
                done += 1
            payloads.close()
        # after any error the request must go on
        except Exception as error:
            # mixfleet may have been started anew with another model
            self.layouts.pop(move.url, None)
            logger.warning("KV of %s from %s is computed here from block %d on: %s", move.request, move.url,
                           move.first + done, error)
        took_ms = (time.perf_counter() - began) * 1e3
        logger.info("KV of %s came from %s: %d of %d blocks, %d bytes in %.1f ms", move.request, move.url, done,
                    len(move.blocks), count, took_ms)
        with self.lock:
            self.failed.update(move.blocks[done:])
            self.loaded.add(move.request)

    def get_finished(self, finished_req_ids):
        with self.lock:
            loaded, self.loaded = self.loaded, set()
        return None, loaded

    def get_block_ids_with_load_errors(self):
        with self.lock:
            failed, self.failed = self.failed, set()
        return failed

    def wait_for_save(self):
        for move in self._get_connector_metadata().saves:
            if self.resting.get(move.url, 0.0) > time.monotonic():
                continue
            began = time.perf_counter()
            try:
                layout = self.layout(move.url)
                payloads = [self.gathered(part) for block in move.blocks for part in self.parts(layout, block)]
                taken = self.clients[move.url].write(layout, move.tokens, 0, payloads, move.salt)
            # after any error the engine must go on
            except Exception as error:
                self.layouts.pop(move.url, None)
                if not isinstance(error, KvError):
                    self.resting[move.url] = time.monotonic() + REST_S
                logger.warning("KV of %s is not taken by %s, which computes it: %s", move.request, move.url, error)
                continue
            took_ms = (time.perf_counter() - began) * 1e3
            logger.info("KV of %s went to %s: %d blocks, %d bytes in %.1f ms", move.request, move.url, taken,
                        sum(map(len, payloads)), took_ms)

    def gathered(self, part):
        kv = torch.stack([torch.stack([keys, values], dim=1) for keys, values in part])
        return memoryview(kv.contiguous().view(torch.uint8).numpy()).cast("B")

    def shutdown(self):
        if self.role == KVConnectorRole.WORKER:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass
