"""The rooms of the package: who may import whom, and that the core works where verl, Ray and vLLM are not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CORE = ("sandbox", "shells", "tree", "advantages", "envs", "model", "config", "generation")
BLOCK = """
import sys

class NotInstalled:
    def find_spec(self, name, *args):
        if name.partition(".")[0] in ("verl", "ray", "vllm", "transfer_queue", "hydra"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, NotInstalled())
"""


def run(*command, cwd=REPOSITORY):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, cwd=cwd)
    return done.returncode, done.stdout + done.stderr


def lint(folder):
    return run(
        "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache", cwd=folder
    )


def test_no_import_breaks_the_rooms():
    code, said = lint(REPOSITORY)
    assert code == 0, said


@pytest.mark.parametrize(
    "module, line, broken",
    [
        ("tree/rows.py", "def f():\n    from verl.protocol import DataProto", "verl_bpo.tree.rows -> verl"),
        ("report/dump.py", "import ray", "verl_bpo.report.dump -> ray"),
        ("sandbox/base.py", "def f():\n    import verl_bpo.tree.rows", "verl_bpo.sandbox.base -> verl_bpo.tree.rows"),
        ("sandbox/base.py", "import verl_bpo.sandbox.memory", "No cycles are allowed in verl_bpo.sandbox"),
        ("config/schema.py", "import hydra", "verl_bpo.config.schema -> hydra"),
    ],
)
def test_an_import_that_breaks_the_rooms_is_named(tmp_path, module, line, broken):
    for file in (REPOSITORY / "verl_bpo").rglob("*.py"):
        copy = tmp_path / file.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    (tmp_path / "pyproject.toml").write_text((REPOSITORY / "pyproject.toml").read_text())
    with open(tmp_path / "verl_bpo" / module, "a") as file:
        file.write(f"\n{line}\n")
    code, said = lint(tmp_path)
    assert code == 1 and broken in said, said


def test_the_core_imports_without_verl_ray_and_vllm():
    files = [file for room in CORE for file in sorted((REPOSITORY / "verl_bpo" / room).rglob("*.py"))]
    names = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert len(names) > 60
    code, said = run("-c", f"{BLOCK}\nimport importlib; [importlib.import_module(name) for name in {names}]")
    assert code == 0, said


def test_the_core_works_without_verl_ray_and_vllm():
    options = ["-q", "-p", "no:hydra_pytest", "-p", "no:cacheprovider"]
    tests = ["tests/tree", "tests/advantages/test_sapo.py", "tests/sandbox/test_memory_sandbox.py"]
    code, said = run("-c", f"{BLOCK}\nimport pytest; sys.exit(pytest.main({options + tests}))")
    assert code == 0, said
