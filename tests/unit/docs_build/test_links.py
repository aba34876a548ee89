"""What the build adds to a strict one: checks of what pages load and name, formulas, and the generated pages."""

from __future__ import annotations

import re
from pathlib import Path

from docs_build import commands, generated
from docs_build.__main__ import with_formulas
from docs_build.links import problems_of_markdown, problems_of_navigation, problems_of_site
from docs_build.metrics import SECTIONS, undescribed
from gxpo_trainer.cli import build_parser


def test_what_a_page_or_style_sheet_loads_from_another_host_is_a_problem(tmp_path: Path) -> None:
    own = '<img src="p.png"><link rel="stylesheet" href="own.css"><a href="https://example.com/">elsewhere</a>'
    (tmp_path / "index.html").write_text(own)
    (tmp_path / "own.css").write_text("@font-face { src: url(fonts/own.woff2) }")
    assert problems_of_site(tmp_path) == []
    foreign = '<script src="https://cdn.example/x.js"></script><link rel="stylesheet" href="//fonts.example/f">'
    (tmp_path / "index.html").write_text(own + foreign)
    (tmp_path / "own.css").write_text("@font-face { src: url('https://fonts.example/f.woff2') }")
    assert problems_of_site(tmp_path) == [
        "index.html: loads https://cdn.example/x.js from another host",
        "index.html: loads //fonts.example/f from another host",
        "own.css: loads https://fonts.example/f.woff2 from another host",
    ]


def test_the_navigation_names_every_page_once(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    for page in ("index.md", "rules/README.md", "rules/grpo.md"):
        (tmp_path / page).write_text("# A page")
    rules = {"Rules": ["rules/README.md", {"GRPO": "rules/grpo.md"}]}
    assert problems_of_navigation([{"Home": "index.md"}, rules], tmp_path) == []
    assert problems_of_navigation([{"Home": "index.md"}, rules, {"Again": "index.md"}, "gone.md"], tmp_path) == [
        "nav: gone.md does not exist",
        "nav: index.md occurs twice",
    ]
    missing = ["rules/README.md is not in nav of zensical.toml", "rules/grpo.md is not in nav of zensical.toml"]
    assert problems_of_navigation([{"Home": "index.md"}], tmp_path) == missing


def test_links_of_the_readme_lead_to_files(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("")
    readme = tmp_path / "README.md"
    readme.write_text('[a](LICENSE) [b](https://example.com) [c](#part) [d](docs/x.md#y) <img src="p.png">')
    missing = ["README.md: docs/x.md does not exist", "README.md: p.png does not exist"]
    assert problems_of_markdown(readme, tmp_path) == missing


def test_formulas_become_mathml_which_needs_no_script() -> None:
    inline = with_formulas(r'so <span class="arithmatex">\(a &lt; b\)</span>, and')
    assert re.fullmatch("so <math.*<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>.*</math>, and", inline)
    block = with_formulas('<div class="arithmatex">\\[\n\\frac{1}{K}\n\\]</div>')
    assert re.fullmatch('<p><math [^>]*display="block">.*<mfrac>.*</math></p>', block)


# The generated pages are what the code generates now, and their sources describe everything.


ROOT = Path(__file__).parents[3]
TRAINER = ROOT / "trainer" / "gxpo_trainer"
GROUPS = "update|gate|grad|gxpo|diagnostics|policy|importance|reward|verify|rollout|time|system|eval"


def test_a_page_that_differs_is_stale(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for path, text in generated.pages().items():
        (tmp_path / path).write_text(text + ("!" if path == "docs/metrics.md" else ""), encoding="utf-8")
    assert generated.stale(tmp_path) == ["docs/metrics.md"]


def test_every_metric_in_the_trainers_code_is_described() -> None:
    code = [path.read_text(encoding="utf-8") for path in TRAINER.rglob("*.py")]
    named = {name for text in code for name in re.findall(rf'"((?:{GROUPS})/[a-z0-9_@/]*[a-z0-9_])"', text)}
    assert len(named) > 60
    assert not undescribed(named)


BUILT = {
    "gate/{name}": {"gate/value", "gate/mean", "gate/std"},
    "policy/{name}": {
        f"policy/{n}" for n in ("clip_fraction", "clip_low_fraction", "clip_high_fraction", "ratio_mean", "kl")
    },
    "policy/pass{number}/{name}": {"policy/pass<n>/…"},
    "importance/{n.removeprefix(prefix)}": {f"importance/{n}" for n in ("mean", "max", "effective_sample_fraction")},
    "reward/{name}": {"reward/<component>"},
    "reward/source/{label}": {"reward/source/<name>"},
    "reward/source/{label}/zero_variance_fraction": {"reward/source/<name>/zero_variance_fraction"},
    "verify/{status}_fraction": {f"verify/{n}_fraction" for n in ("unparsed", "timeout", "error")},
    "env/{end}_fraction": {f"env/{n}_fraction" for n in ("done", "timeout", "error")},
    "warm_start/{ours}": {
        f"warm_start/{n}"
        for n in ("entropy", "tokens", "learning_rate", "grad_norm", "update_norm", "update_s", "step_s")
    },
    "system/gpu{index}/utilization_percent": {"system/gpu<n>/utilization_percent"},
    "system/gpu{index}/memory_bytes": {"system/gpu<n>/memory_bytes"},
    "eval/{name}/{score}": {
        f"eval/<benchmark>/{n}"
        for n in ("pass@1", "pass@<k>", "maj@<n>", "length_mean", "truncated_fraction", "failed_fraction")
    },
    "eval/{name}/full/{score}": {"eval/<benchmark>/full/…"},
}
"""The f-strings that build names in the trainer's code, and the described names that they build."""


def test_every_described_metric_occurs_in_the_trainers_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in TRAINER.rglob("*.py"))
    names = {name for section in SECTIONS for row in section.metrics for name in row}
    written = {name for name in names if f'"{name}"' in code}
    built = {name for template, made in BUILT.items() if f'f"{template}"' in code for name in made}
    assert names == written | built


def test_every_command_and_argument_has_a_help_text() -> None:
    bare = re.findall(r"^\| `[^|]*` \|  \|$", commands.render_page(build_parser()), re.MULTILINE)
    assert {line.split("`")[1].split()[0] for line in bare} <= {"--name", "--notes", "--title"}
