"""Agents for `benchmarks.agents`: the calculator's loop in several hands, and faults. `python -m … PORT` serves those
of libraries, in the environment in which these are installed."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gxpo_trainer.environments.calculator import calculate, last_calculation

Messages = list[Any]
STRAY = "import time; time.sleep(4321)"
FAILING = {"hang", "die", "kill themselves", "use another key", "leave a stream", "exhaust memory", "ask nothing"}
KINDS = (*sorted(FAILING), "leave a child", "flood", "ask for 10^9 tokens", *["behave"] * 10)


def strays() -> int:
    """Number of children that episodes left and that run on."""
    found = subprocess.run(["pgrep", "-fc", re.escape(STRAY)], capture_output=True, text=True, check=False)
    return int(found.stdout)


def _post(body: dict[str, Any], key: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(address, json.dumps({"model": "policy", **body}).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]


def calculator(problem: dict[str, Any], ask: Callable[[Messages], tuple[str, bool]]) -> None:
    messages: Messages = [{"role": "user", "content": problem["text"]}]
    while True:
        text, cut = ask(messages)
        expression = last_calculation(text)
        if cut or expression is None:
            return
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": calculate(expression)}]


def bare(problem: dict[str, Any], **more: Any) -> None:
    def ask(messages: Messages) -> tuple[str, bool]:
        choice = _post({"messages": messages, **more})
        return choice["message"]["content"], choice["finish_reason"] == "length"

    calculator(problem, ask)


def faulty(problem: dict[str, Any]) -> None:
    """One of KINDS by chance; which one is appended to a file. The first episode is tried before the run starts."""
    first_of_all = not Path(os.environ["GXPO_KINDS"]).stat().st_size
    kind = "behave" if first_of_all else random.SystemRandom().choice(KINDS)
    with open(os.environ["GXPO_KINDS"], "a", encoding="utf-8") as file:  # noqa: PTH123, a single write of one line
        file.write(f"{kind}\n")
    first = {"messages": [{"role": "user", "content": problem["text"]}]}
    if kind == "hang":
        time.sleep(600)
    elif kind == "die":
        raise RuntimeError("no idea what to do")
    elif kind == "kill themselves":
        os.kill(os.getpid(), 9)
    elif kind == "use another key":
        _post(first, key="that of a neighbour")
    elif kind == "leave a stream":
        address = urlsplit(os.environ["OPENAI_BASE_URL"])
        connection = HTTPConnection(address.netloc)
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        connection.request("POST", address.path + "/chat/completions", json.dumps({**first, "stream": True}), headers)
        os._exit(3)
    elif kind == "exhaust memory":
        _post(first)
        bytearray(2 << 30)
    elif kind == "leave a child":
        subprocess.Popen([sys.executable, "-c", STRAY], start_new_session=True)
        bare(problem)
    elif kind == "flood":

        def ask() -> None:
            try:
                _post(first)
            except (urllib.error.URLError, ConnectionError):
                return  # refused, or the episode has ended

        threading.stack_size(2**18)  # a hundred stacks of 8 MiB would be another fault: environment.memory_mb
        threads = [threading.Thread(target=ask) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    elif kind == "ask for 10^9 tokens":
        bare(problem, max_tokens=10**9)
    elif kind == "behave":
        bare(problem)


# ---- libraries --------------------------------------------------------------------------------------------------


async def openai_client(problem: dict[str, Any], client: Any) -> None:
    messages: Messages = [{"role": "user", "content": problem["text"]}]
    while True:
        choice = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
        expression = last_calculation(text := choice.message.content or "")
        if expression is None or choice.finish_reason == "length":
            return
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": calculate(expression)}]


async def openai_agents(problem: dict[str, Any], client: Any) -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="calculates", model=OpenAIChatCompletionsModel("policy", client))
    items: Any = problem["text"]
    while True:
        result = await Runner.run(agent, items)
        if (expression := last_calculation(result.final_output)) is None:
            return
        items = [*result.to_input_list(), {"role": "user", "content": calculate(expression)}]


async def pydantic_ai(problem: dict[str, Any], client: Any) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)))
    text, history = problem["text"], None
    while True:
        result = await agent.run(text, message_history=history)
        if (expression := last_calculation(result.output)) is None:
            return
        text, history = calculate(expression), result.all_messages()


def serve(port: int) -> None:
    import uvicorn
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    connections = DefaultAsyncHttpxClient()

    def endpoint(play: Any) -> Any:
        async def run(request: Request) -> JSONResponse:
            body = await request.json()
            address = {"base_url": body["base_url"], "api_key": body["api_key"]}
            await play(body["problem"], AsyncOpenAI(**address, max_retries=0, http_client=connections))
            return JSONResponse({})

        return run

    agents = (openai_client, openai_agents, pydantic_ai)
    app = Starlette(routes=[Route(f"/{play.__name__}", endpoint(play), methods=["POST"]) for play in agents])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
