"""What the site generates: the table of configuration keys, and roles of docstrings as plain code."""

import json
import re
import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package beside this site, installed or not

_PLACE = "<!-- config table -->"
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):(?=<code>)")


def on_page_markdown(markdown: str, **_) -> str:
    """Put the table of ``verl-bpo config`` where a page asks for it."""
    return markdown.replace(_PLACE, config_tables()) if _PLACE in markdown else markdown


def on_page_content(html: str, **_) -> str:
    """``:class:`Shell``` of a docstring is ``Shell`` on the site."""
    return _ROLE.sub("", html)


def config_tables() -> str:
    """A heading and a table of keys for each group of ``bpo.*``, in Markdown."""
    from verl_bpo.config.reference import table

    rows = sorted(table(), key=lambda row: row[0].rpartition(".")[0])  # stable: keys stay in their order
    parts = []
    for group, keys in groupby(rows, key=lambda row: row[0].rpartition(".")[0]):
        parts += [f"## {group}", '<div class="keys" markdown>', "", "| key | default | meaning |", "|---|---|---|"]
        for key, default, meaning in keys:
            cells = (f"`{key.rpartition('.')[2]}`", f"`{json.dumps(default)}`", meaning.replace("|", "\\|"))
            parts.append(f"| {' | '.join(cells)} |")
        parts += ["", "</div>", ""]
    return "\n".join(parts)
