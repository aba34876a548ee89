"""`python -m gxpo_trainer.cli` is `gxpo`."""

import sys

from gxpo_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
