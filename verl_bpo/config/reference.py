"""The reference of ``bpo.*`` and the yaml that lists its keys, generated from the classes that declare them.

``python -m verl_bpo.config.reference`` writes ``bpo_base.yaml`` anew.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from verl_bpo.config.schema import BPOConfig
from verl_bpo.options import Options, keys
from verl_bpo.tree.selectors import SELECTORS

YAML = Path(__file__).with_name("bpo_base.yaml")
_HEAD = """\
# verl's own trainer config plus every key of bpo.*, so that `bpo.preset=guided` needs no leading plus sign.
# Null means: from the preset, else the default. Meanings: `verl-bpo config`. Written by python -m verl_bpo.config.reference.
# To build an own config on: put this in its defaults and both packages in its hydra.searchpath, see bpo_trainer.yaml.
defaults:
  - ppo_trainer
  - _self_

algorithm:
  adv_estimator: bpo

actor_rollout_ref:
  rollout:
    n: 1

"""


def table(cls: type[Options] = BPOConfig, prefix: str = "bpo") -> list[tuple[str, object, str]]:
    """(key, default, meaning) of every key of ``cls``, in the order of their declaration."""
    rows = []
    for name, group in keys(cls).items():
        field = cls.model_fields[name]
        key, default = f"{prefix}.{name}", field.get_default(call_default_factory=True)
        if group is not None and name != "selector":
            rows += table(group, key)
        elif name == "selector":
            rows.append((key, default.NAME, _line(field.description)))
            rows += _selector_rows(prefix)
        else:
            rows.append((key, default, _line(field.description)))
    return rows


def base_yaml() -> str:
    """The text of ``bpo_base.yaml``."""
    tree: dict = {}
    for key, *_ in table():
        *groups, name = key.split(".")
        at = tree
        for group in groups:
            at = at.setdefault(group, {})
        at[name] = {} if name in ("kwargs", "estimator") else None
    return _HEAD + yaml.safe_dump(tree, sort_keys=False)


def _selector_rows(prefix: str) -> list[tuple[str, object, str]]:
    """The built-in selectors' own parameters, each once, with the selectors that have it."""
    owners: dict[tuple[str, str], list[str]] = {}
    defaults = {}
    for selector, cls in SELECTORS.items():
        for name, field in cls.model_fields.items():
            owners.setdefault((name, _line(field.description)), []).append(f"``{selector}``")
            defaults[name] = field.get_default()
    meanings: dict[str, list[str]] = {}
    for (name, meaning), selectors in owners.items():
        meanings.setdefault(name, []).append(f"{', '.join(selectors)}: {meaning}")
    return [(f"{prefix}.{name}", defaults[name], " ".join(said)) for name, said in meanings.items()]


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    YAML.write_text(base_yaml())
