import sys

import pytest

from verl_bpo.sandbox import Environment
from verl_bpo.sandbox.loading import EnvironmentUnavailable, built_in_environments, environment_status, load_environment

OWN = """
from verl_bpo.sandbox import Environment, Observation

class Own(Environment):
    def reset(self, task, seed=0):
        return Observation("hello")
    def step(self, action):
        return Observation(action)

class Other:
    pass
"""


@pytest.fixture
def own_file(tmp_path):
    file = tmp_path / "own_world.py"
    file.write_text(OWN)
    return file


def test_a_class_in_a_users_file_is_found_and_stays_the_same_class(own_file):
    own = load_environment(f"{own_file}:Own")
    assert issubclass(own, Environment)
    assert own().reset("t").text == "hello"
    assert load_environment(f"{own_file}:Own") is own


def test_a_class_in_a_module_is_found(own_file, monkeypatch):
    monkeypatch.syspath_prepend(str(own_file.parent))
    assert load_environment("own_world:Own").__module__ == "own_world"
    sys.modules.pop("own_world")


def test_textworld_is_found_by_its_short_name():
    pytest.importorskip("textworld")
    assert load_environment("textworld").__name__ == "TextworldEnvironment"
    assert environment_status("textworld") == (True, "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "no environment named 'nonsense': use one of .*alfworld.*textworld"),
        ("", "no environment named"),
        (":Own", "no environment named"),
        ("no_such_package.module:Own", "can't be imported .*no_such_package"),
        ("no_such_file.py:Own", "no file no_such_file.py"),
        ("{file}:Missing", "has no class Missing"),
        ("{file}:Other", "derive it from verl_bpo.sandbox.Environment"),
        ("{file}:OWN", "has no class OWN"),
    ],
)
def test_what_cannot_be_used_says_so_in_one_line(own_file, name, message):
    name = name.format(file=own_file)
    with pytest.raises(EnvironmentUnavailable, match=message):
        load_environment(name)
    usable, reason = environment_status(name)
    assert not usable and reason and "\n" not in reason


def test_a_file_that_fails_to_load_is_told_and_tried_again(own_file):
    own_file.write_text("1 / 0")
    with pytest.raises(EnvironmentUnavailable, match="ZeroDivisionError"):
        load_environment(f"{own_file}:Own")
    own_file.write_text(OWN)
    assert load_environment(f"{own_file}:Own")


def test_a_missing_dependency_of_a_built_in_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    monkeypatch.delitem(sys.modules, "verl_bpo.envs.textworld.environment", raising=False)
    for name in [m for m in sys.modules if m.startswith("textworld.")]:
        monkeypatch.setitem(sys.modules, name, None)
    usable, reason = environment_status("textworld")
    assert not usable and "pip install textworld" in reason


def test_every_built_in_environment_is_described():
    assert {"textworld", "alfworld"} <= set(built_in_environments())
    assert all(built_in_environments().values())
