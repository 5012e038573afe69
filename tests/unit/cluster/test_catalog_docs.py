"""docs/cluster against the catalog: every key is told, and every recipe has a page that names its pins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparkguard.cluster.catalog import read as catalog
from sparkguard.cluster.catalog.tables import Table

REPOSITORY = Path(__file__).parents[3]
DOCS = REPOSITORY / "docs" / "cluster"
EXAMPLE = catalog.load(REPOSITORY / "models.example.toml", example=True)
MORE = """
[[cluster.nodes]]
name = "a"
[[models.x.mounts]]
container = "/x"
[[models.x.checkpoints]]
repo = "a/b"
[models.x.build]
base = "x"
[[models.x.build.files]]
url = "x"
[models.n]
wrapper = "nim"
[models.n.nim]
[models.t]
wrapper = "tensorfold"
[models.t.tensorfold]
[models.l]
wrapper = "llamacpp"
[models.l.llamacpp]
[yue]
[clients.c]
"""


def known_keys(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every key that the reader asks any table for."""
    found: set[str] = set()
    end = Table.end

    def noted(self: Table) -> None:
        found.update(self.known)
        end(self)

    monkeypatch.setattr(Table, "end", noted)
    catalog._catalog(catalog.tomllib.loads(MORE), "x", catalog.Faults())
    return found


def test_every_key_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/cluster/catalog.md names each key that a catalog may have."""
    text = (DOCS / "catalog.md").read_text()
    told = {word for span in re.findall(r"`[^`\n]+`|^## .*$|\[[^]]+\]", text, re.M) for word in re.findall(r"[a-z_0-9]+", span)}
    keys = known_keys(monkeypatch)
    by_node = {key for key in keys if re.match(r"(host_ip|runtime_cache|ffmpeg_path)_|[ab]\Z", key)}
    assert len(keys) > 90
    assert keys - by_node - told == set()


@pytest.mark.parametrize("model", EXAMPLE.models, ids=lambda model: model.name)
def test_each_recipe_has_a_page_with_its_pins(model: catalog.Model) -> None:
    """The page of a recipe names its image's digest and the revision of each of its checkpoints, and that nobody here ran it."""
    page = (DOCS / f"{model.recipe}.md").read_text()
    image = model.build.base if model.build else model.image
    pins = [image.rpartition("sha256:")[2][:8]] if "sha256:" in image else [image]
    pins += [each.revision[:8] for each in model.checkpoints if each.pinned]
    assert [pin for pin in pins if pin not in page] == []
    assert "Not run on hardware by this project" in page
    assert f"[{model.recipe}.md]({model.recipe}.md)" in (DOCS / "recipes.md").read_text()


def test_links_of_the_pages_lead_somewhere() -> None:
    """Each link to another page of docs/cluster is to one that is there."""
    pages = ("catalog", "recipes", "recovery", "independent-sparks", "yue", *(model.recipe for model in EXAMPLE.models))
    broken = []
    for name in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / f"{name}.md").read_text()):
            if not (DOCS / target).exists():
                broken.append(f"{name}.md: {target}")
    assert broken == []
