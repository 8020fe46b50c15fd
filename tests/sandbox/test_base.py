"""What environments and rollouts have agreed on."""

import pytest

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
