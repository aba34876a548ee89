"""Which mutants there are, and a sample of them.

The mutants are cosmic-ray's: comparisons, arithmetic, boolean logic, constants, loops and exception handlers. Left out
are those that say nothing about tests: an operator of another kind (a float cannot be shifted), identity in place of
equality, and what no result depends on (`_meaning`). The targets are pure; docs/mutants.md has the criterion.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (
    "trainer/gxpo_trainer/rules/*.py",
    "trainer/gxpo_trainer/algo/*.py",
    "trainer/gxpo_trainer/compare/*.py",
    "trainer/gxpo_trainer/grading/**/*.py",
    "services/gxpo_services/run_states.py",
    "services/gxpo_services/api/fields.py",
    "services/gxpo_services/compare/schemas.py",
    "services/gxpo_services/sweeps/grid.py",
    "services/gxpo_services/ingest/batches.py",
    "services/gxpo_services/outputs/metric_series.py",
    "services/gxpo_services/scheduling/decisions.py",
)
IMPURE = tuple(f"grading/{name}.py" for name in ("http_rewards", "pool", "sandbox"))
DATABASE = {"Session", "ReadSession", "Database"}
"""Types of parameters whose functions are not pure."""
# Replacements within a set of operators.
FAMILIES = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitOr", "BitAnd", "BitXor"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
    {"UAdd", "USub"},
    {"Delete", "USub"},
    {"Delete", "Invert"},
    {"Delete", "Not"},
)
OTHERS = {"AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"}
OTHERS |= {"ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"}
OTHERS |= {"ExceptionReplacer", "NumberReplacer"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file. key: names it by the text of its line, which later edits elsewhere do not change."""

    path: str
    operator: str
    occurrence: int
    line: int
    key: str

    def source(self) -> str | None:
        """The mutated file; None when nothing that counts changes, or when it is not Python."""
        original = (ROOT / self.path).read_text()
        mutated = mutate_code(original, plugins.get_operator(self.operator)(), self.occurrence)
        if mutated is None or _meaning(mutated, self.operator) in (None, _meaning(original, self.operator)):
            return None
        return mutated


def target_files() -> list[Path]:
    files = []
    for pattern in TARGETS:
        paths = sorted(path for path in ROOT.glob(pattern) if not str(path).endswith(IMPURE))
        if not paths:
            raise SystemExit(f"{pattern} matches no file; bring TARGETS up to date")
        files += paths
    return files


def all_mutants() -> list[Mutant]:
    """Every mutant of the target files."""
    operators = [(name, plugins.get_operator(name)()) for name in sorted(filter(_is_used, plugins.operator_names()))]
    mutants: list[Mutant] = []
    for path in target_files():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        nodes, lines = list(ast_nodes(get_ast(text))), text.splitlines()
        impure = _database_lines(text)
        seen: Counter[str] = Counter()
        for operator_name, operator in operators:
            places = ((node, place) for node in nodes for place in operator.mutation_positions(node))
            for occurrence, (node, ((line, _), _)) in enumerate(places):
                if node.parent and node.parent.type == "parameters":
                    continue  # the star before keyword-only parameters is no product
                key = f"{name} {operator_name} {lines[line - 1].strip()}"
                seen[key] += 1
                if line in impure:
                    continue
                mutants.append(Mutant(name, operator_name, occurrence, line, f"{key} {seen[key]}"))
    return mutants


def sample(mutants: list[Mutant], seed: int, size: int) -> list[tuple[Mutant, str]]:
    """The mutants of the lowest hashes of seed and key with their sources, in order of file and line."""

    def rank(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    chosen: list[tuple[Mutant, str]] = []
    for mutant in sorted(mutants, key=rank):
        if len(chosen) < size and (source := mutant.source()):
            chosen.append((mutant, source))
    # The grader's tests take longest: last.
    return sorted(chosen, key=lambda item: ("grading" in item[0].path, item[0].path, item[0].line, item[0].key))


def _is_used(operator: str) -> bool:
    kind, *words = operator.removeprefix("core/").split("_")
    return any(set(words) <= family for family in FAMILIES) if words else kind in OTHERS


def _database_lines(text: str) -> set[int]:
    """Lines of the functions that take a session or the database."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            annotations = [a.annotation for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if any(isinstance(a, ast.Name) and a.id in DATABASE for a in annotations):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                lines.update(range(first, (node.end_lineno or node.lineno) + 1))
    return lines


def _meaning(source: str, operator: str) -> str | None:
    """The syntax tree without what no result depends on (see docs/mutants.md); None for what does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the star of keyword-only parameters, taken for a product
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.ClassDef):
            node.decorator_list = []
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            no_effect = {"lru_cache": {"maxsize"}, "Field": {"examples"}}.get(name, set())
            if name == "zip" and operator == "core/ReplaceTrueWithFalse":
                no_effect = {"strict"}
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in no_effect]
    return ast.dump(tree)
