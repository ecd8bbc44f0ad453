"""What stands in the page, without a browser."""

import json
import re
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blockcompact_jax.costs import RetainCosts, assumed, measured
from blockcompact_jax.decision_log import DecisionLog
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor.page import build_page, build_run_page
from blockcompact_jax.monitor.results import read_results
from blockcompact_jax.monitor.serve import serve_page
from blockcompact_jax.period import PeriodByCosts

from .pages import (
    make_report,
    write_benchmark,
    write_checks,
    write_comparison,
    write_decisions,
    write_document,
    write_sweep,
)

STORED_RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


@pytest.fixture
def document(tmp_path):
    return write_document(tmp_path / "contracts.md")


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def states_of(page):
    return {each["number"]: each["state"] for each in data_of(page)["board"]["contracts"]}


def rows_of(page):
    runs = data_of(page)["runs"]
    return [dict(zip(runs["columns"], row, strict=True)) for row in runs["rows"]]


def test_MON_3_without_checks_every_contract_is_not_run(document):
    """MON-3: no result file is no success."""
    page = build_page(document=document, checks=None, results=[])
    assert states_of(page) == {"ABC-1": "not run", "ABC-2": "not run", "ABC-3": "not run"}


def test_MON_2_the_board_shows_the_states_of_the_checks(document, tmp_path):
    """MON-2: state, tests and evidence come from the file, and nothing else decides them."""
    checks = write_checks(tmp_path / "checks.json")
    page = build_page(document=document, checks=checks, results=[])
    assert states_of(page) == {"ABC-1": "held", "ABC-2": "failed", "ABC-3": "not run"}
    assert data_of(page)["board"]["sources"]["tests/area/test_things.py"] == "a" * 64
    assert {source["name"] for source in data_of(page)["sources"]} == {
        "contracts.md",
        "checks.json",
    }


def test_MON_2_checks_of_another_document_are_refused(document, tmp_path):
    """MON-2: a contract whose words have changed since is not shown as held."""
    checks = write_checks(tmp_path / "checks.json")
    document.write_text(document.read_text().replace("Another.", "Quite another."))
    with pytest.raises(CompactionError, match="ABC-2 differ"):
        build_page(document=document, checks=checks, results=[])
    checks.write_text('{"schema": "other"}')
    with pytest.raises(CompactionError, match="`schema` is 'other'"):
        build_page(document=document, checks=checks, results=[])


def test_MON_1_the_page_holds_the_rows_of_a_sweep(document, tmp_path):
    """MON-1: configuration, measures and costs; what is unmeasured is null, a measured 0 is 0."""
    sweep = write_sweep(tmp_path / "s.jsonl", budgets=(1, 99))
    done, failed = rows_of(build_page(document=document, checks=None, results=[sweep]))
    assert (done["draft_tokens"], done["acceptance_rate"], done["budget_share"]) == (8, 0.1, 0.1)
    assert (done["cost.plan_us"], done["cost.table_update_us"]) == (5.0, 0.0)
    assert done["cost.metadata_us"] is None
    assert done["cost.wait_us"] is None
    assert (done["metrics.resident_move_bytes"], done["seconds.full_decode"]) == (0, None)
    assert (failed["state"], failed["error"]) == ("failed", "ValueError: too large")
    assert failed["acceptance_rate"] is None
    assert "text" not in done


def test_benchmarks_are_tables_and_their_sampled_runs_are_runs(document, tmp_path):
    path = tmp_path / "end.json"
    sweep = write_sweep(tmp_path / "s.jsonl", budgets=(5,))
    report = json.loads(sweep.read_text())["report"]
    rows = [{"workload": {"model": "m"}, "speedup": 2.0, "samples": [report]}]
    path.write_text(json.dumps({"machine": {"processor": "p"}, "results": rows}))
    found = read_results(path)
    assert [table.rows for table in found.tables] == [[{"workload.model": "m", "speedup": 2.0}]]
    assert [run["acceptance_rate"] for run in found.runs] == [0.5]
    assert found.origin == {"machine.processor": "p"}
    path.write_text(json.dumps(report))
    assert [run["file"] for run in read_results(path).runs] == ["end.json"]
    other = write_benchmark(tmp_path / "kernels.json")
    page = build_page(document=document, checks=None, results=[other])
    table = data_of(page)["benchmarks"][0]["tables"][0]
    assert (table["columns"], table["rows"]) == (
        ["job", "median_us"],
        [["pack", 3.5], ["gather", None]],
    )


