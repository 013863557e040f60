"""Schedules: every task once in a possible order, the papers' bubbles and memory, refusal of what cannot be built."""

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.errors import ConfigError
from polyreme.mesh import (
    SCHEDULES,
    Durations,
    Schedule,
    Task,
    make_schedule,
)
from polyreme.mesh.schedule import measured_bubble, published_bubble
from polyreme.mesh.schedules import ScheduleKind

ALL = (
    ("FThenB", 1),
    ("1F1B", 1),
    ("Eager1F1B", 1),
    ("VPP", 2),
    ("VPP", 3),
    ("ZBH1", 1),
    ("ZBVPP", 2),
    ("DualPipeV", 2),
)
SPLIT = ("ZBH1", "ZBVPP", "DualPipeV")
every_schedule = pytest.mark.parametrize(("name", "v"), ALL)


@st.composite
def sizes(draw):
    name, v = draw(st.sampled_from([*ALL, ("VPP", 4)]))
    return name, draw(st.integers(1, 9)), draw(st.integers(1, 24)), v


def stage_of(name, chunk, p):
    """Where the papers put a chunk: down the stages again and again, or down and back up."""
    return min(chunk, 2 * p - 1 - chunk) if name in ("ZBVPP", "DualPipeV") else chunk % p


def walk(schedule):
    """The stages run one task each in turn, in table order; returns the order of completion, short if they block."""
    last, done, queues = schedule.num_stages * schedule.num_virtual - 1, set(), [list(t) for t in schedule.tables]
    while True:
        before = len(done)
        for queue in queues:
            if not queue:
                continue
            kind, i, c = queue[0]
            needs = {"F": {("F", i, c - 1)} if c else set(), "W": {("B", i, c)}, "B": {("F", i, c)}}[kind]
            if kind == "B" and c < last:
                needs = needs | {("B", i, c + 1)}
            if needs <= done:
                done.add(tuple(queue.pop(0)))
        if len(done) == before:
            return done


def most_live(schedule, stage, last):
    live = [0]
    for kind, _, _ in schedule.tables[stage]:
        live.append(live[-1] + {"F": 1, last: -1}.get(kind, 0))
    return max(live)


@settings(max_examples=150, deadline=None)
@given(sizes())
def test_every_task_runs_once_on_its_stage_and_none_blocks(size):
    name, p, m, v = size
    schedule = make_schedule(name, p, m, v)
    kinds = "FBW" if name in SPLIT else "FB"
    assert schedule.split_backward == (name in SPLIT)
    for stage, table in enumerate(schedule.tables):
        mine = [c for c in range(p * v) if stage_of(name, c, p) == stage]
        assert schedule.chunks_of(stage) == tuple(mine)
        assert sorted(table) == sorted((kind, i, c) for kind in kinds for c in mine for i in range(m))
    assert len(walk(schedule)) == p * v * m * len(kinds)


