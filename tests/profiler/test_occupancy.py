"""polyreme.profiler.occupancy: a device's time is shared out once, against a count of every unit of it."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.profiler import occupancy
from polyreme.profiler.occupancy import Occupied

LENGTH = 24


@st.composite
def nested(draw, thread):
    """Spans on one thread, each beside or within the others, as calls are."""
    spans, todo = [], [(0, LENGTH)]
    while todo and len(spans) < 8:
        begin, end = todo.pop()
        if end - begin < 1 or not draw(st.booleans()):
            continue
        a = draw(st.integers(begin, end - 1))
        b = draw(st.integers(a + 1, end))
        spans.append(Occupied(a, b, thread, f"{thread}{len(spans)}", draw(st.booleans())))
        todo += [(a, b), (b, end), (begin, a)]
    return spans


def innermost(spans, at):
    within = [span for span in spans if span.begin <= at < span.end]
    # of spans of one extent the later one is within the other
    return max(within, key=lambda span: (span.begin, -span.end, spans.index(span)), default=None)


@settings(max_examples=80, deadline=None)
@given(nested("a"), nested("b"), st.integers(0, 4), st.integers(18, LENGTH))
def test_each_unit_of_time_is_counted_once(first, second, begin, end):
    computing, exposed, hidden, idle = defaultdict(float), defaultdict(float), defaultdict(float), 0.0
    for at in range(begin, end):
        active = [span for span in (innermost(first, at), innermost(second, at)) if span is not None]
        ours = [span for span in active if not span.is_communication]
        others = [span for span in active if span.is_communication]
        for span in ours:
            computing[span.key] += 1 / len(ours)
        for span in others:
            (hidden if ours else exposed)[span.key] += 1 / len(others)
        idle += not active
    result = occupancy.occupancy([*first, *second], begin, end)
    assert (result.computing, result.exposed, result.hidden) == (computing, exposed, hidden)
    assert occupancy.length(result.idle) == idle


@settings(max_examples=80, deadline=None)
@given(*[st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=6)] * 2)
def test_intervals_are_sets_of_times(first, second):
    def times(intervals):
        return {unit for begin, end in intervals for unit in range(int(begin), int(end))}

    a, b = (occupancy.united((at, at + size) for at, size in each) for each in (first, second))
    assert times(occupancy.common(a, b)) == times(a) & times(b)
    assert times(occupancy.without(a, b)) == times(a) - times(b)
    assert occupancy.length(a) == len(times(a))
