"""The page of trees: its content, and what a real browser makes of it."""

import json
import os
import re
import shutil
import subprocess

import pytest
from fake_run import FakeRollout, as_release_0_1, small_steps, write_dump

from verl_bpo.report.dump import Dump
from verl_bpo.report.recompute import recompute
from verl_bpo.report.trees import histogram, survey, write_page
from verl_bpo.tree.record import set_aside

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
browser_test = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: install Debian's package chromium")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
]

# Visits every turn of every tree as a reader would, and walks a few steps with the keyboard.
WALK = """<script>
history.replaceState = () => {};  // browsers throttle hundreds of these
let visited = 0, doubts = [];
for (let k = 0; k < trees.length; k++) {
  show(k);
  for (let i = 0; i < tree.parent.length; i++) {
    select(i);
    visited++;
    const why = document.getElementById("why").textContent;
    if (!why || /The dump says|NaN|undefined/.test(why)) doubts.push(`${k}/${i}: ${why}`);
  }
}
show(0); select(0);
const press = (key) => {
  document.getElementById("scroll").dispatchEvent(new KeyboardEvent("keydown", { key }));
  return selected;
};
const right = press("ArrowRight"), down = press("ArrowDown"), up = press("ArrowUp"), left = press("ArrowLeft");
const sameDepth = down !== right && tree.depth[down] === tree.depth[right];
const steps = { after: tree.parent[right], sameDepth, back: up === right, left };
document.body.dataset.walk = JSON.stringify({ visited, doubts, ...steps });
</script></body>"""


