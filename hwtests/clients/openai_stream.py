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


def tell_prompt(client, model):
    """As the lm-eval package asks for the likelihood of a text."""
    fields = {"prompt": "The fleet is", "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    answer = client.completions.create(model=model, max_tokens=1, **fields)
    told, prompt_tokens = answer.choices[0].logprobs, answer.usage.prompt_tokens
    check(answer.choices[0].text.startswith("The fleet is"), f"no echo: {answer.choices[0].text!r}")
    check(told.token_logprobs[0] is None, "the first token has a log-probability")
    lengths = [len(told.tokens), len(told.token_logprobs), len(told.top_logprobs), len(told.text_offset)]
    check(all(length >= prompt_tokens for length in lengths), f"lengths {lengths} of {prompt_tokens} tokens")
    check(all(value < 0 for value in told.token_logprobs[1:prompt_tokens]), f"{told.token_logprobs}")
    nothing = client.completions.create(model=model, max_tokens=0, **fields)
    check(nothing.usage.completion_tokens == 0, f"{nothing.usage}")
    check(len(nothing.choices[0].logprobs.tokens) == prompt_tokens, "the prompt alone")


def respond(client, model):
    schema = {
        "type": "object", "properties": {"count": {"enum": [1, 2]}}, "required": ["count"],
        "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
    }
    form = {"format": {"type": "json_schema", "name": "pool", "schema": schema}}
    fields = {"model": model, "instructions": "Be brief.", "max_output_tokens": 64, "temperature": 0}
    history = [
        {"role": "user", "content": "How many?"},
        {"type": "function_call", "call_id": "c1", "name": "count", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    for conversation in ("How many?", history[:1]):
        whole = client.responses.create(input=conversation, text=form, **fields)
        check(whole.status == "completed" and whole.store is False, f"{whole.status}, store {whole.store}")
        check(whole.output_text in ('{"count":1}', '{"count":2}'), f"{whole.output_text!r}")
        check(whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens, f"{whole.usage}")
    with client.responses.stream(input="How many?", text=form, **fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    check(kinds[:2] == ["response.created", "response.in_progress"], f"{kinds}")
    check(kinds[-1] == "response.completed" and "response.output_text.delta" in kinds, f"{kinds}")
    check(final.output_text == whole.output_text, f"{final.output_text!r}, not {whole.output_text!r}")
    cut = client.responses.create(input="How many?", **{**fields, "max_output_tokens": 1}, extra_body={"ignore_eos": True})
    check(cut.incomplete_details.reason == "max_output_tokens", f"{cut.incomplete_details}")
    for refused in ({"previous_response_id": "resp_1"}, {"store": True}, {"background": True}):
        try:
            client.responses.create(input=history, **fields, **refused)
        except openai.BadRequestError as error:
            check(error.param in refused, f"{refused}: {error.param}")
        else:
            sys.exit(f"FAILED: {refused} was accepted")


def refuse(client, model):
    cases = [
        (openai.NotFoundError, "model_not_found", {"model": model + "-other"}),
        (openai.BadRequestError, "context_length_exceeded", {"max_tokens": 2_000_000_000}),
        (openai.BadRequestError, "unsupported_parameter", {"suffix": "x"}),
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
    tell_prompt(client, model)
    respond(client, model)
    refuse(client, model)
    print(f"ok: openai {openai.__version__}, {usage.completion_tokens} tokens streamed: {text!r}")


if __name__ == "__main__":
    main()
