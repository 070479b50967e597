"""What the site has beside docs/: README, changelog, receipts, help of commands, the repository.

In the repository pages link to files above docs/ (`../receipts/soak_2/receipt.json`), and README.md
links into it (`docs/start.md`). The site has one folder, so both kinds of links are rewritten.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
COPIED = ("receipts", "benchmarks/results")


# Code in a line, and words in it that fit the line of a phone and are not to be broken there.
INLINE = re.compile(r"<code>([^<>\n]+)</code>")
WORD = re.compile(r"(?<!\S)\S{2,34}(?!\S)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository that this clone is of, where that has an address."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    # git@host:owner/name and https://user:secret@host/owner/name: neither user nor secret is shown.
    found = re.fullmatch(
        r"(?:https?://|ssh://)?(?:[^@/]*@)?([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?", told
    )
    if found:
        config.repo_url = f"https://{found[1]}/{found[2]}"
        config.repo_name = found[2]
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Keep keywords and options whole: see site.css."""
    return INLINE.sub(_unbroken, html)


def on_files(files: Files, *, config: Any) -> Files:
    """Add what lies beside docs/."""
    for address, name in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, address, content=_from_the_root(text)))
    for folder in COPIED:
        for path in sorted((ROOT / folder).rglob("*.*")):
            address = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links of docs/ to what lies above it, and the help of commands."""
    if page.file.src_uri == "cli.md":
        helps = json.loads((ROOT / "samestep" / "pages.json").read_text(encoding="utf-8"))
        markdown += "".join(
            f"\n## samestep {name}\n\n```text\n{each['help']}```\n" for name, each in helps.items()
        )
    up = "../" * page.file.src_uri.count("/")
    return re.sub(
        rf"\]\({up}\.\./([^)]*)\)", lambda found: f"]({up}{_address(found[1])})", markdown
    )


def _unbroken(code: re.Match[str]) -> str:
    words = WORD.sub(r'<span class="word">\g<0></span>', code[1])
    return f"<code>{words}</code>"


def _from_the_root(text: str) -> str:
    """The text of a page of the root, with links as docs/ would have them."""
    return re.sub(
        r"\]\(((?!https?:|#)[^)]*)\)",
        lambda found: f"]({_address(found[1].removeprefix('docs/'))})",
        text,
    )


def _address(link: str) -> str:
    """Where the site has a file of the repository; a folder stands for the receipt in it."""
    for address, name in PAGES.items():
        if link.partition("#")[0] == name:
            return address + link.removeprefix(name)
    return f"{link}/receipt.json" if (ROOT / link / "receipt.json").exists() else link
