"""The stored pages are what commands say of themselves, and shells complete by them."""

import re
import shutil
import subprocess

import pytest

from samestep import cli
from samestep.tooling.completion import SCRIPTS
from samestep.tooling.pages import broken_lines, flags_in, stored_pages
from tests.limits import HANG
from tests.pages import pages


def words_of(page):
    """Python's versions break lines of help in different places."""
    return page._replace(help=page.help.split())


def test_stored_pages_are_those_of_the_commands():
    """What was meant is stored by: python -m tests.pages."""
    live = pages()
    assert list(stored_pages()) == list(cli.COMMANDS)
    for name, page in stored_pages().items():
        assert words_of(page) == words_of(live[name]), name
        assert max(map(len, page.help.splitlines())) <= 80


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_one_form(name):
    """Usage, a sentence, examples, options under titles, the exit status."""
    text = stored_pages()[name].help
    parts = text.strip().split("\n\n")
    assert parts[0].startswith(f"usage: samestep {name} [options]")
    sentence = " ".join(parts[1].split())
    assert re.fullmatch(r"[A-Z][^.]*\.", sentence), sentence
    assert parts[-1].startswith("Exit status: 0, ")
    examples = [part for part in parts if part.startswith("    ")]
    assert len(examples) == 1
    lines = examples[0].splitlines()  # of 80 columns: a broken one does not begin with a command
    assert all(re.match(r"    (torchrun .*-m |source <\()?samestep ", line) for line in lines), (
        lines
    )
    assert all(f"samestep {name}" in line for line in lines)
    options = text[text.index("\noptions:\n") :].strip().split("\n\n")
    assert options[0].splitlines()[1:] == [
        line for line in options[0].splitlines() if line.startswith("  -h, --help")
    ]
    for section in options[1:-1]:
        title, *rest = section.splitlines()
        assert re.fullmatch(r"[a-z].*:", title), title
        shown = "\n".join(rest).split("\n  --")
        assert all(re.search(r"\s{2,}\S.{9}", each, re.DOTALL) for each in shown), shown


def test_flags_and_their_values():
    text = (
        "x [--out PATH]\n    torchrun --nproc 2 x\n  -h, --help  shows it\n"
        "  --backend {gloo,nccl}  (--out)\n  --size {None}|INT  a size\n  --sp, --no-sp  split"
    )
    assert flags_in(text) == {
        "--backend": ["gloo", "nccl"], "--help": [], "--no-sp": [], "--size": [], "--sp": [],
    }  # fmt: skip
    assert broken_lines("  one two three   \n\nx", 10) == "  one two\n  three\n\nx\n"


def completed_by(shell, words, tmp_path):
    """What a shell offers for the last of the words."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell](stored_pages()))
    if shell == "fish":
        code = f"source {script}; complete -C 'samestep {' '.join(words)}'"
    else:
        typed = " ".join(f"'{word}'" for word in ["samestep", *words])
        lines = [
            f"source {script}",
            f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}",
            "_samestep",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
        if shell == "zsh":  # bashcompinit calls functions in this mode
            lines[:0] = ["autoload -U compinit && compinit -u -D"]
            lines.insert(2, "emulate ksh")
        code = "; ".join(lines)
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *options, "-c", code], capture_output=True, text=True, timeout=HANG, cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize("shell", SCRIPTS)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["be"], {"bench"}),
        (["bench", "c"], {"crossover", "client"}),
        (["bench", "client", ""], {"nanochat", "llama"}),
        (["stress", "--re"], {"--reduction"}),
        (["stress", "--seed", "3", "--reduction", ""], {"ordered", "fast"}),
        (["bench", "client", "llama", "--dtype", "b"], {"bfloat16"}),
        (["completion", ""], set(SCRIPTS)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_shells_complete(shell, words, offered, tmp_path):
    found = completed_by(shell, words, tmp_path)
    found = {word for word in found if word.startswith(words[-1])}  # zsh itself leaves out others
    found -= {word for word in found if word.startswith("--") and words[-1] == ""}
    assert found == offered
