"""Tests of the picture of the packages, and of the size of the pages that are read in one go."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fft
from tools import reference
from tools.reference import outdated, surface
from tools.rooms import PAGE, direct, imports, lines

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CHANGE_SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
RECORD_SECTIONS = ["Context", "Decision", "Alternatives rejected", "Consequences"]
MADE_BY_THE_SITE = {"reference/cli.md", "reference/spec.md", "reference/timeouts.md"}


def test_the_picture_in_the_design_is_drawn_from_the_imports() -> None:
    assert "\n".join(lines(imports())) in PAGE.read_text(), "python -m tools.rooms"


def test_pages_written_from_the_code_are_up_to_date() -> None:
    assert outdated() == [], "python -m tools.reference"


def test_page_of_the_surface_shows_a_changed_name_argument_and_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The page would be outdated."""
    before = surface()
    with monkeypatch.context() as patch:
        patch.setattr(fft, "__all__", [name for name in fft.__all__ if name != "Loader"])
        assert "fft.Loader(" in before and "fft.Loader(" not in surface()
    with monkeypatch.context() as patch:
        patch.setattr(fft.Loader, "__init__", lambda self, loader: None)
        assert "fft.Loader(loader)" in surface()
    with monkeypatch.context() as patch:
        patch.setattr(fft.ManagerFFT, "added", lambda self, value=1: None, raising=False)
        assert "    added(value=1)" in surface()
    (tmp_path / "fft").mkdir()
    (tmp_path / "fft" / "added.py").write_text('environ["FFT_ADDED"]')
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert reference.variables() == ["FFT_ADDED"]


def test_every_room_is_in_the_picture_and_in_the_table() -> None:
    rooms = {path.parent.name for path in (ROOT / "fft").glob("*/__init__.py")}
    drawn = {room for pair in imports() for room in pair} - {"cli"}
    assert rooms - {"cli"} == drawn
    table = PAGE.read_text(encoding="utf-8")
    assert {room for room in rooms if f"| `{room}/`" not in table} <= {"cli"}


def test_only_the_nearest_rooms_are_joined() -> None:
    assert list(direct({("a", "b"), ("b", "c"), ("a", "c")})) == [("a", "b"), ("b", "c")]
    with pytest.raises(ValueError, match="a → b → a"):
        list(direct({("a", "b"), ("b", "a")}))


@pytest.mark.parametrize(("name", "most"), [("README.md", 100), ("DESIGN.md", 300)])
def test_the_first_pages_stay_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def test_links_between_pages_lead_somewhere() -> None:
    """Anchors are checked by ``make docs``."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target) or target in MADE_BY_THE_SITE:
                continue
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_navigation_of_the_site_lists_each_page_and_each_example_once() -> None:
    listed = re.findall(r"^ +- ([\w/-]+(?:\.\w+)*\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    examples = {
        f"examples/{path.relative_to(ROOT / 'examples')}.md"
        for path in (ROOT / "examples").rglob("*.py")
    }
    made = {"index.md", "design.md", "contributing.md", "changelog.md", *MADE_BY_THE_SITE}
    others = {"examples/hsdp_demo_faults.yaml.md"}
    assert sorted(listed) == sorted(pages | examples | made | others)


def test_page_of_variables_lists_those_of_the_code() -> None:
    code = "".join(path.read_text("utf-8") for path in (ROOT / "fft").rglob("*.py"))
    page = (ROOT / "docs" / "reference" / "variables.md").read_text("utf-8")
    listed, internal = page.split("## Between")
    known = set(re.findall(r"`(FFT_\w+)`", listed)), set(re.findall(r"`(FFT_\w+)`", internal))
    assert known[0] | known[1] == set(re.findall(r"\bFFT_[A-Z_]*[A-Z]\b", code))
    assert not known[0] & known[1] and len(known[0]) <= 12


def test_decision_index_lists_each_record_with_its_date() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"\[([^]]+)\]\(([\w-]+\.md)\) \| (\S+) \|", index)
    records = {path.name for path in folder.glob("*.md")} - {"index.md"}
    assert sorted(name for _, name, _ in listed) == sorted(records)
    for title, name, date in listed:
        text = (folder / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n\n- Date: {date}\n- Status: "), name
        assert re.findall(r"^## (.*)", text, re.M) == RECORD_SECTIONS, name


def test_changelog_has_each_section_once_and_no_entry_twice() -> None:
    """Merging an older branch can bring entries back at the end of the file."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = text.partition("\n## ")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.*)", newest, re.M) == CHANGE_SECTIONS
    names = re.findall(r"^- `(?:fft\.)?(\w+)`(?:,|:) ", newest, re.M)
    assert sorted(names) == sorted(set(names))


def test_files_that_the_pages_name_are_there() -> None:
    named = r"`((?:fft(?!/JOB)|tests|benchmarks|examples|fsm_specs|docs)/[\w/.]+)`"
    for page in PAGES:
        for path in re.findall(named, page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)}: {path}"
