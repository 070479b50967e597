"""The example of QK-clip, at a tiny size."""

import asyncio
from pathlib import Path

from examples import qk_clip
from tests.soak import twin


@twin
def test_logits_that_grow_without_are_held_by_the_clip(tmp_path, capsys, monkeypatch):
    corpus = qk_clip.load_corpus(Path(asyncio.__file__).parent)  # all of the library takes long
    monkeypatch.setattr(qk_clip, "load_corpus", lambda: corpus)
    out = tmp_path / "made" / "by it.png"
    words = ["--steps", "16", "--limit", "4.0", "--lr", "0.2", "--out", str(out)]
    assert qk_clip.main(words) == 0
    without, clipped, drawn = capsys.readouterr().out.splitlines()
    assert "above the limit of 4 in 0 of 16 steps" not in without
    assert "above the limit of 4 in 0 of 16 steps" in clipped
    assert drawn == f"drawn in {out}"
    assert out.read_bytes().startswith(b"\x89PNG")
