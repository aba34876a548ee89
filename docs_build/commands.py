"""Renders docs/commands.md from the parsers of the `gxpo` command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

INTRODUCTION = """# Commands

<!-- Written by `make docs` from the parsers of the commands; edit the help texts there. -->

For users of the command line: every command of `gxpo` with its arguments. In a clone the command is `.venv/bin/gxpo`.

Exit codes: 0 success, 1 failure, 2 invalid usage, config or data, 130 interrupted; `gxpo plan` answers 1 for a run that
does not fit, `gxpo watch` for a run that did not succeed. `gxpo COMMAND --help` prints the same as this page.

Commands that talk to a service find that of `gxpo up` and its token by themselves; elsewhere use `--url` or `GXPO_URL`,
and `--token-file` or `GXPO_TOKEN`. A run is named by its id, by an end of it that no other run has, or by its name
where that is unique.

"""


def render_page(parser: argparse.ArgumentParser) -> str:
    """The whole page as Markdown. parser: that of `gxpo`, with every command."""
    commands = sorted(_commands(parser, parser.prog), key=lambda command: command[0])
    index = ["| command | what it does |", "|---|---|"]
    index += [f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(words)} |" for name, words, _ in commands]
    return INTRODUCTION + "\n".join(index) + "\n" + "".join(_section(*command) for command in commands)


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, description and parser of each command that runs, those of `gxpo token` one by one."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        words = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for word, command in action.choices.items():
            nested = list(_commands(command, f"{name} {word}"))
            yield from nested or [(f"{name} {word}", words[word], command)]


def _section(name: str, words: str, parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    rows = [_row(action) for action in sorted(actions, key=lambda action: bool(action.option_strings))]
    arguments = "\n".join(["| argument | meaning |", "|---|---|", *rows])
    sentence = words[:1].upper() + words[1:]
    return f"\n## {name}\n\n{sentence}.\n\n" + (f"{arguments}\n" if rows else "It takes no argument.\n")


def _row(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    rendered = f"{value} …" if action.nargs in ("+", "*") else str(value)
    names = [f"{option} {rendered}".strip() for option in action.option_strings] or [rendered]
    required = "required; " if action.option_strings and action.required else ""
    choices = f" ({', '.join(map(str, action.choices))})" if action.choices and action.metavar else ""
    cells = (", ".join(f"`{name}`" for name in names), f"{required}{action.help or ''}{choices}")
    return f"| {_cell(cells[0])} | {_cell(cells[1])} |"


def _cell(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
