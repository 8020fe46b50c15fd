"""``bpo.*``: presets, checks and messages."""

import pytest

from verl_bpo.config import reference, schema
from verl_bpo.config.reference import table
from verl_bpo.config.schema import build, find_estimator
from verl_bpo.options import ConfigError
from verl_bpo.tree.selectors import TopK


def test_a_users_key_beats_the_preset_and_the_preset_beats_the_default():
    config = build({"branch": {"forks": 5}}, "guided")
    assert (config.branch.forks, config.branch.selector, config.branch.depth) == (5, TopK(trunk="success"), 2)


def test_presets_are_complete_and_valid():
    for preset in schema.PRESETS:
        assert build({"preset": preset}, "plain").preset == preset


@pytest.mark.parametrize(
    "user, message",
    [
        ({"brnch": {}}, "unknown key bpo.brnch"),
        ({"branch": {"selektor": "none"}}, "unknown key bpo.branch.selektor"),
        ({"branch": {"selector": "entropy"}}, "bpo.branch.selector='entropy' is not one of most_uncertain, threshold"),
        ({"branch": {"forks": 0}}, "bpo.branch.forks=0 must be at least 1"),
        ({"branch": {"forks": "three"}}, "bpo.branch.forks='three' must be int"),
        ({"branch": {"trunk": "success"}}, "bpo.branch.trunk is for selector top_k"),
        ({"branch": 3}, "bpo.branch=3 must hold keys"),
        ({"budget": {"unit": "env_steps", "limit": 5}}, "less than one trajectory can cost"),
        ({"budget": {"limit": 0}}, "bpo.budget.limit=0 must be at least 1"),
        ({"budget": {"limit": 2}, "branch": {"root_samples": 4}}, "less than bpo.branch.root_samples=4"),
        ({"preset": "best"}, "bpo.preset='best' is not one of plain, paper, paper_threshold, guided, critic"),
        ({"prompt": {"template": "xml"}}, "prompt.template='xml' is not one of bare, think_action"),
        ({"env": {"execution": "docker"}}, "bpo.env.execution='docker' is not one of .*local.*, package"),
        ({"env": {"container": {"engin": "docker"}}}, "unknown key bpo.env.container.engin; known here: engine, image"),
        ({"env": {"container": {"run_options": "--env '"}}}, "bpo.env.container.run_options=.*No closing quotation"),
        ({"env": {"backend": "docker"}}, "bpo.env.backend='docker' is not one of .*memory.*, package"),
        ({"env": {"placement": {"where": "cluster"}}}, "bpo.env.placement.where='cluster' is not one of local, ray"),
        ({"env": {"placement": {"worlds": 0}}}, "bpo.env.placement.worlds=0 must be at least 1"),
        ({"env": {"placement": {"num_cpus": 1.5}}}, "bpo.env.placement.num_cpus=1.5 must be whole if above 1"),
        ({"env": {"placement": {"resources": {"GPU": 1}}}}, "resources.GPU is no custom resource"),
        ({"env": {"placement": {"resources": {"sandbox": "1"}}}}, "resources.sandbox='1' must be a number above 0"),
        ({"env": {"placement": {"start_timeout": 0}}}, "start_timeout=0 must be above 0"),
        ({"env": {"isolation": "none", "placement": {"where": "ray"}}}, "set isolation=process"),
    ],
)
def test_a_bad_key_is_named_with_what_would_be_right(user, message):
    with pytest.raises(ConfigError, match=message):
        build(user, "paper")


def test_whole_numbers_serve_as_floats():
    assert build({"branch": {"threshold": 2}}, "paper").branch.selector.threshold == 2.0


def test_a_fork_alone_is_allowed_where_the_trunk_is_a_fair_sibling():
    with pytest.raises(ConfigError, match="without a sibling to compare with"):
        find_estimator(build({"branch": {"forks": 1, "entropy_tokens": "all"}}, "paper"), "bpo")
    assert find_estimator(build({"branch": {"forks": 1, "entropy_tokens": "first"}}, "paper_threshold"), "bpo")
    assert build({"branch": {"forks": 1, "entropy_tokens": "first"}}, "paper_threshold").branch.forks == 1
    assert not build({"branch": {"entropy_tokens": "open"}}, "paper").branch.state_only


def test_the_yaml_is_written_from_the_classes():
    assert reference.YAML.read_text() == reference.base_yaml(), "run: python -m verl_bpo.config.reference"


def test_every_key_says_what_it_means():
    assert [key for key, _, meaning in table() if not meaning] == []


def test_guided_goes_by_values_where_rollouts_know_them():
    keys = lambda config: (config.branch.selector.score, config.branch.selector.trunk)  # noqa: E731
    assert keys(build({}, "guided")) == ("entropy", "success")
    assert keys(build({}, "guided", values=True)) == ("value", "any")
    assert keys(build({"branch": {"score": "entropy_value"}}, "guided")) == ("entropy_value", "any")
    assert keys(build({"branch": {"score": "entropy", "trunk": "success"}}, "guided", values=True)) == (
        "entropy",
        "success",
    )
    assert build({}, "paper", values=True).branch.selector.score == "entropy"


def test_a_value_depends_on_the_state_alone():
    branch = {"selector": "quantile", "entropy_tokens": "all"}
    assert not build({"branch": branch}, "paper").branch.state_only
    assert build({"branch": {**branch, "score": "value"}}, "paper").branch.state_only
    assert not build({"branch": {**branch, "score": "entropy_value"}}, "paper").branch.state_only
