"""What environments and rollouts have agreed on."""

import textwrap
from pathlib import Path

import pytest

from verl_bpo import sandbox
from verl_bpo.sandbox.base import is_won


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