def test_CMP_4_comparisons_are_rows_with_their_figures_apart(document, tmp_path):
    """CMP-4, MON-1: KL of drafts against budgets; the verifier's own figures stand beside them."""
    files = [
        write_comparison(tmp_path / f"{budget}.json", budget=budget, kl=kl)
        for budget, kl in (("4b", 0.25), ("50%", 0.125))
    ]
    data = data_of(build_page(document=document, checks=None, results=files))
    rows = [dict(zip(data["runs"]["columns"], row, strict=True)) for row in data["runs"]["rows"]]
    assert [row["draft.mean_kl"] for row in rows] == [0.25, 0.125]
    assert [row["numeric.mean_kl"] for row in rows] == [0.0, 0.0]
    assert [row["budget_share"] for row in rows] == [0.4, 0.5]
    assert [row["file"] for row in rows] == ["4b.json", "50%.json"]
    assert (rows[0]["metrics.h2d_bytes"], rows[0]["draft_tokens"]) == (11, 8)
    assert data["benchmarks"] == []
    broken = json.loads(files[0].read_text())
    del broken["configuration"]["budget"]
    files[0].write_text(json.dumps(broken))
    with pytest.raises(CompactionError, match=r"4b\.json', which has no 'budget'"):
        build_page(document=document, checks=None, results=files)


def test_CST_2_decisions_of_an_engine_are_a_table(document, tmp_path):
    """CST-2: every value of a decision stands in the page, and a bound that was none as null."""
    path = write_decisions(tmp_path / "decisions.jsonl")
    page = build_page(document=document, checks=None, results=[path])
    (benchmark,) = data_of(page)["benchmarks"]
    assert benchmark["origin"]["engine"] == "made up"
    (table,) = benchmark["tables"]
    assert table["name"] == "decisions"
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]] == [
        {"number": 0, "age_tokens": 4, "mass_lost": 0.25, "max_mass_lost": None},
        {"number": 1, "age_tokens": 8, "mass_lost": 0.5, "max_mass_lost": None},
    ]


def test_CST_1_CST_2_terms_of_a_chosen_period_are_a_table(document, tmp_path):
    """CST-1, CST-2: every term with its value, what is assumed and what is unmeasured by name."""
    period = PeriodByCosts(first_rounds=4)
    period.book_selection(RetainCosts(plan=measured(5.0), kv_move=assumed(0.0)))
    path = tmp_path / "decisions.jsonl"
    DecisionLog(path, engine="made up").add(period.decision_row())
    (benchmark,) = data_of(build_page(document=document, checks=None, results=[path]))["benchmarks"]
    (table,) = benchmark["tables"]
    (row,) = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    assert (row["plan_us"], row["kv_move_us"], row["wait_us"]) == (5.0, 0.0, None)
    assert row["assumed"] == "kv_move, avoided_stall"
    assert {"wait", "output_penalty"} < set(row["unmeasured"].split(", "))
    assert (row["horizon_rounds"], row["margin_us"], row["benefit_us"]) == (4, 0.0, None)


@pytest.mark.skipif(not STORED_RESULTS, reason="not a source checkout")
def test_every_stored_result_of_this_project_stands_in_the_page(document):
    """MON-1: `blockcompact monitor 'benchmarks/results/*.json'`, as the guide has it."""
    page = build_page(document=document, checks=None, results=STORED_RESULTS)
    benchmarks = {each["file"]: each for each in data_of(page)["benchmarks"]}
    assert list(benchmarks) == [path.name for path in STORED_RESULTS]
    for each in benchmarks.values():
        assert all(table["rows"] for table in each["tables"])
        assert each["origin"]["machine.processor"]
    quality = {table["name"]: table for table in benchmarks["quality.json"]["tables"]}["results"]
    assert {"model", "method", "budget", "num_kept_tokens", "kl"} <= set(quality["columns"])


