"""What we rely on in verl, vLLM and Ray: that it is as recorded, and that all of it is recorded."""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

from verl_bpo.integration import reliance
from verl_bpo.integration.reliance import KINDS, RELEASES, RELIANCES, Reliance, problem

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted((REPOSITORY / "verl_bpo" / "integration").glob("*.py"))
NAMES = {entry.name for entry in RELIANCES}
KNOWN = ("verl", "vllm", "ray", "transfer_queue")


@pytest.mark.parametrize("entry", RELIANCES, ids=lambda entry: f"{entry.kind}:{entry.name}")
def test_it_is_as_recorded(entry):
    if importlib.util.find_spec(entry.package) is None:
        pytest.skip(f"{entry.package} is not installed")
    found = problem(entry)
    assert found is None, f"{found}. We need it in integration/({entry.used_by}).py: {entry.reason}"


@pytest.mark.parametrize(
    "entry, found",
    [
        (Reliance("call", "verl.protocol.Gone", "", ""), "is gone"),
        (Reliance("call", "verl.gone.DataProto", "", ""), "is gone"),
        (
            Reliance("call", "verl.trainer.ppo.utils.need_critic", "", "", parameters="wrong"),
            "takes (config), not (wrong)",
        ),
        (Reliance("patch", "verl.trainer.ppo.utils.need_critic", "", "", lines=("mended = 1",)), "no longer has"),
        (Reliance("copy", "verl.trainer.ppo.utils.need_critic", "", "", digest="0"), "has changed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_moved_is_named(entry, found):
    assert found in problem(entry) and entry.name in problem(entry)


def test_each_entry_names_our_files_once():
    assert len({(entry.kind, entry.name) for entry in RELIANCES}) == len(RELIANCES)
    ours = {file.stem for file in FILES}
    for entry in RELIANCES:
        assert entry.kind in KINDS and entry.package in (*RELEASES, "torch") and entry.reason
        assert set(entry.used_by.split(", ")) <= ours, entry.name


def imported():
    """What integration imports of them, by dotted name, with our file."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in KNOWN:
                yield from ((f"{node.module}.{alias.name}", file.stem) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (
                    (a.name, file.stem) for a in node.names if a.name.partition(".")[0] in KNOWN and "." in a.name
                )


def test_every_import_is_recorded():
    recorded = {f"{entry.name} {file}" for entry in RELIANCES for file in entry.used_by.split(", ")}
    forgotten = sorted(
        f"{name} (in {file})"
        for name, file in imported()
        if not name.startswith(("ray.exceptions.", "ray.remote"))  # documented
        and not any(line.startswith((f"{name} ", f"{name}.")) and line.endswith(f" {file}") for line in recorded)
    )
    assert not forgotten


def overridden():
    """Attributes of foreign classes that ours define again, by where the base defines them."""
    for file in FILES:
        if file.stem == "vllm_server" and importlib.util.find_spec("vllm") is None:
            continue  # its module imports vLLM
        module = importlib.import_module(f"verl_bpo.integration.{file.stem}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ != module.__name__:
                continue
            for name in vars(cls):
                bases = [base for base in cls.__mro__[1:] if name in vars(base) and "<locals>" not in base.__qualname__]
                foreign = [base for base in bases if base.__module__.partition(".")[0] in KNOWN]
                if foreign and not (name.startswith("__") and name != "__init__") and name != "_abc_impl":
                    yield f"{foreign[0].__module__}.{foreign[0].__qualname__}", name, file.stem


def test_every_override_is_recorded():
    forgotten = sorted(
        f"{base}.{name} (in {file})"
        for base, name, file in overridden()
        if f"{base}.{name}" not in NAMES and not base.endswith(".PlatformBase")  # an interface, all of which we fill in
    )
    assert not forgotten


def test_every_private_name_is_recorded():
    """Attributes that begin with an underscore and that nothing of ours defines."""
    own, used = set(), {}
    for file in (REPOSITORY / "verl_bpo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    own.add(node.attr)
                elif file in FILES:
                    used.setdefault(node.attr, file.stem)
    recorded = {entry.name.rpartition(".")[2] for entry in RELIANCES}
    python = {"__init__", "__name__", "__module__", "__mro__", "__wrapped__", "__qualname__", "__origin__"}
    forgotten = {name: file for name, file in used.items() if name not in own | recorded | python}
    assert not forgotten


def test_the_page_is_up_to_date():
    page = (REPOSITORY / "docs" / "verl.md").read_text()
    assert page == reliance.as_markdown(), "python -m verl_bpo.integration.reliance > docs/verl.md"
