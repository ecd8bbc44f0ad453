"""`blockcompact simulate` as a user runs it."""

import functools
import json

import pytest
from typer.testing import CliRunner

from blockcompact_jax.cli.app import app
from blockcompact_jax.cli.errors import UserError
from blockcompact_jax.cli.simulate import is_passed, parse_faults
from blockcompact_jax.ledger import LedgerShape
from blockcompact_jax.simulation import check as check_module
from blockcompact_jax.simulation import explore as explore_module
from blockcompact_jax.simulation.mutants import MUTANTS

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, ["simulate", *arguments])


def test_json_is_one_object_and_the_exit_code_is_zero():
    """COM-8: a clean run, with what was tried."""
    done = run("--seed", "3", "--steps", "400", "--steps-per-world", "100", "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["seed"], report["worlds"], report["events"]) == (3, 4, 400)
    assert sum(report["dispositions"].values()) == 400
    assert report["violations"] == []
    assert 0 < report["invalid_events"] < 100
    assert report["faults"] == ["crash", "delay", "drop", "duplicate", "reorder", "restart"]


def test_a_violation_names_its_seed_and_ends_with_one(monkeypatch):
    """A broken ledger is shown with the command that replays it."""
    broken = MUTANTS["abort_frees_slots_in_flight"]
    monkeypatch.setattr(check_module, "check", functools.partial(check_module.check, apply=broken))
    done = run("--steps", "3000", "--steps-per-world", "300", "--faults", "delay,drop")
    assert done.exit_code == 1
    assert "replay: blockcompact simulate --seed " in done.stdout
    assert "--faults delay,drop" in done.stdout
    report = json.loads(run("--steps", "3000", "--steps-per-world", "300", "--json").stdout)
    seed = report["violations"][0]["seed"]
    alone = run("--seed", str(seed), "--steps", "300", "--json")
    assert json.loads(alone.stdout)["violations"] == report["violations"][:1]


def test_mutants_are_listed_with_the_seed_that_caught_them():
    """Every mutant is caught; the table names them."""
    done = run("--steps", "10", "--mutants", "--json")
    assert done.exit_code == 0
    mutants = json.loads(done.stdout)["mutants"]
    assert set(mutants) == set(MUTANTS)
    assert all(isinstance(seed, int) for seed in mutants.values())


def test_exhaustive_reports_what_it_visited(monkeypatch):
    """COM-8: states, transitions and problems of a (here tiny) exploration are in the report."""
    tiny = functools.partial(
        explore_module.Scenario,
        shape=LedgerShape(max_requests=1, max_operations=1, max_slots=1, num_ranks=1),
        slots_by_operation=(1,),
        max_admissions=1,
    )
    monkeypatch.setattr(explore_module, "Scenario", tiny)
    done = run("--steps", "10", "--exhaustive", "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["exhaustive_problems"] == {}
    assert report["events_tried"] > report["transitions_explored"] > report["states_explored"] > 20
    assert "states explored" in run("--steps", "10", "--exhaustive").stdout


def test_a_missed_mutant_or_a_problem_of_the_exploration_is_a_failure():
    """Nothing that went wrong ends with 0."""
    assert is_passed({"violations": []})
    assert is_passed({"violations": [], "mutants": {"a": 0}, "exhaustive_problems": {}})
    assert not is_passed({"violations": [], "mutants": {"a": 0, "b": None}})
    assert not is_passed({"violations": [], "exhaustive_problems": {"x": 1}})
    assert not is_passed({"violations": [{}]})


def test_faults_are_named():
    """An unknown fault is refused with the known ones."""
    assert parse_faults("none") == frozenset()
    assert parse_faults("drop, delay") == {"drop", "delay"}
    with pytest.raises(UserError, match="`faults` names lose; give some of delay, drop"):
        parse_faults("drop,lose")
    with pytest.raises(UserError, match="names nothing"):
        parse_faults(",")
