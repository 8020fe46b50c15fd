"""E2B's own SDK against a fake server (tests/helpers/fake_e2b.py), not against the service."""

import gc
import sys

import pytest
from shells import need_isolation

pytest.importorskip("e2b", reason="no e2b: pip install e2b (Python 3.11 or later)")
if sys.version_info < (3, 11):
    pytest.skip("e2b's SDK needs Python 3.11", allow_module_level=True)

from fake_e2b import FakeE2B

from verl_bpo.envs.repair.generate import make_repairs
from verl_bpo.sandbox import MemorySandbox, SandboxError, TaskError
from verl_bpo.sandbox.loading import load_environment
from verl_bpo.shells.base import SHELLS, Limits, Workspace
from verl_bpo.shells.e2b import E2BShell
from verl_bpo.shells.transfer import list_files


@pytest.fixture
def server(tmp_path, monkeypatch):
    need_isolation()
    with FakeE2B(tmp_path / "service") as fake:
        for name, value in {
            "E2B_API_KEY": "e2b_fake", "E2B_API_URL": fake.url, "E2B_SANDBOX_URL": fake.url, "E2B_HTTP_VERSION": "1.1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield fake


@pytest.fixture
def shell(server):
    with E2BShell("base", limits=Limits(output=1000)) as shell:
        yield shell


def test_a_command_says_what_it_says_with_its_exit_code(shell):
    done = shell.execute("echo out; echo err >&2; exit 3")
    assert (done.output, done.returncode, done.timed_out) == ("out\nerr\n", 3, False)
    assert shell.execute("pwd; echo $TZ $HOME").output == "/testbed\nUTC /tmp\n"


def test_bytes_arrive_as_they_are(shell):
    data = bytes(range(256)) * 3
    shell.write("/testbed/sub/b", data)
    assert shell.read("/testbed/sub/b") == data
    assert (
        shell.execute("sha256sum", stdin=data).output.split()[0] == shell.execute("sha256sum < sub/b").output.split()[0]
    )
    assert list(list_files(shell, "/testbed", 20)) == ["sub/b"]
    assert (
        shell.execute("ls /dev/shm").output.startswith("said.")
        and len(shell.execute("ls /dev/shm").output.split()) == 1
    )


def test_a_long_output_loses_its_middle(shell):
    done = shell.execute("seq 1 2000")
    assert done.output.startswith("1\n2\n") and done.output.endswith("2000\n") and "bytes left out" in done.output
    assert done.left_out == 8893 - 1000


def test_a_command_that_takes_too_long_is_stopped_and_leaves_nothing(shell):
    done = shell.execute("sleep 100", timeout=0.5)
    assert done.timed_out and done.returncode == 137
    shell.execute("(sleep 2; touch late) & disown; echo done")
    assert "late" not in shell.execute("sleep 2.5; ls").output


def test_states_are_gone_back_to_in_any_order_more_than_once(shell, server):
    shell.execute("echo one > a")
    one = shell.save()
    assert shell.save() is one, "nothing ran since"
    shell.execute("echo two > a; touch b")
    two = shell.save()
    for state, said in ((one, "one\na\n"), (two, "two\na\nb\n"), (one, "one\na\n")):
        shell.load(state)
        assert shell.execute("cat a; ls").output == said
    shell.reset()
    assert shell.execute("ls").output == ""
    assert len(server.sandboxes) == 1, "what was left behind is ended"
    assert server.created[1:4] == [one.template, two.template, one.template]


def test_a_state_that_nobody_holds_is_deleted_on_the_service(shell, server):
    shell.execute("touch a")
    one = shell.save()
    shell.execute("touch b")
    two = shell.save()
    assert server.snapshots == [one.template, two.template]
    del one
    gc.collect()
    assert server.snapshots == [two.template]


def test_no_command_no_snapshot_and_going_on_needs_no_new_sandbox(shell, server):
    first = shell.save()
    assert server.created == [] and server.snapshots == []
    shell.execute("touch a")
    state = shell.save()
    shell.load(state)
    assert shell.execute("ls").output == "a\n" and server.created == ["base"]
    shell.load(first)
    assert shell.execute("ls").output == ""


def test_a_sandbox_has_no_network_and_a_lifetime(shell, server):
    shell.execute("true")
    assert server.calls[0]["allow_internet_access"] is False and server.calls[0]["timeout"] == 3600


def test_a_sandbox_that_is_gone_costs_its_branch_and_the_shell_goes_on(shell, server):
    shell.execute("touch a")
    state = shell.save()
    server.sandboxes.clear()
    with pytest.raises(SandboxError, match="E2B: .*what wasn't saved is lost"):
        shell.execute("ls")
    shell.load(state)
    assert shell.execute("ls").output == "a\n"


def test_an_unknown_template_is_the_tasks_fault(server):
    with E2BShell("nosuch") as shell, pytest.raises(TaskError, match="no template nosuch"):
        shell.execute("true")


def test_it_is_a_kind_by_name_and_says_what_it_lacks(server, monkeypatch):
    kind = SHELLS.load("e2b")
    assert kind is E2BShell and kind.probe()[0] and "snapshots (full)" in kind.probe()[1]
    with pytest.raises(ValueError, match="use full or filesystem"):
        kind.check(snapshot="half")
    with pytest.raises(ValueError, match="another user"):
        kind.check(user="root")
    with pytest.raises(SandboxError, match="kwargs.shell.template"):
        kind.open(Workspace({"/testbed": None}), Limits())
    monkeypatch.delenv("E2B_API_KEY")
    assert kind.probe() == (False, "bpo.env.execution=e2b needs a key of the service: export E2B_API_KEY=...")


def test_repairs_are_done_in_it_and_branches_go_apart(server, tmp_path):
    make_repairs(tmp_path / "repairs", {"train": 1}, progress=False)
    repair = load_environment("repair")
    (task,) = repair.tasks(root=str(tmp_path / "repairs"))
    environment = repair(execution="e2b", shell={"template": "base"})
    with MemorySandbox(environment) as sandbox:
        sandbox.reset(task)
        right, wrong = sandbox.snapshot().fork(2)
        expert = environment.expert_actions()
        wrong.step("rm *.py")
        assert [right.step(action) for action in expert][-1].reward == 1.0
        assert wrong.step("submit").reward == 0.0
