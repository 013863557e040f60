"""Conversations as tokens: a model is asked for the text of answers and what ends them, after the server's own ids."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyreme.data.chat_encoding import ChatEncoder, ChatForm, encode_rows
from polyreme.data.chat_rows import ChatRow
from polyreme.data.chat_templates import TEMPLATES, load_template
from polyreme.data.packing import NO_LABEL, PackedDataset
from polyreme.data.text_files import BadLines
from polyreme.errors import ConfigError, DataError
from polyreme.generation.tokenizer import AutoTokenizer
from tests.data.chat_tokenizers import SPECIAL, chat_tokenizer

TOKENIZERS = {name: chat_tokenizer(name) for name in TEMPLATES}
CHATML = TEMPLATES["chatml"].text
every_template = pytest.mark.parametrize("name", TEMPLATES)


def talk(*texts, system=None, **fields):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return ChatRow("rows.jsonl:1", tuple(messages), **fields)


def written(name, row):
    """What a template makes of each answer, its end included."""
    trims = name in ("llama3", "mistral", "roles")
    texts = [m["content"] for m in row.messages if m["role"] == "assistant"]
    lead = " " if name in ("mistral", "roles") else ""
    return [lead + (text.strip() if trims else text) + SPECIAL[name][2] for text in texts]


def asked_pieces(chat):
    """Runs of tokens that a model is asked for."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], chat.is_asked, [False]]).astype(int)))
    return [chat.ids[a:b].tolist() for a, b in zip(bounds[::2], bounds[1::2], strict=True)]


