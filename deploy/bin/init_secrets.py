"""Make the secrets of a cluster once: the database's password and Ray's token, each in a file of its own volume.

What exists is left alone, so that this may run at every start. The third secret, the first admin token, is made by
migrate.py, as the database must know its hash.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

FILES = ("database/password", "ray/token")


def main(root: Path = Path("/secrets")) -> int:
    for name in FILES:
        file = root / name
        if file.exists() and file.stat().st_size:
            print(f"{file}: kept")
            continue
        # Written to a temporary file first: a partly written secret would be kept.
        partial = file.with_suffix(".part")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
        print(f"{file}: made")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
