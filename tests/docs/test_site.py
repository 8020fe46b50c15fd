"""The site and the front page."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_bpo.config.reference import table

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


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


def test_the_configuration_page_has_every_key_and_its_meaning(site):
    page = (site / "configuration" / "index.html").read_text()
    text = _words(html.unescape(re.sub(r"<[^>]+>", "", page)))
    for key, _, meaning in table():
        group, _, name = key.rpartition(".")
        assert f">{group}<" in page and f"<code>{name}</code>" in page, key
        assert _words(meaning) in text, key


def test_a_page_loads_nothing_from_elsewhere(site):
    loads = re.compile(
        r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\brel=["']?stylesheet[^>]*//"""
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text()), page.relative_to(site)


def test_a_key_that_a_page_names_exists():
    """Results pages are left out: they name keys as they were at the release that was measured."""
    keys = [key for key, _, _ in table()]
    groups = {key.rsplit(".", i)[0] for key in keys for i in (1, 2)}
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        if page.parent.name == "results":
            continue
        for name in re.findall(r"\bbpo\.(?!md|png|py|yaml)[a-z_]+(?:\.[a-z_]+)*", page.read_text()):
            free = name.startswith(("bpo.env.kwargs.", "bpo.env.placement.resources", "bpo.estimator."))
            assert free or name in keys or name in groups, f"{page.name}: {name}"


def test_no_page_names_a_place_of_one_machine():
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert not re.search(r"(?<![\w.~])/(?:work|home|root)/", page.read_text()), page.relative_to(ROOT)


def test_the_front_page_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 180
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", text):
        assert (ROOT / target).exists(), target


def _words(text: str) -> str:
    """Letters and figures alone: Markdown's own signs and typographic quotes are gone."""
    return re.sub(r"[^a-z0-9]+", "", text.lower())
