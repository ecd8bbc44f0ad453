"""Sweeps over an engine that counts: what is run, stored, resumed and compared."""

import json

import pytest
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.sweep import sweep as sweep_module
from blockcompact_jax.sweep.difference import compare_sweeps
from blockcompact_jax.sweep.grid import configuration_hash, expand, parse_setting, read_grids
from blockcompact_jax.sweep.store import ResultFile, flatten, latest_rows, read_rows
from blockcompact_jax.sweep.sweep import run_sweep


class CountingEngine:
    def __init__(self, *, faults=(), speed=1.0, released=4):
        self.faults, self.speed, self.released = set(faults), speed, released
        self.ran = []

    def run(self, configuration):
        self.ran.append(configuration["budget"])
        if configuration["budget"] in self.faults:
            raise ValueError("does not\nfit")
        return {
            "token_ids": [1, 2],
            "acceptance_rate": 0.5,
            "speedup_vs_full": self.speed * 2,
            "tokens_per_second": self.speed * 10,
            "tokens_per_second_full": None,
            "metrics": {"physical_blocks_released": self.released, "plan_us": self.speed},
            "memory_bytes": {"weights": 7},
        }


class Watcher:
    def __init__(self):
        self.heard = []

    def on_stage(self, name, total):
        self.heard.append((name, total))

    def on_progress(self, done):
        self.heard.append(done)


CONFIGURATIONS = expand([{"budget": ["10%", "25%", "50%"], "seed": [3]}])


def sweep(path, engine, configurations=CONFIGURATIONS, watcher=None):
    return run_sweep(
        configurations, engine=engine, results=ResultFile(path), observer=watcher or Watcher()
    )


def test_MON_1_every_row_says_where_it_comes_from(tmp_path):
    """MON-1: seed, complete configuration, source hashes, versions and machine in every row."""
    watcher = Watcher()
    sweep(tmp_path / "new" / "s.jsonl", CountingEngine(), watcher=watcher)
    rows = read_rows(tmp_path / "new" / "s.jsonl")
    assert [row["configuration"] for row in rows] == CONFIGURATIONS
    for row in rows:
        assert (row["seed"], row["state"], row["error"]) == (3, "done", None)
        assert row["configuration_hash"] == configuration_hash(row["configuration"])
        assert all(len(digest) == 64 for digest in row["sources"].values())
        assert set(row["sources"]) == {"blockcompact_jax", "torch_bridge"}
        assert row["machine"]["num_cpus"] >= 1
        assert row["versions"]["jax"]
    assert watcher.heard == [("sweeping 3 configurations", 3), 1, 2, 3]


def test_MON_1_a_resumed_sweep_runs_only_what_is_not_done(tmp_path):
    """MON-1: done rows are skipped, failed ones tried again, and the others ran all the same."""
    path = tmp_path / "s.jsonl"
    first = CountingEngine(faults={"25%"})
    summary = sweep(path, first)
    assert first.ran == ["10%", "25%", "50%"]
    assert [error for _, error in summary.failures] == ["ValueError: does not fit"]
    second = CountingEngine()
    summary = sweep(path, second)
    assert second.ran == ["25%"]
    assert (summary.num_configurations, summary.num_skipped) == (3, 2)
    assert {row["state"] for row in latest_rows(read_rows(path)).values()} == {"done"}
    third = CountingEngine()
    sweep(path, third)
    assert third.ran == []


def test_MON_1_a_line_that_was_never_finished_is_run_again(tmp_path):
    """MON-1: a sweep killed while writing loses that one row, and no other."""
    path = tmp_path / "s.jsonl"
    sweep(path, CountingEngine())
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(CompactionError, match="line 3 is no JSON"):
        read_rows(path)
    engine = CountingEngine()
    sweep(path, engine)
    assert engine.ran == ["50%"]
    assert len(read_rows(path)) == 3


