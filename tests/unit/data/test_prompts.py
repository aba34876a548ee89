"""Prompts from every source, what is refused with which place, templates, and the resumable cursor."""

from __future__ import annotations

import hashlib
import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, strategies as st
from support.data_files import write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gxpo_trainer.config import DataConfig, EvaluationConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.data import records
from gxpo_trainer.data.benchmarks import load_benchmark
from gxpo_trainer.data.chat import prompt_text
from gxpo_trainer.data.prompts import (
    MixedCursor,
    PromptCursor,
    final_answer,
    json_extra,
    load_prompts,
    make_cursor,
    read_level,
    tokenize_prompts,
)
from gxpo_trainer.errors import CheckpointError, ConfigError, DataError
from gxpo_trainer.types import Prompt, VerifyOptions

ROWS: list[dict[str, Any]] = [
    {"id": "a", "problem": "1 + 1?", "answer": "2", "level": "Level 1", "subject": "Sums"},
    {"id": "b", "problem": "2 * 3?", "answer": 6, "level": 3},
    {"problem": "Roots of x^2 = 4?", "answer": ["2", "-2"], "level": "5"},
]


def load(source: Path | str, **settings: Any):
    return load_prompts(DataConfig(source=str(source), **settings), seed=0)


def test_the_name_of_an_embedded_task_is_that_task_whatever_the_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "word_problems").mkdir()  # as the output of a run may be called
    monkeypatch.chdir(tmp_path)
    assert len(load("word_problems", num_problems=20).prompts) == 20
    with pytest.raises(DataError, match="has no files"):
        load("./word_problems")


def test_guesses_are_of_word_problems_alone() -> None:
    few = DataConfig(source="arithmetic_skill", num_problems=50, guess_share=0.5)
    guessed, worked = (
        load_prompts(data, seed=0, completions=True) for data in (few, few.model_copy(update={"guess_share": 0.0}))
    )
    assert guessed == worked


