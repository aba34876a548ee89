"""Make the secrets of a cluster once: the database's password and Ray's token, each in a file of its own volume.

What exists is left alone, so that this may run at every start. The third secret, the first admin token, is made by
migrate.py, as the database must know its hash.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from gxpo_services.auth.tokens import replace_file

FILES = ("database/password", "ray/token")


def main(root: Path = Path("/secrets")) -> int:
    for name in FILES:
        file = root / name
        if file.exists() and file.stat().st_size:
            print(f"{file}: kept")
            continue
        replace_file(file, secrets.token_hex(32), 0o400)
        print(f"{file}: made")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