@settings(max_examples=150, deadline=None)
@given(sizes())
def test_live_activations_stay_within_the_bound(size):
    name, p, m, v = size
    schedule = make_schedule(name, p, m, v)
    group = math.ceil(m / max(1, m // p))  # p, or a few more where p does not divide m
    for s in range(p):
        bound = {
            "FThenB": m,
            "1F1B": min(p - s, m),
            "Eager1F1B": min(2 * (p - s) - 1, m),
            "VPP": min(m * v, 2 * (p - s - 1) + (v - 1) * group + 1),
            "ZBH1": min(p, m),
            "ZBVPP": min(2 * p, 2 * m),
            "DualPipeV": min(2 * p + 1, 2 * m),
        }[name]
        last = "W" if name in SPLIT else "B"
        assert schedule.peak_live(s) == schedule.peak_live(s, until=last) == most_live(schedule, s, last) <= bound
        if name in ("FThenB", "1F1B", "Eager1F1B"):
            assert schedule.peak_live(s) == bound
        if name == "ZBH1":  # until B, stage by stage what 1F1B holds
            assert schedule.peak_live(s, until="B") == most_live(schedule, s, "B") == min(p - s, m)


@settings(max_examples=60, deadline=None)
@given(sizes(), st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 4))
def test_order_is_a_timeline_that_could_happen(size, costs, send):
    name, p, m, v = size
    schedule, durations = make_schedule(name, p, m, v), Durations(*costs, send)
    whole = {"F": costs[0], "B": costs[1] + (0 if name in SPLIT else costs[2]), "W": costs[2]}
    spans = schedule.order(durations)
    end, free_at, last = {}, [0.0] * p, p * v - 1
    for stage, (kind, i, c), start, stop in spans:
        before = [(kind, i, c + (1 if kind == "B" else -1))] if kind != "W" else []
        before += [{"B": ("F", i, c), "W": ("B", i, c)}[kind]] if kind != "F" else []
        # an input is ready, one send after its end if it is another stage's
        inputs = [end[n] + (send if stage_of(name, n[2], p) != stage else 0) for n in before if 0 <= n[2] <= last]
        assert start == max([free_at[stage], *inputs])
        assert stop - start == whole[kind]
        end[kind, i, c] = free_at[stage] = stop
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    assert schedule.makespan(durations) == max(end.values())
    idle = p * max(end.values()) - sum(whole[kind] * m * v * p for kind in schedule.kinds)
    assert schedule.bubble_fraction(durations) == idle / (p * max(end.values()))


@pytest.mark.parametrize("name", ["FThenB", "1F1B", "Eager1F1B"])
@pytest.mark.parametrize("p", range(1, 9))
def test_gpipe_and_1f1b_idle_p_minus_1_microbatches(name, p):
    """Narayanan et al. 2021, arXiv:2104.04473, 2.2.1: idle time (p - 1)(tF + tB) a stage, whatever tF and tB."""
    for m in (1, 2, p, p + 1, 4 * p):
        for forward, backward in ((1, 2), (3, 4)):
            durations = Durations(forward, backward - 1, 1)
            makespan = make_schedule(name, p, m).makespan(durations)
            assert makespan - m * (forward + backward) == (p - 1) * (forward + backward)
        assert make_schedule(name, p, m).bubble_fraction() == float(Fraction(p - 1, m + p - 1))


@pytest.mark.parametrize("p", range(2, 9))
def test_eager_hides_sends_that_1f1b_waits_for(p):
    """A send as long as half a microbatch's forward costs fill and drain alone: 2 (p - 1) of them."""
    durations = Durations(1, 1, 1, 0.5)
    eager, plain = (make_schedule(name, p, 4 * p).makespan(durations) for name in ("Eager1F1B", "1F1B"))
    assert eager == 3 * (4 * p + p - 1) + 2 * (p - 1) * 0.5 < plain


@pytest.mark.one_in(6)
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", range(1, 9))
def test_interleaving_divides_the_bubble_by_the_chunks(p, v):
    """arXiv:2104.04473, 2.2.2: (p - 1)(tF + tB) / v, for m a multiple of p in the paper and for every m >= p here."""
    for m in (*range(p, 2 * p + 2), 4 * p):
        assert make_schedule("VPP", p, m, v).bubble_fraction() == float(Fraction(p - 1, v * m + p - 1)), m
    for m in range(1, p):  # no schedule is shorter than one microbatch there and back, and the others after it
        assert make_schedule("VPP", p, m, v).makespan() == 3 * (v * p + m - 1)


@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_holds_the_published_activations(v):
    """Korthikanti et al. 2022, arXiv:2205.05198, 4.2.3: 1 + (p - 1) / (p v) times the p microbatches of 1F1B."""
    for p in range(2, 9):
        assert make_schedule("VPP", p, 4 * p, v).peak_live(0) / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize("p", range(1, 9))
def test_zero_bubble_h1_idles_a_third_of_1f1b(p):
    """Qi et al. 2023, arXiv:2401.10241: (p - 1)(tF + tB - tW) idle a stage with tF = tB = tW, in 1F1B's memory."""
    for m in (p, p + 1, 2 * p, 3 * p + 1):
        schedule = make_schedule("ZBH1", p, m)
        assert schedule.makespan() - 3 * m == p - 1
        assert max(map(schedule.peak_live, range(p))) == max(map(make_schedule("1F1B", p, m).peak_live, range(p)))


def test_zero_bubble_h1_keeps_its_formula_while_weights_cost_no_more_than_the_rest():
    for f, b, w in ((2, 2, 1), (3, 4, 3), (4, 4, 3)):
        makespan = make_schedule("ZBH1", 4, 12).makespan(Durations(f, b, w))
        assert makespan - 12 * (f + b + w) == 3 * (f + b - w)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_v_never_idles_between_its_first_and_last_task(p):
    """Qi et al., arXiv:2401.10241 (ZB-V) and arXiv:2405.15362 (V-ZB): no bubble, p microbatches of activations."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        schedule = make_schedule("ZBVPP", p, m, 2)
        for stage in range(p):
            mine = [span for span in schedule.order() if span.stage == stage]
            assert mine[-1].end - mine[0].start == 6 * m
        assert schedule.span_bubble_fraction() == 0
        # the last stage cannot begin before p - 1, so a step that ends everywhere at once cannot be shorter
        assert schedule.makespan() == 6 * m + p - 1
        assert [schedule.peak_live(s) for s in range(p)] == [2 * p] * p
    # With fewer microbatches it cannot fill; what it costs is recorded here so that it does not grow.
    assert make_schedule("ZBVPP", p, p, 2).makespan() == 6 * p + p - 1


def test_dual_pipe_v_puts_each_forward_beside_a_backward_of_the_other_chunk():
    """As DeepSeek's stages go, arXiv:2412.19437, figure 5: PP + 1 chunks live, and in between F and B in pairs."""
    p, m = 4, 20
    schedule = make_schedule("DualPipeV", p, m, 2)
    assert [schedule.peak_live(s) for s in range(p)] == [2 * p + 1] * p
    assert schedule.makespan() == 6 * m + p - 1
    for stage, table in enumerate(schedule.tables):
        start = 2 * (p - 1 - stage) + 2 * (stage + 1) + 3 * (p - 1 - stage)
        steady = table[start : start + 6 * (m - 2 * p + stage + 1)]
        for forward, backward, weights in zip(*[iter(steady)] * 3, strict=True):
            assert (forward.kind, backward.kind, weights.kind) == ("F", "B", "W")
            assert {forward.chunk, backward.chunk} == {stage, 2 * p - 1 - stage}


@pytest.mark.one_in(6)
@every_schedule
def test_formula_is_met_wherever_it_holds(name, v):
    for p in range(1, 7):
        for m in range(1, 3 * p):
            schedule = make_schedule(name, p, m, v)
            value = published_bubble(schedule)
            assert (value is None) == (m < SCHEDULES[name].bubble.least_microbatches(p))
            assert value is None or measured_bubble(schedule) == value
    renamed = dataclasses.replace(make_schedule(name, 2, 4, v), name="mine")
    assert published_bubble(renamed) is None
    assert measured_bubble(renamed) == renamed.bubble_fraction()


def test_text_of_a_stage():
    """As the reference's static scheduler prints it: 2 stages, 4 microbatches."""
    schedule = make_schedule("1F1B", 2, 4)
    assert [schedule.stage_text(s) for s in (0, 1)] == ["f0;f1;b0;f2;b1;f3;b2;b3;", "f0;b0;f1;b1;f2;b2;f3;b3;"]
    interleaved = make_schedule("VPP", 2, 4, 2)
    assert interleaved.stage_text(0).startswith("f0_vp0;f1_vp0;f0_vp1;f1_vp1;f2_vp0;b0_vp1;f3_vp0;b1_vp1;")
    assert make_schedule("ZBH1", 2, 2).stage_text(1) == "f0;b0;f1;b1;w0;w1;"
    # startup forwards of stage s: min(stages - s - 1, microbatches)
    for m in (1, 2, 8):
        for s in range(4):
            text = make_schedule("1F1B", 4, m).stage_text(s)
            assert text.split("b")[0].count("f") == min(4 - s - 1, m) + (1 if m > 4 - s - 1 else 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_are_those_a_plan_takes(name):
    assert make_schedule(name, 2, 4, SCHEDULES[name].least_virtual).name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ZBH", 2, 2), "unknown schedule 'ZBH'; did you mean 'ZBH1'"),
        (
            ("gpipe", 2, 2),
            "unknown schedule 'gpipe'; the choices are FThenB, 1F1B, Eager1F1B, VPP, ZBH1, ZBVPP, DualPipeV",
        ),
        (("1F1B", 0, 2), "1F1B with num_stages=0; give a whole number"),
        (("1F1B", 2, 2.0), r"num_microbatches=2.0; give a whole number"),
        (("1F1B", 2, True), "num_microbatches=True"),
        (("VPP", 2, 2), "VPP with num_virtual=1; give 2 or more, or schedule 1F1B"),
        (("1F1B", 2, 2, 2), "1F1B with num_virtual=2; give 1, or schedule VPP"),
        (("FThenB", 2, 2, 3), "FThenB with num_virtual=3; give 1"),
        (("ZBH1", 2, 2, 2), "ZBH1 with num_virtual=2; give 1, or schedule ZBVPP"),
        (("ZBVPP", 2, 2, 3), "ZBVPP with num_virtual=3; give 2, or schedule ZBH1"),
    ],
)
def test_what_cannot_be_built(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(*arguments)


def test_the_page_lists_every_schedule():
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    for name, kind in SCHEDULES.items():
        assert f"| `{name}` | {kind.summary} | {kind.chunks_text} | {kind.source} |\n" in page


def one_chunk(name="Mine", **traits):
    return ScheduleKind(name, "all forwards first", "this test", SCHEDULES["FThenB"].tables, **traits)


@pytest.mark.parametrize("kind", [one_chunk("1F1B"), one_chunk("F-then-B"), one_chunk(aliases=("F-then-B",))])
def test_a_name_is_given_once(kind):
    with pytest.raises(ConfigError, match=r"there is a schedule '.*' already"):
        SCHEDULES.register(kind)


def test_a_registered_schedule_leaves_nothing_behind():
    with SCHEDULES.registered(one_chunk()):
        assert make_schedule("Mine", 2, 2).tables == make_schedule("FThenB", 2, 2).tables
    with pytest.raises(ConfigError, match="unknown schedule 'Mine'"):
        make_schedule("Mine", 2, 2)
    # another one of that name is not mistaken for it
    with SCHEDULES.registered(ScheduleKind("Mine", "as 1F1B", "this test", SCHEDULES["1F1B"].tables)):
        assert make_schedule("Mine", 2, 2).tables == make_schedule("1F1B", 2, 2).tables


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"least_virtual": 2}, "of 2 to 1 chunks a stage; give at least 1"),
        ({"least_virtual": 0}, "of 0 to 1 chunks a stage; give at least 1"),
        ({"is_v": True}, "laid out as a V, of 1 to 1 chunks a stage; a V has 2"),
        ({"peak_live": lambda p, m, s: m, "split_backward": True}, "peak_live counts one chunk a stage"),
    ],
)
def test_traits_that_contradict_each_other(traits, message):
    with pytest.raises(ConfigError, match=message):
        one_chunk(**traits)


