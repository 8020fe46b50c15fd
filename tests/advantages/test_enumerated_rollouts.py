"""The direction of the expected gradient at every state, exactly, through the real rollout."""

import pytest
from enumeration import Process, expected_gradient

from verl_bpo.config.schema import build
from verl_bpo.tree.selectors import SELECTORS

PRESETS = {
    "paper": {"budget": {"limit": 4}},
    "paper_threshold": {"budget": {"limit": 4}, "branch": {"threshold": 0.6}},
    "guided": {"budget": {"limit": 4}, "branch": {"root_samples": 2, "top_k": 1, "entropy_tokens": "first"}},
}
CASES = [(preset, {}) for preset in PRESETS]
CASES += [("paper_threshold", {"selector": name}) for name in SELECTORS if name not in ("none", "threshold")]
CASES += [("guided", {"trunk": "any"})]


def settings(preset, branch):
    given = PRESETS[preset]
    kept = {} if "selector" in branch else given.get("branch", {})
    return build({**given, "branch": kept | branch, "env": {"max_turns": 3, "max_action_tokens": 1}}, preset)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("preset, branch", CASES)
def test_the_gradient_points_the_right_way_at_every_state(preset, branch, graded):
    """With every preset and every selector, of rewards 0 and 1 and of graded ones."""
    processes = [Process.drawn(seed, horizon=2, graded=graded) for seed in range(8)]
    for process in [p for p in processes if len(set(p.returns.values())) > 1][:2]:
        expected, true = expected_gradient(process, settings(preset, branch))
        trained = {state for state, x in expected.items() if abs(x) > 1e-12}
        assert trained
        for state in trained:
            assert expected[state] * true[state] > 0, (process, state, expected[state])
