"""The shape of the code: files, lines, functions that only call another one, modules with exactly one importer.

    python -m benchmarks.house

A function counts as calling only another one when its body, apart from the docstring, is one expression or return of a
call. Contracts among them are counted too, and once more by themselves: what is decorated (endpoints, properties),
special methods, and methods whose name another class has as well (overrides, protocols, actors and their handles).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "trainer/gxpo_trainer",
    "services/gxpo_services",
    "dashboard/gxpo_dashboard",
    "client/gxpo_client",
    "client/gxpo",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, Path]:
    """Dotted name and file of every module of the product."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__") for file in files)
    return dict(zip(names, files, strict=True))


def only_calls(function: Function) -> bool:
    body = [part for part in function.body if not _is_text(part)]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    return isinstance(value.value if isinstance(value, ast.Await) else value, ast.Call)


def methods(trees: list[ast.Module]) -> dict[str, list[Function]]:
    """All methods by name."""
    named: dict[str, list[Function]] = defaultdict(list)
    for tree in trees:
        for part in ast.walk(tree):
            for method in part.body if isinstance(part, ast.ClassDef) else ():
                if isinstance(method, Function):
                    named[method.name].append(method)
    return named


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def imported(tree: ast.Module, names: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in names else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def measure() -> dict[str, float]:
    """The figures of the working tree."""
    names = modules()
    importers: dict[str, set[str]] = defaultdict(set)
    trees: list[ast.Module] = []
    lines = 0
    for name, file in names.items():
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += text.count("\n")
        trees.append(tree)
        for module in imported(tree, names):
            importers[module].add(name)
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]
    shared = {id(method) for same in methods(trees).values() if len(same) > 1 for method in same}
    calls = [function for function in functions if only_calls(function)]
    contracts = [f for f in calls if f.decorator_list or f.name.startswith("__") or id(f) in shared]
    test_files = sorted((ROOT / "tests").rglob("*.py"))
    others = [file for name in PACKAGES for kind in ("js", "css") for file in (ROOT / name).rglob(f"*.{kind}")]
    return {
        "files": len(names),
        "lines": lines,
        "lines_with_js_and_css": lines + sum(file.read_text(encoding="utf-8").count("\n") for file in others),
        "lines_per_file": round(lines / len(names), 1),
        "functions": len(functions),
        "functions_of_one_call": len(calls),
        "contracts_among_them": len(contracts),
        "modules_with_one_importer": sum(len(importers[name]) == 1 for name in names),
        **{f"subpackages_of_{Path(name).name}": len(list((ROOT / name).glob("*/__init__.py"))) for name in PACKAGES},
        "test_files": len(test_files),
        "test_lines": sum(file.read_text(encoding="utf-8").count("\n") for file in test_files),
    }  # fmt: skip


def main() -> None:
    for name, value in measure().items():
        print(f"{name:32} {value:>10,}")


if __name__ == "__main__":
    main()
