"""Agents for tests, some of them faulty: `python agents_of_tests.py NAME`, or `agents_of_tests:NAME`. Standard library
only, apart from what the name says."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

STRAY = [sys.executable, "-c", "import time; time.sleep(600)"]


def post(path, body, key=None, base=None):
    """Status and text of the answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request((base or os.environ["OPENAI_BASE_URL"]) + path, data, headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask(messages, **options):
    status, text = post("/chat/completions", {"model": "any", "messages": messages, **options})
    assert status == 200, text
    return json.loads(text)["choices"][0]


def user(text):
    return {"role": "user", "content": text}


def twice(problem):
    """Two turns, a reward for each; the second message tells what came first."""
    messages = [user(problem["text"])]
    first = ask(messages)["message"]
    post("/episodes/reward", {"reward": 0.25})
    ask([*messages, first, user("again " + first["content"])])
    post("/episodes/reward", {"reward": 0.5})


async def asynchronous(problem):
    twice(problem)


def calculates(problem):
    """What the policy asks, as the built-in environment does."""
    from gxpo_trainer.environments.calculator import calculate, last_calculation

    messages = [user(problem["text"])]
    while True:
        choice = ask(messages)
        expression = last_calculation(choice["message"]["content"])
        if choice["finish_reason"] == "length" or expression is None:
            break
        messages += [choice["message"], user(calculate(expression))]


def edits_and_dies(problem):
    """Edits its history, unless it ends by an error after the first turn."""
    first = ask([user(problem["text"])])["message"]["content"]
    post("/episodes/reward", {"reward": 0.5})
    if len(first) % 3 == 0:
        sys.exit(f"no more, after {len(first)}")
    ask([user(problem["text"]), user("Again, after " + first[:10])])
    post("/episodes/reward", {"reward": float(len(first) % 2)})


def hangs(problem):
    ask([user("one")])
    time.sleep(600)


def dies(problem):
    ask([user("one")])
    raise RuntimeError("no idea what to do")


def kills_itself(problem):
    ask([user("one")])
    os.kill(os.getpid(), 9)


def ends_when_told(problem):
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
    ask([user(problem["text"])])


def silent(problem):
    pass


def forks(problem):
    """Leaves a child, and one in a session of its own."""
    for own in (False, True):
        subprocess.Popen(STRAY, start_new_session=own)
    hangs(problem)


def floods(problem):
    """More requests at a time than may wait, until 30 were refused."""
    refused = []
    open_at_a_time = threading.Semaphore(100)

    def one():
        status, _ = post("/chat/completions", {"messages": [user("flood")]})
        refused.extend([status] if status != 200 else [])
        open_at_a_time.release()

    while len(refused) < 30:
        open_at_a_time.acquire()
        threading.Thread(target=one).start()  # waited for at the end of the process
    assert set(refused) == {429}


def leaves(problem):
    """Opens connections without a request, and closes one within a body and one without reading its stream."""
    import http.client

    address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connections = [http.client.HTTPConnection(address.netloc) for _ in range(100)]
    for connection in connections:
        connection.connect()
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"messages": [user("x")], "stream": True})
    path = address.path + "/chat/completions"
    connections[0].request("POST", path, body, key | {"Content-Length": "400000"})
    connections[0].close()
    connections[1].request("POST", path, body, key)
    select.select([connections[1].sock], [], [])
    connections[1].close()
    ask([user("back")])


def stops_waiting_when_told(problem):
    """Closes the connection of its request, and hangs."""
    import http.client

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(address.netloc)
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", address.path + "/chat/completions", json.dumps({"messages": [user("one")]}), key)
    signal.sigwait([signal.SIGUSR1])
    connection.close()
    time.sleep(600)


def named(problem):
    """The agent that the problem names."""
    globals()[problem["extra"]["agent"]](problem)


def lends(problem):
    """Writes down its address and its key before its only request."""
    given = [os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]]
    Path(os.environ["GIVEN"]).write_text(json.dumps(given))
    ask([user("mine")])


def borrows(problem):
    """Reports the statuses of what it asks with the other's key at its own address, and the other way round."""
    base, key = json.loads(Path(os.environ["GIVEN"]).read_text())
    own = os.environ["OPENAI_API_KEY"]
    places = {"key": key}, {"base": base, "key": own}
    calls = ("/chat/completions", {"messages": [user("x")]}), ("/episodes/reward", {"reward": 1.0}), ("/models", None)
    ask([user(json.dumps([post(*call, **place)[0] for place in places for call in calls]))])


def probes(problem):
    """Sends what is refused, and reports the statuses as a message."""
    image = {"role": "user", "content": [{"type": "image_url"}]}
    histories = [], [image], [user("\ud800")], [user("x" * 30_000_000)]
    cases = [
        post("/models", None, key="x" * 43),
        post("/chat/completions", {"messages": [user("x")]}, key="another"),
        post("/nowhere", {}),
        post("/chat/completions", {"messages": [user("x")], "n": 2}),
        *(post("/chat/completions", {"messages": history}) for history in histories),
        *(post("/episodes/reward", {"reward": reward}) for reward in (float("nan"), 10**400)),
        post("/models", None),
    ]
    ask([user(json.dumps([status for status, _ in cases]))])


def uses_tools(problem):
    """A streamed call of a tool by OpenAI's client, and the answer to it."""
    from openai import OpenAI

    client = OpenAI(max_retries=0)
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
    messages = [user(problem["text"])]
    fields = {"model": "policy", "messages": messages, "tools": tools}
    with client.chat.completions.stream(**fields, n=1, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.usage.total_tokens == 12
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"e": "6*7"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    messages += [choice.message.model_dump(exclude_none=True), result]
    client.chat.completions.create(**fields)


if __name__ == "__main__":
    globals()[sys.argv[1]](json.load(sys.stdin))