def by_hand(*tables, split=False, m=1, stage_of_chunk=(0, 1)):
    tasks = tuple(tuple(Task(t[0], int(t[1]), int(t[2])) for t in table.split()) for table in tables)
    return Schedule("mine", 2, 1, m, tasks, stage_of_chunk, split)


def test_a_table_written_by_hand_is_checked():
    assert by_hand("F00 B00", "F01 B01").makespan() == 6
    for tables, message in (
        (("F00", "F01 B01"), "stage 0 lacks B0 of chunk 0"),
        (("F00 B00 F00", "F01 B01"), "stage 0 repeats F0 of chunk 0"),
        (("F00 B00 F01", "F01 B01"), "stage 0 has no place for F0 of chunk 1"),
        (
            ("B00 F00", "F01 B01"),
            "deadlocks: stage 0 is at B0 of chunk 0 and waits for F0 of chunk 0 and B0 of chunk 1",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            by_hand(*tables)
    with pytest.raises(ConfigError, match="stage 0 has no place for W0"):
        by_hand("F00 B00 W00", "F01 B01 W01")
    assert by_hand("F00 B00 W00", "F01 B01 W01", split=True).makespan() == 5  # stage 1 does W while stage 0 does B
    # each stage's list is possible by itself, both together are not
    both = r"stage 0 is at B0 of chunk 0 and waits for B0 of chunk 1; stage 1 is at F1 of chunk 1 and waits for F1"
    with pytest.raises(ConfigError, match=both):
        by_hand("F00 B00 F10 B10", "F01 F11 B01 B11", m=2)
    with pytest.raises(ConfigError, match=r"2 stages of 1 chunks got 2 tables and stage_of_chunk \(0, 0\)"):
        by_hand("F00 B00", "F01 B01", stage_of_chunk=(0, 0))
    with pytest.raises(ConfigError, match="mine with num_microbatches=0"):
        by_hand("", "", m=0)


def test_the_same_question_gets_the_same_value():
    assert make_schedule("1F1B", 2, 1) is make_schedule("1F1B", 2, 1)
    assert make_schedule("1F1B", 2, 1) != make_schedule("FThenB", 2, 1)


def test_refused_questions():
    schedule = make_schedule("1F1B", 2, 2)
    with pytest.raises(ConfigError, match=r"until='W'\) of schedule 1F1B; give B"):
        schedule.peak_live(0, until="W")
    for ask in (schedule.peak_live, schedule.stage_text, schedule.chunks_of):
        for stage in (2, -1):
            with pytest.raises(ConfigError, match=f"stage {stage} of schedule 1F1B; give 0 to 1"):
                ask(stage)
    for durations, name in ((Durations(-1), "forward=-1"), (Durations(send=math.inf), "send=inf")):
        with pytest.raises(ConfigError, match=f"duration {name}; give a finite number"):
            schedule.order(durations)
    assert schedule.bubble_fraction(Durations(0, 0, 0)) == schedule.span_bubble_fraction(Durations(0, 0, 0)) == 0