@pytest.mark.parametrize("text", ["[]", "{}", '{"a": 1}', "no json"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(CompactionError, match="`results` is"):
        read_results(path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
def test_numbers_that_JSON_does_not_have_are_refused(tmp_path, number):
    path = tmp_path / "r.json"
    path.write_text(f'{{"results": [{{"median_us": {number}}}]}}')
    with pytest.raises(CompactionError, match=rf"`results` is .*no JSON \({number}"):
        read_results(path)


def test_a_report_that_lacks_a_value_is_refused_by_name(tmp_path):
    sweep = write_sweep(tmp_path / "s.jsonl", budgets=(5,))
    report = json.loads(sweep.read_text())["report"]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**report, "metrics": 3}))
    with pytest.raises(CompactionError, match=r"`results` is .*run\.json"):
        read_results(path)
    del report["block_tokens"]
    path.write_text(json.dumps(report))
    with pytest.raises(CompactionError, match=r"`results` is .*run\.json.*'block_tokens'"):
        read_results(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda checks: checks.pop("contracts"), "has no `contracts`"),
        (lambda checks: checks.update(contracts=3), "`contracts` is no list"),
        (lambda checks: checks["contracts"][1].pop("text"), "has no `text` of a contract"),
        (lambda checks: checks["tests"].clear(), r"has no `tests/area/\S+` of `tests`"),
    ],
)
def test_MON_2_incomplete_checks_are_refused_by_name(document, tmp_path, change, said):
    """MON-2: a board is made of whole checks."""
    path = write_checks(tmp_path / "checks.json")
    checks = json.loads(path.read_text())
    change(checks)
    path.write_text(json.dumps(checks))
    with pytest.raises(CompactionError, match=f"`checks` is .*{said}"):
        build_page(document=document, checks=path, results=[])


def test_integers_that_a_browser_would_round_are_text(document, tmp_path):
    path = tmp_path / "b.json"
    values = [2**53, 2**53 + 1, -(2**60) - 1]
    path.write_text(json.dumps({"results": [{"seed": value} for value in values]}))
    page = build_page(document=document, checks=None, results=[path])
    (table,) = data_of(page)["benchmarks"][0]["tables"]
    assert table["rows"] == [[2**53], [str(2**53 + 1)], [str(-(2**60) - 1)]]


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_nothing_from_elsewhere(document, tmp_path):
    checks = write_checks(tmp_path / "checks.json")
    sweep = write_sweep(tmp_path / "s.jsonl")
    page = build_page(document=document, checks=checks, results=[sweep], title="a <b> & c")
    elements = Elements()
    elements.feed(page)
    assert not [attributes for _, attributes in elements.found if "src" in attributes]
    assert [each["href"] for _, each in elements.found if "href" in each] == ["data:,"]
    assert sum(tag == "script" for tag, _ in elements.found) == 2
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_the_server_outlives_any_fault_of_a_page():
    def build():
        raise KeyError("configuration")

    with serve_page(build, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/", timeout=10)
            assert error.value.code == 500
            assert error.value.read() == b"KeyError: 'configuration'"
        finally:
            server.shutdown()
            thread.join()


def test_the_server_makes_the_page_anew_and_answers_only_loopback_names():
    pages = iter(["first", "second"])
    with serve_page(lambda: next(pages), port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            assert server.server_address[0] == "127.0.0.1"
            for expected in (b"first", b"second"):
                with urllib.request.urlopen(f"{url}/", timeout=10) as answer:
                    assert answer.read() == expected
            for path, host, code in (("/x", "localhost", 404), ("/", "elsewhere.example", 403)):
                request = urllib.request.Request(f"{url}{path}", headers={"Host": host})
                with pytest.raises(urllib.error.HTTPError) as error:
                    urllib.request.urlopen(request, timeout=10)
                assert error.value.code == code
        finally:
            server.shutdown()
            thread.join()


def test_a_course_that_is_none_is_refused_and_names_the_file(document, tmp_path):
    report = make_report()
    report["course"]["selections"][1]["resident"].pop()
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report))
    with pytest.raises(CompactionError, match=r"'run.json', and its `course` has 1 rows of"):
        build_page(document=document, checks=None, results=[path])
    with pytest.raises(CompactionError, match="1 rows of `resident`"):
        build_run_page(report)


def test_the_page_of_a_run_has_its_row_and_its_course():
    page = build_run_page(make_report())
    (row,) = rows_of(page)
    assert (row["model"], row["acceptance_rate"], row["file"]) == ("<m>", 0.5, "this run")
    assert not [name for name in row if name.startswith("course")]
    assert data_of(page)["courses"]["0"]["layers"] == [0, 3]
    assert data_of(page)["board"] is None
    assert "<m>" not in page.partition("<body>")[0]