@pytest.mark.parametrize("rest", [5, 60, 200])
def test_MON_1_a_first_line_that_was_never_finished_is_run_again(tmp_path, rest):
    """MON-1: also a sweep killed while writing its very first row is resumed."""
    path = tmp_path / "s.jsonl"
    sweep(path, CountingEngine(), CONFIGURATIONS[:1])
    path.write_bytes(path.read_bytes()[:rest])
    engine = CountingEngine()
    sweep(path, engine, CONFIGURATIONS[:1])
    assert (engine.ran, len(read_rows(path))) == (["10%"], 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", b'{"model": "m"}'),
        ("run.json", b""),
        ("notes.jsonl", b'{"model": "m"}'),
        ("notes.jsonl", b'{"model": "m"}\n{"model": "n"}\n'),
        ("notes.jsonl", b'{"model": "m"}\n{"model"'),
    ],
)
def test_MON_1_a_file_that_is_no_sweep_is_left_as_it_is(tmp_path, name, content):
    """MON-1: a wrong `--out` destroys nothing."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CompactionError, match=r"`(out|results)` is"):
        ResultFile(path)
    assert path.read_bytes() == content


def test_MON_1_only_a_line_feed_ends_a_row(tmp_path):
    """MON-1: a text with other line breaks in it is stored and read as it is."""
    path = tmp_path / "s.jsonl"
    text = "a\u2028b\u2029c\x85d\ne\rf\x0cg"
    configurations = expand([{"budget": ["10%", text]}])
    sweep(path, CountingEngine(), configurations)
    assert [row["configuration"]["budget"] for row in read_rows(path)] == ["10%", text]
    engine = CountingEngine()
    sweep(path, engine, configurations)
    assert engine.ran == []


def test_MON_1_a_report_that_JSON_cannot_hold_is_a_failed_configuration(tmp_path):
    """MON-1: a NaN ends no sweep; the row says which value it was."""

    class Unmeasured(CountingEngine):
        def run(self, configuration):
            report = super().run(configuration)
            if configuration["budget"] == "25%":
                report["metrics"]["rounds"] = [1.0, float("nan")]
            return report

    path = tmp_path / "s.jsonl"
    summary = sweep(path, Unmeasured())
    ((failed, error),) = summary.failures
    assert failed["budget"] == "25%"
    assert "`report.metrics.rounds[1]` is nan" in error
    assert [row["state"] for row in read_rows(path)] == ["done", "failed", "done"]


def test_a_row_that_cannot_be_written_names_the_file_and_a_fault_inside_a_run_does_not(tmp_path):
    """A full disk ends a sweep; an engine's own OSError is a failed configuration."""

    class Disconnected(CountingEngine):
        def run(self, configuration):
            raise ConnectionError("gone")

    summary = sweep(tmp_path / "s.jsonl", Disconnected(), CONFIGURATIONS[:1])
    assert [error for _, error in summary.failures] == ["ConnectionError: gone"]
    (tmp_path / "file").write_text("")
    engine = CountingEngine()
    with pytest.raises(CompactionError, match=r"`out` is .*x\.jsonl', which cannot be written"):
        sweep(tmp_path / "file" / "x.jsonl", engine)
    assert engine.ran == []  # no configuration ran for nothing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("configuration"), "`configuration` of line 2 is absent"),
        (lambda row: row.update(report=3), "`report` of line 2 is 3; expected an object or null"),
        (lambda row: row.update(wall_seconds=float("inf")), "line 2 is no JSON .*Infinity"),
    ],
)
def test_MON_1_a_broken_row_is_refused_by_line_and_name(tmp_path, change, said):
    """MON-1: a reader says what is wrong where."""
    path = tmp_path / "s.jsonl"
    sweep(path, CountingEngine())
    rows = read_rows(path)
    change(rows[1])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CompactionError, match=said):
        read_rows(path)


def test_MON_1_a_file_in_another_encoding_is_refused(tmp_path):
    """MON-1: bytes that are no UTF-8 are no row."""
    path = tmp_path / "s.jsonl"
    path.write_bytes('{"schema": "ü"}\n'.encode("latin-1"))
    with pytest.raises(CompactionError, match=r"line 1 is no JSON .*utf-8"):
        read_rows(path)


def test_MON_1_an_interrupt_keeps_what_is_done(tmp_path):
    """MON-1: Ctrl-C is no failed configuration."""

    class Interrupted(CountingEngine):
        def run(self, configuration):
            if configuration["budget"] == "25%":
                raise KeyboardInterrupt
            return super().run(configuration)

    path = tmp_path / "s.jsonl"
    with pytest.raises(KeyboardInterrupt):
        sweep(path, Interrupted())
    assert [row["configuration"]["budget"] for row in read_rows(path)] == ["10%"]


def test_MON_1_results_of_other_sources_are_not_mixed(tmp_path, monkeypatch):
    """MON-1: one file never holds the results of two versions of the code."""
    path = tmp_path / "s.jsonl"
    sweep(path, CountingEngine(), CONFIGURATIONS[:1])
    here = sweep_module.origin()
    for name, said in (("sources", "other sources"), ("versions", "other versions")):
        changed = {**here, name: {**here[name], "jax": "other"}}
        monkeypatch.setattr(sweep_module, "origin", lambda changed=changed: changed)
        engine = CountingEngine()
        with pytest.raises(CompactionError, match=said):
            sweep(path, engine)
        assert engine.ran == []


def test_MON_1_results_of_other_weights_are_not_mixed(tmp_path):
    """MON-1: a directory's name says nothing of the weights in it."""
    configurations = expand([{"model": ["./m", "n"], "budget": ["10%"]}])
    path, arguments = tmp_path / "s.jsonl", {"observer": Watcher(), "engine": CountingEngine()}
    for _ in range(2):
        run_sweep(configurations, results=ResultFile(path), digests={"./m": "a"}, **arguments)
    assert [row["weights"] for row in read_rows(path)] == ["a", None]
    with pytest.raises(CompactionError, match="other files of the model"):
        run_sweep(configurations, results=ResultFile(path), digests={"./m": "b"}, **arguments)
    assert len(arguments["engine"].ran) == 2


