"""The decision tree of which_layout.md as a picture that reads on light and dark pages alike.

    python docs/layout_tree.py          # writes docs/layout_tree.svg

Every text has a ground of its own, and the lines are grey, so nothing depends on the page behind.
It is narrow enough to be read on a phone. The same questions stand in the page, as text.
"""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("layout_tree.svg")

# Question, and what to take if the answer is yes: lines of text, the first of which is code.
# The last is what is left.
TREE = (
    (
        "One device?",
        ("MuonAdamW(model)", "nothing else to say"),
    ),
    (
        "Does a trainer wrap or shard the model?",
        ("samestep.hf.factory(lr=3e-4)", "or the line for yours: integrations.md"),
    ),
    (
        "XLA devices?",
        ("MuonAdamW(model)", "one program for all of them: xla.md"),
    ),
    (
        "Is a matrix, or a layer's experts, too much for one device?",
        ("mesh.build(tp=..., ep=...), Stack(...)", "cut inside a host: hybrid.md"),
    ),
    (
        'Is the peak of "none" below half of a device?',
        ('sharding="none"', "nothing is gathered after the update"),
    ),
    (
        "Below three quarters?",
        ('sharding="zero1"', "ranks share the state"),
    ),
    (
        'Does the peak of "zero2" fit?',
        ('sharding="zero2", overlap_grad_reduce=True', "and gradients, freed inside backward"),
    ),
    (
        "Does FSDP2 fit?",
        ("fully_shard(...), MuonAdamW(model)", "and parameters: dtensors.md"),
    ),
    (
        "Then layers have to go to different ranks.",
        ("mesh.build(pp=...), Pipeline(...)", "stages across hosts: pipeline.md"),
    ),
)

WIDTH, INDENT, LINE = 460, 44, 19
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1b1f3b }
.code { font: 13px ui-monospace, monospace; fill: #0b3d1f; font-weight: 600 }
.take { fill: #0b3d1f }
.small { font-size: 12px; fill: #333 }
"""


def draw() -> str:
    """The picture as SVG."""
    body, height = [], 8
    for number, (question, answer) in enumerate(TREE):
        asked = list(_wrapped(question, 52))
        tall = 14 + LINE * len(asked)
        body += _box(4, height, WIDTH - 8, tall, "#e3e6fa", "#7f88c9", asked, "")
        top, height = height + tall, height + tall + 12
        taken = 14 + LINE * len(answer)
        below = height + taken
        last = number == len(TREE) - 1
        end = height + taken / 2 if last else below + 14
        body.append(f'<path d="M22 {top} V{end} M22 {height + taken / 2} H{INDENT}"/>')
        body += _box(
            INDENT, height, WIDTH - INDENT - 4, taken, "#dff3e4", "#6fae80", answer, "take"
        )
        if not last:
            body += _chip(INDENT - 8, height + taken / 2, "yes")
            body += _chip(22, below + 4, "no")
        height = below + 14
    label = escape("; ".join(f"{question} yes: {answer[0]}" for question, answer in TREE))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{label}">\n<style>{STYLE}</style>\n'
        '<g fill="none" stroke="#8a8fa8" stroke-width="2">\n'
        + "\n".join(line for line in body if line.startswith("<path"))
        + "\n</g>\n"
        + "\n".join(line for line in body if not line.startswith("<path"))
        + "\n</svg>\n"
    )


def _box(
    x: float,
    y: float,
    wide: float,
    tall: float,
    fill: str,
    edge: str,
    lines: Iterable[str],
    kind: str,
) -> Iterator[str]:
    size = f'width="{wide}" height="{tall}" rx="7"'
    yield f'<rect x="{x}" y="{y}" {size} fill="{fill}" stroke="{edge}"/>'
    for number, line in enumerate(lines):
        css = "code" if kind and number == 0 else kind
        shown = escape(line, quote=False)
        yield f'<text class="{css}" x="{x + 14}" y="{y + 21 + LINE * number}">{shown}</text>'


def _chip(x: float, y: float, word: str) -> Iterator[str]:
    size = 'width="30" height="18" rx="9"'
    yield f'<rect x="{x - 15}" y="{y - 9}" {size} fill="#f4f4f4" stroke="#8a8fa8"/>'
    yield f'<text class="small" x="{x}" y="{y + 4}" text-anchor="middle">{word}</text>'


def _wrapped(text: str, most: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > most:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
