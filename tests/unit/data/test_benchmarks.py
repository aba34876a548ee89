"""Benchmarks by name: sources, rows, golds and rules of each, templates, hashes; training problems that repeat them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.data_files import write

from gxpo_trainer.config import DataConfig, EvaluationConfig
from gxpo_trainer.config.tasks import EMBEDDED_TASKS
from gxpo_trainer.data import benchmarks
from gxpo_trainer.data.prompts import PromptSet
from gxpo_trainer.errors import ConfigError, DataError
from gxpo_trainer.types import Prompt, VerifyOptions

COPIES = {
    "math500": "test.jsonl",
    "amc23": "data/test-00000-of-00001.parquet",
    "gsm8k": "main/test-00000-of-00001.parquet",
    "minerva": "test.jsonl",
    "olympiadbench": "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet",
    "aime24": "data/train-00000-of-00001.parquet",
}


def load(name: str, root: Path | None = None, data: DataConfig | None = None, **settings: Any) -> benchmarks.Benchmark:
    evaluation = EvaluationConfig(data_root=None if root is None else str(root), **settings)
    return benchmarks.load_benchmark(name, data or DataConfig(), evaluation)


@pytest.mark.parametrize("name", list(benchmarks.BENCHMARKS))
def test_a_local_copy_in_hub_layout_is_read(name: str, tmp_path: Path) -> None:
    file = COPIES[name]
    write(tmp_path / name / file, {"question": "p", "answer": "1", "url": "u"})
    (tmp_path / name / "README.md").write_text("# a data set")
    benchmark = load(name, tmp_path)
    assert [(prompt.text, prompt.gold, prompt.extra) for prompt in benchmark.prompts] == [("p", "1", {})]
    assert list(benchmark.files_sha256) == [Path(file).name]
    assert "\\boxed{}" in benchmark.template


def test_a_data_root_without_the_benchmark_is_rejected_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation\.data_root = .* no copy of aime24; put aime24\.jsonl or a folder"):
        load("aime24", tmp_path)
    with pytest.raises(DataError, match=r"is not a folder; correct or remove"):
        load("aime24", tmp_path / "nowhere")
    (tmp_path / "aime24").mkdir()
    with pytest.raises(DataError, match=r"of the split 'train' of aime24"):
        load("aime24", tmp_path)
    known = r"'math50' is unknown; use word_problems, arithmetic_skill, math500, .* a \.jsonl, \.csv, \.parquet file"
    with pytest.raises(ConfigError, match=known):
        load("math50")


@pytest.mark.parametrize(
    ("name", "fields", "gold"),
    [
        ("math500", {"solution": "so \\boxed{1}", "answer": "\\frac{1}{2}"}, "\\frac{1}{2}"),
        ("olympiadbench", {"final_answer": ["$69$,$84$"]}, "69,84"),
        ("amc23", {"answer": 27.0}, "27"), ("amc23", {"answer": "27.5"}, "27.5"), ("amc23", {"answer": 27}, "27"),
        ("aime24", {"answer": "000"}, "0"), ("aime24", {"answer": "073"}, "73"), ("aime24", {"answer": "204"}, "204"),
        ("gsm8k", {"answer": "so\n#### -1,200"}, "-1200"), ("gsm8k", {"answer": "#### 1.50"}, "1.50"),
        # Python becomes LaTeX.
        ("minerva", {"answer": "2.7778e-6"}, "2.7778 \\times 10^{-6}"), ("minerva", {"answer": "x^2 e^3"}, "x^2 e^3"),
        ("minerva", {"answer": "4E+07"}, "4 \\times 10^{7}"), ("minerva", {"answer": "-1./3"}, "-\\frac{1}{3}"),
        ("minerva", {"answer": "np.arcsin(10/13)"}, "\\arcsin(10/13)"),
        ("minerva", {"answer": "4.5e33", "answer_latex": "4.5 \\times 10^{33}"}, "4.5 \\times 10^{33}"),
        ("minerva", {"solution": "so \\boxed{7e37}"}, "7 \\times 10^{37}"),
    ],
)  # fmt: skip
def test_golds_are_read_as_the_benchmark_means_them(
    name: str, fields: dict[str, Any], gold: str, tmp_path: Path
) -> None:
    write(tmp_path / f"{name}.jsonl", {"problem": "p", **fields})
    assert load(name, tmp_path).prompts[0].gold == gold


def test_the_first_problems_are_evaluated_and_the_rest_is_known(tmp_path: Path) -> None:
    write(tmp_path / "aime24.jsonl", *({"problem": str(n), "answer": str(n)} for n in range(5)))
    benchmark = load("aime24", tmp_path, num_problems=2)
    assert [prompt.text for prompt in benchmark.prompts] == ["0", "1"]
    assert [prompt.text for prompt in benchmark.left_out] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, None),
        ({"problem": "q"}, None),
        ({"final_answer": ["2"], "is_multiple_answer": False, "unit": None, "error": None}, None),
        ({"is_multiple_answer": True}, VerifyOptions(several=True)),
        ({"unit": "%", "error": "1e-1"}, VerifyOptions(0.1, "%")),
        ({"is_multiple_answer": "True", "error": 0.01}, VerifyOptions(0.01, None, True)),
    ],
)
def test_olympiad_rows_bring_their_rules_and_the_hash_sees_all(
    fields: dict[str, Any], options: VerifyOptions | None, tmp_path: Path
) -> None:
    row = {"id": 1, "problem": "p", "final_answer": ["$1$"]}
    write(tmp_path / "olympiadbench.jsonl", row)
    plain = load("olympiadbench", tmp_path)
    write(tmp_path / "olympiadbench.jsonl", {**row, **fields})
    benchmark = load("olympiadbench", tmp_path)
    assert benchmark.prompts[0].extra.get("verify") == options
    assert (benchmark.sha256 == plain.sha256) == (fields == {})


def test_templates_follow_evaluation_then_training_then_the_benchmark(tmp_path: Path) -> None:
    write(tmp_path / "aime24.jsonl", {"problem": "p", "answer": "1"})
    own = "Q: {problem}"
    assert load("aime24", tmp_path, data=DataConfig(template=own)).template == own
    assert load("aime24", tmp_path, data=DataConfig(template=own), template="plain").template == "{problem}"
    assert {load(task).template for task in EMBEDDED_TASKS} == {"{problem}"}
    assert load("word_problems", template=own).template == own


def test_a_missing_or_empty_file_is_one_of_the_benchmarks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation.benchmarks: the file '.*gone.csv' does not exist; correct"):
        load(str(tmp_path / "gone.csv"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty.jsonl: contains no problems; set evaluation.benchmarks to a file"):
        load(str(tmp_path / "empty.jsonl"))


def test_fields_and_system_prompt_of_an_own_file(tmp_path: Path) -> None:
    file = write(tmp_path / "own.csv", {"question": "1?", "final": "1"})
    data = DataConfig(answer_field=None, system_prompt="Add.")
    with pytest.raises(ConfigError, match=r"evaluation.answer_field: the problems of .*own.csv' need answers"):
        load(str(file), data=data, prompt_field="question")
    loaded = load(str(file), data=data, prompt_field="question", answer_field="final")
    system = {"role": "system", "content": "Add."}
    assert loaded.prompts == (Prompt("own/1", "1?", "1", history=(system,)),)
    plain = load(str(file), prompt_field="question", answer_field="final")
    assert (plain.name, plain.prompts[0].history) == ("own", ())
    assert plain.sha256 != loaded.sha256


def test_half_a_character_in_a_benchmark_is_refused_or_hashed(tmp_path: Path) -> None:
    for place, name in ((tmp_path / "own.jsonl", str(tmp_path / "own.jsonl")), (tmp_path / "aime24.jsonl", "aime24")):
        write(place, '{"problem": "x\\ud800", "answer": "1"}')
        with pytest.raises(DataError, match=r"jsonl:1: field 'problem' has half a character"):
            load(name, tmp_path)
        # An id is only shown.
        write(place, '{"problem": "x", "answer": "1", "id": "\\ud800"}')
        assert len(load(name, tmp_path).sha256) == 64


def test_the_rules_of_a_row_of_ones_own_file_are_read_and_checked(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", {"problem": "p", "answer": "1", "verify": {"tolerance": 0.5}})
    assert load(str(file)).prompts[0].extra["verify"] == VerifyOptions(0.5)
    write(file, {"problem": "p", "answer": "1", "verify": {"tolerance": "a"}})
    with pytest.raises(DataError, match=r"mine\.jsonl:1: 'verify': tolerance = 'a'"):
        load(str(file))


def test_the_run_files_of_the_evaluation_page_are_valid() -> None:
    import re
    import tomllib

    from gxpo_trainer.config.io import build

    page = (Path(__file__).resolve().parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    sets, rewards = (build(tomllib.loads(block)) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL))
    assert (sets.data.levels, sets.data.contamination) == ((3, 4, 5), "drop")
    assert set(sets.evaluation.benchmarks) <= benchmarks.BY_ANY_NAME.keys()
    assert [reward.label for reward in rewards.verifier.rewards] == ["correctness", "format", "Brevity"]
    # Every benchmark has its row in the table.
    assert all(f"| `{name}` |" in page for name in benchmarks.BENCHMARKS if name != "aime24")


HELD_OUT = {"mine": [Prompt("e0", r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 3$.", "?")]}


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"t{i}", text, "?") for i, text in enumerate(texts)]


def test_layout_case_and_punctuation_hide_no_copy_and_another_sign_or_number_is_another_problem() -> None:
    copies = [
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 3$.",
        r"compute \( \frac{1}{2}+x^2 \) for \(x\le3\)",
        "COMPUTE\n\n\\[\\tfrac{1}{2}\\,+\\,x^{2}\\]\tfor $x\\leq 3$.",
        r"Compute $\left.\frac{1}{2}\right. + x^{2}$; for $x \leq 3$:",
    ]
    others = [
        r"Compute $\dfrac{1}{2} - x^{2}$, for $x \leq 3$.",
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \geq 3$.",
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 30$.",
        r"Compute $\dfrac{1}{2} + x^{2}$, for $x \leq 3.5$.",
        r"Compute $\dfrac{1}{2} + x^{2}$",
    ]
    duplicates = benchmarks.find_duplicates(prompts(*copies, *others), HELD_OUT)
    assert duplicates == [(f"t{number}", "mine", "e0") for number in range(len(copies))]


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("What is 10²?", "What is 102?", False),
        ("What is 10₂?", "What is 102?", False),
        ("What is 3½?", "What is 31/2?", False),
        ("2²3", "2^{23}", False),
        ("⌊x⌋", "⌈x⌉", False),
        ("5‰", "5", False),
        ("x² + 10¹² + y⁻¹", "x^2 + 10^{12} + y^{-1}", True),
        ("2²3²", "2^{2}3^{2}", True),
        ("1011₂ and x₁", "1011_2 and x_{1}", True),
        ("½ of 30°", r"1/2 of $30^\circ$", True),
        ("¿Cuánto es 2+2?", "Cuánto es 2+2?", True),
        ("求x的值。", "求 $x$ 的值", True),
        ("求x的值", "求y的值", False),
        ("\ufeff2 +\u200b 2", "2 + 2", True),
        ("What is «a», „b“ and ‘c’ — d?", """What is "a", 'b' and "c" - d?""", True),
        ("3 × 4 ÷ 2 · 5", r"3\times4\div2\cdot 5", True),
        ("x≤3, y≥4 and z≠5", r"$x \leq 3$, $y\ge 4$ and $z \neq 5$", True),
        ("3 ≤ 4", "3 ≥ 4", False),
        ("√2 ± π", r"\sqrt{2} \pm \pi", True),
    ],
)
def test_typed_signs_are_those_of_latex_and_punctuation_of_any_script_is_ignored(
    text: str, other: str, same: bool
) -> None:
    assert (benchmarks.words(text) == benchmarks.words(other)) == same


def test_a_copy_has_the_same_messages_before_it() -> None:
    """The last message of all is the same; a system message asks nothing."""

    def asked(name: str, *messages: str) -> Prompt:
        roles = {"s": "system", "u": "user", "a": "assistant"}
        *history, last = ({"role": roles[text[0]], "content": text[1:]} for text in messages)
        return Prompt(name, last["content"], "?", history=tuple(history))

    held_out = {
        "mine": [asked("e", "sBe brief.", "uLet $x+1=4$.", "aYes?", "uSolve it."), asked("whole", "uWhat is 2+2?")]
    }
    train = [
        asked("same", "uLet x + 1 = 4", "aYes", "uSOLVE it"),
        asked("other", "uLet $y/3=3$.", "aYes?", "uSolve it."),
        asked("alone", "uSolve it."),
        asked("after examples", "uWhat is 1+1?", "a2", "uWhat is 2 + 2?"),
    ]
    assert benchmarks.find_duplicates(train, held_out) == [("same", "mine", "e"), ("after examples", "mine", "whole")]


def test_exact_copies_are_dropped_and_counted_rejected_or_kept_as_configured() -> None:
    problem = HELD_OUT["mine"][0].text
    data = PromptSet(tuple(prompts("1 + 1?", problem.lower(), "2 + 2?")), {"f": "hash"}, {"data.levels": 7})
    kept = benchmarks.without_contamination(data, HELD_OUT, "drop")
    assert [prompt.id for prompt in kept.prompts] == ["t0", "t2"]
    assert kept.num_left_out == {"data.levels": 7, "data.contamination": 1}
    assert kept.sha256 == data.sha256
    with pytest.raises(DataError, match=r"data\.contamination = 'refuse': 1 of 3 .*such as t1 is e0 of mine"):
        benchmarks.without_contamination(data, HELD_OUT, "refuse")
    assert benchmarks.without_contamination(data, HELD_OUT, "ignore") == data
    with pytest.raises(DataError, match="train and evaluate on different problems"):
        benchmarks.without_contamination(PromptSet(tuple(HELD_OUT["mine"]), {}), HELD_OUT, "drop")
