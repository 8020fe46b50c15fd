"""Classes with tools as TRL takes them."""

import importlib.util
import random
from pathlib import Path

import pytest

from verl_bpo.sandbox import SandboxPool, ToolCall, ToolCalls
from verl_bpo.sandbox.asynchronous import settled
from verl_bpo.sandbox.loading import EnvironmentUnavailable, load_environment

CUPS = f"trl:{Path(__file__).parents[3] / 'recipes' / 'extend' / 'cups.py'}:Cups"
WORLDS = '''
import asyncio


class Counter:
    def reset(self, start, **columns):
        self.n, self.asked = start, 0

    def add(self, by: int) -> str:
        """Add to the number.

        Args:
            by: How much.
        """
        if by < 0:
            raise ValueError("only up")
        self.n += by
        return f"It is {self.n}."

    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(0)
        return "You waited."

    async def get_reward(self) -> float:
        self.asked += 1
        return float(self.n)

    def _hidden(self):
        pass


class Undocumented:
    def reset(self):
        pass

    def act(self, what):
        pass


class Silent:
    def reset(self):
        pass


class NoReset:
    pass
'''
ROW = {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go. "}], "start": 3}


@pytest.fixture
def worlds(tmp_path):
    file = tmp_path / "worlds.py"
    file.write_text(WORLDS)
    return file


def call(name, **arguments):
    return ToolCalls((ToolCall(name, arguments),))


def step(environment, action):
    return settled(environment.step(action))


def test_methods_are_tools_the_row_opens_it_and_exceptions_go_to_the_model(worlds):
    environment = load_environment(f"trl:{worlds}:Counter")()
    first = settled(environment.reset("t", 0, ROW))
    assert [(m.role, m.content) for m in first.messages] == [("system", "Count."), ("user", "Go. ")]
    assert [tool["function"]["name"] for tool in first.tools] == ["add", "wait"]
    assert first.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"by": {"type": "integer", "description": "How much."}},
        "required": ["by"],
    }
    assert [message.content for message in step(environment, call("add", by=2)).messages] == ["It is 5."]
    assert step(environment, call("wait")).text == "You waited."
    assert step(environment, call("add", by=-1)).text == "{'error': 'only up'}"
    assert "no tool 'subtract'" in step(environment, call("subtract")).text
    assert "'by' is a required property" in step(environment, call("add")).text
    end = step(environment, "Done.")
    assert end.terminated


@pytest.mark.parametrize("each", [True, False])
def test_rewards_sum_up_to_what_the_class_says_at_the_end(worlds, each):
    environment = load_environment(f"trl:{worlds}:Counter")(reward_each_turn=each)
    settled(environment.reset("t", 0, {**ROW, "start": 0}))
    rewards = [
        step(environment, action).reward for action in (call("add", by=2), call("wait"), call("add", by=1), "Done.")
    ]
    assert rewards == ([2.0, 0.0, 1.0, 0.0] if each else [0.0, 0.0, 0.0, 3.0])
    assert environment._inner.asked == (5 if each else 1)


def test_what_reset_returns_follows_the_rows_prompt():
    environment = load_environment(CUPS)()
    alone = settled(environment.reset("t", 0)).messages[-1].content
    made = {"prompt": [{"role": "user", "content": "t"}], "reward_model": {"style": "environment"}}
    assert settled(environment.reset("t", 0, made)).messages[-1].content == alone  # make-data's, which says nothing
    both = settled(environment.reset("t", 0, {"prompt": [{"role": "user", "content": "Play. "}]})).messages
    assert [message.content for message in both] == [f"Play. {alone}"]


@pytest.mark.parametrize("backend", ["memory", "fork", "replay"])
def test_branches_have_global_chance_of_their_own(backend):
    lift = call("lift", cup="red")
    with SandboxPool(CUPS, backend=backend) as pool, pool.open() as world:
        trunk, _ = world.reset("t", 0)
        trunk.step(lift)
        one, other = trunk.snapshot().fork(2)
        first = [one.step(lift).text, one.step(lift).text]
        again = [trunk.step(lift).text, trunk.step(lift).text]
        assert [other.step(lift).text, other.step(lift).text] == first == again
        assert world.recoveries == 0


def test_an_environment_leaves_the_processs_own_chance_alone():
    random.seed(1)
    expected = random.random()
    random.seed(1)
    environment = load_environment(CUPS)()
    settled(environment.reset("t", 0))
    step(environment, call("lift", cup="red"))
    assert random.random() == expected


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("Nothing", "has no class Nothing"),
        ("NoReset", "has no reset"),
    ],
)
def test_what_trl_would_not_take_is_refused(worlds, name, wrong):
    with pytest.raises(EnvironmentUnavailable, match=wrong):
        load_environment(f"trl:{worlds}:{name}")


def test_a_method_that_makes_no_tool_is_named(worlds):
    with pytest.raises(ValueError, match=r"Undocumented\.act makes no tool"):
        load_environment(f"trl:{worlds}:Undocumented")()


def test_a_task_that_says_nothing_is_refused(worlds):
    with pytest.raises(Exception, match="neither has its row a prompt"):
        settled(load_environment(f"trl:{worlds}:Silent")().reset("t", 0))


def test_tools_are_those_that_trls_trainer_finds(worlds, tmp_path):
    """By the lines of its GRPOTrainer; importing the trainer is not needed for it."""
    found = importlib.util.find_spec("trl")
    if found is None:
        pytest.skip("trl isn't installed")
    source = (Path(found.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    for line in (
        "for member_name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction):",
        'elif member_name == "get_reward":',
        'elif not member_name.startswith("_"):',
        "observation = environment.reset(**reset_kwargs)",
        '"content": content + observation',
        'result = {"error": str(e)}',
        "content = result if isinstance(result, list) else str(result)",
    ):
        assert line in source, f"TRL has moved on: {line}"
