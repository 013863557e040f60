"""Text of tokens as they come is the text at once, for any bytes and any cut; stop strings are what a search finds."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyreme.generation import TextTokenizer
from polyreme.generation.text_stream import TextStream
from polyreme.models.tokenizer import train_byte_level_bpe

BYTES = TextTokenizer(train_byte_level_bpe(iter(["to be né or 北京 not \U0001f600"] * 3), 290))
ALPHABET = "abé北\U0001f600\N{REPLACEMENT CHARACTER}"


def pieces_of(ids, cuts=(), tokenizer=BYTES, **options):
    stream = TextStream(tokenizer, **options)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [stream.add(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return [*pieces, stream.finish()], stream


def tokens_of_bytes(data):
    """Each byte a token of its own."""
    table = {name: number for name, number in BYTES.tokenizer.get_vocab().items() if len(name) == 1}
    known = {bytes_of(name): number for name, number in table.items()}
    return [known[bytes([byte])] for byte in data]


def bytes_of(name):
    return _TABLE[name]


_TABLE = {}
for _byte in range(256):
    # as GPT-2 writes bytes: printable ones are themselves, the others follow from 256 on
    _printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    _others = [b for b in range(256) if b not in _printable]
    _name = chr(_byte) if _byte in _printable else chr(256 + _others.index(_byte))
    _TABLE[_name] = bytes([_byte])


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_any_tokens_in_any_cut_are_the_text_of_all(ids, cuts):
    pieces, _ = pieces_of(ids, cuts)
    assert "".join(pieces) == BYTES.decode(ids)


@given(
    st.binary(max_size=40) | st.text(ALPHABET, max_size=12).map(str.encode), st.lists(st.integers(0, 40), max_size=8)
)
def test_any_bytes_are_the_text_of_all(data, cuts):
    pieces, _ = pieces_of(tokens_of_bytes(data), cuts)
    assert "".join(pieces) == data.decode(errors="replace")


@given(st.text(ALPHABET[:-1], max_size=12))
def test_a_replacement_character_is_in_no_piece_of_a_text_without_one(text):
    pieces, _ = pieces_of(tokens_of_bytes(text.encode()))
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    # nothing waits longer than its character: after its last byte it is there
    assert pieces[-1] == ""


def until_stop(text, stops):
    """The text before the string that is complete first; of several, before the longest."""
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@given(
    st.text("abé", max_size=16),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_stop_strings_are_left_out_wherever_tokens_are_cut(text, stops, cuts):
    for ids in (tokens_of_bytes(text.encode()), BYTES.encode(text)):
        pieces, stream = pieces_of(ids, cuts, stop=stops)
        assert ("".join(pieces), stream.stopped) == until_stop(text, stops)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=3), st.integers(0, 12))
def test_a_stop_string_counts_from_the_least_length_on(text, stop, least):
    pieces, stream = pieces_of(tokens_of_bytes(text.encode()), stop=[stop], min_tokens=least)
    first = max(0, least - len(stop))
    place = text.find(stop, first)
    assert ("".join(pieces), stream.stopped) == ((text, False) if place < 0 else (text[:place], True))


def test_words_and_pieces_keep_their_spaces():
    names = ["[UNK]", "to", "be", "##st", ",", "not"]
    words = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    marked = Tokenizer(models.BPE({"\u2581to": 0, "\u2581be": 1, "st": 2}, []))
    marked.pre_tokenizer, marked.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    for tokenizer, ids in ((TextTokenizer(words), [1, 2, 3, 4, 5, 2]), (TextTokenizer(marked), [0, 1, 2, 0])):
        pieces, _ = pieces_of(ids, range(6), tokenizer)
        assert "".join(pieces) == tokenizer.decode(ids)


def test_bytes_between_pieces_become_characters():
    """Tokenizers that fall back to bytes turn a run of them into text, or all of it into replacement characters."""
    names = ["\u2581to", "a", "<0xE2>", "<0x82>", "<0xAC>", "<0x61>"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    for ids in ([0, 2, 3, 4, 1], [0, 5, 2, 3, 4], [2, 3, 4] * 3):
        pieces, _ = pieces_of(ids, range(9), TextTokenizer(tokenizer))
        assert "".join(pieces) == tokenizer.decode(ids)
    torn, _ = pieces_of([0, 2, 3, 1, 0], range(9), TextTokenizer(tokenizer))
    assert "".join(torn) == tokenizer.decode([0, 2, 3, 1, 0])


def test_a_text_behind_another_is_written_as_behind_it():
    """Words that are joined by spaces: the first of a text has none before it, unless others stand there."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2}, "[UNK]"))
    tokenizer = TextTokenizer(words)
    for after, want in (((), "be to"), ([1], " be to"), ([1, 2] * 10, " be to")):
        stream = TextStream(tokenizer, after=after)
        assert stream.add([2]) + stream.add([1]) + stream.finish() == want
