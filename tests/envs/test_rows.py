"""Rows that are nearly right are mended; the others are named, with instance and column, before anything is built."""

import json

import pytest

from verl_bpo.envs.swebench import prepare as preparing
from verl_bpo.envs.swebench.prepare import prepare
from verl_bpo.envs.swebench.rows import COLUMNS, PrepareError, checked_rows, load_rows

PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-y\n+x\n"


def row(name="pallets__flask-1", **changed):
    return {
        "instance_id": name, "repo": "pallets/flask", "version": "2.3", "base_commit": "0123456789abcdef",
        "problem_statement": "Mend it.", "patch": PATCH.format("a.py"), "test_patch": PATCH.format("t.py"),
        "FAIL_TO_PASS": '["t.py::new"]', "PASS_TO_PASS": '["t.py::old", "t.py::odd"]', **changed,
    }  # fmt: skip


def checked(*rows):
    return checked_rows(rows, lambda row: None)


GOOD = {**row(), "FAIL_TO_PASS": ["t.py::new"], "PASS_TO_PASS": ["t.py::old", "t.py::odd"]}


@pytest.mark.parametrize(
    "changed",
    [
        {"FAIL_TO_PASS": ["t.py::new"]},
        {"FAIL_TO_PASS": ("t.py::new", "t.py::new")},
        {"FAIL_TO_PASS": "['t.py::new']", "PASS_TO_PASS": "('t.py::old', \"t.py::odd\")"},
        {"FAIL_TO_PASS": json.dumps('["t.py::new"]')},
        {"patch": row()["patch"].rstrip("\n"), "test_patch": row()["test_patch"].replace("\n", "\r\n")},
        {"patch": row()["patch"].encode()},
        {"version": 2.3, "instance_id": " pallets__flask-1\n"},
        {"hints_text": float("nan"), "created_at": None, "environment_setup_commit": float("nan"), "difficulty": 3},
    ],
)  # fmt: skip
def test_rows_that_are_nearly_right_are_mended(changed):
    assert checked(row(**changed)) == ([GOOD], [])


def test_arrays_are_lists_and_no_other_tests_are_none():
    numpy = pytest.importorskip("numpy")
    ((found,), problems) = checked(row(FAIL_TO_PASS=numpy.array(["t.py::new"], object), PASS_TO_PASS=float("nan")))
    assert problems == [] and found["FAIL_TO_PASS"] == ["t.py::new"] and found["PASS_TO_PASS"] == []
    json.dumps(found)


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"FAIL_TO_PASS": "t.py::new"}, "FAIL_TO_PASS: neither JSON nor a Python list: 't.py::new'"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: it names no test"),
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS: empty (None)"),
        ({"PASS_TO_PASS": [1, 2]}, "PASS_TO_PASS: no list of tests' names: '[1, 2]'"),
        ({"PASS_TO_PASS": "{}"}, "PASS_TO_PASS: no list of tests' names"),
        ({"patch": float("nan")}, "patch: empty (nan)"),
        ({"patch": 7}, "patch: a int ('7'), where a text belongs"),
        ({"test_patch": "None"}, "test_patch: it changes no file in git's form"),
        ({"test_patch": PATCH.format("t.py")[:-3] + "?\n"}, "test_patch: corrupt patch"),
        ({"base_commit": "main"}, "base_commit: 'main' isn't of the form of a commit's hash"),
        ({"base_commit": "--upload-pack=x"}, "base_commit: "),
        ({"repo": "flask"}, "repo: 'flask' isn't of the form owner/repository"),
        ({"version": None}, "version: empty (None)"),
        ({"instance_id": "../x"}, "instance_id: '../x' isn't of the form"),
        ({"problem_statement": ""}, "problem_statement: empty ('')"),
    ],
)  # fmt: skip
def test_what_cant_be_mended_is_named_with_its_column(changed, problem):
    rows, ((name, found),) = checked(row(**changed), row("pallets__flask-2"))
    assert found.startswith(problem) and name == changed.get("instance_id", "pallets__flask-1").replace("../x", "row 1")
    assert [good["instance_id"] for good in rows] == ["pallets__flask-2"]


