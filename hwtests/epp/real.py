"""Two unlike llama.cpp servers and two fakes behind Envoy and the picker, asked by the openai package; see ../epp.sh."""

import concurrent.futures
import sys

sys.path.insert(0, "hwtests/engines")
from common import check, free_port  # noqa: E402
from envoy import Envoy  # noqa: E402
from llamacpp import Engine  # noqa: E402
from picker import Picker, Server, Setup  # noqa: E402

import openai  # noqa: E402

CLIENTS = 32


def ask(client, number):
    messages = [{"role": "user", "content": f"client {number}: what is a fleet?"}]
    more = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
    raw = client.chat.completions.with_raw_response
    if number % 2:
        response = raw.create(**more)
        answer = response.parse()
        whole = answer.choices[0].finish_reason in ("length", "stop") and answer.usage.completion_tokens > 0
    else:
        response = raw.create(**more, stream=True, stream_options={"include_usage": True})
        chunks = list(response.parse())
        finished = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        whole = finished[-1] in ("length", "stop") and chunks[-1].usage.completion_tokens > 0
    return response.headers["x-request-id"], response.headers["x-mixfleet-placement"], whole


def main(program, envoy, model):
    with Setup() as setup:
        # one has four times the context of the other
        engines = [Engine(model, free_port()), Engine(model, free_port(), 8192)]
        for engine in engines:
            setup.stops.append(engine.kill)
        servers = engines + [setup.add(Server(token_ms=0.5, pace_ms=4)) for _ in range(2)]
        labels = [{"mixfleet.dev/engine": "llamacpp"}] * 2 + [{}] * 2
        picker = setup.add(Picker(program, servers, labels=labels))
        gate = setup.add(Envoy(envoy, {"picked": "picker"}, [server.address for server in servers], picker.listen))
        picker.wait_for("get requests")
        headers = {"x-mixfleet-explain": "1"}
        client = openai.OpenAI(base_url=f"http://{gate.fronts['picked']}/v1", api_key="none", max_retries=0, default_headers=headers)
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda number: ask(client, number), range(4 * CLIENTS)))
        check(all(whole for _, _, whole in answers), f"{len(answers)} chats of {CLIENTS} openai clients are whole, streams too")
        check(all(asked == told for asked, told, _ in answers), "each tells its placement")
        placed = [picker.placement(asked)[0] for asked, _, _ in answers]
        counts = [placed.count(server.address) for server in servers]
        check(min(counts[:2]) > 0, f"both llama.cpp servers get some, of four: {counts}")
        served = sum(picker.metric(f'mixfleet_picks_served_total{{device="llamacpp:{engine.address}"') for engine in engines)
        check(served == sum(counts[:2]), "Envoy served them where they were placed")


main(*sys.argv[1:])
