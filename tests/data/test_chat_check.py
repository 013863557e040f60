"""What is wrong with rows of conversations is told with the rows; samples are shown with what counts in them."""

import numpy as np
import pytest

from polyreme.data.chat_check import check_rows
from polyreme.data.chat_encoding import ChatEncoder, ChatForm, encode_rows
from polyreme.data.chat_preview import COLOUR, sample_lines
from polyreme.data.chat_rows import ChatRow
from polyreme.data.packing import PackedDataset
from tests.data.chat_tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer("mistral")
BOS = TOKENIZER.bos


def rows_of(*talks):
    roles = ("user", "assistant") * 9
    return [
        ChatRow(f"f:{line}", tuple({"role": role, "content": text} for role, text in zip(roles, texts, strict=False)))
        for line, texts in enumerate(talks, 1)
    ]


def report(rows, tokenizer=TOKENIZER, **form):
    return check_rows(rows, ChatEncoder(tokenizer, ChatForm(**{"max_tokens": 500, **form})), BOS)


def test_good_rows():
    good = report(rows_of(("a", "b"), ("God", "a", "b", "c")))
    assert good.is_good
    assert list(good.lines(64))[-1] == "nothing is wrong with them"
    assert sum(good.asked) == sum(len(TOKENIZER.encode(f" {text}</s>", False)) for text in ("b", "a", "c"))


@pytest.mark.parametrize(
    ("talks", "form", "told"),
    [
        ([("a", "b"), ("c", "d"), ("a", "b")], {}, "note: rows that come again: 1 (f:3)"),
        ([("a", " ")] * 1, {}, "error: empty messages of assistant: 1 (f:1)"),
        ([("", "b")], {}, "note: empty messages of user: 1 (f:1)"),
        ([("a </s>", "b")], {}, "note: messages of user that spell out a special token: 1 (f:1)"),
        ([("a", "b </s> c")], {}, "error: f:1: messages[1]: this answer spells out a token that ends a text"),
        ([("a", "b" * 40)], {"max_tokens": 30, "truncation": "cut"},
         "error: answers without the token that ends them in the loss: 1 (f:1)"),
        ([("a", "b"), ("a", "b" * 40)], {"max_tokens": 30}, "note: conversations left out, too long: 1 (f:2)"),
        ([(f"{i}", "b" * 40) for i in range(7)], {"max_tokens": 30, "truncation": "drop"},
         "note: conversations left out, too long: 7 (f:1, f:2, f:3, f:4, f:5 and 2 more)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(talks, form, told):
    looked = report(rows_of(*talks), **form)
    lines = list(looked.lines(64))
    assert any(line.startswith(told) for line in lines), lines
    assert looked.is_good == told.startswith("note")


def test_a_doubled_beginning_is_an_error():
    doubled = TOKENIZER.with_template("{{ bos_token }}" + TOKENIZER.template)
    assert any("begins a text stands twice: 1 (f:1)" in line for line in report(rows_of(("a", "b")), doubled).lines(64))


def test_preferences_are_looked_at_on_both_sides():
    row = rows_of(("a", "b"))[0]
    same = ChatRow("f:1", row.messages, rejected=row.messages)
    looked = report([same])
    assert [finding.what for finding in looked.findings] == ["rows whose chosen and rejected are the same"]
    assert len(looked.lengths) == 2


@pytest.mark.parametrize("is_packed", [True, False])
def test_samples_are_shown_with_what_counts(is_packed):
    rows = rows_of(("a", "God", "c", "a God"), ("b", "earth"))
    chats = encode_rows(rows, ChatEncoder(TOKENIZER, ChatForm(64)))
    data = PackedDataset(chats, 0, chats.num_documents, 64, is_packed, chats.is_asked)

    def decode(ids):
        return TOKENIZER.decode(ids, skip_special_tokens=False)

    shown = []
    for index in range(len(data)):
        head, *lines = sample_lines(*data[index], decode, end=TOKENIZER.end, bos=BOS)
        assert head.endswith("tokens counted, between [[ and ]]")
        shown += lines
    texts = sorted(shown[1::2])
    assert texts == [
        "<s>[INST] a [/INST][[ God</s>]][INST] c [/INST][[ a God</s>]]",
        "<s>[INST] b [/INST][[ earth</s>]]",
    ]
    assert all("1 beginning tokens" in line for line in shown[::2])
    assert sorted(line.split(", ")[2] for line in shown[::2]) == ["1 end tokens", "2 end tokens"]
    _, _, green, *_ = sample_lines(*data[0], decode, marks=COLOUR)
    assert f"{COLOUR[0]} God</s>{COLOUR[1]}" in green or f"{COLOUR[0]} earth</s>{COLOUR[1]}" in green


def test_a_sample_that_ends_with_nothing_to_learn_is_shown_whole():
    inputs, labels = np.arange(5), np.array([-100, 2, -100, -100, -100])
    assert list(sample_lines(inputs, labels, str))[2] == "[0, 1][[[2]]]"
