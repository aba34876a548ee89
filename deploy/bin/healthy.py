"""Exit code 0 when every address, http(s)://…, answers with status 200.

usage: healthy.py [--ray] ADDRESS…        --ray: ask with the token of RAY_AUTH_TOKEN_PATH
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

ANSWER_S = 4.0


def trouble(address: str, headers: dict[str, str]) -> str | None:
    """What is wrong, None when it answers."""
    try:
        # A proxy of the environment is for the outside world.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(address, headers=headers), timeout=ANSWER_S) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except OSError as error:  # URLError and HTTPError are OSErrors
        return str(error)


def main(words: list[str]) -> int:
    headers: dict[str, str] = {}
    if words[:1] == ["--ray"]:
        words = words[1:]
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
        headers["Authorization"] = f"Bearer {token}"
    found = {address: trouble(address, headers) for address in words}
    for address, why in found.items():
        print(f"{address}: {why or 'answers'}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
