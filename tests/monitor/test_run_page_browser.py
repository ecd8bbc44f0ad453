"""The page of one run in a real Chromium: residency over time, decisions, costs, acceptance."""

import pytest

from blockcompact_jax.monitor.page import build_page, build_run_page

from .pages import make_report, write_document, write_sweep

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def page(open_html):
    return open_html(build_run_page(make_report()))


def cells(page, section, column):
    return page.locator(f"{section} tbody tr td:nth-child({column})").all_text_contents()


def kind_at(page, block, row):
    """What the page says of the block under the pointer."""
    box = page.locator(".residency svg").bounding_box()
    width = 14  # blocks of the longest sequence: 135 tokens of 10
    x = box["x"] + box["width"] * (block + 0.5) / width
    page.mouse.move(x, box["y"] + box["height"] * (row + 0.5) / 2)
    return page.locator(".residency output").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_of_a_run_draws_without_errors_and_fits(open_html, width, scheme):
    page = open_html(build_run_page(make_report()), width=width, scheme=scheme)
    assert page.said == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "[object" not in page.inner_text("body")
    assert page.locator("main > section > h2").all_text_contents() == ["One run", "Sources"]
    assert "acceptance rate 50.0 %" in page.inner_text("#run")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    shades = {
        kind: page.evaluate(f"getComputedStyle(document.querySelector('path.{kind}')).fill")
        for kind in ("kept", "fresh", "tail", "absent")
    }
    assert len(set(shades.values())) == 4


def test_the_map_shows_each_layers_blocks_at_the_chosen_time(page):
    page.locator(".residency").scroll_into_view_if_needed()
    slider = page.get_by_role("slider", name="Selection")
    assert "Selection 1 of 3, after the prefill: 115 tokens" in page.inner_text(".residency .facts")
    assert (
        kind_at(page, 2, 0) == "Layer 0, block 2, tokens 20 to 29: new: uploaded, or from the tail"
    )
    assert kind_at(page, 2, 1).endswith("Layer 3, block 2, tokens 20 to 29: not resident")
    assert kind_at(page, 11, 1).endswith(": always-resident tail")
    assert kind_at(page, 13, 1) == "Point at a block."  # no such block yet
    slider.press("ArrowRight")
    assert "after round 2: 125 tokens" in page.inner_text(".residency .facts")
    assert slider.get_attribute("aria-valuetext") == page.inner_text(".residency .facts")
    assert kind_at(page, 1, 0).endswith(": resident before and now")
    assert kind_at(page, 2, 0).endswith(": dropped by this selection")
    assert kind_at(page, 7, 0).endswith(": new: uploaded, or from the tail")
    page.click(".residency summary")
    assert [cells(page, ".residency", column) for column in range(1, 6)] == [
        ["0", "3"],
        ["3", "3"],
        ["1", "0"],
        ["2", "3"],
        ["1", "0"],
    ]
    page.get_by_role("button", name="Later selection").click()
    assert "1 physical blocks released" not in page.inner_text(".residency .facts")
    assert "2 physical blocks released" in page.inner_text(".residency .facts")
    assert cells(page, ".residency", 3) == ["1", "1"]
    assert page.said == []


def test_CST_1_CST_2_the_log_shows_every_decision_and_what_was_unmeasured(page):
    """CST-1, CST-2: open decisions say what is missing and what was done; a 0 is a number."""
    heads = page.locator(".decisions thead button").all_text_contents()
    table = {name: cells(page, ".decisions", place) for place, name in enumerate(heads, start=1)}
    assert table["round"] == ["1", "2", "3", "4", "5", "6"]
    assert table["action"] == ["go on", "select anew"] * 3
    assert table["is retained"] == ["open", "open", "does not pay", "pays", "does not pay", "pays"]
    assert table["basis"][:3] == ["unmeasured: fixed period kept"] * 2 + ["costs"]
    assert table["benefit us"] == ["not measured", "not measured", "5", "27", "5", "27"]
    assert table["cost us"] == ["18"] * 6
    assert table["unmeasured"][0].startswith("attention_before, attention_after, avoided_stall")
    assert table["avoided stall us"][1:3] == ["not measured", "0"]
    assert table["assumed"][2] == "avoided_stall"
    assert len(heads) == 8 + 7 + 10  # the round, the decision, and each term of CST
    page.fill(".decisions input", "basis=costs pays")
    assert cells(page, ".decisions", 1) == ["4"]
    page.fill(".decisions input", "is_retained=pays")
    assert cells(page, ".decisions", 1) == ["4", "6"]
    page.fill(".decisions input", "")
    page.locator(".decisions thead button", has_text="benefit us").click()
    assert cells(page, ".decisions", 1)[-2:] == ["1", "2"]  # not measured is last
    assert page.said == []


def test_costs_are_a_waterfall_and_rounds_a_chart(page):
    """Each bar begins where the one before ends; what is unmeasured has none and is in no sum."""
    costs = page.locator("#run .waterfall")
    names = costs.locator("> span:nth-child(3n+1)").all_text_contents()
    values = dict(zip(names, costs.locator("> .value").all_text_contents(), strict=True))
    assert values["plan us"] == "5"
    assert values["metadata us"] == "unmeasured"
    assert values["measured terms (2 of 6)"] == "5"
    begins = costs.locator(".track div").evaluate_all(
        "all => all.map(each => each.style.marginLeft)"
    )
    assert begins == ["0%", "0%", "100%", "100%", "100%", "100%", "0%"]
    dots = page.locator(".acceptance circle")
    assert dots.count() == 6
    tops = dots.evaluate_all("all => all.map(each => Number(each.getAttribute('cy')))")
    assert tops[5] < tops[4]  # 6 of 8 accepted lies above 2 of 8
    assert page.locator(".acceptance .anew").count() == 3
    assert page.locator(".acceptance .mean").count() == 3
    assert page.locator("#run figure.map rect.fresh").count() == 3


def test_MON_1_a_sweep_with_courses_opens_the_same_views(open_html, tmp_path):
    """MON-1: the row that is picked shows its course; a row without one says so."""
    sweeps = [
        write_sweep(tmp_path / "with.jsonl", has_course=True),
        write_sweep(tmp_path / "without.jsonl"),
    ]
    document = write_document(tmp_path / "contracts.md")
    page = open_html(build_page(document=document, checks=None, results=sweeps))
    assert page.locator(".residency").count() == 1
    page.locator("#runs tbody tr").nth(1).click()
    assert page.locator(".decisions tbody tr").count() == 6
    page.locator("#runs tbody tr").nth(2).click()
    assert page.locator(".residency").count() == 0
    assert "No course was recorded" in page.inner_text("#run")
    assert not [head for head in cells(page, "#run details", 1) if head.startswith("course.")]
    assert page.said == []
