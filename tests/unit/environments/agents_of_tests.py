"""Agents for tests, some of them faulty: `python agents_of_tests.py NAME`, or `agents_of_tests:NAME`. Standard library
only, apart from what the name says."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

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
    ask([user(problem["gold"])])


def hangs(problem):
    ask([user("one")])
    time.sleep(600)


def dies(problem):
    ask([user("one")])
    raise RuntimeError("no idea what to do")


def silent(problem):
    pass


def forks(problem):
    """Leaves a child, and one in a session of its own."""
    subprocess.Popen(STRAY)
    subprocess.Popen(STRAY, start_new_session=True)
    ask([user("one")])
    time.sleep(600)


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
        threading.Thread(target=one, daemon=True).start()
    assert set(refused) == {429}
    os._exit(0)


def leaves(problem):
    """Asks for a stream and closes the connection."""
    import http.client

    host = os.environ["OPENAI_BASE_URL"].split("/")[2]
    connection = http.client.HTTPConnection(host)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": [user("x")], "stream": True}), headers)
    time.sleep(0.2)
    connection.close()
    ask([user("back")])


def probes(problem):
    """Sends what is refused, and reports the statuses as a message."""
    cases = [
        post("/models", None, key="x" * 43),
        post("/chat/completions", {"messages": [user("x")]}, key="another"),
        post("/nowhere", {}),
        post("/chat/completions", {"messages": [user("x")], "n": 2}),
        post("/chat/completions", {"messages": []}),
        post("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        post("/chat/completions", {"messages": [user("\ud800")]}),
        post("/chat/completions", {"messages": [user("x" * 30_000_000)]}),
        post("/episodes/reward", {"reward": float("nan")}),
        post("/models", None),
    ]
    ask([user(json.dumps([status for status, _ in cases]))])


def streams(problem):
    """One streamed turn; its text is the reward of the second request."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, text = post("/chat/completions", {"messages": [user("x")], **options})
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert text.endswith("data: [DONE]\n\n")
    assert chunks[-1]["usage"]["total_tokens"] == 12
    said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    ask([user(said)])


def uses_tools(problem):
    """A streamed call of a tool by OpenAI's client, and the answer to it."""
    from openai import OpenAI

    client = OpenAI(max_retries=0)
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
    messages = [user(problem["text"])]
    with client.chat.completions.stream(model="policy", messages=messages, tools=tools, n=1) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"e": "6*7"}
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    client.chat.completions.create(model="policy", messages=messages, tools=tools)


if __name__ == "__main__":
    globals()[sys.argv[1]](json.load(sys.stdin))