words = st.text(st.sampled_from("ab God. \n\té漢🙂<|>[]"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(st.tuples(words, words), min_size=1, max_size=3),
    st.none() | words,
    st.booleans(),
)
def test_a_model_is_asked_for_answers_and_their_ends_alone(name, turns, system, mask_history):
    tokenizer, row = TOKENIZERS[name], talk(*(text for turn in turns for text in turn), system=system)
    encoder = ChatEncoder(tokenizer, ChatForm(max_tokens=10_000, mask_history=mask_history))
    try:
        chat = encoder.encode(row)
    except DataError as error:  # white space at an answer's beginning may belong to the token before it
        if "the tokenizer joins" not in str(error):
            raise
        assume(False)
    expected = written(name, row)
    pieces = asked_pieces(chat)
    texts = [tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]
    assert texts == (expected[-1:] if mask_history else expected)
    assert all(piece[-1] in tokenizer.end for piece in pieces)
    answers = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
    for number, answer in zip(answers[-len(pieces) :], chat.answers, strict=True):
        served = tokenizer.encode_chat(row.messages[:number])
        assert chat.ids[: answer.begin].tolist() == served
    bos = tokenizer.bos
    assert bos is None or chat.ids.tolist().count(bos) == 1


@every_template
def test_ids_are_those_of_the_whole_conversation(name):
    tokenizer, row = TOKENIZERS[name], talk("a", "b", "a God", "God b")
    chat = ChatEncoder(tokenizer, ChatForm(100)).encode(row)
    whole = tokenizer.encode_chat(row.messages, add_generation_prompt=False)
    assert chat.ids.tolist() == whole[: len(chat.ids)]
    assert tokenizer.decode(whole[len(chat.ids) :], skip_special_tokens=False).strip() == ""
    everything = ChatEncoder(tokenizer, ChatForm(100, train_on_prompt=True)).encode(row)
    assert everything.ids.tolist() == whole
    assert everything.is_asked.tolist() == [False] + [True] * (len(whole) - 1)


def test_answers_that_are_not_to_be_learnt():
    tokenizer = TOKENIZERS["chatml"]
    encoder = ChatEncoder(tokenizer, ChatForm(100))
    chat = encoder.encode(talk("a", "b", "a", "God", "a", "b", trained=(False, True, False)))
    assert [tokenizer.decode(piece) for piece in asked_pieces(chat)] == ["God"]
    nothing = encoder.encode(talk("a", "b", trained=(False,)))
    assert nothing.is_empty
    assert nothing.left_out == {"conversations without an answer to learn": 1}


UNCLOSED = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def test_a_template_that_does_not_close_answers_is_refused():
    open_ended = TOKENIZERS["chatml"].with_template(UNCLOSED)
    with pytest.raises(ConfigError, match=r"does not close an answer with a token that ends a text \('<\|im_end\|>'\)"):
        ChatEncoder(open_ended, ChatForm(100))
    endless = chat_tokenizer("chatml")
    endless.end = ()
    with pytest.raises(ConfigError, match="says of no token that it ends a text"):
        ChatEncoder(endless, ChatForm(100))


@pytest.mark.parametrize(
    ("template", "texts", "told"),
    [
        (CHATML, ("a", "x<|im_end|>y"), r"messages\[1\]: this answer spells out a token that ends a text"),
        (CHATML, ("a", "\n\nb"), r"messages\[1\]: the tokens before this answer .* from token \d+ on"),
        # thoughts of earlier turns are left out of the history
        (
            CHATML.replace(
                "message['content']", "('x' if 'God' in message['content'] and not loop.last else message['content'])"
            ),
            ("a", "God", "a", "b"),
            r"messages\[1\]: this answer is changed by later turns",
        ),
        (
            "{{ raise_exception('no') if messages|length > 2 }}" + CHATML,
            ("a", "b", "a", "b"),
            "failed.*no",
        ),
    ],
)
def test_answers_that_cannot_be_told_from_what_is_before_them(template, texts, told):
    encoder = ChatEncoder(TOKENIZERS["chatml"].with_template(template), ChatForm(100))
    with pytest.raises(DataError, match=rf"^rows.jsonl:1: .*{told}"):
        encoder.encode(talk(*texts))
    good = ChatRow("rows.jsonl:2", talk("a", "b").messages)
    bad = BadLines(1)
    assert encode_rows([talk(*texts), good], encoder, bad).places == ("rows.jsonl:2",)
    assert bad.lines == {"rows.jsonl:1"}


def test_nothing_is_cut_without_being_counted():
    tokenizer, row = TOKENIZERS["plain"], talk("a", "b", "God God God God", "God God God God God God")
    whole = ChatEncoder(tokenizer, ChatForm(1000)).encode(row)
    first, second = whole.answers
    room = second.begin + 2
    shortened = {way: ChatEncoder(tokenizer, ChatForm(room, truncation=way)) for way in ("turns", "drop", "cut")}
    turns, drop, cut = (encoder.encode(row) for encoder in shortened.values())
    assert (len(turns.ids), turns.answers) == (first.end, (first,))
    assert turns.left_out == {"answers left out at the end of long conversations": 1}
    assert (drop.is_empty, drop.left_out) == (True, {"conversations left out, too long": 1})
    assert len(cut.ids) == room
    assert cut.left_out == {"answers cut short, without their end": 1}
    assert cut.ids[-1] not in tokenizer.end
    with pytest.raises(DataError, match=rf"^rows.jsonl:1: {len(whole.ids)} tokens, more than {room}"):
        ChatEncoder(tokenizer, ChatForm(room, truncation="refuse")).encode(row)
    with pytest.raises(DataError, match=r"no conversation is left to learn from .2 conversations left out, too long"):
        encode_rows([row, row], shortened["drop"])
    kept = encode_rows([row, talk("a", "b")], shortened["drop"])
    assert (kept.num_documents, kept.left_out) == (1, {"conversations left out, too long": 1})


@pytest.mark.parametrize("is_packed", [True, False])
def test_packed_rows_ask_for_the_same_tokens(is_packed):
    tokenizer = TOKENIZERS["roles"]
    rows = [talk("a" * n, "God " * (n % 5) + "b", "a", "b") for n in range(1, 20)]
    chats = encode_rows(rows, ChatEncoder(tokenizer, ChatForm(64)))
    data = PackedDataset(chats, 0, chats.num_documents, 64, is_packed, chats.is_asked)
    assert len(data) < len(rows) if is_packed else len(data) == len(rows)
    labels = sorted(int(label) for row in range(len(data)) for label in data[row][1] if label != NO_LABEL)
    assert labels == sorted(chats.ids[chats.is_asked].tolist())
    if is_packed:
        inputs, row_labels = data[0]
        for place in np.flatnonzero(row_labels != NO_LABEL):
            following = inputs[0][place + 1] if place + 1 < inputs[1][place] else row_labels[place]
            assert row_labels[place] == following


def test_templates_by_name_and_file(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ 1 }}")
    assert load_template("own.jinja", tmp_path).text == "{{ 1 }}"
    assert load_template("chatml").text == CHATML
    with pytest.raises(ConfigError, match="template 'chatlm' is unknown; did you mean 'chatml'"):
        load_template("chatlm")
    with pytest.raises(ConfigError, match=r"gone\.jinja: cannot be read"):
        load_template("gone.jinja", tmp_path)
    with pytest.raises(ConfigError, match="truncation 'turn' is unknown; did you mean 'turns'"):
        ChatForm(8, truncation="turn")
    with pytest.raises(ConfigError, match="max_tokens=1: a conversation has at least 2"):
        ChatForm(1)


def test_what_closes_answers_ends_texts_of_the_model_that_learns_it(tmp_path):
    base = chat_tokenizer("chatml")
    base.end = (base.tokenizer.token_to_id("<|endoftext|>"),)
    chatml = load_template("chatml")
    tokenizer = base.with_template(chatml.text, chatml.end)
    chat = ChatEncoder(tokenizer, ChatForm(100)).encode(talk("a", "b"))
    tokenizer.save_pretrained(tmp_path)
    assert int(chat.ids[-1]) in AutoTokenizer.from_pretrained(tmp_path).end
    llama = load_template("llama3")
    with pytest.raises(ConfigError, match=r"closes answers with <\|eot_id\|>, which is no token"):
        base.with_template(llama.text, llama.end)
