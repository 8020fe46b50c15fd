"""Kinds of shell by name, an own one in a file, and what every kind can do."""

import pytest
from shells import need_isolation

from verl_bpo.config.schema import build
from verl_bpo.generation.pools import Pools, environment_kwargs
from verl_bpo.sandbox import SandboxError
from verl_bpo.sandbox.loading import EnvironmentUnavailable, load_environment
from verl_bpo.shells.base import SHELLS, Limits, Workspace
from verl_bpo.shells.local import LocalShell

OWN = '''
from verl_bpo.shells.base import CommandResult, Shell, Workspace
from verl_bpo.shells.environment import ShellEnvironment


class Saved:
    nbytes = None

    def __init__(self, lines):
        self.lines = list(lines)


class Notebook(Shell):
    """Runs nothing: it writes commands down."""

    files_from = "folders"

    def __init__(self, workspace, limits, title):
        self.limits, self.cwd, self.facts, self.title = limits, next(iter(workspace.trees)), {}, title
        self.lines = []

    @classmethod
    def open(cls, workspace, limits, allow_unsafe=False, title="notes"):
        return cls(workspace, limits, title)

    @classmethod
    def check(cls, title="notes"):
        if not title:
            raise ValueError("a notebook has a title")

    @classmethod
    def probe(cls, title="notes"):
        return True, "paper"

    def execute(self, command, cwd=None, timeout=None, stdin=b"", most=None):
        self.lines.append(command)
        return CommandResult(f"{self.title}: {' '.join(self.lines)}", 0)

    def save(self):
        return Saved(self.lines)

    def load(self, files):
        self.lines = list(files.lines)

    def reset(self):
        self.lines = []

    def close(self):
        self.lines = []


class Half:
    files_from = "folders"

    def execute(self, command):
        return None


class Desk(ShellEnvironment):
    def _open(self, task, seed):
        shell = self._shell or self._open_shell(Workspace({"/desk": None}))
        shell.reset()
        return shell, "Write."

    def _score(self, shell):
        return 1.0, {}
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "notebook.py"
    file.write_text(OWN)
    return str(file)


def test_the_built_in_kinds_are_found_by_their_modules():
    assert {"container", "local"} <= set(SHELLS.built_in())


def test_an_own_kind_is_one_file_that_the_config_names(own):
    kwargs = {"shell": {"title": "mine"}, "observation": "plain"}
    spec = build({"env": {"execution": f"{own}:Notebook", "kwargs": kwargs, "workers": 1}}, "plain").env
    pools = Pools(spec)
    try:
        with pools[f"{own}:Desk"].open() as world:
            trunk, _ = world.reset("t")
            trunk.step("a")
            (fork,) = trunk.snapshot().fork()
            assert trunk.step("b").text == "mine: a b"
            assert fork.step("c").text == "mine: a c"
    finally:
        pools.close()


def test_options_that_no_shell_can_be_opened_with_are_told_before_the_first_task(own):
    desk = load_environment(f"{own}:Desk")
    with pytest.raises(ValueError, match="a notebook has a title"):
        desk(execution=f"{own}:Notebook", shell={"title": ""})
    with pytest.raises(ValueError, match="files='zip': use auto, overlay or git"):
        desk(shell={"files": "zip"})
    with pytest.raises(TypeError, match="colour"):
        desk(shell={"colour": "red"})


def test_what_is_no_kind_of_shell_says_what_is_missing(own):
    with pytest.raises(
        EnvironmentUnavailable, match="give it open, check, probe, read, write, save, load, reset, close"
    ):
        SHELLS.load(f"{own}:Half")
    with pytest.raises(EnvironmentUnavailable, match="no kind of shell named 'cloud': use one of .*local"):
        SHELLS.load("cloud")


def test_a_config_names_shells_only_to_environments_that_run_commands(own):
    spec = build({"env": {"execution": f"{own}:Notebook", "kwargs": {"timeout": 9}}}, "plain").env
    assert environment_kwargs("textworld", spec) == {"timeout": 9}
    assert environment_kwargs("repair", spec) == {"timeout": 9, "execution": f"{own}:Notebook", "shell": {}}


def test_files_travel_as_bytes():
    need_isolation()
    data = bytes(range(256)) * 5000  # more than a command's output may be
    with LocalShell.open(Workspace({"/testbed": None}), Limits(output=1000)) as shell:
        shell.write("new/folder/it's", data)
        assert shell.read("new/folder/it's") == shell.read("/testbed/new/folder/it's") == data
        shell.write("new/folder/it's", b"")
        assert shell.read("new/folder/it's") == b""
        with pytest.raises(SandboxError, match="no-such-file can't be read in the shell"):
            shell.read("no-such-file")
        with pytest.raises(SandboxError, match="new can't be written in the shell: .*[Ii]s a directory"):
            shell.write("new", b"x")
