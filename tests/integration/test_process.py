"""What of ours verl knows in a process, whatever that process imported first."""

import os
import subprocess
import sys

import pytest

from verl_bpo.commands import doctor


@pytest.mark.parametrize("first", ["verl", "verl_bpo.integration.tree_trainer", "verl_bpo.integration.sapo_trainer"])
def test_all_is_registered_whatever_is_imported_first(first):
    script = f"import {first}; from verl_bpo.integration.process import *; print(registrations(), ERRORS)"
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.endswith("[]") and "False" not in line, line


def test_the_doctor_tells_what_is_registered(monkeypatch):
    tables = {"advantage estimator bpo": True, "trainer mode bpo_sync": False}
    monkeypatch.setattr("verl_bpo.integration.process.registrations", lambda: tables)
    monkeypatch.setattr("verl_bpo.integration.process.ERRORS", ["trainer: ImportError: gone"])
    checks = {check.name: (check.ok, check.detail) for check in doctor._registrations()}
    assert checks == {
        "advantage estimator bpo": (True, "registered"),
        "trainer mode bpo_sync": (False, "missing"),
        "plugin": (False, "trainer: ImportError: gone"),
    }
