"""A scheduler as a process of its own, whose trainers are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

from process_launcher import ProcessLauncher

from gxpo_services import logging
from gxpo_services.scheduling.scheduler import serve
from gxpo_services.settings import ServiceSettings, make_home

TRAINER = Path(__file__).with_name("stand_in_trainer.py")


def command(folder: Path) -> list[str]:
    files = [str(folder / "config.toml"), "--out", str(folder), "--continue", "--service", str(folder / "service.json")]
    return [sys.executable, str(TRAINER), *files]


if __name__ == "__main__":
    settings = ServiceSettings()
    logging.configure(as_json=False)
    make_home(settings)
    serve(settings, ProcessLauncher(settings.home.resolve() / "jobs", kill_after_s=2.0), command=command)
