"""What pages say: files, links and anchors are there, examples run, pictures have commands."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from samestep.tooling.pages import stored_pages
from tests import tables
from tests.inventory import LISTED, MODULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOLDERS = ("samestep", "benchmarks", "tests", "examples", "docs")
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
}
OF_USERS = {"file.py", "mine.py", "train.py", "yours.py"}
PICTURES = sorted(path.name for path in DOCS.iterdir() if path.suffix in (".png", ".svg"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Links of pages: the text may not hold a bracket, the address no space.
LINK = re.compile(r"\]\(([^)\s]+)\)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(text):
    """A page without its code."""
    text = re.sub(r"^(?:    .*\n)+", "", FENCED.sub("", text), flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page):
    """What links may name in it, as GitHub and the site make it of headings."""
    found = {}
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = found.setdefault(slug, 0)
        found[slug] += 1
        yield f"{slug}-{number}" if number else slug


@each_page
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    named = set(re.findall(r"[\w./-]+\.py\b", text)) - OF_USERS
    missing = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in FILES)}
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = module.replace(".", "/")
        if path.startswith(FOLDERS) and not {f"{path}.py", f"{path}/__main__.py"} & FILES:
            missing.add(module)
    assert missing == set()


@each_page
def test_links_lead_to_files_and_headings(page):
    dead = []
    for link in LINK.findall(prose(page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_a_dead_link_would_be_seen():
    assert LINK.findall(prose("see [a](b.md#c), `[x](y)` and\n\n    [i](j)\n")) == ["b.md#c"]
    assert "would-it-find-a-bug" in anchors(DOCS / "prove.md")
    assert "state_dict-and-load_state_dict" in anchors(DOCS / "checkpoints.md")


@each_page
def test_tables_are_whole(page):
    """A row that a blank line has torn from its table is shown as text."""
    lines = ["", *FENCED.sub("", page.read_text()).splitlines(), ""]
    torn = [
        line
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False)
        if line.startswith("|")
        and not before.startswith("|")
        and not re.match(r"\|[ :-]+\|", after)
    ]
    assert torn == []


@each_page
def test_tables_are_made_of_receipts(page):
    """Made anew by `python -m tests.pages`."""
    text = page.read_text()
    assert text.count("<!-- made: ") == len(tables.MARKED.findall(text))
    assert text == tables.with_tables(page, text)


def test_a_table_that_was_edited_would_be_seen():
    text = "<!-- made: foreign -->\n| a |\n<!-- end -->\n"
    made = tables.with_tables(DOCS / "prove.md", text)
    assert made.startswith("<!-- made: foreign -->\n| optimizer |")
    assert made == tables.with_tables(DOCS / "prove.md", made)


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:", 1)[1].split("\ntheme:", 1)[0]
    lines = [line for line in nav.splitlines() if not line.lstrip().startswith("#")]
    named = re.findall(r"([\w/]+\.md)", "\n".join(lines))
    brought = {"index.md", "changelog.md", "contributing.md"}  # by docs/site_hooks.py
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(named) == sorted(pages | brought)


def test_every_picture_is_shown_and_has_its_command():
    commands = (DOCS / "dev" / "proofs.md").read_text().split("\n## Pictures\n")[1]
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"!\[[^]]+\]\((?:docs/)?([\w.-]+)\)", page.read_text())
    }
    made = re.findall(r"^\| `([\w.-]+)`.*? \| `.*` ?.*\|$", commands, re.MULTILINE)
    assert shown == set(PICTURES)
    assert sorted(made) == PICTURES


def flags_named(text):
    """Options that a page gives to commands of samestep: (command, options)."""
    called = re.findall(r"\bsamestep ((?:bench client |bench )?[a-z]+)((?: +[^\s`|#]+)*)", text)
    for command, rest in called:
        if command in stored_pages():
            yield command, re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)


@each_page
def test_options_of_commands_are_there(page):
    pages = stored_pages()
    missing = [
        f"{command} {flag}"
        for command, flags in flags_named(page.read_text())
        for flag in flags
        if flag not in pages[command].flags
    ]
    assert missing == []


def test_an_option_that_is_not_there_would_be_seen():
    text = "run `samestep plan x --mesh dp=8 --mesch` or\n    samestep bench step --out a  # --b\n"
    assert [*flags_named(text)] == [("plan", ["--mesh", "--mesch"]), ("bench step", ["--out"])]


@each_page
def test_examples_are_python(page):
    for kind, code in FENCED.findall(page.read_text()):
        if kind == "python":
            compile(code, page.name, "exec")


def run_page(page):
    """What each block of text says, and what the block of Python above it has printed."""
    names = {"__name__": "__main__"}
    printed, said = "", []
    for kind, code in FENCED.findall(page.read_text()):
        if kind == "python":
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                exec(compile(code, page.name, "exec"), names)
            printed = shown.getvalue()
        elif kind == "text":
            said.append((printed, code))
    return said


def test_public_names_are_in_the_reference():
    listed = json.loads(LISTED.read_text())
    page = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))
    for module, members in re.findall(
        r"^::: ([\w.]+)\n    options:\n      members: \[([\w, ]+)\]", page, re.MULTILINE
    ):
        shown |= {f"{module}.{name}" for name in members.split(", ")}
    # Modules that are public names, and names that the top has too.
    top = set(listed["samestep"]) - {
        "__version__",
        "hf",
        "mesh",
        "presets",
        "recipes",
        "torchtitan",
    }
    wanted = {f"samestep.{name}" for name in top}
    wanted |= {f"{m}.{name}" for m in MODULES for name in listed[m] if name not in top}
    assert wanted - shown == set()


def test_pages_that_code_names_are_there():
    named = {
        (path.name, page, heading)
        for path in (ROOT / "samestep").rglob("*.py")
        for page, heading in re.findall(r"\bdocs/([\w/]+\.md)(?:#([\w-]+))?", path.read_text())
    }
    assert len(named) >= 5
    assert {n for n in named if not (DOCS / n[1]).is_file()} == set()
    assert {n for n in named if n[2] and n[2] not in anchors(DOCS / n[1])} == set()
