"""The record of a run's course: bits, counts and decisions, against what was put in."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcompact_jax.costs import RetainBenefits, RetainCosts, assumed, decide_retention, measured
from blockcompact_jax.course import (
    RoundRecord,
    RunCourse,
    SelectionRecord,
    check_course,
)
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.metrics import CompactionMetrics
from blockcompact_jax.reselection import Basis, RoundDecision


def selection(resident, **facts):
    rows = len(resident)
    return SelectionRecord(
        **{
            "num_tokens": 32 * resident.shape[1] + 5,
            "budget_blocks": 3,
            "num_uploaded": np.arange(rows),
            "num_kept": np.zeros(rows, int),
            "num_dropped": np.ones(rows, int),
            "booked": CompactionMetrics(h2d_bytes=7, plan_us=2.0),
            **facts,
        },
        resident_blocks=resident,
    )


def decision(**costs):
    terms = RetainCosts(**{name: measured(value) for name, value in costs.items()})
    return RoundDecision(
        age_rounds=2,
        is_reselecting=True,
        basis=Basis.UNMEASURED,
        retention=decide_retention(
            terms, RetainBenefits(avoided_stall=assumed(0.0)), horizon_steps=3, margin_us=1.5
        ),
    )


def unpacked(text, length):
    """Bit by bit: block b is bit b % 8 of byte b // 8."""
    content = base64.b64decode(text)
    return [bool(content[block // 8] >> (block % 8) & 1) for block in range(length)]


@given(st.lists(st.lists(st.booleans(), min_size=21, max_size=21), min_size=1, max_size=4))
def test_the_map_has_the_bit_of_each_block(rows):
    course = RunCourse(layers=tuple(range(len(rows))), block_tokens=32)
    course.add_selection(selection(np.array(rows)))
    (found,) = check_course(json.loads(json.dumps(course.to_dict())))["selections"]
    assert [unpacked(text, 21) for text in found["resident"]] == rows
    assert found["num_candidate_blocks"] == 21
    assert found["num_uploaded"] == list(range(len(rows)))
    assert found["metrics"]["h2d_bytes"] == 7
    assert found["metrics"]["wait_us"] is None


def test_CST_2_a_round_keeps_every_term_and_names_the_unmeasured_ones():
    """CST-2: six costs, four benefits, horizon and margin; no value where nobody measured."""
    course = RunCourse(layers=(0,), block_tokens=32)
    course.add_round(
        RoundRecord(
            num_drafted=8,
            num_accepted=5,
            num_gained=6,
            round_us=1234.5,
            decision=decision(plan=4.0, kv_move=0.0),
        )
    )
    rounds = course.to_dict()["rounds"]
    (row,) = [dict(zip(rounds["columns"], each, strict=True)) for each in rounds["rows"]]
    assert (row["plan_us"], row["kv_move_us"], row["avoided_stall_us"]) == (4.0, 0.0, 0.0)
    missing = ["table_update", "metadata", "wait", "allocator"]
    missing += ["attention_before", "attention_after", "output_penalty"]
    assert row["unmeasured"].split(", ") == missing
    assert {row[f"{name}_us"] for name in missing} == {None}
    assert row["assumed"] == "avoided_stall"
    assert (row["is_retained"], row["cost_us"], row["benefit_us"]) == (None, None, None)
    assert (row["horizon_rounds"], row["margin_us"]) == (3, 1.5)
    assert (row["round"], row["age_rounds"], row["action"]) == (1, 2, "select anew")
    assert row["basis"] == "unmeasured: fixed period kept"
    assert (row["num_drafted"], row["num_accepted"], row["num_gained"]) == (8, 5, 6)


def test_maps_beyond_the_limit_leave_out_every_second_selection():
    resident = np.ones((2, 24), bool)  # 4 characters a row
    course = RunCourse(layers=(0, 1), block_tokens=32, max_residency_bytes=40)
    for number in range(100):
        course.add_selection(selection(resident, num_tokens=1000 + number))
        found = course.to_dict()
        assert len(found["selections"]) <= 5
        numbers = [each["number"] for each in found["selections"]]
        assert numbers == list(range(0, number + 1, found["selection_stride"]))
        assert [each["num_tokens"] for each in found["selections"]] == [1000 + n for n in numbers]
    assert found["num_selections"] == 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda course: course.update(schema="other"), "expected `schema`"),
        (lambda course: course.pop("layers"), "no usable `layers`"),
        (lambda course: course.update(block_tokens=None), "no usable `block_tokens`"),
        (lambda course: course.pop("selections"), "no usable `selections`"),
        (lambda course: course["selections"][0].pop("num_tokens"), "no usable `num_tokens`"),
        (lambda course: course["selections"][0]["resident"].pop(), "1 rows of `resident`"),
        (lambda course: course["selections"][0].pop("num_kept"), "no usable `num_kept`"),
        (
            lambda course: course.update(selections=[3]),
            r"`selections\[0\]` has '3'; expected an obj",
        ),
        (lambda course: course["selections"][0].update(resident=2), "no usable `resident`"),
        (lambda course: course["selections"][0].update(number=True), "no usable `number`"),
        (lambda course: course.update(rounds={}), "`rounds` has no usable `columns`"),
        (lambda course: course["rounds"].update(rows=7), "`rounds` has no usable `rows`"),
        (lambda course: course["rounds"]["rows"][0].pop(), r"`rounds.rows\[0\]` that does not fit"),
        (
            lambda course: course["rounds"]["rows"].append(5),
            r"`rounds.rows\[1\]` that does not fit",
        ),
        (lambda course: course["rounds"]["columns"].pop(0), "rounds without `round`"),
    ],
)
def test_what_is_no_course_is_refused(change, said):
    course = RunCourse(layers=(0, 3), block_tokens=32)
    course.add_selection(selection(np.ones((2, 9), bool)))
    course.add_round(
        RoundRecord(
            num_drafted=8, num_accepted=5, num_gained=6, round_us=1.0, decision=decision(plan=4.0)
        )
    )
    document = course.to_dict()
    check_course(document)
    change(document)
    with pytest.raises(CompactionError, match=said):
        check_course(document)
    with pytest.raises(CompactionError, match="`course` is none of a run"):
        check_course([])
