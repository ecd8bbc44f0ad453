"""What a sweep says in words: every number counted by hand from made-up rows."""

from blockcompact_jax.cli.sweep_summary import summarize_runs, summarize_study, summarize_tasks


def run(context, policy, speedup, acceptance, *, same=True, engine="transformers"):
    return {
        "configuration": {
            "engine": engine,
            "context": context,
            "policy": policy,
            "budget": "10%",
        },
        "report": {
            "speedup_vs_full": speedup,
            "acceptance_rate": acceptance,
            "tokens_identical_to_full": same,
        },
    }


def test_MON_1_a_sweep_of_runs_says_what_is_best_what_limits_and_what_is_unknown():
    """MON-1: results a person can use, and no speed claimed that was not compared."""
    rows = [
        run(1024, "attention", 1.13, 0.90),
        run(1024, "random", 0.62, 0.56),
        run(2048, "attention", 1.94, 1.0),
        run(2048, "recency", 2.08, 0.9, same=False),
        run(2048, "random", 0.42, 0.56),
        run(2048, "random", None, None, same=None),
    ]
    text = "\n".join(summarize_runs(rows, ["context", "policy"]))
    assert "Fastest: 2.08 times the speed of full attention, with context 2048, policy" in text
    assert "Not faster than full attention: 2 of 5." in text
    assert "where 75% or more of them were accepted, the speed was 1.13 to 2.08 times" in text
    assert "elsewhere 0.42 to 0.62" in text
    assert "1.13 at 1,024, 1.94 to 2.08 at 2,048" in text
    assert "attention 95%, random 56%, recency 90%" in text
    assert "The same tokens as full attention: 4 of 5." in text
    assert "Speed not compared: 1 of 6." in text
    assert "timed once, on one text" in text


def test_a_sweep_in_which_nothing_is_faster_says_so():
    text = "\n".join(summarize_runs([run(512, "attention", 0.8, 0.5)], []))
    assert text.startswith("Nothing was faster than full attention: at best")
    assert "0.80 times" in text
    assert "Fastest" not in text


def test_a_sweep_without_full_attention_compares_nothing():
    text = "\n".join(summarize_runs([run(512, "attention", None, 0.5, same=None)], []))
    assert "was not compared" in text
    assert "Speed not compared: 1 of 1." in text
    assert "times" not in text.replace("timed", "")


def test_engines_are_summed_up_each_by_itself():
    rows = [
        run(1024, "attention", 1.5, 0.9),
        run(2048, "attention", 1.8, 0.9, engine="vllm-lossless"),
        run(2048, "attention", 1.2, None, same=False, engine="vllm-attend"),
    ]
    text = "\n".join(summarize_runs(rows, ["engine", "context"]))
    assert "transformers: Fastest: 1.50 times the speed of full attention, with context" in text
    assert "vllm-lossless: Fastest: 1.80 times" in text
    assert "vllm-lossless: The same tokens as full attention: 1 of 1.\n" in text
    assert "vllm-attend: The same tokens as full attention: 0 of 1 (a lossy engine" in text
    assert "Rejected drafts" not in text
    assert text.count("timed once") == 1


def study(budget, policy, kept, *, retention="layer_tables", ownership="layer", moved=0, peak=0):
    return {
        "configuration": {
            "budget": budget,
            "policy": policy,
            "retention": retention,
            "ownership": ownership,
        },
        "report": {
            "study": {
                "mass_kept": kept,
                "mass_kept_at_best": 0.97,
                "path": {"pool_peak_bytes": peak},
            },
            "metrics": {"h2d_bytes": 2_000_000, "resident_move_bytes": moved},
        },
    }


def test_a_study_names_the_policy_that_keeps_most_at_each_budget():
    rows = [
        study("10%", "attention", 0.8),
        study("10%", "recency", 0.85),
        study("25%", "attention", 0.95),
        study("25%", "recency", 0.9),
    ]
    lines = summarize_study(rows, ["budget", "policy"])
    assert lines[0].startswith("Budget 10%: policy recency keeps most of the attention, 85.0%, of")
    assert lines[1].startswith("Budget 25%: policy attention keeps most of the attention, 95.0%")
    assert "not accuracy" in lines[2]


def test_MET_1_a_study_of_several_paths_says_what_each_costs():
    """MET-1: uploads, moves and the pool apart, means over the rows of a path."""
    group = {"ownership": "group", "retention": "byte_move"}
    rows = [
        study("10%", "attention", 0.8, peak=4_000_000),
        study("25%", "attention", 0.9, peak=6_000_000),
        study("10%", "attention", 0.8, moved=1_500_000, peak=9_000_000, **group),
    ]
    lines = summarize_study(rows, ["budget", "retention", "ownership"])
    assert lines[2:4] == [
        "layer_tables, owned by layer: 85.0% kept, 2.0 MB uploaded, 0.0 MB moved, a pool of 5.0 MB "
        "(means).",
        "byte_move, owned by group: 80.0% kept, 2.0 MB uploaded, 1.5 MB moved, a pool of 9.0 MB "
        "(means).",
    ]
    assert "nothing was moved" in lines[4]


def test_tasks_say_what_was_found_beside_full_attention():
    found = {"num_cases": 4, "token_accuracy": 0.5, "token_accuracy_full": 1.0, "agreement": 0.5}
    tasks = {"needle": found, "code": {**found, "token_accuracy": 1.0}}
    rows = [
        {"configuration": {"budget": "10%"}, "report": {"tasks": tasks, "speedup_vs_full": 1.25}}
    ]
    lines = summarize_tasks(rows, ["budget"])
    assert lines[0] == (
        "budget 10%: 75% of the answers' tokens found, 100% with full attention; both say the same "
        "in 50% (8 cases), at 1.25 times its speed."
    )
    assert "without the contexts'" in lines[1]
