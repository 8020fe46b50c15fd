"""verl's tool files, by its own BaseTool."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl.tools.base_tool")

from verl_bpo.sandbox import SandboxError, SandboxPool, ToolCall, ToolCalls
from verl_bpo.sandbox.asynchronous import settled
from verl_bpo.sandbox.loading import EnvironmentUnavailable, load_environment

FOLDER = Path(__file__).parents[3] / "recipes" / "extend" / "verl_tools"
ROW = {
    "prompt": [{"role": "system", "content": "Open it."}, {"role": "user", "content": "Which number?"}],
    "extra_info": {"tools_kwargs": {"try_number": {"create_kwargs": {"number": 7}}}},
}


def attempt(number):
    return ToolCalls((ToolCall("try_number", {"number": number}),))


@pytest.mark.parametrize("backend", ["memory", "replay"])
def test_a_tool_lives_through_the_episode_and_is_forked(backend):
    with SandboxPool(f"verl_tools:{FOLDER / 'tools.yaml'}", backend=backend) as pool, pool.open() as world:
        trunk, first = world.reset("t", 0, ROW)
        assert [message.role for message in first.messages] == ["system", "user"]
        assert first.tools[0]["function"]["name"] == "try_number"
        low = trunk.step(attempt(3))
        assert (low.text, low.reward) == ("Higher.", -0.1)
        one, other = trunk.snapshot().fork(2)
        assert one.step(attempt(7)).text == "The safe opens."
        assert (one.step("Done.").reward, other.step("Done.").reward) == (1.0, 0.0)
        assert trunk.step(attempt(9)).text == "Lower."
        assert "'seven' is not of type 'integer'" in trunk.step(attempt("seven")).text


SAVED = '''
import json
from pathlib import Path
from safe import Safe


class Filed(Safe):
    """Its state lies in a file, which no copy of it has."""

    def file(self, instance_id):
        return Path(self.config["folder"]) / instance_id

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        self.file(instance_id).write_text("")
        return await super().create(instance_id, create_kwargs, **kwargs)

    async def execute(self, instance_id, parameters, **kwargs):
        with self.file(instance_id).open("a") as file:
            file.write(str(parameters["number"]))
        response, reward, metrics = await super().execute(instance_id, parameters, **kwargs)
        return type(response)(text=self.file(instance_id).read_text()), reward, metrics

    async def snapshot(self, instance_id):
        return self.file(instance_id).read_text()

    def restore(self, instance_id, state):
        self.file(instance_id).write_text(state)
'''


def test_a_tool_with_snapshot_and_restore_is_saved_by_them(tmp_path):
    shutil.copy(FOLDER / "safe.py", tmp_path)
    (tmp_path / "filed.py").write_text(SAVED)
    text = (FOLDER / "tools.yaml").read_text()
    (tmp_path / "files").mkdir()
    text = text.replace("safe.Safe", "filed.Filed").replace("cost: 0.1", f"cost: 0\n      folder: {tmp_path / 'files'}")
    (tmp_path / "tools.yaml").write_text(text)
    with SandboxPool(f"verl_tools:{tmp_path / 'tools.yaml'}") as pool, pool.open() as world:
        trunk, _ = world.reset("t", 0, ROW)
        trunk.step(attempt(1))
        one, other = trunk.snapshot().fork(2)
        assert one.step(attempt(2)).text == "12"
        assert other.step(attempt(3)).text == "13"
        assert one.step(attempt(4)).text == "124"
        assert trunk.step(attempt(5)).text == "15"


def test_a_row_without_a_prompt_is_told():
    environment = load_environment(f"verl_tools:{FOLDER / 'tools.yaml'}")()
    with pytest.raises(SandboxError, match="its row has no prompt"):
        settled(environment.reset("t", 0, {**ROW, "prompt": []}))


@pytest.mark.parametrize(
    "text, wrong",
    [
        (None, "there is no tool file"),
        ("tools: 3", "there is no tool file"),
        ("tools: [{class_name: pathlib.Path}]", "no tool of verl's: it has no create"),
    ],
)
def test_what_is_no_tool_file_is_refused(tmp_path, text, wrong):
    file = tmp_path / "tools.yaml"
    if text:
        file.write_text(text)
    with pytest.raises(EnvironmentUnavailable, match=wrong):
        load_environment(f"verl_tools:{file}")
