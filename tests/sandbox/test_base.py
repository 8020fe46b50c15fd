"""What environments and rollouts have agreed on."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

from verl_bpo import sandbox
from verl_bpo.sandbox import Environment, Observation, SandboxError
from verl_bpo.sandbox.answers import LARGEST, received
from verl_bpo.sandbox.base import is_won
from verl_bpo.sandbox.worker import LocalWorker


@pytest.mark.parametrize(
    "info, episode_return, won",
    [
        ({"won": True}, 0.0, True),
        ({"won": False}, 0.4, False),  # a graded reward: something was bought, not the right thing
        ({}, 0.4, True),
        ({}, 0.0, False),
        ({}, -1.0, False),
    ],
)
def test_an_environment_says_what_is_won_and_else_the_return_does(info, episode_return, won):
    assert is_won(info, episode_return) is won


def test_the_figure_of_what_is_where_is_the_same_in_the_package_and_on_the_site():
    page = Path(__file__).parents[2] / "docs" / "_sandbox_processes.md"
    figure = page.read_text().split("```")[1].removeprefix("text\n")
    assert textwrap.indent(figure, "    ") in sandbox.__doc__


# --- what environments answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5, np.float16), 0.5])
def test_numbers_of_numpy_are_taken_as_pythons(number):
    given = Observation(
        "ok",
        number,
        np.bool_(True),
        np.array(False),
        ["look"],
        {"won": np.bool_(True), "score": np.float32(2), "n": np.int64(3)},
    )
    found = received(given)
    assert found == Observation("ok", 0.5, True, False, ("look",), {"won": True, "score": 2.0, "n": 3})
    values = [found.reward, found.terminated, found.truncated, *found.info.values()]
    assert [type(value) for value in values] == [float, bool, bool, bool, float, int]


@pytest.mark.parametrize(
    "answer, said",
    [
        (("ok", 1.0, True, False, {}), "the environment answered tuple .*return verl_bpo.sandbox.Observation"),
        (Observation(b"ok"), "text is bytes b'ok': it must be a str"),
        (Observation("ok", None), "reward is NoneType None: it must be a finite number"),
        (Observation("ok", "1"), "reward is str '1'"),
        (Observation("ok", float("nan")), "reward is float nan"),
        (Observation("ok", np.float32("inf")), "reward is float32"),
        (Observation("ok", np.zeros(2)), "reward is ndarray"),
        (Observation("ok", terminated="no"), "terminated is str 'no': it must be True or False"),
        (Observation("ok", actions="look"), "actions is str 'look': it must be a tuple of str"),
        (Observation("ok", actions=(1,)), "actions is tuple"),
        (Observation("ok", info=None), "info is NoneType None: it must be a dict"),
        (Observation("\ud83d alone"), r"text has '\\ud83d' at character 0, half a pair"),
        (Observation("ok", actions=("a", "\udcff")), r"one of Observation.actions has '\\udcff'"),
        (Observation("ok", info={"note": "\udc80"}), r"info\['note'\] has '\\udc80'"),
        (Observation("ok", info={"\udc80": 1}), r"a key of Observation.info has"),
        (Observation("x" * (LARGEST + 1)), "text has 16,777,217 characters: at most 16,777,216 are taken"),
        (Observation("ok", 10**400), "reward is int 1000"),
        (Observation("ok", 1j), "reward is complex 1j"),
        (Observation("ok", truncated=None), "truncated is NoneType None"),
        (Observation("ok", terminated=1), "terminated is int 1: it must be True or False"),
        (Observation("ok", info={"won": "yes"}), r"info\['won'\] is str 'yes': it must be True or False"),
        (Observation("ok", info={"won": float("nan")}), r"info\['won'\] is float nan"),
        (Observation("ok", info={1: 2}), "info has the key int 1"),
        (Observation("ok", info={"n": 1 << 64}), r"info\['n'\] is a number of 65 bits"),
        (Observation("ok", info={"a": {"b": [object]}}), r"info\['a'\]\['b'\]\[0\] is type .*plain values"),
    ],
)
def test_an_answer_against_the_contract_is_told_in_one_line(answer, said):
    with pytest.raises(SandboxError, match=said) as error:
        received(answer)
    assert "\n" not in str(error.value)


def test_every_world_passes_on_what_was_received():
    worker = LocalWorker()
    worker.open(f"{__file__}:NumpyWorld", {}, "memory")
    assert type(worker.call("reset", 0, "a", 0, timeout=1).reward) is float
    assert type(worker.call("step", 0, "look", timeout=1).reward) is float
    with pytest.raises(SandboxError, match="reward is NoneType None"):
        worker.call("step", 0, "none", timeout=1)


class NumpyWorld(Environment):
    def reset(self, task, seed=0):
        return Observation("start", np.float32(0))

    def step(self, action):
        return Observation("ok", None if action == "none" else np.float32(1))
