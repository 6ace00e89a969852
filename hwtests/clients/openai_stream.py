"""Talks to a running server through the `openai` package, as an application would.

    python openai_stream.py http://127.0.0.1:8000 MODEL

Fails on the first thing that is not as OpenAI documents it. OPENAI_API_KEY is used if set.
"""

import os
import sys

import openai


def check(condition, message):
    if not condition:
        sys.exit(f"FAILED: {message}")


def check_usage(usage, what):
    check(usage is not None, f"{what}: no usage")
    check(usage.prompt_tokens > 0, f"{what}: {usage}")
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"{what}: {usage}")
    check(usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens, f"{what}: {usage}")


def stream_chat(client, model):
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say something short."}],
        max_completion_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, roles, finish, usage = "", [], None, None
    for chunk in stream:
        check(usage is None, "a chunk after the usage")
        usage = chunk.usage
        for choice in chunk.choices:
            check(finish is None, "a choice after its finish_reason")
            finish = choice.finish_reason
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
    check(roles == ["assistant"], f"roles {roles}")
    check(finish in ("stop", "length"), f"finish_reason {finish}")
    check_usage(usage, "stream")
    return text, usage


def complete(client, model):
    answer = client.completions.create(
        model=model, prompt=["One", "Two"], n=2, max_tokens=8, temperature=0, seed=1, logprobs=2,
        extra_body={"ignore_eos": True},
    )
    check([choice.index for choice in answer.choices] == [0, 1, 2, 3], "four choices in order")
    check(all(choice.finish_reason == "length" for choice in answer.choices), "every choice is 8 tokens long")
    check(all(len(choice.logprobs.tokens) == 8 for choice in answer.choices), "a log-probability per token")
    check_usage(answer.usage, "completion")
    check(answer.usage.completion_tokens == 32, f"{answer.usage}")


def refuse(client, model):
    cases = [
        (openai.NotFoundError, "model_not_found", {"model": model + "-other"}),
        (openai.BadRequestError, "context_length_exceeded", {"max_tokens": 2_000_000_000}),
        (openai.BadRequestError, "unsupported_parameter", {"logit_bias": {"5": 1}}),
        (openai.BadRequestError, "invalid_value", {"temperature": 9}),
    ]
    for kind, code, fields in cases:
        try:
            client.completions.create(**{"model": model, "prompt": "x", **fields})
        except kind as error:
            check(error.code == code, f"{fields}: code {error.code}")
        else:
            sys.exit(f"FAILED: {fields} was accepted")


def main():
    url, model = sys.argv[1:]
    key = os.environ.get("OPENAI_API_KEY", "none")
    client = openai.OpenAI(base_url=url.rstrip("/") + "/v1", api_key=key, max_retries=0)
    check(model in [entry.id for entry in client.models.list()], f"{model} is not listed")
    check(client.models.retrieve(model).id == model, "retrieve")
    text, usage = stream_chat(client, model)
    whole = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say something short."}],
        max_tokens=24,
        temperature=0,
    )
    check(isinstance(whole.choices[0].message.content, str), "a whole answer has content")
    check(whole.choices[0].finish_reason in ("stop", "length"), "a whole answer has a finish_reason")
    check_usage(whole.usage, "chat")
    complete(client, model)
    refuse(client, model)
    print(f"ok: openai {openai.__version__}, {usage.completion_tokens} tokens streamed: {text!r}")


if __name__ == "__main__":
    main()