def test_a_column_that_one_row_lacks_and_all_problems_of_a_row_are_named():
    lacking = {key: value for key, value in row().items() if key not in ("version", "patch")}
    assert checked(lacking)[1] == [("pallets__flask-1", "version: missing"), ("pallets__flask-1", "patch: missing")]


def test_of_rows_with_one_name_equal_ones_are_one_and_others_are_named():
    assert checked(row(), row()) == ([GOOD], [])
    rows, problems = checked(row(), row("b__b-1"), row("Pallets__Flask-1"), row("b__b-1", version="9"))
    assert rows == []
    assert problems == [
        ("Pallets__Flask-1", "instance_id: row 3 has it too, with other columns than the row before it"),
        ("b__b-1", "instance_id: row 4 has it too, with other columns than the row before it"),
    ]


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "csv", "lines.json", "columns.json", "one.json"])
def test_all_files_that_datasets_come_in_give_the_same_rows(tmp_path, kind):
    pandas = pytest.importorskip("pandas")
    rows = [row("b__b-1", problem_statement='caf\u00e9,\n"x" \u2028', created_at="2020-01-01T00:00:00Z")]
    rows += [] if kind == "one.json" else [row("b__b-2", hints_text=None)]
    file, table = tmp_path / f"rows.{kind}", pandas.DataFrame(rows)
    if kind == "parquet":
        table.to_parquet(file)
    elif kind == "csv":
        table.to_csv(file, index=False)
    elif kind == "columns.json":
        table.to_json(file)
    elif kind in ("jsonl", "lines.json"):
        file.write_text(
            "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows), encoding="utf-8"
        )
    else:
        file.write_text(json.dumps(rows[0] if kind == "one.json" else rows))
    assert checked(*load_rows(str(file))) == checked(*rows) and checked(*rows)[1] == []


def test_files_that_hold_no_rows_are_told_in_one_line(tmp_path):
    def said(name, text=None):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(PrepareError) as error:
            load_rows(str(tmp_path / name))
        return str(error.value)

    assert "no such file" in said("none.jsonl")
    assert "has no rows" in said("a.json", "[]")
    assert "line 2: Expecting" in said("b.jsonl", '{"a": 1}\n{"a": \n')
    assert "row 1 is no table" in said("c.json", "[1]")
    assert "can't be read (JSONDecodeError" in said("d.json", "[{]")
    assert "isn't of SWE-bench's form: it has no FAIL_TO_PASS, PASS_TO_PASS, base_commit" in said(
        "e.jsonl", '{"instance_id": "a"}\n'
    )


def test_problems_are_said_before_anything_is_built(tmp_path, monkeypatch):
    pytest.importorskip("swebench", reason="no swebench package: pip install verl_bpo[swe]")
    events = []
    monkeypatch.setattr(preparing, "_prepare", lambda row, *rest: events.append(f"built {row['instance_id']}"))
    out = tmp_path / "out"
    monkeypatch.setattr(type(out), "is_relative_to", lambda self, other: False)  # or /tmp is refused
    rows = [row(), row("b__b-1", patch=None, version="1"), row("b__b-2", version="77.7")]
    ready, failed = prepare(rows, out, say=events.append)
    assert events == [
        "b__b-1: patch: empty (None)",
        "b__b-2: version: the swebench package has no specification for pallets/flask 77.7",
        "built pallets__flask-1",
    ]
    assert ready == ["pallets__flask-1"] and list(failed) == ["b__b-1", "b__b-2"]


def test_the_benchmarks_own_rows_are_right(benchmark_data):
    pytest.importorskip("swebench", reason="no swebench package: pip install verl_bpo[swe]")
    given = load_rows(str(benchmark_data / "swebench" / "swe_bench_verified_test.parquet"))
    rows, problems = checked_rows(given, preparing.specification)
    assert problems == [] and len(rows) == 500
    for before, after in zip(given, rows, strict=True):
        assert {c: before[c] for c in COLUMNS if "_TO_" not in c} == {c: after[c] for c in COLUMNS if "_TO_" not in c}
