"""Rows of every format give the same typed value; what is wrong with one is told by file, line and field."""

import gzip
import json

import pytest

from polyreme.data.chat_rows import FORMATS, ChatRow, check_kind, format_named, read_row, read_rows
from polyreme.data.record_files import Record
from polyreme.data.text_files import BadLines
from polyreme.errors import ConfigError, DataError

USER, ANSWER = {"role": "user", "content": "To be?"}, {"role": "assistant", "content": "Or not."}
WORSE = {"role": "assistant", "content": "No."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def said(*texts):
    return tuple({"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts))


def row(*messages, **fields):
    return ChatRow("f:1", messages, **fields)


CASES = [
    ({"messages": [SYSTEM, USER, ANSWER]}, row(SYSTEM, USER, ANSWER)),
    ({"messages": [{**SYSTEM, "role": "developer"}, USER, ANSWER], "tools": TOOLS},
     row(SYSTEM, USER, ANSWER, tools=tuple(TOOLS))),
    ({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]},
     row(USER, ANSWER, USER, ANSWER, trained=(False, True))),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "To "}, {"type": "text", "text": "be?"}]},
                   ANSWER]}, row(USER, ANSWER)),
    ({"prompt": "To be?", "completion": "Or not.", "source": 7}, row(USER, ANSWER)),
    ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, row(SYSTEM, USER, ANSWER)),
    ({"prompt": "To be?", "completion": "No.", "label": False}, row(USER, WORSE, is_desirable=False)),
    ({"prompt": "To be?", "chosen": "Or not.", "rejected": "No."}, row(USER, ANSWER, rejected=(USER, WORSE))),
    ({"prompt": "To be?", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
     row(USER, ANSWER, rejected=(USER, WORSE))),
    ({"chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, row(USER, ANSWER, rejected=(USER, WORSE))),
    ({"instruction": "Add.", "input": "1 1", "output": "2", "system": "Be brief.", "history": [["a", "b"]]},
     row(SYSTEM, *said("a", "b", "Add.\n1 1", "2"))),
    ({"instruction": "To be?", "input": "", "output": "Or not."}, row(USER, ANSWER)),
    ({"instruction": "To be?", "chosen": "Or not.", "rejected": "No."}, row(USER, ANSWER, rejected=(USER, WORSE))),
    ({"instruction": "To be?", "output": "Or not.", "kto_tag": True}, row(USER, ANSWER, is_desirable=True)),
    ({"conversations": [{"from": "human", "value": "To be?"}, {"from": "gpt", "value": "Or not."}],
      "system": "Be brief."}, row(SYSTEM, USER, ANSWER)),
    ({"conversations": [USER, ANSWER]}, row(USER, ANSWER)),
    ({"conversations": [{"from": "human", "value": "To be?"}], "chosen": {"from": "gpt", "value": "Or not."},
      "rejected": {"from": "gpt", "value": "No."}}, row(USER, ANSWER, rejected=(USER, WORSE))),
    ({"conversations": [USER, {"from": "function_call", "value": '{"name": "add", "arguments": {}}'},
                        {"from": "observation", "value": "2"}, {"from": "gpt", "value": "Or not."}], "tools": "[{}]"},
     row(USER, {"role": "assistant", "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]},
         {"role": "tool", "content": "2"}, ANSWER, tools=({},))),
    ({"src": ["a", "c"], "tgt": ["b", "d"], "system": "Be brief.", "label": [0, 1]},
     row(SYSTEM, *said("a", "b", "c", "d"), trained=(False, True))),
    ({"src": "To be?", "tgt": "Or not."}, row(USER, ANSWER)),
    ({"src": ["a", "To be?"], "tgt": ["b"], "response": [["No."], ["Or not."]], "sort": [0, 1]},
     row(*said("a", "b"), USER, ANSWER, rejected=(*said("a", "b"), USER, WORSE))),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), CASES)
def test_rows_of_a_format_are_read(fields, expected):
    assert read_row(Record("f:1", fields)) == expected


def test_every_format_has_a_case():
    assert {name for name in FORMATS if any(FORMATS[name].takes(fields) for fields, _ in CASES)} == {*FORMATS}
    assert format_named("erniekit").name == "paddle"
    with pytest.raises(ConfigError, match="unknown type of rows 'alpacca'; did you mean 'alpaca'"):
        format_named("alpacca")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"text": "a"}, "keys: 'text' are of no type of rows; those have messages;"),
        ({"prompt": "a", "completion": "b", "messages": []}, "of several types, messages, prompt_completion"),
        ({"messages": []}, "messages: an empty list where messages are expected"),
        ({"messages": [USER, {"role": "asistant", "content": "a"}]}, r"messages\[1\].role: 'asistant' is no role; did"),
        ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\].content: nothing \(null\) where a text"),
        ({"messages": [USER, {"content": "a"}]}, r"messages\[1\]: has no 'role', but 'content'"),
        ({"messages": [USER, "a"]}, r"messages\[1\]: a str where a message"),
        ({"messages": [ANSWER, USER]}, r"messages\[1\].role: 'user'; the last message must be an answer"),
        ({"messages": [ANSWER]}, "messages: has answers alone"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"messages\[1\].weight: 0.5 is neither"),
        ({"messages": [USER, {**ANSWER, "tool_calls": {}}]}, r"messages\[1\].tool_calls: a dict where a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
         r"messages\[0\].content\[0\].type: 'image'; of parts text alone"),
        ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, r"messages\[0\].content: has half of a surr"),
        ({"messages": [USER, ANSWER], "tools": "no"}, r"tools: not JSON"),
        ({"messages": [USER, ANSWER], "tools": {}}, r"tools: a dict where a list"),
        ({"prompt": 1, "completion": "b"}, "prompt: a int where a text is expected"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label: 'yes' is neither true nor false"),
        ({"chosen": "a", "rejected": "b"}, "prompt: is missing"),
        ({"instruction": "a", "chosen": "b", "rejected": 1}, "rejected: a int where a text"),
        ({"conversations": [USER], "chosen": "b"}, "rejected: is missing beside the other"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, r"history\[0\]: is no \[question, answer\]"),
        ({"instruction": "a", "output": "b", "history": "a"}, "history: a str where a list"),
        ({"conversations": [USER, {"from": "function_call", "value": "{}"}]}, r"conversations\[1\].value: is no call"),
        ({"src": ["a"], "tgt": []}, "src: 1 texts; there must be as many as those of tgt, which has 0"),
        ({"src": ["a"], "tgt": ["b"], "label": [1, 0]}, "label: 2 values for 1 texts of tgt"),
        ({"src": ["a"], "tgt": [], "response": ["b"], "sort": [1, 0]}, "response: is no list of two"),
        ({"src": ["a"], "tgt": [], "response": ["b", "c"], "sort": [1, 1]}, r"sort: \[1, 1\] does not say"),
        ({"src": ["a"], "tgt": [], "response": ["b", "c"], "sort": ["1", {}]}, r"sort: \['1', {}\] does not say"),
        ({"src": ["a"], "tgt": [], "response": [["b", "c"], "c"], "sort": [1, 0]}, r"response\[0\]: 2 texts"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_told_by_its_field(fields, told):
    with pytest.raises(DataError, match=rf"^rows.jsonl:7: .*{told}"):
        read_row(Record("rows.jsonl:7", fields))


def test_a_type_that_is_named_takes_rows_of_several():
    fields = {"prompt": "x", "messages": [USER, ANSWER], "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}
    assert read_row(Record("f:1", fields), format_named("openai")) == row(USER, ANSWER)
    with pytest.raises(
        DataError, match=r"f:1: keys: 'prompt', .*, but rows of type alpaca have instruction and output or"
    ):
        read_row(Record("f:1", fields), format_named("alpaca"))


GOOD = {"prompt": "To be?", "completion": "Or not."}


def write(path, text):
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pytest.importorskip("zstandard").compress(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.parquet"])
def test_files_that_hold_rows(tmp_path, name):
    path, rows = tmp_path / name, [GOOD, {"prompt": "To be?", "completion": "No.", "label": 1}]
    if name == "a.parquet":
        parquet, library = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(library.Table.from_pylist([{**GOOD, "label": None}, rows[1]]), path)
        places = [f"{path}: row 1", f"{path}: row 2"]
    elif "jsonl" in name:
        write(path, "".join(json.dumps(fields) + "\n\n" for fields in rows))
        places = [f"{path}:1", f"{path}:3"]
    else:
        write(path, json.dumps(rows, indent=1))
        places = [f"{path}:2", f"{path}:6"]
    first, second = read_rows([path])
    assert [first.place, second.place] == places
    assert (first.messages, first.is_desirable) == ((USER, ANSWER), None)
    assert (second.messages, second.is_desirable) == ((USER, WORSE), True)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", json.dumps(GOOD) + "\n{", r"a.jsonl:2: not JSON"),
        ("a.jsonl", "7\n", r"a.jsonl:1: a int, not an object"),
        ("a.jsonl", json.dumps(GOOD) + '\n{"prompt": "a"}', r"a.jsonl:2: keys: 'prompt' are of no type"),
        ("a.jsonl", "\n", r"a.jsonl: has no rows"),
        ("a.json", f"[\n{json.dumps(GOOD)},\n7]", r"a.json:3: a int in the array"),
        ("a.json", f"[\n{json.dumps(GOOD)}\n{{}}]", r"a.json:2: the array does not go on with"),
        ("a.json", "[\n{]", r"a.json:2: not JSON"),
        ("a.json", "[{}] 7", r"a.json:1: keys: none|a.json: has more after its array"),
        ("a.txt", "a", r"a.txt: a file of text, which has no rows"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, told):
    with pytest.raises(DataError, match=told):
        read_rows([write(tmp_path / name, text)])
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        read_rows([tmp_path / "gone.jsonl"])


def test_rows_that_cannot_be_read_may_be_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps(GOOD) + '\n{"prompt": 1, "completion": ""}\n{\n' + json.dumps(GOOD))
    assert len(read_rows([path], bad=BadLines(2))) == 2
    with pytest.raises(DataError, match=r"a.jsonl:3: not JSON .* 1 lines before it were left out"):
        read_rows([path], bad=BadLines(1))


def test_a_stage_names_the_row_that_it_cannot_learn_from():
    preference = read_row(Record("f:2", {"prompt": "a", "chosen": "b", "rejected": "c"}))
    check_kind([preference], "preference", "dpo")
    with pytest.raises(DataError, match="f:1: a row of kind answers; stage dpo needs rows with chosen and rejected"):
        check_kind([preference, read_row(Record("f:1", GOOD))], "preference", "dpo")
