"""The site in a real browser, light and dark, on a phone and a desktop: `make test-browser`.

It is read from out/site, which `make site` has built, through a server of its own.
"""

import shutil
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser.chromium import open_page
from tests.browser.test_report import CONTRAST

pytestmark = pytest.mark.browser
SITE = Path(__file__).parents[2] / "out" / "site"
PAGES = sorted(path.name for path in SITE.glob("*.html"))


class Quiet(SimpleHTTPRequestHandler):
    timeout = 1  # Chromium opens connections ahead, and may never use them

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture(scope="module")
def address():
    assert PAGES, "there is no site: make site"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium")
    assert executable, "there is no chromium: apt-get install chromium"
    with open_page(executable) as page:
        yield page


# Words of code that two lines share, and code that is smaller than the text around it.
BROKEN = """[...document.querySelectorAll(".md-content code .word")].filter(
    word => word.getClientRects().length > 1).map(word => word.textContent)"""
SMALLER = """[...document.querySelectorAll(".md-content p > code, .md-content td > code")].filter(
    code => parseFloat(getComputedStyle(code).fontSize) <
        parseFloat(getComputedStyle(code.parentElement).fontSize)).map(code => code.textContent)"""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_asks_nobody_else(browser, address, name):
    for width in (390, 1440):
        browser.look(width, 844, phone=width < 500)
        browser.open(address + name)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        outside = f"""[...document.querySelectorAll(".md-content *")].filter(element =>
            element.getBoundingClientRect().right > {width} + 1 &&
            !element.closest("pre, .md-typeset__scrollwrap, .md-code__nav")
        ).map(element => element.outerHTML.slice(0, 80))"""
        assert browser.evaluate(outside) == []
        assert browser.evaluate(BROKEN) == []
        assert browser.evaluate(SMALLER) == []
        assert browser.complaints == []
        asked = [url for url in browser.requested if not url.startswith((address, "data:"))]
        assert asked == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", ["index.html", "benchmarks.html", "api.html", "status.html", "start.html"]
)
def test_light_and_dark_have_enough_contrast(browser, address, name, scheme):
    browser.look(1280, scheme=scheme)
    browser.open(address + name)
    shown = "document.body.getAttribute('data-md-color-scheme')"
    assert browser.evaluate(shown) == {"light": "default", "dark": "slate"}[scheme]
    contrast = CONTRAST.replace('"main *"', '".md-content *, .md-nav__link"')
    # What lies on a tint of the ground is left out: the tints are a tenth of a colour.
    colours = [each for each in browser.evaluate(contrast) if " on rgba(" not in each[0]]
    assert len(colours) > 4
    assert {where: round(ratio, 2) for where, ratio in colours if ratio < 4.5} == {}


def test_the_search_finds_a_page(browser, address):
    browser.look(1280)
    browser.open(address + "index.html")
    browser.evaluate("document.querySelector('.md-search__input').focus()")
    browser.call("Input.insertText", text="presence")
    found = """new Promise(done => { const look = () => {
        const items = document.querySelectorAll(".md-search-result__item");
        items.length ? done(items.length) : setTimeout(look, 50); }; look(); })"""
    assert browser.evaluate(found) > 2


class Parsed(HTMLParser):
    """The ids of a page, and where it leads."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for key, value in attrs:
            if key == "id" or (tag == "a" and key == "name"):
                self.ids.add(value)
            elif key in ("href", "src") and value:
                self.links.append(value)


def test_no_link_is_dead():
    parsed = {path: Parsed(path) for path in SITE.glob("*.html")}
    dead = []
    for path, page in parsed.items():
        for link in page.links:
            split = urlsplit(link)
            if split.scheme or split.netloc:
                continue
            target = path if not split.path else (path.parent / unquote(split.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            there = target.exists() or path.name == "404.html"
            if there and split.fragment and target in parsed:
                there = unquote(split.fragment) in parsed[target].ids
            if not there:
                dead.append(f"{path.name}: {link}")
    assert dead == []
