"""KV frames of mixfleet (docs/reference/external-engines.md, "KV exchange"): their format, and how they are read and written
over HTTP. Needs the package xxhash; knows nothing of vLLM.

A frame is the KV of one block of tokens, `[layers, tokens, 2, kv_heads, head_dim]`, then a trailer (little endian): magic,
version, number of tokens, namespace, hash of the block and all before it, XXH3-64 of the KV, token ids, XXH3-64 of the
trailer so far.
"""

import http.client
import json
import struct
import urllib.parse

from xxhash import xxh3_64_digest, xxh3_64_intdigest

SCHEMA = "mixfleet.kv/1"
MAGIC, VERSION = b"mxfKVblk", 1
NAMED = struct.Struct("<8sIIQQ")
DIGEST = struct.Struct("<Q")


class KvError(Exception):
    """KV that is not what it should be, or that cannot be had."""


def chain(tokens, block_tokens, namespace):
    """The hashes of the whole blocks of a prompt, each of its block and all before it."""
    hashes = []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        own = xxh3_64_intdigest(ids(tokens[at:at + block_tokens]), seed=namespace)
        if hashes:
            own = xxh3_64_intdigest(DIGEST.pack(hashes[-1]) + DIGEST.pack(own), seed=namespace)
        hashes.append(own)
    return hashes


def ids(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


class Layout:
    """What all frames of one mixfleet have in common, as its `/v1/kv` tells it."""

    def __init__(self, told):
        if told.get("schema") != SCHEMA:
            raise KvError(f"the server speaks {told.get('schema')}, not {SCHEMA}")
        self.namespace = int(told["namespace"], 16)
        self.block_tokens, self.block_bytes = told["block_tokens"], told["block_bytes"]
        self.layers, self.kv_heads, self.head_dim = told["layers"], told["kv_heads"], told["head_dim"]
        self.dtype, self.model = told["dtype"], told["model"]
        self.frame_bytes = self.block_bytes + NAMED.size + 2 * DIGEST.size + 4 * self.block_tokens
        if self.frame_bytes != told["frame_bytes"]:
            raise KvError(f"its frames have {told['frame_bytes']} bytes, not {self.frame_bytes}")

    def shape(self):
        return {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype}

    def trailer(self, tokens, block_hash, digest):
        named = NAMED.pack(MAGIC, VERSION, len(tokens), self.namespace, block_hash)
        trailer = named + digest + ids(tokens)
        return trailer + xxh3_64_digest(trailer)[::-1]

    def frame(self, payload, tokens, block_hash):
        if len(payload) != self.block_bytes:
            raise KvError(f"KV of a block has {self.block_bytes} bytes and not {len(payload)}")
        return bytes(payload) + self.trailer(tokens, block_hash, xxh3_64_digest(payload)[::-1])

    def payload(self, frame, tokens, block_hash):
        """The KV in a frame that must be the block of these tokens behind all that `block_hash` says."""
        if len(frame) != self.frame_bytes:
            raise KvError(f"a frame has {self.frame_bytes} bytes and not {len(frame)}")
        payload, trailer = memoryview(frame)[:self.block_bytes], bytes(frame[self.block_bytes:])
        if xxh3_64_digest(trailer[:-8])[::-1] != trailer[-8:]:
            raise KvError("its trailer does not match its checksum")
        magic, version, count, namespace, named = NAMED.unpack_from(trailer)
        if (magic, version, count) != (MAGIC, VERSION, self.block_tokens):
            raise KvError("it is no block of this format")
        if namespace != self.namespace:
            raise KvError("it is of another namespace: another model, tokenizer or dtype")
        if named != block_hash:
            raise KvError("it is another block")
        rest = trailer[NAMED.size:-8]
        if rest[8:] != ids(tokens):
            raise KvError("its token ids differ from the prompt's")
        if xxh3_64_digest(payload)[::-1] != rest[:8]:
            raise KvError("its KV does not match its checksum")
        return payload


class Client:
    """One mixfleet, by its address and the key that it wants."""

    def __init__(self, url, key=None, timeout_s=30.0):
        self.url, self.timeout_s = urllib.parse.urlsplit(url), timeout_s
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, method, path, body=None, kind="application/json"):
        over = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[self.url.scheme]
        connection = over(self.url.netloc, timeout=self.timeout_s)
        try:
            connection.request(method, path, body, self.headers | {"content-type": kind})
        except (BrokenPipeError, ConnectionResetError):
            # a body that is refused is not read to its end, and the answer says why
            pass
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(4096).decode(errors="replace")
            connection.close()
            raise KvError(f"{method} {path}: status {response.status}: {text}")
        return connection, response

    def layout(self):
        connection, response = self.ask("GET", "/v1/kv")
        try:
            return Layout(json.loads(response.read()))
        finally:
            connection.close()

    def head(self, layout, tokens, first, salt):
        head = {"model": layout.model, "prompt": tokens, "first": first}
        return json.dumps(head | ({"cache_salt": salt} if salt else {})).encode()

    def read(self, layout, tokens, first, salt=None):
        """The KV of the blocks of a prompt from `first` on, each checked, as far as it is there."""
        hashes = chain(tokens, layout.block_tokens, layout.namespace)
        connection, response = self.ask("POST", "/v1/kv/read", self.head(layout, tokens, first, salt))
        try:
            for at in range(first, len(hashes)):
                frame = response.read(layout.frame_bytes)
                if not frame:
                    return
                own = tokens[at * layout.block_tokens:(at + 1) * layout.block_tokens]
                try:
                    yield layout.payload(frame, own, hashes[at])
                except KvError as error:
                    raise KvError(f"block {at} of the prompt: {error}") from None
        finally:
            connection.close()

    def write(self, layout, tokens, first, payloads, salt=None):
        """Sends the KV of a prompt's blocks from `first` on; returns the number of accepted blocks."""
        hashes = chain(tokens, layout.block_tokens, layout.namespace)
        head = self.head(layout, tokens, first, salt)
        pieces = [DIGEST.pack(len(head)), head]
        for at, payload in enumerate(payloads, first):
            own = tokens[at * layout.block_tokens:(at + 1) * layout.block_tokens]
            pieces.append(layout.frame(payload, own, hashes[at]))
        body = b"".join(pieces)
        connection, response = self.ask("POST", "/v1/kv/write", body, "application/octet-stream")
        try:
            return json.loads(response.read())["blocks"]
        finally:
            connection.close()
