"""Small Python packages with a bug each, for agents that act by shell commands; generated, the same for the same seed.

A task is one JSON file: the files to repair, the calls that must come out right, and a way to repair it. A package is
put together from the functions below, one (or two) of which are broken in one of the ways that stand beside it. Train
and valid tasks share functions and bugs; what differs is their combination and where things are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from verl_bpo.envs.manifest import open_folder, write_whole

_VERSION = 1
MODULES = ("tools", "core", "util", "lib", "calc", "text", "base", "misc")


@dataclass(frozen=True)
class Function:
    source: str
    bugs: tuple[tuple[str, str], ...]
    """What to replace in ``source`` (it is there once), and by what."""
    calls: tuple[tuple[Any, ...], ...]
    """Arguments to try it with."""

    @property
    def name(self) -> str:
        return self.source.split("(")[0].removeprefix("def ")


def _function(source: str, bugs: list[tuple[str, str]], calls: list[tuple]) -> Function:
    return Function(source.strip("\n") + "\n", tuple(bugs), tuple(calls))


FUNCTIONS = (
    _function(
        "def mean(xs):\n    return sum(xs) / len(xs)",
        [("/ len(xs)", "/ 2"), ("sum(xs)", "max(xs)")],
        [([1, 2, 3],), ([4],), ([2, 2, 8, 0],)],
    ),
    _function(
        "def clamp(x, low, high):\n    return max(low, min(x, high))",
        [("min(x, high)", "min(x, low)"), ("max(low", "max(high")],
        [(5, 0, 3), (-1, 0, 3), (2, 0, 3)],
    ),
    _function(
        "def count_vowels(s):\n    return sum(c in 'aeiou' for c in s.lower())",
        [("'aeiou'", "'aeio'"), ("s.lower()", "s")],
        [("queue",), ("AbE",), ("xyz",)],
    ),
    _function(
        "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
        [("n * factorial", "n + factorial"), ("return 1 if", "return 0 if")],
        [(0,), (3,), (5,)],
    ),
    _function(
        "def reverse_words(s):\n    return ' '.join(s.split()[::-1])",
        [("' '.join", "''.join"), ("s.split()[::-1]", "s.split()")],
        [("a b c",), ("one two",), ("x",)],
    ),
    _function(
        "def total(xs):\n    t = 0\n    for x in xs:\n        t += x\n    return t",
        [("t += x", "t = x"), ("t = 0", "t = 1")],
        [([1, 2],), ([],), ([5, 5, 5],)],
    ),
    _function(
        "def is_leap(y):\n    return y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)",
        [("y % 100 != 0", "y % 100 == 0"), ("y % 4 == 0 and", "y % 4 == 1 and")],
        [(2000,), (1900,), (2024,), (2023,)],
    ),
    _function(
        "def largest(xs):\n    best = xs[0]\n    for x in xs:\n        if x > best:\n            best = x\n    return best",
        [("x > best", "x < best"), ("best = xs[0]", "best = 0")],
        [([1, 9, 3],), ([-4, -2],), ([7],)],
    ),
    _function(
        "def unique(xs):\n    out = []\n    for x in xs:\n        if x not in out:\n            out.append(x)\n    return out",
        [("x not in out", "x in out"), ("return out", "return xs")],
        [([1, 1, 2],), ([],), ([3, 2, 3],)],
    ),
    _function(
        "def initials(s):\n    return ''.join(w[0].upper() for w in s.split())",
        [("w[0]", "w[1]"), (".upper()", ".lower()")],
        [("grace hopper",), ("alan mathison turing",)],
    ),
    _function(
        "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
        [("a % b", "b % a"), ("return a", "return b")],
        [(12, 18), (7, 3), (8, 8)],
    ),
    _function(
        "def pairs(xs):\n    return [[x, y] for x, y in zip(xs, xs[1:])]",
        [("xs[1:]", "xs"), ("[x, y]", "[y, x]")],
        [([1, 2, 3],), ([4],)],
    ),
    _function(
        "def is_palindrome(s):\n    s = s.lower()\n    return s == s[::-1]",
        [("s == s", "s != s"), ("s.lower()", "s.strip()")],
        [("Level",), ("abc",), ("noon",)],
    ),
    _function(
        "def minutes(h, m):\n    return 60 * h + m",
        [("60 * h", "24 * h"), ("h + m", "h - m")],
        [(1, 30), (0, 5), (2, 0)],
    ),
    _function(
        "def middle(xs):\n    xs = sorted(xs)\n    return xs[len(xs) // 2]",
        [("len(xs) // 2", "len(xs) // 3"), ("sorted(xs)", "list(xs)")],
        [([3, 1, 2],), ([9, 7, 8, 1, 2],)],
    ),
    _function(
        "def discount(price, percent):\n    return price * (100 - percent) / 100",
        [("100 - percent", "100 + percent"), (") / 100", ") / 10")],
        [(50, 10), (80, 25)],
    ),
)


@dataclass(frozen=True)
class Level:
    modules: int
    functions: int
    bugs: int


LEVELS = {1: Level(1, 2, 1), 2: Level(2, 4, 1), 3: Level(2, 5, 2)}
RUN_TESTS = "python3 tests.py"
"""Shows what comes out wrong."""


def make(out: Path, train: int, valid: int, seed: int, level: int) -> None:
    """What ``verl-bpo make-games --kind repair`` does."""
    make_repairs(out, {"train": train, "valid": valid}, seed=seed, level=level)


def make_repairs(
    out_dir: str | Path,
    counts: Mapping[str, int] | None = None,
    seed: int = 0,
    level: int = 1,
    progress: bool = True,
) -> Path:
    """Write ``<out_dir>/<split>/<number>.json`` tasks; none is in two splits.

    Nothing is done when the same ones are there already.

    Args:
        counts: tasks per split; default 64 train and 32 valid.
        level: 1: one module, one bug. 2: two modules, one bug. 3: two modules, two bugs.

    Raises:
        ValueError: unknown level, a count below 1, too many for this level, or ``out_dir`` holds tasks made otherwise.
    """
    counts = dict(counts or {"train": 64, "valid": 32})
    if level not in LEVELS:
        raise ValueError(f"level={level}: use one of {', '.join(map(str, LEVELS))}")
    if not counts or min(counts.values()) < 1:
        raise ValueError(f"counts={counts}: each split needs at least one task")
    folder = Path(out_dir).expanduser()
    options = {"kind": "repair", "version": _VERSION, "counts": counts, "seed": seed, **asdict(LEVELS[level])}
    if open_folder(folder, json.loads(json.dumps(options)), "*/*.json") is not None:
        return folder
    random, seen, tasks = Random(f"{seed}/{level}"), set(), {}
    with tqdm(total=sum(counts.values()), desc="making tasks", unit="task", disable=not progress) as bar:
        for split, count in counts.items():
            (folder / split).mkdir(exist_ok=True)
            for number in range(count):
                task, content = _new_task(random, LEVELS[level], seen)
                name = f"{split}/{number:04d}.json"
                write_whole(folder / name, json.dumps(task, indent=1))
                tasks[name] = content
                bar.update()
    write_whole(folder / "manifest.json", json.dumps({"options": options, "games": tasks}, indent=1))
    return folder


def _new_task(random: Random, level: Level, seen: set[str]) -> tuple[dict[str, Any], str]:
    """A task whose content isn't in ``seen`` (to which it is added), and its content's hash."""
    for _ in range(1000):
        task = _task(random, level)
        digest = hashlib.sha256(json.dumps(task["files"], sort_keys=True).encode()).hexdigest()
        if digest not in seen:
            seen.add(digest)
            return task, digest
    raise ValueError(f"no further task of this level found after {len(seen)}: ask for fewer")


def _task(random: Random, level: Level) -> dict[str, Any]:
    modules = random.sample(MODULES, level.modules)
    functions = random.sample(FUNCTIONS, level.functions)
    homes = {f.name: modules[i % len(modules)] for i, f in enumerate(functions)}
    random.shuffle(functions)
    broken = {f.name: random.choice(f.bugs) for f in random.sample(functions, level.bugs)}
    files, repairs, offers, checks = {}, [], [], []
    for module in sorted(modules):
        sources = []
        for function in (f for f in functions if homes[f.name] == module):
            good, bad = broken.get(function.name, ("", ""))
            sources.append(function.source.replace(good, bad) if good else function.source)
            above = sum(source.count("\n") + 2 for source in sources[:-1])
            for right, wrong in function.bugs:
                now = sources[-1].splitlines()
                if (right, wrong) == (good, bad):
                    then = function.source.splitlines()
                else:
                    then = sources[-1].replace(right, wrong).splitlines()
                for number, (old, new) in enumerate(zip(now, then), start=1 + above):
                    if old != new:
                        offers.append(_edit(number, new, module))
                        if (right, wrong) == (good, bad):
                            repairs.append(offers[-1])
            checks += [[module, function.name, list(call), _result(function, call)] for call in function.calls]
        files[f"{module}.py"] = "\n\n".join(sources)
    files["tests.py"] = _tests(checks)
    looks = [f"cat -n {module}.py" for module in sorted(modules)]
    cat = [f"cat -n {homes[f.name]}.py" for f in functions if f.name in broken]
    return {
        "files": files,
        "checks": checks,
        "offers": [RUN_TESTS, *looks, *sorted(offers), "submit"],
        "expert": [RUN_TESTS, *dict.fromkeys(cat), *repairs, RUN_TESTS, "submit"],
        "type": f"{level.modules}_modules_{level.bugs}_bugs",
    }


def _tests(checks: list[list[Any]]) -> str:
    imports = sorted({f"import {module}" for module, *_ in checks})
    lines = [*imports, "", "CHECKS = ["]
    lines += [f"    ({module}.{name}, {call!r}, {result!r})," for module, name, call, result in checks]
    return "\n".join([*lines, "]", *_RUNNER]) + "\n"


_RUNNER = (
    "bad = 0",
    "for f, args, want in CHECKS:",
    "    try:",
    "        got = f(*args)",
    "    except Exception as e:",
    "        got = type(e).__name__",
    "    if got != want:",
    "        bad += 1",
    "        print(f'FAIL {f.__module__}.{f.__name__}{tuple(args)}: want {want!r}, got {got!r}')",
    "print(f'{bad} failed')",
    "raise SystemExit(bad > 0)",
)


def _result(function: Function, call: tuple) -> Any:
    names: dict[str, Any] = {}
    exec(function.source, names)
    return names[function.name](*json.loads(json.dumps(call)))


def _edit(number: int, line: str, module: str) -> str:
    """A command that replaces a line."""
    quote = '"' if "'" in line else "'"
    return f"sed -i {quote}{number}c\\{line}{quote} {module}.py"
