"""README and pages are within their budgets of words."""

from tests.words import BUDGETS, counted, exceeded


def test_pages_are_within_their_budgets():
    """`python -m tests.words` prints the words of each page."""
    assert [*exceeded()] == []


def test_too_many_words_and_pages_would_be_seen(tmp_path):
    for name, budget in BUDGETS.items():
        folder = tmp_path / name
        for number in range(budget.pages):
            page = folder / budget.pattern.replace("*", str(number))
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text("word " * (budget.words // budget.pages))
        assert len(counted(folder, budget)) == budget.pages
        assert [*exceeded(folder)] == []
        page.write_text(page.read_text() + "word " * budget.pages)
        if "*" in budget.pattern:
            page.with_name("more.md").write_text("")
        found = " ".join(exceeded(folder))
        assert f"{name}: " in found
        assert (f"{budget.pages + 1} pages" in found) == ("*" in budget.pattern)
        assert f"at most {budget.words:,}" in found
