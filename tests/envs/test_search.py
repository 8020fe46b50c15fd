"""Questions over a corpus: what an action does, scores, prompt files, the generator."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("bm25s", reason="search needs its extra: pip install verl_bpo[search]")

from verl_bpo.commands.check_env import check_environment
from verl_bpo.commands.make_data import write_prompts
from verl_bpo.envs.search import retrievers
from verl_bpo.envs.search.environment import SearchEnvironment
from verl_bpo.envs.search.generate import make_questions, name_pool
from verl_bpo.envs.search.scoring import exact_match, f1, normalized
from verl_bpo.sandbox import TaskError
from verl_bpo.sandbox.base import NoTaskCanWork
from verl_bpo.sandbox.memory import MemoryBackend

CORPUS = [
    ("Ada Lovelace", "Ada Lovelace wrote the first program, for the Analytical Engine."),
    ("Analytical Engine", "The Analytical Engine was designed by Charles Babbage."),
    ("Charles Babbage", "Charles Babbage was born in London."),
    ("Paris", "Paris is the capital of France."),
]
ROW = {
    "id": "test_0",
    "question": "Where was the designer of the Analytical Engine born?",
    "golden_answers": ["London", "the city of London"],
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Answer the given question. ..."}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["London", "the city of London"]}},
    "extra_info": {"index": 0, "split": "test"},
}


def write_corpus(file, passages=CORPUS):
    rows = [{"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in enumerate(passages)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(file, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "corpus.jsonl")
    write_rows(tmp_path / "test.parquet", [ROW])
    return tmp_path


@pytest.fixture
def asked(folder):
    """An environment at the first question."""
    environment = SearchEnvironment(top_k=2)
    environment.reset(f"{folder}/test.parquet#0")
    return environment


@pytest.fixture(scope="module")
def invented(tmp_path_factory):
    return make_questions(tmp_path_factory.mktemp("invented") / "games", 200, 50, seed=1, level=3)


# Scores


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The Cat's  mat.", "cats mat"),
        ("A. B.", "b"),  # punctuation goes before articles
        ("another theory", "another theory"),
        ("ÉCOLE a\tla", "école la"),
        ("the", ""),
    ],
)
def test_answers_are_normalised_as_by_squad(text, expected):
    assert normalized(text) == expected


def test_exact_match_takes_any_of_the_gold_answers():
    assert exact_match("The London!", ["Paris", "london"])
    assert not exact_match("London town", ["Paris", "london"])


@pytest.mark.parametrize(
    "answer, gold, expected",
    [
        ("big red cat", ["red cat"], 0.8),  # precision 2/3, recall 1
        ("cat cat", ["cat"], 2 / 3),  # a word counts as often as the gold answer has it
        ("dog", ["cat"], 0.0),
        ("the", ["the"], 0.0),  # nothing is left: the script's own rule
        ("red", ["blue", "dark red", "red"], 1.0),
    ],
)
def test_f1_is_squads_and_the_best_gold_answer_counts(answer, gold, expected):
    assert f1(answer, gold) == pytest.approx(expected)


# Episodes


def test_a_search_shows_the_best_passages_with_their_titles(asked):
    shown = asked.step("search[who designed the Analytical Engine]")
    first, second = shown.text.splitlines()
    assert first == "Doc 1(Title: Analytical Engine) The Analytical Engine was designed by Charles Babbage."
    assert second.startswith("Doc 2(Title: Ada Lovelace) ")
    assert (shown.reward, shown.done, shown.info["won"]) == (0.0, False, False)


@pytest.mark.parametrize(
    "contents, title, text",
    [('"Paris"\na\nb', "Paris", "a\nb"), ('""Heroes" (song)"\nx', '"Heroes" (song)', "x"), ("Paris", "Paris", "")],
)
def test_a_title_loses_one_pair_of_quotes(contents, title, text):
    assert retrievers.Passage.of(contents) == (title, text)


def test_a_long_passage_is_cut(folder):
    environment = SearchEnvironment(passage_characters=12)
    environment.reset(f"{folder}/test.parquet#0")
    assert environment.step("search[Paris]").text == "Doc 1(Title: Paris) Paris is the..."


def test_an_answer_ends_the_episode_and_exact_match_is_the_reward(asked):
    wrong = asked.step("answer[London town]")
    assert (wrong.reward, wrong.terminated, wrong.info["won"]) == (0.0, True, False)
    assert wrong.info["score"] == pytest.approx(2 / 3) and wrong.info["task_type"] == "hotpotqa"
    again = asked.step("answer[London]")
    assert again.terminated and again.reward == 0.0 and not again.info["won"]


@pytest.mark.parametrize("reward, expected", [("em", 0.0), ("f1", 2 / 3)])
def test_f1_may_be_the_reward(folder, reward, expected):
    environment = SearchEnvironment(reward=reward)
    environment.reset(f"{folder}/test.parquet#0")
    assert environment.step("answer[London town]").reward == pytest.approx(expected)


@pytest.mark.parametrize("action", ["look around", "search[]", "search[ ]", "answer", "search[x] now", ""])
def test_what_is_no_action_is_an_ordinary_step(asked, action):
    answer = asked.step(action)
    assert answer.text == "Use search[query] or answer[text]." and not answer.done
    assert answer.actions == ("search[<query>]", "answer[<text>]")


def test_an_action_may_be_spelt_in_capitals_hold_brackets_and_find_nothing(asked):
    assert asked.step(" Search[Paris [France]] ").text.startswith("Doc 1(Title: Paris)")
    assert asked.step("search[zzz]").text == "Nothing was found."
    assert asked.step("ANSWER[London]").info["won"]


def test_forks_share_the_corpus_and_go_on_alone(folder, monkeypatch):
    built = []
    make = retrievers.CorpusRetriever.__init__
    monkeypatch.setattr(
        retrievers.CorpusRetriever, "__init__", lambda self, file: (built.append(file), make(self, file))[1]
    )
    backend = MemoryBackend("search", {})
    one, two = backend.sandbox(), backend.sandbox()
    for sandbox in (one, two):
        sandbox.reset(f"{folder}/test.parquet#0")
    assert built == [folder / "corpus.jsonl"]
    snapshot = one.snapshot()
    left, right = snapshot.fork(2)
    assert left.step("answer[London]").info["won"]
    assert not right.step("answer[Paris]").info["won"]
    assert not one.step("search[Paris]").done


def test_check_env_says_that_snapshots_are_exact(invented):
    report = check_environment("search", SearchEnvironment.tasks("valid", root=str(invented))[:1])
    assert report.ok, report.render()
    assert {"restore", "fork"} <= {name for name, *_ in report.findings} and report.costs["snapshot bytes"] < 4096


# Files


def test_prompt_files_are_made_of_search_r1s(folder):
    (folder / "out").mkdir()
    record = write_prompts("search", "test", folder / "out/test.parquet", kwargs={"root": str(folder)})
    (row,) = pyarrow.parquet.read_table(folder / "out/test.parquet").to_pylist()
    assert record["rows"] == 1 and row["data_source"] == "hotpotqa"
    assert row["extra_info"]["task"] == f"{folder}/test.parquet#0"
    same = write_prompts("search", "test", folder / "out/b.parquet", kwargs={"root": f"{folder}/test.parquet"})
    write_rows(folder / "test.parquet", [{**ROW, "golden_answers": ["Paris"]}])
    other = write_prompts("search", "test", folder / "out/c.parquet", kwargs={"root": str(folder)})
    assert same["rows"] == 1 and other["sha256"] != record["sha256"]


def test_answers_may_stand_in_the_reward_model_alone(folder):
    write_rows(folder / "test.parquet", [{key: value for key, value in ROW.items() if key != "golden_answers"}])
    environment = SearchEnvironment()
    environment.reset(f"{folder}/test.parquet#0")
    assert environment.step("answer[the city of London]").info["won"]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"question": " "}, "row 1, column question: ' ' is no text"),
        ({"question": None}, "row 1, column question: None is no text"),
        ({"golden_answers": []}, "row 1, column golden_answers: [] is no list of answers"),
        ({"golden_answers": ["x", ""]}, "row 1, column golden_answers: '' is no text"),
        ({"golden_answers": None}, "row 1, column golden_answers: None is no list of answers"),
    ],
)
def test_a_wrong_row_is_named_with_its_column(folder, change, said):
    write_rows(folder / "test.parquet", [ROW, {**ROW, **change}, ROW])
    with pytest.raises(TaskError, match="mend these rows") as caught:
        SearchEnvironment.tasks("test", root=str(folder))
    assert said in str(caught.value)
    with pytest.raises(TaskError) as caught:
        SearchEnvironment().reset(f"{folder}/test.parquet#1")
    assert said in str(caught.value)


def test_a_wrong_target_is_named_with_its_whole_path(folder):
    row = {**ROW, "reward_model": {"style": "rule", "ground_truth": {"target": []}}}
    del row["golden_answers"]
    write_rows(folder / "test.parquet", [row] * 5)
    with pytest.raises(TaskError, match=r"column reward_model\.ground_truth\.target.*and 2 more"):
        SearchEnvironment.tasks("test", root=str(folder))


def test_what_is_missing_is_named(folder, monkeypatch):
    monkeypatch.delenv("SEARCH_DATA", raising=False)
    monkeypatch.delenv("SEARCH_RETRIEVER", raising=False)
    with pytest.raises(TaskError, match="set SEARCH_DATA or --root"):
        SearchEnvironment.tasks()
    with pytest.raises(TaskError, match=r"no questions in .*train\.parquet"):
        SearchEnvironment.tasks(root=str(folder))
    write_rows(folder / "train.parquet", [{"question": "?", "answer": "x"}])
    with pytest.raises(TaskError, match="has columns question, answer: question, and golden_answers or reward_model"):
        SearchEnvironment.tasks(root=str(folder))
    (folder / "train.parquet").write_text("no parquet")
    with pytest.raises(TaskError, match="is no parquet file"):
        SearchEnvironment.tasks(root=str(folder))
    with pytest.raises(TaskError, match="has 1 questions, and no row 1"):
        SearchEnvironment().reset(f"{folder}/test.parquet#1")
    with pytest.raises(TaskError, match="is no question: tasks are"):
        SearchEnvironment().reset("17")
    (folder / "corpus.jsonl").unlink()
    for look in (SearchEnvironment().reset, SearchEnvironment.check_task):
        with pytest.raises(TaskError, match="no corpus"):
            look(f"{folder}/test.parquet#0")


def test_a_missing_package_ends_the_run_and_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(NoTaskCanWork, match="pip install bm25s PyStemmer"):
        SearchEnvironment().reset(f"{folder}/test.parquet#0")


@pytest.mark.parametrize("line", ['{"id": "1"}', "[]", "no json", '{"contents": 3}'])
def test_a_broken_line_of_a_corpus_is_named(folder, line):
    with open(folder / "corpus.jsonl", "a") as file:
        file.write(line)
    with pytest.raises(TaskError, match="passage 5: no JSON object"):
        SearchEnvironment(retriever=str(folder / "corpus.jsonl"))


def test_an_empty_corpus_is_named(folder):
    (folder / "corpus.jsonl").write_text("")
    with pytest.raises(TaskError, match="is empty"):
        SearchEnvironment(retriever=str(folder / "corpus.jsonl"))


def test_the_index_of_a_large_corpus_is_kept_beside_it(folder, monkeypatch):
    monkeypatch.setattr(retrievers, "KEPT_FROM", 1)
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("\n")  # a blank line is no passage
    first = retrievers.CorpusRetriever(folder / "corpus.jsonl")("Analytical Engine", 3)
    assert len(list(folder.glob("corpus.jsonl.bm25s-*"))) == 1
    monkeypatch.setattr(retrievers.Bm25sSearch, "_built", None)
    assert retrievers.CorpusRetriever(folder / "corpus.jsonl")("Analytical Engine", 3) == first


# The generator


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_the_same_arguments_give_the_same_questions(tmp_path, invented):
    assert files(make_questions(tmp_path / "a", 200, 50, seed=1, level=3)) == files(invented)
    other = files(make_questions(tmp_path / "b", 200, 50, seed=2, level=3))
    assert all(other[name] != content for name, content in files(invented).items())


def test_names_are_one_pool_whatever_the_seed():
    given, family = name_pool()
    assert len(set(given)) == len(set(family)) == 32
    assert all(name[-1] in "aeiou" for name in given) and all(name[-1] in "nkrsl" for name in family)


def test_a_folder_made_otherwise_is_refused(invented, tmp_path):
    with pytest.raises(ValueError, match="made with other options"):
        make_questions(invented, 200, 50, seed=1, level=2)
    assert make_questions(invented, 200, 50, seed=1, level=3) == invented
    with pytest.raises(ValueError, match="level=5: use one of 0, 1, 2, 3, 4"):
        make_questions(tmp_path / "c", level=5)
    with pytest.raises(ValueError, match="are more than the .* there are: ask for fewer"):
        make_questions(tmp_path / "d", 64, 5000, level=1)


@pytest.mark.parametrize("level, hops, passages", [(0, 3, 4096), (1, 1, 1024), (4, 4, 1024)])
def test_a_level_is_the_number_of_hops_and_level_0_has_one_fact_a_passage(tmp_path, level, hops, passages):
    folder = make_questions(tmp_path / "games", 3, 2, level=level)
    assert len((folder / "corpus.jsonl").read_text().splitlines()) == passages
    for row in pyarrow.parquet.read_table(folder / "train.parquet").to_pylist():
        assert len(row["queries"]) == hops and row["data_source"] == f"invented_{hops}_hops"


def test_of_single_facts_a_fitting_query_finds_its_own_first(tmp_path):
    folder = make_questions(tmp_path / "games", 40, 2, level=0)
    environment = SearchEnvironment()
    for task in SearchEnvironment.tasks("train", root=str(folder)):
        environment.reset(task)
        for action in environment.expert_actions()[:-1]:
            query = action[len("search[") : -1]
            first, *others = environment.step(action).text.splitlines()
            assert f" {query} is " in first and not any(f" {query} is " in other for other in others)


def test_the_expert_answers_every_question_by_as_many_searches_as_hops(invented):
    environment = SearchEnvironment()
    for task in SearchEnvironment.tasks("valid", root=str(invented)):
        environment.reset(task)
        actions = environment.expert_actions()
        seen = [environment.step(action) for action in actions]
        assert len(actions) == 4 and seen[-1].info["won"] and seen[-1].reward == 1.0
        for action, shown in zip(actions, seen[:-1]):
            name = action[len("search[") :].partition("'s ")[0]
            assert shown.text.startswith(f"Doc 1(Title: {name}) ")  # and two distractors behind it
            assert len(shown.text.splitlines()) == 3


def test_held_out_questions_meet_nobody_of_the_training_questions(invented):
    corpus = [json.loads(line)["contents"] for line in (invented / "corpus.jsonl").read_text().splitlines()]
    met = defaultdict(set)
    for split in ("train", "valid"):
        for row in pyarrow.parquet.read_table(invented / f"{split}.parquet").to_pylist():
            met[split] |= {query.partition("'s ")[0] for query in row["queries"]} | set(row["golden_answers"])
    assert met["train"] and not met["train"] & met["valid"]
    assert len(corpus) == 1024


def test_a_wrong_hop_does_not_lead_to_the_answer(invented):
    """Of the people that one passage names, the one that was asked for alone leads on: prefixes matter."""
    rows = pyarrow.parquet.read_table(invented / "valid.parquet").to_pylist()
    facts = dict(json.loads(line)["contents"][1:].split('"\n') for line in (invented / "corpus.jsonl").open())
    reached = 0
    for row in rows:
        start, relations = row["question"][len("Who is ") : -1].partition("'s ")[::2]
        asked, *rest = relations.split("'s ")
        for sentence in facts[start].rstrip(".").split(". "):
            known, _, person = sentence.partition("'s ")[2].partition(" is ")
            if known == asked:
                continue
            for relation in rest:
                person = facts[person].partition(f"'s {relation} is ")[2].partition(".")[0]
            reached += person in row["golden_answers"]
    assert reached <= len(rows) // 10
