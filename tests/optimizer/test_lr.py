"""Learning rate schedulers: against formulas, against recorded PaddlePaddle runs, state, observers and errors."""

import copy
import gc
import json
import math
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.errors import CheckpointError, ConfigError, NumericsError
from polyreme.optimizer import lr

EPS = np.finfo(np.float64).eps
LAMBDAS = {"inverse": lambda k: 1.0 / (1 + k), "ninetenths": lambda k: 0.9 + 0.01 * k, "half_phase": lambda x: 0.5**x}


def build(name, arguments):
    values = {k: LAMBDAS[v] if isinstance(v, str) and v in LAMBDAS else v for k, v in arguments.items()}
    return getattr(lr, name)(**values)


# name, arguments, the rate at epoch e written out by hand
FORMULAS = [
    ("NoamDecay", dict(d_model=16, warmup_steps=4), lambda e: 0.25 * (e / 8 if e < 4 else 1 / math.sqrt(e))),
    ("PiecewiseDecay", dict(boundaries=[2, 5], values=[3, 2, 1]), lambda e: 3 if e < 2 else 2 if e < 5 else 1),
    ("PiecewiseDecay", dict(boundaries=[2, 2], values=[3, 2, 1]), lambda e: 3 if e < 2 else 1),
    ("NaturalExpDecay", dict(learning_rate=0.5, gamma=0.1), lambda e: 0.5 * math.e ** (-0.1 * e)),
    ("InverseTimeDecay", dict(learning_rate=0.5, gamma=0.1), lambda e: 0.5 / (1 + e / 10)),
    (
        "PolynomialDecay",
        dict(learning_rate=0.5, decay_steps=8, end_lr=0.1, power=2),
        lambda e: 0.1 + 0.4 * (1 - e / 8) ** 2 if e < 8 else 0.1,
    ),
    (
        "PolynomialDecay",
        dict(learning_rate=0.5, decay_steps=8, end_lr=0.1, cycle=True),
        lambda e: 0.1 + 0.4 * (1 - e / (8 if e <= 8 else 16 if e <= 16 else 24)),
    ),
    (
        "LinearWarmup",
        dict(learning_rate=0.5, warmup_steps=4, start_lr=0.1, end_lr=0.3),
        lambda e: 0.1 + 0.05 * e if e < 4 else 0.5,
    ),
    ("ExponentialDecay", dict(learning_rate=0.5, gamma=0.9), lambda e: 0.5 * math.exp(e * math.log(0.9))),
    ("MultiStepDecay", dict(learning_rate=8.0, milestones=[2, 5], gamma=0.5), lambda e: (8, 4, 2)[(e >= 2) + (e >= 5)]),
    ("StepDecay", dict(learning_rate=8.0, step_size=3, gamma=0.5), lambda e: 8 / 2 ** (e // 3)),
    ("LambdaDecay", dict(learning_rate=0.5, lr_lambda="inverse"), lambda e: 0.5 / (e + 1)),
    ("MultiplicativeDecay", dict(learning_rate=0.5, lr_lambda="inverse"), lambda e: 0.5 / math.factorial(e + 1)),
    (
        "CosineAnnealingDecay",
        dict(learning_rate=0.5, T_max=6, eta_min=0.1),
        lambda e: 0.1 + 0.4 * math.cos(math.pi * e / 12) ** 2,
    ),
    (
        "CosineAnnealingWarmRestarts",
        dict(learning_rate=0.5, T_0=3, T_mult=2),
        lambda e: 0.5 * math.cos(math.pi / 2 * (e / 3 if e < 3 else (e - 3) / 6 if e < 9 else (e - 9) / 12)) ** 2,
    ),
    ("LinearLR", dict(learning_rate=0.6, total_steps=4), lambda e: 0.2 + 0.1 * min(e, 4)),
    (
        "OneCycleLR",
        {
            **dict(max_learning_rate=1.0, total_steps=20, phase_pct=0.25, divide_factor=5),
            **dict(end_learning_rate=0, anneal_strategy="linear"),
        },
        lambda e: 0.2 + 0.2 * e if e <= 4 else 1 - (e - 4) / 15,
    ),
    (
        "OneCycleLR",
        dict(max_learning_rate=1.0, total_steps=20, phase_pct=0.05, end_learning_rate=0.0),
        lambda e: math.cos(math.pi / 2 * e / 19) ** 2,  # the rise has no length: max from the first epoch
    ),
    (
        "CyclicLR",
        dict(base_learning_rate=0.1, max_learning_rate=0.9, step_size_up=4, mode="triangular2"),
        lambda e: 0.1 + 0.2 * (4 - abs(e % 8 - 4)) / 2 ** (e // 8),
    ),
]


@pytest.mark.parametrize(("name", "arguments", "formula"), FORMULAS, ids=[f[0] for f in FORMULAS])
def test_rate_is_the_formula(name, arguments, formula):
    s = build(name, arguments)
    for epoch in range(20):
        # each side takes up to epoch + 10 roundings of numbers of size at most 8 (the largest rate)
        assert s() == pytest.approx(formula(epoch), rel=0, abs=(epoch + 10) * 8 * EPS), epoch
        assert (s.last_epoch, s.last_lr) == (epoch, s())
        if epoch < 19:
            s.step()


RECORD = json.loads((Path(__file__).parent / "fixtures" / "lr.json").read_text())["cases"]

# Where this package departs from the record, and why: (class, whether a case is meant) -> reason.
DEPARTURES = [
    ("CosineAnnealingDecay", lambda c: "last_epoch" in c["arguments"], "the record walks from base_lr on resume"),
    ("LinearLR", lambda c: "last_epoch" in c["arguments"] or 7 in c["actions"], "so too, and on a jump"),
    ("OneCycleLR", lambda c: True, "the record rises again, or goes below 0, at epoch total_steps"),
]  # fmt: skip


def departs(case):
    return any(case["class"] == name and meant(case) for name, meant, _ in DEPARTURES)


def play(case):
    inner = case.get("inner")
    extra = {"learning_rate": build(inner["class"], inner["arguments"])} if inner else {}
    s = build(case["class"], {**case["arguments"], **extra})
    yield s
    for action in case["actions"]:
        if action == "step":
            s.step()
        elif isinstance(action, dict):
            s.step(action["metric"], epoch=action.get("epoch"))
        else:
            s.step(action)
        yield s


def check_seen(s, seen):
    # The record may come by a recursion of up to 24 steps, a few roundings of numbers below 2 in each.
    close = {"rel": 0, "abs": 24 * 8 * 2 * EPS}
    assert s() == pytest.approx(seen["lr"], **close)
    assert s.last_epoch == seen["last_epoch"]
    state, want = dict(s.state_dict()), dict(seen["state"])
    if "LinearWarmup_LR" in want:
        assert state.pop("LinearWarmup_LR") == pytest.approx(want.pop("LinearWarmup_LR"), **close)
    if want.get("best", 0) is None:
        assert state.pop("best") is want.pop("best")
    assert state == pytest.approx(want, **close)


@pytest.mark.parametrize("case", [c for c in RECORD if not departs(c)], ids=lambda c: c["class"])
def test_runs_as_recorded(case):
    for s, seen in zip(play(case), case["seen"], strict=True):
        check_seen(s, seen)


@pytest.mark.parametrize("case", [c for c in RECORD if c["class"] == "OneCycleLR"], ids=lambda c: str(c["arguments"]))
def test_one_cycle_runs_as_recorded_up_to_its_last_step(case):
    total = case["arguments"]["total_steps"]
    for s, seen in zip(play({**case, "actions": case["actions"][: total - 1]}), case["seen"], strict=False):
        check_seen(s, seen)


def test_one_cycle_holds_its_end_and_then_refuses():
    s = lr.OneCycleLR(1.0, total_steps=3, anneal_strategy="linear", end_learning_rate=0.01)
    for _ in range(3):
        s.step()
    assert s() == pytest.approx(0.01, abs=4 * EPS)
    with pytest.raises(ConfigError, match="total_steps=3 and stepped to epoch 4"):
        s.step()


EVERY = [(name, arguments) for name, arguments, _ in FORMULAS]
every = pytest.mark.parametrize(("name", "arguments"), EVERY, ids=[n for n, _ in EVERY])


@every
def test_walk_jump_and_resume_agree(name, arguments):
    walked, jumped = build(name, arguments), build(name, arguments)
    for _ in range(11):
        walked.step()
    jumped.step(11)
    assert jumped() == pytest.approx(walked(), rel=16 * EPS)
    assert build(name, {**arguments, "last_epoch": 10})() == pytest.approx(walked(), rel=16 * EPS)


@every
def test_state_goes_through_json_and_continues_bit_for_bit(name, arguments):
    a, b = build(name, arguments), build(name, arguments)
    for _ in range(7):
        a.step()
    b.set_state_dict(json.loads(json.dumps(a.state_dict())))
    assert b() == a()
    for _ in range(6):
        a.step()
        b.step()
        assert (a(), a.state_dict()) == (b(), b.state_dict())


@every
def test_bad_learning_rate_is_refused(name, arguments):
    key = next((k for k in arguments if k.endswith("learning_rate")), None)
    for bad in (-1.0, "fast", math.nan, True):
        if key:
            with pytest.raises(ConfigError, match=f"{name}: .*learning_rate="):
                build(name, {**arguments, key: bad})


def warmed():
    return lr.LinearWarmup(lr.CosineAnnealingDecay(0.4, T_max=9), warmup_steps=3, start_lr=0.1, end_lr=0.4)


def test_warmup_saves_and_restores_its_inner_scheduler():
    a, b = warmed(), warmed()
    for _ in range(6):
        a.step()
    b.set_dict(json.loads(json.dumps(a.state_dict())))
    assert b.state_dict() == a.state_dict()
    assert b.learning_rate.last_epoch == 3
    a.step()
    b.step()
    assert a() == b()


def test_warm_restarts_take_fractions_and_resume_in_between():
    a = lr.CosineAnnealingWarmRestarts(0.5, T_0=3, T_mult=2)
    a.step(2.5)
    assert (a.last_epoch, a()) == (2, pytest.approx(0.5 * math.cos(math.pi * 2.5 / 6) ** 2, abs=8 * EPS))
    b = lr.CosineAnnealingWarmRestarts(0.5, T_0=3, T_mult=2)
    b.set_state_dict(json.loads(json.dumps(a.state_dict())))
    a.step()
    b.step()
    assert a() == b() == pytest.approx(0.5 * math.cos(math.pi * 0.5 / 12) ** 2, abs=8 * EPS)
    b.step(4)
    assert "epoch_fraction" not in b.state_dict()


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(0, 3), st.integers(0, 3), st.sampled_from(("min", "max")))
def test_plateau_only_falls_and_keeps_its_floor(metrics, patience, cooldown, mode):
    s = lr.ReduceOnPlateau(1.0, mode=mode, patience=patience, cooldown=cooldown, factor=0.5, min_lr=0.01)
    rates = [s()]
    for metric in metrics:
        s.step(metric)
        rates.append(s())
    assert all(a >= b >= 0.01 for a, b in pairwise(rates))
    cuts = [i for i, (a, b) in enumerate(pairwise(rates)) if b < a]
    assert all(b - a > patience + cooldown for a, b in pairwise(cuts))


class OneElement:
    """What a Tensor looks like to a scheduler."""

    def __init__(self, *values):
        self.values = values

    def numpy(self):
        return np.array(self.values, np.float32)


def test_plateau_takes_arrays_and_tensors_and_saves_plain_numbers():
    s = lr.ReduceOnPlateau(1.0)
    for metric in (np.array([3.0]), np.float32(2.0), OneElement(1.0), 1):
        s.step(metric)
    assert s.best == 1.0
    assert s.get_lr() == 1.0
    assert json.loads(json.dumps(s.state_dict())) == s.state_dict()


def test_plateau_never_takes_nan_for_better():
    s = lr.ReduceOnPlateau(1.0, patience=1)
    s.step(math.nan)
    s.step(math.nan)
    assert s.best is None
    assert s() == pytest.approx(0.1)


class Counting(lr.LRScheduler):
    """A user's scheduler with state of its own."""

    def __init__(self):
        self.calls = np.int64(0)
        super().__init__(0.5)

    def get_lr(self):
        self.calls += 1
        return OneElement(self.base_lr / self.calls)

    def state_keys(self):
        self.keys = ["last_epoch", "last_lr", "calls"]


def test_a_subclass_names_its_own_state():
    s = Counting()
    s.step()
    assert s.state_dict() == {"last_epoch": 1, "last_lr": 0.25, "calls": 2}
    assert type(s.last_lr) is float
    json.dumps(s.state_dict())


class Holder:
    def __init__(self):
        self.seen = []

    def set(self, rate):
        self.seen.append(rate)


def test_observers_hear_every_change_and_are_held_weakly():
    s, holder, gone = lr.ExponentialDecay(1.0, 0.5), Holder(), Holder()
    seen = gone.seen
    s.subscribe(holder.set)
    s.subscribe(gone.set)
    s.step()
    del gone
    gc.collect()
    s.step(3)
    s.set_state_dict({"last_epoch": 1, "last_lr": 0.7})
    assert holder.seen == [0.5, 0.125, 0.7]
    assert seen == [0.5]
    s.unsubscribe(holder.set)
    s.step()
    assert len(holder.seen) == 3
    with pytest.raises(ConfigError, match="does not observe this ExponentialDecay"):
        s.unsubscribe(holder.set)


def test_a_plain_function_observes_and_the_rest_of_the_state_is_set_before_it_hears():
    s, seen = lr.ExponentialDecay(1.0, 0.5), []

    def observe(rate):
        seen.append((rate, s.last_epoch))

    s.subscribe(observe)
    s.set_state_dict({"last_lr": 0.7, "last_epoch": 9})
    assert seen == [(0.7, 9)]


def test_plateau_tells_observers_only_of_cuts():
    s, holder = lr.ReduceOnPlateau(1.0, patience=0, factor=0.5), Holder()
    s.subscribe(holder.set)
    for metric in (1.0, 1.0, 0.5):
        s.step(metric)
    assert holder.seen == [0.5]


def test_copies_and_pickles_leave_the_observers_behind():
    s, holder = warmed(), Holder()
    s.subscribe(holder.set)
    for other in (copy.deepcopy(s), pickle.loads(pickle.dumps(s))):
        other.step()
        assert other() == pytest.approx(0.2)
    assert holder.seen == []
    assert s.learning_rate is not copy.deepcopy(s).learning_rate


def test_verbose_prints_each_step(capsys):
    lr.StepDecay(0.5, 1, gamma=0.5, verbose=True).step()
    plateau = lr.ReduceOnPlateau(1.0, patience=0, factor=0.5, verbose=True)
    plateau.step(1.0)
    plateau.step(1.0)
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 0: StepDecay set learning rate to 0.5.",
        "Epoch 1: StepDecay set learning rate to 0.25.",
        "Epoch 2: ReduceOnPlateau set learning rate to 0.5.",
    ]


ERRORS = [
    (lambda: lr.ExponentialDecay(0.1, 1.0), "ExponentialDecay: gamma=1.0; give a number above 0.0 and below 1.0"),
    (lambda: lr.ExponentialDecay(0.1, 0.9, last_epoch=-2), "last_epoch=-2"),
    (lambda: lr.ExponentialDecay(0.1, 0.9).step(-1), "epoch=-1; give a number at least 0"),
    (lambda: lr.NaturalExpDecay(0.1, 0), "NaturalExpDecay: gamma=0"),
    (lambda: lr.InverseTimeDecay(0.1, -1), "InverseTimeDecay: gamma=-1"),
    (lambda: lr.NoamDecay(0, 10), "d_model=0"),
    (lambda: lr.NoamDecay(8, 0), "warmup_steps=0"),
    (lambda: lr.PiecewiseDecay([3], [0.1]), "1 boundaries and 1 values"),
    (lambda: lr.PiecewiseDecay([], [0.1]), "give at least one boundary"),
    (lambda: lr.PiecewiseDecay([5, 3], [1, 2, 3]), r"boundaries=\[5, 3\]; give a list of numbers, none below"),
    (lambda: lr.PiecewiseDecay([3], [1, "x"]), "values='x'"),
    (lambda: lr.PolynomialDecay(0.1, 2.5), "decay_steps=2.5; give a whole number"),
    (lambda: lr.PolynomialDecay(0.1, 5, power=0), "power=0"),
    (lambda: lr.LinearWarmup(0.1, 0, 0, 0.1), "warmup_steps=0"),
    (lambda: lr.LinearWarmup(0.1, 3, 0.2, 0.1), "end_lr=0.1; give a number above 0.2"),
    (lambda: lr.LinearWarmup(lr.ReduceOnPlateau(0.1), 3, 0, 0.1), "cannot step a ReduceOnPlateau"),
    (lambda: lr.MultiStepDecay(0.1, [4, 4]), r"milestones=\[4, 4\]"),
    (lambda: lr.MultiStepDecay(0.1, 5), "milestones=5"),
    (lambda: lr.MultiStepDecay(0.1, [2], gamma=1.0), "gamma=1.0"),
    (lambda: lr.StepDecay(0.1, 0), "step_size=0"),
    (lambda: lr.LambdaDecay(0.1, 3), "lr_lambda=3; give a function"),
    (lambda: lr.MultiplicativeDecay(0.1, 3), "lr_lambda=3"),
    (lambda: lr.CosineAnnealingDecay(0.1, 0), "T_max=0"),
    (lambda: lr.CosineAnnealingDecay(0.1, 5, eta_min="a"), "eta_min='a'"),
    (lambda: lr.CosineAnnealingWarmRestarts(0.1, 3, T_mult=1.5), "T_mult=1.5"),
    (lambda: lr.OneCycleLR(1.0, 10, phase_pct=1.5), "phase_pct=1.5; give a number at least 0.0 and at most 1.0"),
    (lambda: lr.OneCycleLR(1.0, 10, phase_pct=0.5, three_phase=True), "phase_pct=0.5; .*below 0.5"),
    (lambda: lr.OneCycleLR(1.0, 10, anneal_strategy="x"), "anneal_strategy='x'; give one of cos, linear"),
    (lambda: lr.OneCycleLR(1.0, 10, divide_factor=0), "divide_factor=0"),
    (lambda: lr.CyclicLR(0.1, 1.0, 4, 0), "step_size_down=0"),
    (lambda: lr.CyclicLR(0.1, 1.0, 4, mode="x"), "mode='x'; give one of triangular"),
    (lambda: lr.CyclicLR(0.1, 1.0, 4, scale_mode="x"), "scale_mode='x'"),
    (lambda: lr.CyclicLR(0.1, 1.0, 4, scale_fn=2), "scale_fn=2"),
    (lambda: lr.LinearLR(0.1, 3, start_factor=0), "start_factor=0; give a number above 0.0 and at most 1.0"),
    (lambda: lr.LinearLR(0.1, 3, end_factor=2), "end_factor=2"),
    (lambda: lr.ReduceOnPlateau(0.1, mode="x"), "mode='x'; give one of min, max"),
    (lambda: lr.ReduceOnPlateau(0.1, factor=1.0), "factor=1.0"),
    (lambda: lr.ReduceOnPlateau(0.1, threshold_mode="x"), "threshold_mode='x'"),
    (lambda: lr.ReduceOnPlateau(0.1).step([1.0]), r"step got \[1.0\]; give one number"),
    (lambda: lr.ReduceOnPlateau(0.1).step(np.ones(2)), "give one number, array or Tensor"),
]


@pytest.mark.parametrize(("make", "match"), ERRORS, ids=[m[:30] for _, m in ERRORS])
def test_bad_input_says_what_to_change(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"last_epoch": 3}, r"\['last_lr'\] are missing"),
        ({"last_epoch": 3, "last_lr": 0.1, "best": 1.0}, r"\['best'\] unknown"),
        (warmed().state_dict(), r"\['LinearWarmup_LR'\] unknown"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(state, match):
    s = lr.ExponentialDecay(0.1, 0.9)
    with pytest.raises(CheckpointError, match=match):
        s.set_state_dict(state)
    assert s.state_dict() == {"last_epoch": 0, "last_lr": 0.1}


def test_warmup_refuses_a_state_without_its_inner_scheduler():
    with pytest.raises(CheckpointError, match=r"\['LinearWarmup_LR'\] are missing"):
        warmed().set_state_dict({"last_epoch": 3, "last_lr": 0.1})


def test_a_rate_that_is_not_finite_is_refused():
    with pytest.raises(NumericsError, match="LambdaDecay gives learning rate nan at epoch 0"):
        lr.LambdaDecay(0.1, lambda epoch: math.nan)


def test_the_base_class_alone_has_no_rate():
    with pytest.raises(NotImplementedError, match="must define get_lr"):
        lr.LRScheduler(0.1)


def test_all_public_schedulers_are_there():
    assert len(lr.__all__) == 18
    assert all(issubclass(getattr(lr, name), lr.LRScheduler) for name in lr.__all__)