def test_a_jsonl_or_csv_file_gives_its_problems_in_order(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", ROWS[0], "", *ROWS[1:])
    loaded = load(file)
    assert [(prompt.id, prompt.text, prompt.gold) for prompt in loaded.prompts] == [
        ("a", "1 + 1?", "2"),
        ("b", "2 * 3?", "6"),
        ("mine/4", "Roots of x^2 = 4?", "2, -2"),
    ]
    assert loaded.prompts[0].extra == {"level": "Level 1", "subject": "Sums"}
    assert loaded.sha256 == {"mine.jsonl": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert loaded.num_left_out == {}
    # CSV as spreadsheets save it: with a byte order mark, and quoted cells of several lines.
    text = '\ufeffid,question,final,level\r\na,"1, and\r\n1?",2,3\r\n,2*3?,6,\r\n'
    (tmp_path / "mine.csv").write_bytes(text.encode())
    loaded = load(tmp_path / "mine.csv", prompt_field="question", answer_field="final")
    assert loaded.prompts == (Prompt("a", "1, and\r\n1?", "2", {"level": "3"}), Prompt("mine/2", "2*3?", "6", {}))
    # CSV as pandas saves it: with an index.
    (tmp_path / "frame.csv").write_text(",problem,answer\n0,1?,1\n1,2?,2\n", encoding="utf-8")
    assert load(tmp_path / "frame.csv").prompts == (Prompt("frame/1", "1?", "1"), Prompt("frame/2", "2?", "2"))
    # A long cell is a cell.
    (tmp_path / "long.csv").write_text(f"problem,answer\n{'1+' * 100_000}1?,2\n", encoding="utf-8")
    assert len(load(tmp_path / "long.csv").prompts[0].text) == 200_002
    # Rows need no answer where the setting says so.
    write(file, {"problem": "Write a haiku."}, {"problem": "And?", "answer": "unused"})
    loaded = load_prompts(DataConfig(source=str(file), answer_field=None), 0)
    assert [(prompt.gold, prompt.extra) for prompt in loaded.prompts] == [("", {}), ("", {"answer": "unused"})]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_blanks_of_prompts_and_completions_are_kept_and_those_of_answers_are_not(suffix: str, tmp_path: Path) -> None:
    text, completion = "Complete:\n    def f():\n", "    return 1\n"
    row = {"problem": text, "completion": completion, "answer": " 1\n"}
    loaded = load_prompts(DataConfig(source=str(write(tmp_path / f"a.{suffix}", row))), 0, completions=True)
    assert [(prompt.text, prompt.completion, prompt.gold) for prompt in loaded.prompts] == [(text, completion, "1")]


def test_rules_that_parquet_fills_up_are_left_out(tmp_path: Path) -> None:
    """A struct has every key in every row."""
    rules: tuple[dict[str, Any] | None, ...] = (
        {"tolerance": 0.1, "unit": "m"},
        {"unit": "km"},
        {"several": True},
        None,
    )
    rows = [{"problem": f"{n}?", "answer": "1", "verify": rule} for n, rule in enumerate(rules)]
    loaded = load(write(tmp_path / "a.parquet", *rows))
    expected = [VerifyOptions(0.1, "m"), VerifyOptions(unit="km"), VerifyOptions(several=True), None]
    assert [prompt.extra.get("verify") for prompt in loaded.prompts] == expected


SYSTEM = {"role": "system", "content": "Be brief."}
EARLIER = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("before", "system_prompt", "rendered"),
    [
        ([], None, ""), (EARLIER, None, "<user>1+1?<assistant>2"),
        (EARLIER, "Add.", "<system>Add.<user>1+1?<assistant>2"),
        ([SYSTEM, *EARLIER], "Add.", "<system>Bebrief.<user>1+1?<assistant>2"),
    ],
)  # fmt: skip
def test_the_template_applies_to_the_last_message_of_a_row(
    suffix: str, before: list[dict[str, str]], system_prompt: str | None, rendered: str, tmp_path: Path
) -> None:
    row = {"prompt": [*before, {"role": "user", "content": "2+2?"}], "answer": "4"}
    file = write(tmp_path / f"chat.{suffix}", row)
    (prompt,) = load(file, prompt_field="prompt", system_prompt=system_prompt).prompts
    assert (prompt.text, prompt.gold, prompt.extra) == ("2+2?", "4", {})
    (ids,) = tokenize_prompts([prompt], tokenizer(chat=True), "Q:{problem}", max_prompt_tokens=99).token_ids
    assert prompt_text(tokenizer(chat=True), ids).replace(" ", "") == f"{rendered}<user>Q:2+2?<assistant>"


def test_templates_that_no_name_has_or_that_refuse_system_messages() -> None:
    for section in ("data", "evaluation"):
        with pytest.raises(ConfigError, match=rf'{section}.template = "bxed": must be one of auto, plain, boxed, or a'):
            build({section: {"template": "bxed"}})
    mine, prompt = tokenizer(chat=True), Prompt("a", "1?", "1", history=(SYSTEM,))
    mine.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    refusal = r"problem a: .* refuses messages of system, user \(no system\); remove data.sys"
    with pytest.raises(DataError, match=refusal):
        tokenize_prompts([prompt], mine, "{problem}", max_prompt_tokens=99)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("data/train-00000-of-00001.parquet", {}), ("train-00000-of-00001.parquet", {}),
        ("main/train-00000-of-00001.parquet", {"subset": "main"}), ("data/main/train.parquet", {"subset": "main"}),
        ("train/part.parquet", {}), ("train.parquet", {}), ("data/train.csv", {}),
    ],
)  # fmt: skip
def test_a_folder_in_hub_layout_gives_its_split(layout: str, settings: dict[str, str], tmp_path: Path) -> None:
    rows = [{"problem": f"{n}?", "answer": str(n)} for n in range(3)]
    write(tmp_path / layout, *rows)
    other = layout.replace("/train", "/test") if "/train" in layout else layout.replace("train", "test")
    write(tmp_path / other, {"problem": "no", "answer": "0"})
    (tmp_path / "README.md").write_text("# a data set")
    assert [prompt.gold for prompt in load(tmp_path, **settings).prompts] == ["0", "1", "2"]


