"""`python -m docs_build write`: generated pages and pictures. `python -m docs_build build`: the site, strictly."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import latex2mathml.converter

from docs_build import generated, links

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "zensical.toml"
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def write() -> int:
    """Write what is generated from code."""
    from docs_build import pictures

    for path, text in generated.pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
    pictures.main()
    return 0


def build() -> int:
    """Build the site; the exit code is 1 for a stale page, a warning, a broken link or a page missing in `nav`."""
    project = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if built.returncode:
        print(built.stdout.strip(), built.stderr.strip().rpartition("\n")[2], sep="\n", file=sys.stderr)
        return 1
    for page in (ROOT / project["site_dir"]).rglob("*.html"):
        page.write_text(with_formulas(page.read_text(encoding="utf-8")), encoding="utf-8")
    problems = [f"{path} is stale; run `make docs`" for path in generated.stale(ROOT)]
    problems += links.problems_of_navigation(project["nav"], ROOT / project["docs_dir"])
    problems += links.problems_of_site(ROOT / project["site_dir"])
    for file in sorted([*ROOT.glob("*.md"), *(ROOT / project["docs_dir"]).rglob("*.md")]):
        problems += links.problems_of_markdown(file, ROOT)
    for problem in problems:
        print(f"docs: {problem}", file=sys.stderr)
    if not problems:
        print(f"docs: {ROOT / project['site_dir'] / 'index.html'}")
    return 1 if problems else 0


def with_formulas(page: str) -> str:
    """The page with its formulas, which arithmatex leaves in LaTeX, as MathML: read without scripts, and offline."""

    def converted(formula: re.Match[str]) -> str:
        latex, block = html.unescape(formula[2]), formula[1] == "div"
        mathml: str = latex2mathml.converter.convert(latex, display="block" if block else "inline")
        return f"<p>{mathml}</p>" if block else mathml

    return _FORMULA.sub(converted, page)


if __name__ == "__main__":
    actions = {"write": write, "build": build}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit("usage: python -m docs_build write|build")
    sys.exit(actions[sys.argv[1]]())
