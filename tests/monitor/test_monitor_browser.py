"""The page in a real Chromium: what it shows, sorts, filters and compares."""

import pytest

from blockcompact_jax.monitor.page import build_page

from .pages import (
    write_benchmark,
    write_checks,
    write_decisions,
    write_document,
    write_paths,
    write_study,
    write_sweep,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def open_page(open_html, tmp_path):
    """Builds a page of everything and opens it."""

    def opened(*, width=1200, scheme="light", **sweep):
        text = build_page(
            document=write_document(tmp_path / "contracts.md"),
            checks=write_checks(tmp_path / "checks.json"),
            results=[
                write_sweep(tmp_path / "s.jsonl", **sweep),
                write_benchmark(tmp_path / "b.json"),
            ],
        )
        return open_html(text, width=width, scheme=scheme)

    return opened


def cells(page, section, column):
    return page.locator(f"#{section} tbody tr td:nth-child({column})").all_text_contents()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_draws_without_errors_and_fits(open_page, width, scheme):
    page = open_page(width=width, scheme=scheme)
    assert page.said == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "[object" not in page.inner_text("body")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != back


def test_MON_2_MON_3_the_board_shows_each_state_and_filters_by_it(open_page):
    """MON-2, MON-3: held, failed and not run, with tests and evidence, in a real browser."""
    page = open_page()
    cards = page.locator("#contracts details")
    assert cards.count() == 3
    assert page.locator("#contracts summary .state").all_text_contents() == [
        "held",
        "failed",
        "not run",
    ]
    assert "</script>." in cards.nth(2).inner_text()
    cards.nth(0).locator("summary").click()
    cards.nth(0).get_by_text("test_things.py::test_one").wait_for()  # made when it is opened
    assert "test_things.py::test_one" in cards.nth(0).inner_text()
    assert "aaaaaaaaaaaa" in cards.nth(0).inner_text()
    page.click("#contracts button:has-text('not run')")
    assert cards.evaluate_all("all => all.map(each => each.dataset.number)") == ["ABC-3"]
    assert page.locator("#contracts tbody").inner_text().split("\t")[:2] == ["gpu", "not run"]


def test_MON_1_runs_are_filtered_sorted_and_compared(open_page):
    """MON-1: the rows asked for; unmeasured values sort last both ways."""
    page = open_page(budgets=(1, 5, 99), seeds=range(40))
    page.fill("#runs input", "budget=5 seed=3")
    assert page.locator("#runs .bar span").inner_text() == "11 of 120 rows"
    page.fill("#runs input", "")
    acceptance = page.locator("#runs thead button", has_text="acceptance rate")
    place = page.locator("#runs thead button").all_text_contents().index("acceptance rate") + 1
    for first, last in (("10.0 %", "not measured"), ("50.0 %", "not measured")):
        acceptance.click()
        found = cells(page, "runs", place)
        assert (found[0], found[-1]) == (first, last)
    page.locator("#runs tbody tr").first.click()
    page.click("#run button:has-text('Compare as B')")
    page.locator("#runs thead button", has_text="acceptance rate").click()
    page.locator("#runs tbody tr").first.click()
    page.click("#run button:has-text('Compare as A')")
    rows = dict(zip(cells(page, "compare", 1), cells(page, "compare", 4), strict=True))
    assert rows["h2d bytes"] == "5"
    assert page.locator("#charts svg circle").count() == 160
    assert page.said == []


def test_unmeasured_costs_say_so_and_a_measured_zero_is_a_number(open_page):
    page = open_page()
    costs = page.locator("#run figure").nth(1)
    values = dict(
        zip(
            costs.locator(".meter > span:nth-child(3n+1)").all_text_contents(),
            costs.locator(".meter > .value").all_text_contents(),
            strict=True,
        )
    )
    assert values["table update us"] == "0"
    assert values["plan us"] == "5"
    assert values["metadata us"] == "unmeasured"


def test_MON_1_a_study_is_drawn_by_the_mass_it_kept_and_decisions_unfold(open_html, tmp_path):
    """MON-1: a sweep without any speed has a chart, and an engine's log its table."""
    text = build_page(
        document=write_document(tmp_path / "contracts.md"),
        checks=None,
        results=[write_study(tmp_path / "s.jsonl"), write_decisions(tmp_path / "d.jsonl")],
    )
    page = open_html(text)
    measures = page.locator("#charts select").first.locator("option").all_text_contents()
    assert measures == ["mass kept", "mass kept worst layer"]
    assert page.locator("#charts figure").first.locator("circle").count() == 2
    assert "52.0 %" in page.locator("#runs tbody tr").first.inner_text()
    details = page.locator("#benchmarks details")
    assert details.locator("tbody tr").count() == 0, "made when it is opened"
    details.locator("summary").click()
    details.locator("tbody tr").first.wait_for()
    assert "not measured" in details.locator("tbody tr").first.inner_text()
    assert page.said == []


@pytest.mark.parametrize("width", [360, 1200])
def test_MON_1_MON_3_engines_and_paths_are_told_apart_without_a_board(open_html, tmp_path, width):
    """MON-1, MON-3: outside of a checkout results stand alone; no value says of which kind."""
    text = build_page(document=None, checks=None, results=[write_paths(tmp_path / "p.jsonl")])
    page = open_html(text, width=width)
    assert page.said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#contracts").count() == 0
    heads = page.locator("#runs thead button").all_text_contents()
    assert heads[0] == "engine"
    engines = cells(page, "runs", 1)
    assert engines == ["vllm-lossless", "vllm-attend", "-", "-", "-", "-"]
    drafts = cells(page, "runs", heads.index("draft tokens") + 1)
    assert drafts[:2] == ["8", "-"]  # an option that an engine lacks was not left unmeasured
    peaks = cells(page, "runs", heads.index("pool peak bytes") + 1)
    assert (peaks[0], peaks[2]) == ("not measured", "14,000")
    assert page.locator("#charts select").nth(1).input_value() == "engine"  # the first that varies
    page.locator("#charts select").nth(1).select_option("retention")
    released = page.locator("#charts figure").nth(1)
    assert released.locator("circle").count() == 6
    assert {"byte_move", "union"} <= set(released.locator(".legend span").all_text_contents())
    page.locator("#runs tbody tr").first.click()
    assert "vllm-lossless" in page.locator("#run b").first.inner_text()