def read_data(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def open_in_browser(page, tmp_path, hash="") -> str:
    """The page's DOM after its script ran."""
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{page}{hash}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    complaints = [line for line in done.stderr.splitlines() if "Uncaught" in line or "CONSOLE" in line]
    assert not complaints, complaints
    return done.stdout


def walk(page, tmp_path) -> dict:
    walked = tmp_path / "walk.html"
    walked.write_text(page.read_text().replace("</body>", WALK))
    dom = open_in_browser(walked, tmp_path)
    return json.loads(re.search(r'data-walk="([^"]*)"', dom)[1].replace("&quot;", '"'))


@pytest.fixture(scope="module")
def page(dump, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "trees.html"
    write_page(Dump(dump), out)
    return out


def test_page_needs_nothing_from_elsewhere(page):
    text = page.read_text()
    assert not re.search(r"\b(src|href)\s*=|@import|url\(", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}, (
        "only a namespace, never loaded"
    )


def test_an_observation_cannot_end_the_script(page):
    text = page.read_text()
    data = read_data(text)
    assert any("</script>" in t for t in data["texts"])
    assert text.count("</script>") == 2


def test_data_holds_every_turn_with_its_advantage(page, dump):
    shown = read_data(page.read_text())["trees"]
    records = {d.record.key: d for d in Dump(dump)}
    assert {(t["step"], t["uid"], t["session"]) for t in shown} == set(records)
    for tree in shown:
        dumped = records[tree["step"], tree["uid"], tree["session"]].advantages
        for drawn, advantage, valid in zip(tree["advantage"], dumped.advantage, dumped.valid):
            assert drawn == (pytest.approx(advantage, abs=1e-4) if valid else None)


def test_why_work_was_not_judged_and_what_was_left_out_are_on_the_page(dump, tmp_path):
    copy = tmp_path / "dump"
    shutil.copytree(dump, copy)
    told = {"unjudged": "timeout", "problem": "too slow </script>", "left_out": "conftest.py"}
    for file in (path for path in copy.rglob("*") if path.is_file()):
        file.write_text(
            file.read_text().replace('"info": {"won": false', f'"info": {{{json.dumps(told)[1:-1]}, "won": false')
        )
    write_page(Dump(copy), tmp_path / "trees.html")
    ends = [t for tree in read_data((tmp_path / "trees.html").read_text())["trees"] for t in tree["trajectories"]]
    lost = [t for t in ends if not t["won"]]
    assert lost and all({key: t[key] for key in told} == told for t in lost)
    assert not any("unjudged" in t for t in ends if t["won"])


def test_overview_counts_the_dump(dump):
    overview = survey(Dump(dump))
    tiles = {name: value for name, value, _ in overview.tiles()}
    records = list(Dump(dump))
    assert tiles["trees"] == str(len(records)) == "12"
    groups = overview.sibling_groups()
    equal = sum(len(set(g)) == 1 for g in groups)
    assert 0 < equal < len(groups) and tiles["zero-advantage groups"] == f"{equal / len(groups):.0%}"
    assert sum(overview.leaves) == sum(len(list(r.tree.usable())) for r in records)


def test_histogram_counts_every_value_once():
    for values in ([0.0, 1.0, 1.0], [0.1, 0.25, 7.5, 7.5], [3.0], [1, 400, 17]):
        (series,) = histogram("t", "x", [("n", values)])["series"]
        assert series["n"] == len(values)
        assert sum(int(b["label"].split(": ")[1].split(" ")[0]) for b in series["bars"]) == len(values)
    assert histogram("t", "x", [("n", [])])["empty"]


def test_limit_spreads_over_the_run_and_keeps_the_most_interesting(dump, tmp_path):
    overview = survey(Dump(dump))
    chosen = overview.choose(4)
    assert len(chosen) == 4 and overview.most_interesting in chosen
    assert {chosen[0][0], chosen[-1][0]} == {1, 3}
    write_page(Dump(dump), tmp_path / "t.html", limit=4)
    data = read_data((tmp_path / "t.html").read_text())
    assert [(t["step"], t["uid"], t["session"]) for t in data["trees"]] == chosen
    first = data["trees"][data["first"]]
    assert (first["step"], first["uid"], first["session"]) == overview.most_interesting


def test_a_half_written_last_line_loses_itself_alone(tmp_path):
    folder = write_dump(tmp_path / "dump", small_steps(count=1))
    for path in (folder / "trees" / "000001-17.jsonl", folder / "advantages" / "000001.jsonl"):
        text = path.read_text()
        path.write_text(text[: len(text) - 30])
    dump = Dump(folder)
    assert len(list(dump)) == 3
    assert dump.broken == {"000001-17.jsonl:4", "000001.jsonl:4"}


def test_trees_of_interrupted_tries_are_not_counted(tmp_path, report, capsys):
    """A resumed run rolls a step again: new prompts ids, or the same ones where verl kept them."""
    folder = write_dump(tmp_path / "dump", small_steps(count=2))
    path = folder / "trees" / "000002-17.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    early = [{**line, "uid": f"{line['uid']}-of-the-first-try"} for line in lines[:2]] + [lines[3] | {"task": "first"}]
    (first := folder / "trees" / "000002-9.jsonl").write_text("".join(json.dumps(line) + "\n" for line in early))
    os.utime(first, (1, 1))
    dump = Dump(folder)
    assert len(list(dump)) == survey(dump).trees == 8 and dump.left_out == 3
    assert "first" not in {d.record.task for d in dump}
    assert report("trees", folder, "--out", tmp_path / "t.html") == 0
    out = capsys.readouterr().out
    assert "8 trees, 8 of them" in out and "left out: 3 trees of an interrupted try" in out
    (folder / "advantages" / "000002.jsonl").unlink()  # where no advantages tell them apart, the same tree is one still
    assert len(list(Dump(folder))) == 10


def test_a_run_that_takes_steps_again_sets_the_old_ones_aside(tmp_path):
    folder = write_dump(tmp_path / "dump", small_steps(count=3))
    for _ in range(2):
        set_aside(folder, after=1)
        assert sorted(p.name for p in folder.rglob("*.jsonl") if p.parent.parent == folder) == [
            "000001-17.jsonl", "000001.jsonl",
        ]  # fmt: skip
        assert len(list((folder / "aside-1").rglob("*.jsonl"))) == 4
    assert len(list(Dump(folder / "aside-1"))) == 8


def test_a_dump_of_release_0_1_still_opens(tmp_path):
    folder = write_dump(tmp_path / "dump", small_steps(count=1), leaf_return="tree_mean")
    as_release_0_1(folder)
    write_page(Dump(folder), tmp_path / "t.html")
    for tree in read_data((tmp_path / "t.html").read_text())["trees"]:
        assert tree["why"] is None and any(tree["advantage"])
    assert [check.matches for check in recompute(folder)] == [True]


def test_an_empty_folder_says_which_folder_is_wanted(tmp_path, report):
    with pytest.raises(FileNotFoundError, match="bpo.dump_dir"):
        report("trees", tmp_path, "--out", tmp_path / "t.html")


def test_step_and_picture(dump, tmp_path, report, capsys):
    from matplotlib.image import imread

    out, png = tmp_path / "deep" / "t.html", tmp_path / "p" / "tree.png"
    assert report("trees", dump, "--step", 2, "--out", out, "--png", png) == 0
    assert {t["step"] for t in read_data(out.read_text())["trees"]} == {2}
    pixels = (imread(png)[..., :3] * 255).round()
    for colour in ((0x1F, 0x63, 0xB5), (0xD1, 0x60, 0x0A)):  # both ends of the palette: the tree has mixed outcomes
        assert (abs(pixels - colour).max(axis=-1) < 60).sum() > 300
    assert "4 trees" in capsys.readouterr().out


@browser_test
def test_browser_draws_every_turn_and_explains_each_as_dumped(page, tmp_path):
    result = walk(page, tmp_path)
    data = read_data(page.read_text())
    assert result["doubts"] == []
    assert result["visited"] == sum(len(t["parent"]) for t in data["trees"])
    assert result["after"] == 0 and result["sameDepth"] and result["back"] and result["left"] == 0


@browser_test
@pytest.mark.parametrize(
    "options",
    [
        {"leaf_return": "tree_mean", "baseline": "mean"},
        {"normalize": "sibling_std"},
        {"center": True},
        {"baseline": "trajectory"},
        {"baseline": "shrunk"},
    ],
)
def test_browser_explains_other_estimators_as_dumped(options, tmp_path):
    write_page(Dump(write_dump(tmp_path / "dump", small_steps(count=1), **options)), tmp_path / "t.html")
    result = walk(tmp_path / "t.html", tmp_path)
    assert result["visited"] > 100 and result["doubts"] == []


@browser_test
def test_browser_opens_a_dump_of_release_0_1(tmp_path):
    as_release_0_1(write_dump(tmp_path / "dump", small_steps(count=1)))
    write_page(Dump(tmp_path / "dump"), tmp_path / "t.html")
    result = walk(tmp_path / "t.html", tmp_path)
    assert result["visited"] > 100 and result["doubts"] == []


@browser_test
def test_browser_draws_five_hundred_leaves_and_opens_a_linked_turn(tmp_path):
    tree = FakeRollout(5, leaves=500, roots=4, nesting=4, turns=16, skill=0.93).tree
    write_page(Dump(write_dump(tmp_path / "dump", {1: [[tree]]})), tmp_path / "t.html")
    dom = open_in_browser(tmp_path / "t.html", tmp_path, "#0/300")
    assert f'data-drawn="{len(tree.nodes)}"' in dom
    assert len(re.findall(r'<circle class="node[^"]*"[^>]*data-i=', dom)) == len(tree.nodes)
    assert re.search(r'<circle class="node[^"]*selected"[^>]*data-i="300"', dom)
    assert f"<h2>Turn {tree.depth(300)}</h2>" in dom
