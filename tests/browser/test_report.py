"""The report of `samestep stress` in a real browser: `make test-browser`."""

import shutil
from collections import Counter

import pytest

from samestep.lab.stress.report import render
from tests.browser.chromium import open_page
from tests.stress.example_receipt import EXAMPLES

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium")
    assert executable, "there is no chromium: apt-get install chromium"
    with open_page(executable) as page:
        yield page


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """The report of an example as a file."""
    folder = tmp_path_factory.mktemp("reports")

    def write(name):
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(render(EXAMPLES[name]()), encoding="utf-8")
        return path

    return write


@pytest.fixture
def page(browser, file_of):
    """Opens the report of an example, as wide as a desktop."""

    def show(name):
        browser.look(1280)
        browser.open(file_of(name))
        return browser

    return show


def number_of(page, selector):
    """How many such elements are shown."""
    return page.evaluate(
        f"[...document.querySelectorAll({selector!r})].filter(e => e.checkVisibility()).length"
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_everything_is_shown_without_a_request_or_a_complaint(page, file_of, name):
    receipt, shown = EXAMPLES[name](), page(name)
    assert number_of(shown, "h1") == 1
    assert shown.evaluate("document.querySelector('.verdict').classList[1]") == receipt["verdict"]
    assert number_of(shown, ".scenario") == len(receipt["scenarios"])
    assert number_of(shown, ".matrix td") == len(receipt["scenarios"]) * len(receipt["layouts"])
    assert number_of(shown, ".panel svg") == 4 * len(receipt["scenarios"])
    assert number_of(shown, "table.presence") == len(receipt["scenarios"])
    assert number_of(shown, "#mutants tbody tr") == len(receipt["mutants"])
    assert shown.complaints == []
    assert shown.requested == [file_of(name).as_uri()]


def test_a_request_and_a_complaint_would_be_noticed(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>nothing()</script>")
    browser.open(path)
    assert "http://127.0.0.1:9/x.png" in browser.requested
    assert any("nothing is not defined" in complaint for complaint in browser.complaints)


def test_without_scripts_the_page_is_the_same(browser, file_of):
    browser.look(1280)
    browser.open(file_of("failed"))
    with_scripts = browser.evaluate("document.querySelector('main').innerText")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(file_of("failed"))
        without = browser.evaluate("document.querySelector('main').innerText")
        assert browser.evaluate("document.querySelectorAll('svg circle > title').length") > 100
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    # All that scripts add is the filter.
    added = Counter(with_scripts.split("\n")) - Counter(without.split("\n"))
    assert [line for line in added if line] == ["all", "failed (3)"]


def test_fourteen_layouts_fit_a_desktop(page):
    shown = page("dense")
    table = "document.querySelector('.scroll:has(.matrix)')"
    assert shown.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")
    assert number_of(shown, ".matrix td.does_not_apply") == 2


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("width", [320, 390, 820])
def test_on_a_phone_only_tables_scroll(page, name, width):
    shown = page(name)
    shown.look(width, 844, phone=True)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    outside = f"""[...document.querySelectorAll("main *")].filter(element =>
        element.getBoundingClientRect().right > {width} && !element.closest(".scroll")
    ).map(element => element.outerHTML.slice(0, 80))"""
    assert shown.evaluate(outside) == []


def test_light_and_dark_have_enough_contrast(page):
    shown = page("failed")
    for scheme in ("light", "dark"):
        shown.look(1280, scheme=scheme)
        colours = shown.evaluate(CONTRAST)
        assert len(colours) > 8
        low = {where: round(ratio, 2) for where, ratio in colours if ratio < 4.5}
        assert low == {}, scheme


def test_the_filter_shows_what_failed_alone(page):
    shown = page("failed")
    shown.evaluate("document.querySelector('[data-show=failed]').click()")
    assert number_of(shown, ".matrix tbody tr") == 2
    assert number_of(shown, ".scenario") == 2
    shown.evaluate("document.querySelector('[data-show=\"\"]').click()")
    assert number_of(shown, ".scenario") == 4
    assert number_of(page("clean"), ".filter") == 0


def test_tips_say_what_is_under_the_pointer(page):
    shown = page("clean")
    assert tip_at(shown, ".series circle").startswith("step 100: adam ")
    assert tip_at(shown, "svg.cells[data-values]") == "adam, step 32: 1 of 2 ranks"
    assert tip_at(shown, ".bar rect") == "all_reduce 4.82 kB per step"
    assert tip_at(shown, "h1") == ""


def test_details_are_open_in_print(page, tmp_path):
    shown = page("failed")
    assert number_of(shown, ".flights") == 0
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert number_of(shown, ".flights") == 6
    shown.evaluate("dispatchEvent(new Event('afterprint'))")
    assert number_of(shown, ".flights") == 0
    shown.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def tip_at(page, selector):
    """The tip with the pointer in the middle of the first such element."""
    x, y = page.evaluate(
        f"""(element => {{
            element.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})(document.querySelector({selector!r}))"""
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    return page.evaluate(
        "(tip => tip.hidden ? '' : tip.textContent)(document.querySelector('.tip'))"
    )


# Of one element per class with text of its own: the contrast of that text to what is behind it.
CONTRAST = """(() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => {
        const [r, g, b] = numbers(colour).map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
        const colour = getComputedStyle(element).backgroundColor;
        return numbers(colour)[3] === 0 ? behind(element.parentElement) : colour;
    };
    const seen = new Map();
    for (const element of document.querySelectorAll("main *")) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
        if (!own || !element.checkVisibility()) continue;
        const drawn = element.closest("svg") !== null;
        const back = drawn ? behind(element.closest("figure, td")) : behind(element);
        const style = getComputedStyle(element);
        const front = drawn ? style.fill : style.color;
        const [low, high] = [light(front), light(back)].sort((a, b) => a - b);
        seen.set(`${element.localName} ${front} on ${back}`, (high + 0.05) / (low + 0.05));
    }
    return [...seen];
})()"""
