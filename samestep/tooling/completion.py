"""`samestep completion`: made from the stored pages; neither it nor its script imports torch."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from samestep.tooling.pages import Page, stored_pages
from samestep.tooling.request import Flag

# Words of a command come before its options: those until the first option, as far as they name a
# command or a group. `known` has both, with spaces around each.
BASH = r"""
_samestep() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local command="" word words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        case "$command${command:+ }$word" in
            @known@) command="$command${command:+ }$word" ;;
            *) break ;;
        esac
    done
    case "$command" in
@words@
    esac
    case "$command $previous" in
@values@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _samestep samestep
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit"
FISH = r"""
function __samestep_command
    set -l command
    for word in (commandline -opc)[2..]
        contains -- "$command $word" @known@
        or break
        set command "$command $word"
    end
    test "$command" = "$argv[1]"
end
"""


@dataclass(frozen=True)
class Options:
    """Print a script with which a shell completes commands, options and their values.

        source <(samestep completion bash)    # in ~/.bashrc
        source <(samestep completion zsh)     # in ~/.zshrc, after compinit
        samestep completion fish > ~/.config/fish/completions/samestep.fish

    Values that are no fixed list are completed as names of files.
    """

    shell: Annotated[
        Literal["bash", "zsh", "fish"], Flag("the shell that will run the script", positional=True)
    ]


def run(options: Options) -> int:
    sys.stdout.write(SCRIPTS[options.shell](stored_pages()))
    return 0


def next_words(pages: dict[str, Page]) -> dict[str, list[str]]:
    """Return the words that may follow each command and group; "" is samestep itself."""
    found: dict[str, list[str]] = {"": []}
    for name in pages:
        words = name.split()
        for place, word in enumerate(words):
            after = found.setdefault(" ".join(words[:place]), [])
            if word not in after:
                after.append(word)
    for group in found:
        found[group] += ["--help", *(["--version"] if group == "" else [])]
    found |= {name: sorted(page.flags) for name, page in pages.items()}
    found["completion"] += SCRIPTS
    return found


def bash(pages: dict[str, Page]) -> str:
    after = next_words(pages)
    known = "|".join(f'"{name}"' for name in after if name)
    words = [
        f"        {_quoted(name)}) words={_quoted(' '.join(after[name]))} ;;" for name in after
    ]
    values = [
        f"        {_quoted(f'{name} {flag}')}) words={_quoted(' '.join(of_flag))} ;;"
        for name, page in pages.items()
        for flag, of_flag in page.flags.items()
        if of_flag
    ]
    script = BASH.replace("@known@", known)
    return script.replace("@words@", "\n".join(words)).replace("@values@", "\n".join(values))


def zsh(pages: dict[str, Page]) -> str:
    """Return the script for zsh, which runs scripts that are made for bash."""
    return f"{ZSH}\n{bash(pages)}"


def fish(pages: dict[str, Page]) -> str:
    after = next_words(pages)
    known = " ".join(_quoted(f" {name}") for name in after if name)
    lines = [FISH.replace("@known@", known)]
    for name, words in after.items():
        # In fish a command has a space before each of its words.
        begin = f"complete -c samestep -n {_quoted('__samestep_command ' + _spaced(name))}"
        page = pages.get(name)
        for word in words:
            if not word.startswith("--"):
                about = pages.get(f"{name} {word}".strip())
                story = "" if about is None else f" -d {_quoted(about.line)}"
                lines.append(f"{begin} -f -a {word}{story}")
                continue
            values = [] if page is None else page.flags[word]
            takes = f" -xa {_quoted(' '.join(values))}" if values else ""
            lines.append(f"{begin} -l {word.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"


def _spaced(name: str) -> str:
    return f'"{"".join(f" {word}" for word in name.split())}"'


def _quoted(text: str) -> str:
    """Return a text quoted for all three shells; no text here has a backslash."""
    return "'" + text.replace("'", "'\\''") + "'"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
