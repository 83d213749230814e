"""Rows in the published schemas become the questions of lm-evaluation-harness, whose texts are worked out by hand from
its task files.  A wrong row is one line.
"""

import json

import numpy as np
import pytest

from gpt2_triton.config import values
from gpt2_triton.data import tasks
from gpt2_triton.data.tasks import TASKS, Hub, load_questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError

PI = "\N{GREEK SMALL LETTER PI}"
ROWS = {  # made up, with every field of the published rows
    "lambada": [
        dict(text="a man went to the sea and saw the\nsea"),
        dict(text="two spaces  end"),
        dict(text=f"alone\n {PI}x"),
        dict(text="word"),
    ],
    "arc_easy": [
        dict(
            id="Mercury_1",
            question="Which is hot?",
            choices=dict(text=["ice", "the sun", PI], label=["A", "B", "C"]),
            answerKey="B",
        ),
        dict(
            id="X_2",
            question="How many?",
            choices=dict(text=["one", "two", "three", "four", "five"], label=["1", "2", "3", "4", "5"]),
            answerKey="5",
        ),
    ],
    "piqa": [
        dict(goal="To boil water,", sol1="heat it.", sol2="cool it.", label=0),
        dict(goal="Cut", sol1="with a spoon", sol2="with a knife", label=1),
    ],
    "winogrande": [
        dict(sentence="A cup fell off its shelf so _ broke.", option1="the cup", option2="the shelf", answer="1"),
        dict(sentence="_ won, as Ann lost _ .", option1="Ann", option2="Eve", answer="2"),
    ],
}
QUESTIONS = {  # [(contexts, endings, lengths, label)]
    "lambada": [
        (["a man went to the sea and saw"], [" the\nsea"], [7], 0),
        (["two spaces"], ["  end"], [3], 0),
        (["alone"], [f"\n {PI}x"], [2], 0),
        ([""], [" word"], [4], 0),
    ],
    "arc_easy": [
        (["Question: Which is hot?\nAnswer:"] * 3, [" ice", " the sun", f" {PI}"], [3, 7, 1], 1),
        (["Question: How many?\nAnswer:"] * 5, [" one", " two", " three", " four", " five"], [3, 3, 5, 4, 4], 4),
    ],
    "piqa": [
        (["Question: To boil water,\nAnswer:"] * 2, [" heat it.", " cool it."], [8, 8], 0),
        (["Question: Cut\nAnswer:"] * 2, [" with a spoon", " with a knife"], [12, 12], 1),
    ],
    "winogrande": [
        (["A cup fell off its shelf so the cup", "A cup fell off its shelf so the shelf"], [" broke."] * 2, [6] * 2, 0),
        (["Ann", "Eve"], [" won, as Ann lost _ ."] * 2, [20] * 2, 1),
    ],
}  # fmt: skip
METRICS = {
    "lambada": ("perplexity", "acc"),
    "arc_easy": ("acc", "acc_norm"),
    "piqa": ("acc", "acc_norm"),
    "winogrande": ("acc",),
}


def write_rows(folder, name):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_the_questions_of_lm_evaluation_harness(tmp_path, name):
    """The harness splits LAMBADA's text at spaces alone: its last word may be "the\\nsea"."""
    coder = get_tokenizer("bytes")
    asked = load_questions(name, write_rows(tmp_path, name), coder, 0)
    expected = QUESTIONS[name]
    texts = [coder.decode(tokens) for tokens in asked.contexts]
    assert [text if text != coder.decode([coder.eot]) else "" for text in texts] == sum((q[0] for q in expected), [])
    assert [coder.decode(tokens) for tokens in asked.endings] == sum((q[1] for q in expected), [])
    assert asked.lengths.tolist() == sum((q[2] for q in expected), [])
    assert asked.counts.tolist() == [len(q[1]) for q in expected]
    assert asked.labels.tolist() == [q[3] for q in expected] and asked.metrics == METRICS[name]
    assert len(load_questions(name, write_rows(tmp_path, name), coder, 1).labels) == 1