def test_a_hub_name_downloads_only_the_files_of_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "main/train-00000-of-00001.parquet", {"question": "1?", "answer": "so\n#### 1"})
    asked: list[Any] = []

    def snapshot(name: str, **settings: Any) -> str:
        asked.append((name, settings))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    loaded = load("someone/sums", subset="main", prompt_field="question")
    assert [prompt.gold for prompt in loaded.prompts] == ["1"]
    ((name, settings),) = asked
    assert (name, settings["repo_type"]) == ("someone/sums", "dataset")
    assert "main/train-*" in settings["allow_patterns"]
    assert not any("test" in pattern for pattern in settings["allow_patterns"])
    monkeypatch.setattr(
        "huggingface_hub.HfApi.list_repo_files",
        lambda self, name, repo_type: ["README.md", "main/train-00000-of-00001.parquet", "socratic/train.parquet"],
    )
    refused = r"someone/sums has no files .* files: main/train-00000-of-00001.parquet, socratic/train.parquet"
    with pytest.raises(DataError, match=refused):
        load("someone/sums")
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, name, repo_type: 1 / 0)
    with pytest.raises(DataError, match=r"someone/sums has no files .* files: main/train-00000-of-00001.parquet"):
        load("someone/sums")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"problem": "1', "is not valid JSON"),
        ("[1, 2]", "is a list"),
        ({"problem": "1?"}, r"has no field 'answer' \(its fields: problem\); set data.answer_field"),
        ({"question": "1?", "answer": "1"}, r"has no field 'problem' .*set data.prompt_field"),
        ({"problem": " ", "answer": "1"}, "field 'problem' is empty"),
        ({"problem": [SYSTEM], "answer": "1"}, "the last message of 'problem' is not the user's"),
        ({"problem": [{"role": "tool", "content": "1"}], "answer": "1"}, "message 1 of 'problem' must"),
        ({"problem": [SYSTEM, {"role": "user", "content": " "}], "answer": "1"}, "message 2 of 'problem' must"),
        (
            '{"problem": "1\\ud800?", "answer": "1"}',
            r"field 'problem' has half a character \(a lone surrogate\), '.ud800'",
        ),
        ('{"problem": "1?", "answer": ["1", "\\udfff"]}', "field 'answer' has half a character"),
        ({"problem": [{"role": "user", "content": "\ud800"}], "answer": "1"}, "message 1 of 'problem' must"),
        ({"problem": "1?", "answer": ""}, "field 'answer' is empty"),
        ({"problem": "1?", "answer": None}, "field 'answer' is empty; correct or remove the row"),
        ({"problem": "1?", "answer": True}, "field 'answer' is true; text is expected"),
        ({"problem": "1?", "answer": []}, "text is expected"),
        ({"problem": "1?", "answer": "\\boxed{}"}, "answer in 'answer' is empty"),
        ('{"problem": "1?", "answer": NaN}', "is not a finite number"),
        ({"id": "a", "problem": "1?", "answer": "1"}, r"repeats the id 'a' of .*mine.jsonl:1; make it unique"),
    ],
)
def test_a_bad_row_is_rejected_with_file_and_line(bad: Any, words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", ROWS[0], "", bad)
    with pytest.raises(DataError, match=rf"mine\.jsonl:3: .*{words}") as caught:
        load(file)
    assert caught.value.exit_code == 2


FRACTION, ROOT = "\\frac{", "\\sqrt{"


def test_golds_that_cannot_be_parsed_and_bad_rows_of_parquet_are_listed_with_their_place(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", *({"problem": "?", "answer": word} for word in ("1", FRACTION, "2", ROOT)))
    with pytest.raises(DataError) as caught:
        load_prompts(DataConfig(source=str(file)), 0)
    assert str(caught.value).splitlines() == [
        f"{file}:2: the gold {FRACTION!r} cannot be parsed; write it as LaTeX that math-verify reads",
        f"{file}:4: the gold {ROOT!r} cannot be parsed; write it as LaTeX that math-verify reads",
        "correct or remove these rows",
    ]
    with pytest.raises(DataError, match=r"t\.parquet, row 2: field 'problem' is empty"):
        load(write(tmp_path / "t.parquet", {"problem": "1?", "answer": "1"}, {"problem": "", "answer": "2"}))


@pytest.mark.parametrize(
    ("file", "content", "source", "settings", "complaint"),
    [
        ("mine.jsonl", b'{"problem": "\xff", "answer": "1"}\n', None, {}, r"mine\.jsonl:1: is not valid JSON"),
        ("data.txt", b"a,b", None, {}, r"ends in '\.txt'; use a \.jsonl, \.csv or \.parquet file"),
        ("a.csv", b"problem,answer\n1?,1,2\n", None, {}, r"a\.csv:2: does not have the 2 cells .*; quote cells"),
        ("a.csv", b"problem,answer\n1?,\n", None, {}, r"a\.csv:2: field 'answer' is empty; correct or remove the row"),
        ("a.csv", b"problem,gold\n1?,\n", None, {}, r"a\.csv:2: has no field 'answer' \(its fields: gold, problem\)"),
        ("a.csv", b"problem;answer\n1,5?;2\n", None, {}, r"a\.csv:1: columns are separated by ';'; save it with comm"),
        ("a.csv", b"problem\tanswer\n1?\t2\n", None, {}, r"a\.csv:1: columns are separated by '\\t'; save it with"),
        ("a.csv", b"problem,problem\n1?,1\n", None, {}, r"a\.csv:1: the first line must name each column once"),
        ("a.csv", b",problem,answer,\n0,1?,1,\n", None, {}, r"a\.csv:1: the first line must name each column once"),
        ("a.csv", b"problem,answer\n\xff,1\n", None, {}, r"a\.csv: is not valid CSV \('utf-8' codec.*as UTF-8 CSV"),
        ("mine.jsonl", b"", "missing.jsonl", {}, r"missing\.jsonl' does not exist"),
        ("main/test.jsonl", b"{}", ".", {}, r"no files of data.split = 'train'.*: main/test\.jsonl"),
        ("main/test.jsonl", b"{}", ".", {"split": ""}, r"no files of data.split = ''"),
        ("main/test.jsonl", b"{}", ".", {"split": "**"}, r"no files of data.split = '\*\*'"),
        ("main/test.jsonl", b"{}", ".", {"split": "**/test"}, r"no files of data.split = '\*\*/test'"),
        ("a.jsonl", b'{"problem": "1?", "answer": "1", "verify": {"tolerance": 1' + b"0" * 400 + b"}}", None, {},
         r"a\.jsonl:1: 'verify': tolerance = 10{39}: must be a finite number"),
        ("mine.jsonl", b'{"problem": "1?", "answer": "1", "level": 3}', None, {"levels": (2,)},
         r"data.levels = \[2\] excludes all 1 problems"),
    ],
)  # fmt: skip
def test_a_source_without_usable_problems_is_rejected(
    file: str, content: bytes, source: str | None, settings: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        load(tmp_path / (source or file), **settings)


def test_a_message_looks_at_some_files_of_a_folder_that_may_be_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", *ROWS)
    monkeypatch.setattr(records, "_MOST_SEEN", 2)
    with pytest.raises(DataError, match=r"one of its \.jsonl, \.csv and \.parquet files: \w\.jsonl, \w\.jsonl$"):
        load(tmp_path, split="other")


def test_parquet_values_are_read_or_refused_with_their_place(tmp_path: Path) -> None:
    rows = [{"problem": "1?", "answer": Decimal("2.50")}]
    assert load(write(tmp_path / "a.parquet", *rows)).prompts[0].gold == "2.50"
    with pytest.raises(DataError, match="field 'answer' is not a finite number"):
        load(write(tmp_path / "a.jsonl", '{"problem": "1?", "answer": Infinity}'))
    for values in (pyarrow.array([2**62], pyarrow.timestamp("us")), pyarrow.array([b"\xff"]).view(pyarrow.string())):
        pyarrow.parquet.write_table(
            pyarrow.table({"problem": ["1?"], "answer": ["1"], "x": values}), tmp_path / "a.parquet"
        )
        with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet: "):
            load(tmp_path / "a.parquet")


def test_further_fields_have_a_form_in_json(tmp_path: Path) -> None:
    row = {"problem": "1?", "answer": "1", "when": date(2026, 11, 28), "score": float("nan"), "most": float("inf")}
    (prompt,) = load(write(tmp_path / "a.parquet", row)).prompts
    assert json_extra(prompt) == {"when": "2026-11-28", "score": None, "most": None}


def test_the_home_folder_of_nobody_does_not_exist() -> None:
    with pytest.raises(DataError, match=r"data\.source = '~nobody-here/a\.jsonl' does not exist"):
        load("~nobody-here/a.jsonl")
    with pytest.raises(DataError, match=r"evaluation\.data_root = '~nobody-here' is not a folder"):
        load_benchmark("math500", DataConfig(), EvaluationConfig(data_root="~nobody-here"))


def test_a_level_filter_keeps_levels_however_they_are_written(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "mine.jsonl", *ROWS), levels=(1, 3))
    assert [prompt.id for prompt in loaded.prompts] == ["a", "b"]
    # A column of whole numbers with empty rows has fractions in pandas, and so in Parquet.
    assert [read_level(value) for value in (5, "5", "Level 4", 3.0)] == [5, 5, 4, 3]
    assert {read_level(value) for value in ("Level ?", None, True, 3.5, [3])} == {None}


def test_the_final_answer_of_a_worked_solution() -> None:
    answers = {
        "42": "42", "48/2 = 24 clips.\n#### 24": "24", "So $x = \\boxed{\\frac{1}{2}}$.": "\\frac{1}{2}",
        "First \\boxed{1}, then \\boxed{2}.": "2", "\\boxed{(1, 2)} and \\boxed{3}": "3", "x = 3 #1": "x = 3 #1",
    }  # fmt: skip
    assert {answer: final_answer(answer) for answer in answers} == answers


def tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(map(chr, range(10, 127)))}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?")
    if chat:
        made.chat_template = (
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
    return made


def test_without_a_chat_template_the_problem_is_in_its_template_alone() -> None:
    # Braces of LaTeX are left alone.
    prompt, template = Prompt("a", "\\frac{1}{2} {problem}?", "2"), "\\boxed{} {problem} ="
    (ids,) = tokenize_prompts([prompt], tokenizer(chat=False), template, max_prompt_tokens=99).token_ids
    assert ids.dtype == np.int32
    assert "".join(chr(10 + token) for token in ids) == "\\boxed{} \\frac{1}{2} {problem}? ="


def test_prompts_that_are_too_long_are_skipped_and_counted() -> None:
    prompts = [Prompt(str(n), "x" * n, "1") for n in (1, 5, 3, 9)]
    tokenized = tokenize_prompts(prompts, tokenizer(chat=False), "{problem}", max_prompt_tokens=4)
    assert [prompt.id for prompt in tokenized.prompts] == ["1", "3"]
    assert [len(ids) for ids in tokenized.token_ids] == [1, 3]
    assert tokenized.num_too_long == 2
    with pytest.raises(DataError, match=r"max_prompt_tokens = 2 excludes all prompts \(the shortest has 5 tokens\)"):
        tokenize_prompts(prompts[1:2], tokenizer(chat=False), "{problem}", max_prompt_tokens=2)


def two(tmp_path: Path, **second: Any) -> DataConfig:
    write(tmp_path / "sums.jsonl", *({"problem": f"{i}+1", "answer": i + 1} for i in range(6)))
    write(tmp_path / "essays.csv", *({"question": f"Write about {i}"} for i in range(3)))
    own = {"path": str(tmp_path / "essays.csv"), "prompt_field": "question", "answer_field": None} | second
    return DataConfig.model_validate({"sources": [{"path": str(tmp_path / "sums.jsonl"), "weight": 3}, own]})


def test_each_source_has_its_fields_rewards_hash_and_ids(tmp_path: Path) -> None:
    loaded = load_prompts(two(tmp_path, name="judged", rewards=["format"]), seed=0)
    shown = [(p.id, p.text, p.gold, p.source, p.rewards) for p in loaded.prompts]
    assert shown[5:7] == [
        ("sums/sums/6", "5+1", "6", "sums", ()),
        ("judged/essays/1", "Write about 0", "", "judged", ("format",)),
    ]
    assert [*loaded.sha256] == ["sums/sums.jsonl", "judged/essays.csv"]
    advice = r"essays.csv:2: has no field 'q' .*; set data.sources\[1\].prompt_field to one"
    with pytest.raises(DataError, match=advice):
        load_prompts(two(tmp_path, prompt_field="q"), seed=0)
    with pytest.raises(DataError, match=r"^data.sources\[1\].path = 'nope.csv' does not exist"):
        load_prompts(two(tmp_path, path="nope.csv"), seed=0)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 9), min_size=4, max_size=4),
    draws=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    cut=st.integers(0, 5),
)
def test_sources_keep_their_shares_and_epochs_and_resume(
    sizes: list[int], weights: list[float], draws: list[int], cut: int
) -> None:
    labels = [f"s{number}" for number in range(len(sizes))]
    listed = [{"path": f"{label}.jsonl", "weight": weight} for label, weight in zip(labels, weights, strict=False)]
    data = DataConfig.model_validate({"sources": listed})
    places = [(label, place) for label, size in zip(labels, sizes, strict=True) for place in range(size)]
    prompts = [Prompt(f"{label}/{place}", "", "", source=label) for label, place in places]
    whole, first, second = (make_cursor(data, prompts, 3) for _ in range(3))
    expected = [whole.next(count).tolist() for count in draws]
    drawn = [first.next(count).tolist() for count in draws[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drawn + [second.next(count).tolist() for count in draws[cut:]] == expected
    order = [prompts[index] for step in expected for index in step]
    for label, size, share in zip(labels, sizes, data.shares, strict=True):
        own = [prompt.id for prompt in order if prompt.source == label]
        assert abs(len(own) - share * len(order)) < len(labels)
        assert own == [f"{label}/{i}" for i in PromptCursor(size, 3).next(max(1, len(own)))][: len(own)]


def test_one_source_without_a_list_is_drawn_as_before_and_cursors_do_not_mix(tmp_path: Path) -> None:
    prompts = load_prompts(two(tmp_path), seed=0).prompts
    single, mixed = make_cursor(DataConfig(), prompts, 5), make_cursor(two(tmp_path), prompts, 5)
    assert isinstance(single, PromptCursor)
    assert isinstance(mixed, MixedCursor)
    assert single.next(9).tolist() == np.random.default_rng([5, 0]).permutation(9).tolist()
    for cursor, other in ((single, mixed), (mixed, single)):
        with pytest.raises(CheckpointError, match="the checkpoint's data cursor has"):
            cursor.load_state_dict(other.state_dict())
    for cursor, here in ((PromptCursor(11, 0), "num_prompts = 10 .* 11"), (PromptCursor(10, 1), "seed = 0 and .* 1")):
        with pytest.raises(CheckpointError, match=here):
            cursor.load_state_dict(PromptCursor(10, 0).state_dict())


@given(num=st.integers(1, 50), count=st.integers(1, 60), seed=st.integers(0, 9), shuffle=st.booleans())
def test_every_epoch_draws_every_prompt_once(num: int, count: int, seed: int, shuffle: bool) -> None:
    cursor = PromptCursor(num, seed, shuffle)
    drawn = np.concatenate([cursor.next(count) for _ in range(-(-3 * num // count))])[: 3 * num]
    for epoch in np.split(drawn, 3):
        assert sorted(epoch) == list(range(num))


def test_the_order_changes_with_the_epoch_and_the_seed() -> None:
    cursor = PromptCursor(100, 0)
    first, second = list(cursor.next(100)), list(cursor.next(100))
    assert first != second
    assert list(PromptCursor(100, 1).next(100)) != first
    generated = [load_prompts(DataConfig(num_problems=20), seed).sha256 for seed in (0, 0, 1)]
    assert generated[0] == generated[1] != generated[2]
    assert list(PromptCursor(4, 0, shuffle=False).next(6)) == [0, 1, 2, 3, 0, 1]
