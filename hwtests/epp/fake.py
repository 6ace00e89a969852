"""A model server that is none, for tests of the picker.

    fake.py PORT [NAME=VALUE...]

It prints its port, which the system chooses if PORT is 0, and answers vLLM's routes. Prompts are computed one after the
other, `token_ms` for each token beyond the prefix that the conversation's last turn left there; answers come a token each
`pace_ms`. Every answer has the SHA-256 of the request's body, so that a change in flight shows.
"""

import asyncio
import hashlib
import json
import sys

MODEL = "m"
CONTEXT = 131072


class Server:
    def __init__(self, port, token_ms=0.0, pace_ms=1.0, status=200):
        self.port, self.token_s, self.pace_s, self.status = port, token_ms / 1e3, pace_ms / 1e3, int(status)
        self.prompts, self.running, self.waiting = asyncio.Lock(), 0, 0
        self.turns = {}

    async def read(self, reader):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
        elif length := int(headers.get("content-length", 0)):
            body = await reader.readexactly(length)
        return lines[0].split(" ")[1], body

    def document(self, writer, text, status=200, more=""):
        kind = "text/plain" if text.startswith("vllm:") else "application/json"
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\n{more}\r\n"
        writer.write(head.encode() + text.encode())

    async def compute(self, body):
        """Computes the prompt: its own tokens, since all before was computed here in the last turn."""
        text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        tokens, turn = len(text) // 4, body.get("user")
        known = self.turns.get(turn, 0) if turn else 0
        self.waiting += 1
        async with self.prompts:
            self.waiting, self.running = self.waiting - 1, self.running + 1
            await asyncio.sleep(max(1, tokens - known) * self.token_s)
            self.running -= 1
        if turn:
            self.turns[turn] = tokens
        return tokens

    async def generate(self, writer, path, raw):
        digest = f"x-body-sha256: {hashlib.sha256(raw).hexdigest()}\r\nx-served-by: 127.0.0.1:{self.port}\r\n"
        if self.status != 200:
            self.document(writer, json.dumps({"error": {"message": "as it was started"}}), self.status, digest)
            return
        body = json.loads(raw)
        tokens = await self.compute(body)
        wanted = body.get("max_tokens", 8)
        usage = {"prompt_tokens": tokens, "completion_tokens": wanted, "total_tokens": tokens + wanted}
        shown = {"id": "a", "created": 5, "model": body["model"]}
        chat = "chat" in path

        def choice(text, finish, whole=False):
            if not chat:
                return {"index": 0, "text": text, "finish_reason": finish}
            part = {"role": "assistant", "content": text} if whole else {"content": text}
            return {"index": 0, "message" if whole else "delta": part, "finish_reason": finish}

        self.running += 1
        try:
            if not body.get("stream"):
                await asyncio.sleep(self.pace_s * wanted)
                text = "".join(f"w{number} " for number in range(wanted))
                answer = {**shown, "choices": [choice(text, "length", True)], "usage": usage}
                self.document(writer, json.dumps(answer), 200, digest)
                return
            head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n{digest}\r\n"
            writer.write(head.encode())
            events = [{**shown, "choices": [choice(f"w{number} ", None)]} for number in range(wanted)]
            events.append({**shown, "choices": [choice("", "length")]})
            if (body.get("stream_options") or {}).get("include_usage"):
                events.append({**shown, "choices": [], "usage": usage})
            for event in [*map(json.dumps, events), "[DONE]"]:
                data = f"data: {event}\n\n"
                writer.write(f"{len(data):x}\r\n{data}\r\n".encode())
                await writer.drain()
                await asyncio.sleep(self.pace_s)
            writer.write(b"0\r\n\r\n")
        finally:
            self.running -= 1

    async def serve(self, reader, writer):
        try:
            while True:
                path, raw = await self.read(reader)
                if path == "/v1/models":
                    models = {"object": "list", "data": [{"id": MODEL, "max_model_len": CONTEXT}]}
                    self.document(writer, json.dumps(models))
                elif path == "/metrics":
                    load = f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting {self.waiting}\n"
                    self.document(writer, load)
                elif path == "/version":
                    self.document(writer, '{"version": "0.32.0"}')
                elif path == "/health":
                    self.document(writer, "{}")
                elif path.endswith("completions"):
                    await self.generate(writer, path, raw)
                else:
                    self.document(writer, '{"error": {"message": "no such route"}}', 404)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def main(port, words):
    server = Server(port, **{name: float(value) for name, value in (word.split("=") for word in words)})
    listening = await asyncio.start_server(server.serve, "127.0.0.1", port, limit=1 << 20, backlog=512)
    server.port = listening.sockets[0].getsockname()[1]
    print(server.port, flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
