"""Quality tasks: what is asked, and how answers are counted; with a stand-in for a tokenizer."""

import re
from types import SimpleNamespace

import pytest
import torch

from blockcompact_jax.budget import OptionError
from torch_bridge.huggingface import task_runs
from torch_bridge.huggingface.task_answers import Answer, answer_with_all, answer_with_blocks
from torch_bridge.huggingface.task_runs import (
    TASK_OPTIONS,
    TaskOptions,
    TaskRuns,
    complete_task_run,
    summary,
)
from torch_bridge.tasks import TASKS, TaskCase, TaskText, make_case, parse_tasks

BOS = 1


class CharacterTokenizer:
    """A token a character; 1 begins a text; a blank before a digit is one token with it."""

    def __call__(self, text, *, add_special_tokens=True, verbose=True):
        pieces = re.findall(r" \d|.", text, flags=re.DOTALL)
        ids = [ord(piece[-1]) + 512 * (len(piece) == 2) for piece in pieces]
        return {"input_ids": [BOS, *ids] if add_special_tokens else ids}

    def text_of(self, ids):
        return "".join(f" {chr(each - 512)}" if each >= 512 else chr(each) for each in ids)


@pytest.fixture
def text():
    return TaskText(CharacterTokenizer())


def read(ids):
    return CharacterTokenizer().text_of(ids)


def case_of(task, text, *, context_tokens=3000, case=0, num_cases=4, seed=0):
    return make_case(
        task, text, context_tokens=context_tokens, case=case, num_cases=num_cases, seed=seed
    )


@pytest.mark.parametrize("task", TASKS)
def test_a_case_has_the_context_asked_for_and_is_drawn_from_its_seed(task, text):
    first = case_of(task, text)
    assert len(first.context) == 3000
    assert first.context[0] == BOS
    assert BOS not in first.context[1:] + first.answer
    assert first.answer
    assert case_of(task, text) == first
    others = [case_of(task, text, case=2), case_of(task, text, seed=1)]
    assert others[0] != first
    assert (others[1] == first) == (task == "code")  # the library's text is what it is


@pytest.mark.parametrize("case", range(4))
def test_a_needle_lies_at_its_depth_and_is_asked_for(text, case):
    made = case_of("needle", text, case=case)
    written = read(made.context)
    (found,) = re.finditer(r"secret number of the library is (\d{7})\.", written)
    assert read(made.answer) == f" {found[1]}."
    assert written.endswith("# Answer: it is")
    assert made.depth == (case + 0.5) / 4
    assert found.start() / len(written) == pytest.approx(made.depth, abs=0.05)


@pytest.mark.parametrize("case", range(4))
def test_a_key_of_the_registry_is_asked_for(text, case):
    made = case_of("key-value", text, case=case)
    written = read(made.context)
    known = dict(re.findall(r"The key ([a-z]{6}) holds (\d{5})\.", written))
    assert len(known) > 50
    (asked,) = re.findall(r"the key ([a-z]{6}) holds$", written)
    assert read(made.answer) == f" {known[asked]}."
    assert written.index(f"The key {asked}") / len(written) == pytest.approx(made.depth, abs=0.05)


def test_a_variables_value_is_found_by_following_it(text):
    written = read(case_of("variables", text).context)
    values = dict(re.findall(r"(variable_[a-z]{6}) = (\S+)\n", written))
    assert len(values) == 6
    (name,) = re.findall(r"The value of (variable_[a-z]{6}) is now$", written)
    num_hops = 0
    while name in values:
        if values[name] in values:  # a variable is set before it is used
            assert written.index(f"{values[name]} = ") < written.index(f"{name} = ")
        name, num_hops = values[name], num_hops + 1
    assert num_hops == 2
    assert read(case_of("variables", text).answer) == f" {name}."


def test_code_goes_on_where_the_context_ends(text):
    one, two = (case_of("code", text, case=case, context_tokens=500) for case in (0, 1))
    whole = text.filler(4000)
    assert [*one.context[1:], *one.answer] == whole[:531]
    assert [*two.context[1:], *two.answer] == whole[531:1062]
    assert len(one.answer) == 32


@pytest.mark.parametrize(
    ("task", "context_tokens"), [*((task, 40) for task in TASKS if task != "code"), ("code", 1)]
)
def test_a_context_without_room_is_refused(task, context_tokens, text):
    with pytest.raises(OptionError, match=f"`context` is {context_tokens} tokens.*'{task}'"):
        case_of(task, text, context_tokens=context_tokens)


def test_a_registry_without_a_line_is_refused_and_one_line_is_asked_for(text):
    """What is asked for is always in the context, in the shortest one that is made, too."""
    made = []
    for context_tokens in range(60, 260):
        try:
            made.append(case_of("key-value", text, context_tokens=context_tokens))
        except OptionError:
            assert not made
    assert 0 < len(made) < 200
    written = read(made[0].context)
    (line,) = re.findall(r"^The key ([a-z]{6}) holds (\d{5})\.$", written, flags=re.MULTILINE)
    assert written.endswith(f"\nIn this registry, the key {line[0]} holds")
    assert read(made[0].answer) == f" {line[1]}."


@pytest.mark.parametrize("given", ["", ",", "needle,haystack"])
def test_unknown_tasks_are_refused(given):
    with pytest.raises(OptionError, match="expected some of needle, key-value, variables, code"):
        parse_tasks(given)


