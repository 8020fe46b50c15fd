"""The site and the front page."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_bpo.commands.main import config_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. A link, an anchor, a snippet or an API name that leads nowhere ends the build."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_configuration_page_has_every_key(site):
    page = html.unescape((site / "configuration" / "index.html").read_text())
    for key, _, meaning in config_table():
        group, _, name = key.rpartition(".")
        assert f">{group}<" in page, key
        assert f"<code>{name}</code>" in page, key
        assert meaning.split("`")[0].split("_")[0].strip() in page, key


def test_a_page_loads_nothing_from_elsewhere(site):
    loads = re.compile(
        r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?(https?:)?//|<link\b[^>]*\brel=["']?stylesheet[^>]*//"""
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text()), page.relative_to(site)


def test_a_page_of_the_site_names_no_place_of_a_machine():
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        assert not re.search(r"(?<![\w.~])/(?:work|home|root)/", page.read_text()), page.relative_to(ROOT)
