"""One-shot job before any replica of a version starts: the newest schema, and the first admin token in GXPO_HOME."""

from __future__ import annotations

import sys

from gxpo_services.auth.tokens import prepare_local
from gxpo_services.cli.common import translated_errors
from gxpo_services.db.migrate import newest_revision
from gxpo_services.settings import read_settings
from gxpo_trainer.errors import GxpoError


def main() -> int:
    try:
        with translated_errors():
            settings = read_settings()
            prepare_local(settings)
    except GxpoError as error:
        print(f"migrate: {error}", file=sys.stderr)
        return error.exit_code
    print(f"at revision {newest_revision()}; the first admin token is in {settings.local_token_file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
