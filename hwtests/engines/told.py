"""An engine that is none: each word of an answer follows from the prompt and the word's number.

    told.py PORT [PACE_MS]

Answers vLLM's routes, so that it can go on with an answer that another one began. `word` says what it must say.
"""

import asyncio
import hashlib
import json
import sys

MODEL = "m"


def word(prompt, number):
    return hashlib.sha256(f"{prompt}|{number}".encode()).hexdigest()[:6] + " "


def answer(prompt, tokens):
    return "".join(word(prompt, number) for number in range(tokens))


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), 0)
    return lines[0].split(" ")[1], json.loads(await reader.readexactly(length)) if length else {}


def document(writer, body):
    text = body if isinstance(body, str) else json.dumps(body)
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())


def asked(path, body):
    """The prompt, and the part of the answer that is there already."""
    if "chat" in path:
        messages = body["messages"]
        begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        return messages[0]["content"], begun
    prompt, _, begun = body["prompt"].partition("\n")
    return prompt, begun


async def generate(writer, path, body, pace):
    prompt, begun = asked(path, body)
    first, tokens = len(begun.split()), body["max_tokens"]
    if begun.strip() != answer(prompt, first).strip():
        # what it is to go on with is not what any engine said
        writer.write(b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\ncontent-length: 28\r\n\r\n" + b'{"error":{"message":"lied"}}')
        return
    usage = {"prompt_tokens": len(prompt.split()) + first, "completion_tokens": tokens, "total_tokens": len(prompt.split()) + first + tokens}
    shown = {"id": "a", "created": 5, "model": body["model"]}

    def choice(text, finish, whole=False):
        if "chat" in path:
            part = {"role": "assistant", "content": text} if whole else {"content": text}
            return {"index": 0, "message" if whole else "delta": part, "finish_reason": finish}
        return {"index": 0, "text": text, "finish_reason": finish}

    if not body.get("stream"):
        await asyncio.sleep(pace * tokens)
        text = "".join(word(prompt, first + number) for number in range(tokens))
        document(writer, {**shown, "choices": [choice(text, "length", True)], "usage": usage})
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def send(data):
        event = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
        writer.write(f"{len(event):x}\r\n{event}\r\n".encode())
        await writer.drain()

    for number in range(first, first + tokens):
        await asyncio.sleep(pace)
        await send({**shown, "choices": [choice(word(prompt, number), None)]})
    await send({**shown, "choices": [choice("", "length")]})
    if (body.get("stream_options") or {}).get("include_usage"):
        await send({**shown, "choices": [], "usage": usage})
    await send("[DONE]")
    writer.write(b"0\r\n\r\n")


async def serve(reader, writer, pace):
    try:
        while True:
            path, body = await read_request(reader)
            if path == "/v1/models":
                document(writer, {"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]})
            elif path == "/metrics":
                document(writer, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")
            elif path == "/version":
                document(writer, {"version": "0.32.0"})
            elif path == "/health":
                document(writer, {})
            elif path == "/tokenize":
                tokens = list(range(len(body.get("prompt", "").split())))
                document(writer, {"tokens": tokens, "count": len(tokens), "max_model_len": 8192})
            elif path.endswith("completions"):
                await generate(writer, path, body, pace)
            else:
                writer.write(b"HTTP/1.1 404 X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main(port, pace):
    server = await asyncio.start_server(lambda reader, writer: serve(reader, writer, pace), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2] if len(sys.argv) > 2 else 10) / 1000))