def test_MON_1_two_sweeps_are_compared(tmp_path):
    """MON-1: exact values that differ are named, speeds are ratios, times are no difference."""
    sweep(tmp_path / "a.jsonl", CountingEngine())
    sweep(tmp_path / "b.jsonl", CountingEngine(speed=3.0, released=5), CONFIGURATIONS[1:])
    left, right = read_rows(tmp_path / "a.jsonl"), read_rows(tmp_path / "b.jsonl")
    right[0]["report"]["token_ids"] = [1, 3]
    right[0]["machine"] = {**right[0]["machine"]}
    difference = compare_sweeps(left, right)
    assert difference["only_first"] == CONFIGURATIONS[:1]
    assert difference["only_second"] == []
    assert difference["origins"] == {}
    assert [row["configuration"]["budget"] for row in difference["rows"]] == ["25%", "50%"]
    assert difference["rows"][0]["changed"] == {
        "metrics.physical_blocks_released": [4, 5],
        "token_ids": ["differ", "differ"],
    }
    assert difference["rows"][1]["ratios"] == {
        "speedup_vs_full": 3.0,
        "tokens_per_second": 3.0,
        "tokens_per_second_full": None,
    }
    assert difference["median_ratios"]["tokens_per_second"] == 3.0


def test_MON_1_counts_that_follow_measured_times_are_not_called_exact(tmp_path):
    """MON-1: with online reselection tokens and sizes alone depend on the configuration alone."""
    configurations = expand([{"budget": ["10%"], "reselect_online": [True, False]}])
    for name, released in (("a.jsonl", 4), ("b.jsonl", 5)):
        sweep(tmp_path / name, CountingEngine(released=released), configurations)
    left, right = read_rows(tmp_path / "a.jsonl"), read_rows(tmp_path / "b.jsonl")
    online, fixed = compare_sweeps(left, right)["rows"]
    assert (online["are_counts_compared"], online["changed"]) == (False, {})
    assert fixed["are_counts_compared"]
    assert list(fixed["changed"]) == ["metrics.physical_blocks_released"]
    arguments = ["sweep", "diff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments).stdout
    assert "1 with reselect_online: selections follow measured times" in told
    right[0]["report"] |= {"token_ids": [1, 3], "memory_bytes": {"weights": 8}}
    (online, _) = compare_sweeps(left, right)["rows"]
    assert sorted(online["changed"]) == ["memory_bytes.weights", "token_ids"]


def test_grids_are_read_from_toml(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        'model = "m"\nnew-tokens = 8\n[[grid]]\nbudget = ["10%", 16]\n[[grid]]\nnew_tokens = [9]\n'
    )
    assert expand(read_grids(path)) == [
        {"model": "m", "new_tokens": 8, "budget": "10%"},
        {"model": "m", "new_tokens": 8, "budget": 16},
        {"model": "m", "new_tokens": 9},
    ]


def test_the_same_configuration_is_run_once():
    assert expand([{"a": [1, 1], "b": [2]}, {"b": [2], "a": [1]}]) == [{"a": 1, "b": 2}]
    assert configuration_hash({"a": 1, "b": 2}) == configuration_hash({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budget = [[1]]", "`budget` holds"),
        ("x = {a = 1}", "`x` holds"),
        ("grid = 1", "no table"),
        ("a =", "no TOML"),
        ("budget = []", "no value"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, said):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(CompactionError, match=said):
        expand(read_grids(path))


@pytest.mark.parametrize("text", ["budget", "=1", "budget=", "budget=,"])
def test_a_broken_setting_is_refused(text):
    with pytest.raises(CompactionError, match="`set` is"):
        parse_setting(text)


def test_settings_take_dashes_and_lists():
    assert parse_setting("new-tokens= 8, 9") == ("new_tokens", ["8", "9"])


def test_a_file_that_is_no_sweep_is_refused(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"model": "m"}) + "\n")
    with pytest.raises(CompactionError, match="line 1 is no row of a sweep"):
        read_rows(path)


def test_nested_values_become_columns():
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1]}) == {"a.b": 1, "a.c.d": None}


def test_parquet_holds_the_same_values(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the [sweep] extra: pyarrow")
    from blockcompact_jax.sweep.store import write_parquet

    sweep(tmp_path / "s.jsonl", CountingEngine(faults={"10%"}))
    rows = read_rows(tmp_path / "s.jsonl")
    write_parquet(rows, tmp_path / "s.parquet")
    table = parquet.read_table(tmp_path / "s.parquet").to_pylist()
    assert [row["configuration.budget"] for row in table] == ["10%", "25%", "50%"]
    assert [row["report.metrics.physical_blocks_released"] for row in table] == [None, 4, 4]