def test_the_configuration_names_every_task_but_hellaswag():
    assert {*values.TASKS} == {*TASKS} - {"hellaswag"} == {*ROWS}


def test_rows_of_the_hub_are_those_of_a_file(tmp_path, monkeypatch):
    """A folder stands for a dataset of the Hub: `datasets` reads both."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "hub").mkdir()
    write_rows(tmp_path, "arc_easy").rename(tmp_path / "hub" / "test.jsonl")
    source = Hub(str(tmp_path / "hub"), None, "test")
    monkeypatch.setitem(TASKS, "arc_easy", TASKS["arc_easy"]._replace(source=source))
    there = load_questions("arc_easy", None, get_tokenizer("bytes"), 0)
    here = load_questions("arc_easy", write_rows(tmp_path, "arc_easy"), get_tokenizer("bytes"), 0)
    assert [t.tolist() for t in there.endings] == [t.tolist() for t in here.endings]
    np.testing.assert_array_equal(there.labels, here.labels)
    monkeypatch.setitem(TASKS, "arc_easy", TASKS["arc_easy"]._replace(source=source._replace(split="dev")))
    with pytest.raises(DataError, match=f"hub: cannot be had: .*expected the split dev; {tasks.IN_COMMAND}$"):
        load_questions("arc_easy", None, get_tokenizer("bytes"), 0)


def test_empty_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    path = write_rows(tmp_path, "piqa")
    plain = load_questions("piqa", path, get_tokenizer("bytes"), 0)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\n \n", 1) + b"\n\n")
    found = load_questions("piqa", path, get_tokenizer("bytes"), 2)
    assert [e.tolist() for e in found.endings] == [e.tolist() for e in plain.endings[:4]]
    path.write_text("plain text\n")
    with pytest.raises(DataError, match="piqa.jsonl:1: not a row: Invalid JSON.*: got plain text, expected"):
        load_questions("piqa", path, get_tokenizer("bytes"), 0)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "lambada",
            dict(text=None),
            "text: Input should be a valid string: got None, expected an object with text that ends",
        ),
        ("lambada", dict(text="two  "), "text: String should match pattern .*: got 'two  ', expected"),
        ("lambada", dict(text=" "), "text: String should match pattern"),
        ("arc_easy", dict(answerKey="D"), "not a row: 3 texts, labels .* and answerKey 'D'"),
        ("arc_easy", dict(choices=dict(text=["a"])), "choices.label: Field required: got the fields text, expected"),
        ("arc_easy", dict(choices={}), "choices.text: Field required: got no field, expected"),
        ("piqa", dict(label=-1), "label: Input should be greater than or equal to 0: got -1"),
        ("winogrande", dict(sentence="no gap"), "sentence: String should match pattern '_': got 'no gap'"),
        ("winogrande", dict(answer=""), "answer: Input should be '1' or '2': got ''"),
    ],
)
def test_wrong_rows_are_named_by_file_and_line(tmp_path, name, wrong, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[name][0], ROWS[name][0] | wrong)))
    with pytest.raises(DataError, match=f"rows.jsonl:2: {message}") as error:
        load_questions(name, path, get_tokenizer("bytes"), 0)
    assert "\n" not in str(error.value)


def test_what_was_found_is_shown_of_a_row_without_spaces(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = ROWS["arc_easy"][0] | dict(answerKey="D")
    path.write_text(json.dumps(row, separators=(",", ":")) + "\n")
    with pytest.raises(DataError, match=r'answerKey .D.: got \{"[a-z]+":".* \.\.\., expected'):
        load_questions("arc_easy", path, get_tokenizer("bytes"), 0)


def test_a_limit_beyond_all_integers_of_the_machine_takes_all_rows(tmp_path):
    write_rows(tmp_path, "piqa")
    path, tokenizer = tmp_path / "piqa.jsonl", get_tokenizer("bytes")
    labels = [load_questions("piqa", path, tokenizer, limit).labels.tolist() for limit in (0, 10**20)]
    assert labels[0] == labels[1]