def test_a_configuration_is_complete_and_has_one_order_of_tasks():
    found = complete_task_run({"tasks": " code , needle", "budget": "16", "context": "300"})
    assert set(found) == set(TASK_OPTIONS)
    assert (found["tasks"], found["budget"], found["context"]) == ("needle,code", "16b", 300)
    assert complete_task_run(found) == found
    assert complete_task_run({"context": 2})["context"] == 2


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"cases": 0}, "`cases` is 0"),
        ({"context": 0}, "`context_tokens` is 0"),
        ({"context": 1}, "`context` is 1, expected at least 2"),
        ({"reselect_every_tokens": 0}, "`reselect_every_tokens` is 0"),
        ({"dtype": "int8"}, "`dtype` is 'int8'"),
        ({"policy": "random"}, "`policy` is no option"),
        ({"tasks": "all"}, "`tasks` is 'all'"),
    ],
)
def test_a_wrong_option_is_refused(configuration, said):
    with pytest.raises(OptionError, match=said):
        complete_task_run(configuration)


def test_shares_are_those_of_answers_and_tokens():
    outcomes = [
        {"depth": 0.25, "answer": [1, 2], "given": [1, 2], "full": [1, 2]},
        {"depth": 0.75, "answer": [3, 4, 5, 6], "given": [3, 0, 5, 0], "full": [3, 0, 5, 6]},
    ]
    found = summary(outcomes)
    assert (found["accuracy"], found["accuracy_full"]) == (0.5, 0.5)
    assert found["token_accuracy"] == pytest.approx(4 / 6)
    assert found["token_accuracy_full"] == pytest.approx(5 / 6)
    assert found["agreement"] == pytest.approx(5 / 6)
    assert found["cases"][1] == {"depth": 0.75, "given": 0.5, "full": 0.75}


def test_times_are_summed_over_cases_and_prefills_are_not_in_a_speed():
    def answer(prefill, decode):
        return Answer(token_ids=[], prefill_seconds=prefill, decode_seconds=decode)

    outcomes = [
        {"answer": [1, 2], "answers": (answer(8.0, 1.0), answer(4.0, 2.0))},
        {"answer": [1, 2, 3], "answers": (answer(8.0, 0.5), answer(4.0, 1.0))},
    ]
    assert task_runs.task_seconds(outcomes) == {
        "num_tokens": 5,
        "prefill": 16.0,
        "prefill_full": 8.0,
        "decode": 1.5,
        "decode_full": 3.0,
    }


def tiny_case(context=160, answer=6):
    drawn = torch.randint(1, 97, (context + answer,), generator=torch.Generator().manual_seed(8))
    tokens = drawn.tolist()
    return TaskCase(task="code", depth=None, context=tokens[:context], answer=tokens[context:])


def test_answers_with_every_block_are_those_of_full_attention(model):
    """CMP-2: at 100 % both sides see the same prefix and all of it."""
    case = tiny_case()
    full = answer_with_all(model, case).token_ids
    options = {"block_tokens": 8, "layout": "vec", "reselect_every_tokens": 3}
    assert answer_with_blocks(model, case, budget="100%", **options).token_ids == full
    few = answer_with_blocks(model, case, budget="2b", **options)
    assert len(few.token_ids) == len(full) == 6
    assert few.prefill_seconds > 0 < few.decode_seconds
    expected = []
    for end in range(160, 166):
        tokens = [*case.context, *case.answer][:end]
        with torch.inference_mode():
            expected.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert full == expected
    shortest = tiny_case(context=2)
    given = answer_with_blocks(model, shortest, budget="100%", **options)
    assert given.token_ids == answer_with_all(model, shortest).token_ids


def test_a_run_answers_every_case_of_its_tasks_and_the_full_model_once(llama, monkeypatch):
    """MON-1: results of tasks are columns of a row; nothing in them depends on the run before."""
    asked = []

    def make(task, text, *, context_tokens, case, num_cases, seed):
        asked.append((task, case))
        return tiny_case(context_tokens, answer=2 + case)

    loaded = SimpleNamespace(
        model=llama, tokenizer=CharacterTokenizer(), max_positions=170, name="t"
    )
    monkeypatch.setattr(task_runs, "make_case", make)
    monkeypatch.setattr("torch_bridge.models.load.load_model", lambda *_, **__: loaded)
    configuration = complete_task_run(
        {"tasks": "needle,code", "cases": 2, "context": 160, "block_tokens": 8, "layout": "vec"}
    )
    runs = TaskRuns()
    first = runs.run({**configuration, "budget": "100%"})
    again = runs.run({**configuration, "budget": "100%"})
    assert asked == [("needle", 0), ("needle", 1), ("code", 0), ("code", 1)]
    assert first["tasks"] == again["tasks"]
    times = [each["task_seconds"]["code"] for each in (first, again)]
    assert [time["num_tokens"] for time in times] == [2 + 3] * 2
    assert times[0]["decode_full"] == times[1]["decode_full"]  # answered, and timed, once
    assert times[0]["decode"] != times[1]["decode"]
    assert list(first["tasks"]) == ["needle", "code"]
    assert first["tasks"]["needle"]["agreement"] == 1
    assert first["budget_blocks"] == 20
    assert TaskRuns().run({**configuration, "budget": "2b"})["budget_blocks"] == 2
    with pytest.raises(OptionError, match="exceeds the 170 positions"):
        runs.run({**configuration, "context": 169})


def test_every_field_of_the_options_can_be_swept():
    assert complete_task_run({}) == complete_task_run(vars(TaskOptions()) | {"budget": "25%"})
