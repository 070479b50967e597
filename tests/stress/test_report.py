"""The page is complete, well formed, escaped and loads nothing; its geometry is right."""

import math
from copy import deepcopy
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from samestep.lab.common.numbers import count, duration, enumeration, moment, ranks, short, size
from samestep.lab.stress.receipt import check_receipt
from samestep.lab.stress.report import plot as plots
from samestep.lab.stress.report import render
from samestep.lab.stress.report.page import (
    CELL,
    cell,
    cells,
    heat_map,
    level,
    parting,
    positions,
    summary,
    traffic,
)
from samestep.lab.stress.report.plot import HEIGHT, WIDTH, Scale, alike, plot
from tests.soak import twin, twin_cases
from tests.stress.example_receipt import (
    EXAMPLES,
    case_of,
    clean,
    dumps,
    failed,
    fast,
    interrupted,
    large,
    with_mutants,
)

VOID = {"meta", "link", "br", "wbr"}
LIMITS = clean()["thresholds"]


class Element:
    """A tag with its attributes, what is inside, and all text in it."""

    def __init__(self, tag, attributes, parent):
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.inside, self.below, self.pieces = [], [], []  # below: at any depth, in order

    @property
    def text(self):
        return " ".join("".join(self.pieces).split())

    def all(self, tag, **wanted):
        """Elements inside with that tag and those attributes; `kind` is one of the classes."""
        kind = wanted.pop("kind", None)
        return [
            each
            for each in self.below
            if tag in ("*", each.tag)
            and (kind is None or kind in each.attributes.get("class", "").split())
            and wanted.items() <= each.attributes.items()
        ]


class Tree(HTMLParser):
    """The page as elements; fails where a tag is not closed."""

    def __init__(self, page):
        super().__init__()
        self.root = self.open = Element("page", {}, None)
        self.feed(page)
        self.close()
        assert self.open is self.root, f"{self.open.tag} is not closed"

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open = self.open.inside[-1]

    def handle_startendtag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), f"{tag} has one twice"
        element = Element(tag, {name: value or "" for name, value in attributes}, self.open)
        self.open.inside.append(element)
        for around in self._open_ones():
            around.below.append(element)

    def handle_endtag(self, tag):
        assert tag == self.open.tag, f"{self.open.tag} is closed as {tag}"
        self.open = self.open.parent

    def handle_data(self, data):
        for around in self._open_ones():
            around.pieces.append(data)

    def _open_ones(self):
        element = self.open
        while element is not None:
            yield element
            element = element.parent


def tree(receipt):
    return Tree(render(receipt)).root


def section_of(page, scenario):
    return page.all("section", id=f"scenario-{scenario}")[0]


@pytest.fixture(scope="module")
def page_of():
    """The page of an example, rendered once."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = tree(EXAMPLES[name]())
        return known[name]

    return get


@twin_cases("large", "dense")
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_case_scenario_layout_and_mutant_is_there(name, page_of):
    receipt, page = EXAMPLES[name](), page_of(name)
    headings = [section.all("h2")[0].text for section in page.all("section", kind="scenario")]
    assert headings == list(receipt["scenarios"])
    rows = [row for table in page.all("table", kind="matrix") for row in table.all("tr")[1:]]
    shown = {}
    for row, scenario in zip(rows, receipt["scenarios"], strict=True):
        assert row.all("th")[0].text == scenario
        for layout, box in zip(receipt["layouts"], row.all("td"), strict=True):
            shown[scenario, layout] = box.all("span", kind="status")[0].text
    words = {"exact": "✓ exact", "within_tolerance": "≈ within tolerance", "failed": "✗ failed"}
    words["does_not_apply"] = "∅ does not apply"
    assert shown == {(c["scenario"], c["layout"]): words[c["status"]] for c in receipt["cases"]}
    for name, scenario in receipt["scenarios"].items():
        assert scenario["story"] in section_of(page, name).text
    for part in page.all("section", id="matrix"):
        assert all(layout["story"] in part.text for layout in receipt["layouts"].values())
    mutants = [row for part in page.all("section", id="mutants") for row in part.all("tr")[1:]]
    for row, mutant in zip(mutants, receipt["mutants"], strict=True):
        assert row.all("th")[0].text == mutant["name"] + mutant["story"]
        assert ("caught" in row.text, "escaped" in row.text) == (
            mutant["caught"],
            not mutant["caught"],
        )
        assert [check.text for check in row.all("span", kind="check")] == [
            *mutant["by"], mutant["expected"],
        ]  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_everything_can_be_read_by_a_screen_reader(name, page_of):
    page = page_of(name)
    for picture in page.all("svg"):
        if picture.attributes.get("aria-hidden") != "true":
            assert picture.attributes["role"] == "img"
            assert picture.attributes["aria-label"]
            assert picture.inside[0].tag == "title"
            assert picture.inside[0].text
    for table in page.all("table"):
        assert {cell.attributes["scope"] for cell in table.all("th")} == {"row", "col"}
    assert page.all("html")[0].attributes["lang"] == "en"
    assert len(page.all("h1")) == len(page.all("main")) == 1


@twin_cases("large")
@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_loaded_and_every_link_leads_somewhere(name, page_of):
    page = page_of(name)
    assert "http" not in render(EXAMPLES[name]()).replace("http-equiv", "")
    ids = [each.attributes["id"] for each in page.all("*") if "id" in each.attributes]
    assert len(set(ids)) == len(ids)
    for element in page.all("*"):
        assert "src" not in element.attributes
        if "href" in element.attributes:
            target = element.attributes["href"]
            assert target == "data:," or target.removeprefix("#") in ids
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]
    assert policy.attributes["content"].startswith("default-src 'none'")


@twin
def test_text_of_the_receipt_is_never_markup():
    bad = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7 * 7 }}"
    receipt = failed()

    def spoil(part):
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, value in list(items):
            if isinstance(value, str) and key in FREE_TEXT:
                part[key] = bad
            elif isinstance(value, dict | list) and key not in ("layouts", "presence"):
                spoil(value)

    receipt["mutants"] = with_mutants()["mutants"]
    spoil(receipt)
    receipt["ran"]["environment"] = {bad: bad}
    receipt["ran"]["command"] = [bad]
    receipt["scenarios"][bad] = receipt["scenarios"].pop("megatron_conditional")
    receipt["scenarios"][bad]["presence"]["params"][0] = bad
    receipt["layouts"][bad] = {"story": bad}
    for case in receipt["cases"]:
        if case["scenario"] == "megatron_conditional":
            case["scenario"] = bad
            case["positions"] = dict.fromkeys(case["positions"], bad)
    assert len(receipt["cases"]) == 24
    page = render(receipt)
    assert page.count("<script") == 1
    assert "<img" not in page
    assert "{{ 7 * 7 }}" in page
    shown = Tree(page).root
    assert bad in shown.all("section", id="run")[0].text
    assert shown.text.count("<script>alert(1)</script>") > 50
    for element in shown.all("*"):
        assert not any(name.startswith("on") for name in element.attributes)


FREE_TEXT = {
    "story", "message", "name", "kind", "dtype", "machine", "fallback_reason", "model",
    "torch", "samestep", "python", "requested_backend", "digest",
}  # fmt: skip


def test_what_was_run_is_told(page_of):
    told = page_of("clean").all("section", id="run")[0].text
    for fact in (
        "samestep stress --world-size 2 --steps 1000",
        "2, forked",
        "gloo on cpu",
        "no CUDA device was found",
        "torch 2.13.0+cpu",
        "OMP_NUM_THREADS",
        "Linux-6.1.0",
    ):
        assert fact in told


def test_failures_are_told_on_top_and_in_their_section(page_of):
    page, receipt = page_of("failed"), failed()
    for case in receipt["cases"]:
        for found in case["findings"]:
            assert found["message"] in page.all("section", id="failures")[0].text
            assert found["message"] in section_of(page, case["scenario"]).text
    hung = section_of(page, "megatron_conditional")
    where = hung.all("table", kind="positions")[0]
    assert [row.text for row in where.all("tr")[1:]] == [
        "0reduce bucket 3 of 0",
        "1reduce bucket 3 of 0",
        "2presence of 0 ← not where most are",
    ]
    assert len(hung.all("details")) == 3 + 1
    flights = hung.all("table", kind="flights")
    assert [len(table.all("tr")) for table in flights] == [13, 13, 13]
    assert "in flight" in flights[2].text
    assert "Ranks part at operation 697" in hung.text
    assert page_of("clean").all("section", id="failures") == []


# --- the verdict's sentence ------------------------------------------------------------------


def sentence(receipt):
    told = summary(receipt)
    return f"{told.headline}: {told.rest}"


def test_the_verdict_of_a_clean_run():
    assert sentence(large()) == (
        "All 126 runs clean: every replica and every layout bit-identical after up to 1,000 steps; "
        "furthest from the float64 reference 4.1e-7 of 2e-5; all 6 mutants caught"
    )
    receipt = clean()
    receipt["cases"] = receipt["cases"][:1]
    assert sentence(receipt).startswith("The 1 run clean: every replica bit-identical after")


def test_the_verdict_flags_what_is_only_near():
    assert sentence(fast()).startswith(
        "All 12 runs clean, 10 of them not to the bit: every replica bit-identical after up to "
        "1,000 steps; layouts up to 1.2e-6 apart; furthest from"
    )


def test_the_verdict_of_failures():
    assert sentence(failed()) == (
        "3 of 24 runs failed: first dist_adamw_muon_random in zero2_overlap, after 300 steps; "
        "the checks that found it: replicas, reference, state, hang and error"
    )
    assert sentence(with_mutants(escaped=("local_norm", "stale_chunk"))).startswith(
        "2 of 6 mutants escaped: stale_chunk and local_norm; all 6 runs clean; every replica and"
    )


def test_the_verdict_of_an_interrupted_run():
    assert sentence(interrupted()) == "Interrupted: nothing had come to its end"
    receipt = clean() | {"verdict": "interrupted"}
    receipt["cases"][-1]["status"] = "interrupted"
    assert sentence(receipt).startswith("Interrupted: of 6 runs 5 exact and 1 interrupted; every")


def test_the_verdict_of_mutants_alone():
    receipt = interrupted() | {"verdict": "clean", "mutants": with_mutants()["mutants"]}
    assert sentence(receipt) == "All 6 mutants caught: "
    assert [tile.name for tile in summary(receipt).tiles] == ["mutants", "time"]
    receipt["mutants"][2]["caught"] = False
    assert sentence(receipt) == "1 of 6 mutants escaped: stale_chunk"
    receipt["mutants"] = []
    assert sentence(receipt) == "Nothing was run: "


def test_the_time_says_in_how_many_stretches():
    receipt = clean()
    stretch = {"started": receipt["ran"]["started"], "seconds": 7.0, "cases": 3, "commit": None}
    stretch |= {"command": ["samestep"], "cpus": 2}
    for number, note in (
        (1, "6,000 steps in 6 runs"),
        (2, "6,000 steps in 6 runs, in 2 stretches"),
    ):
        receipt["ran"] |= {"code": "0123", "stretches": [stretch] * number}
        check_receipt(receipt)
        assert summary(receipt).tiles[-1].note == note


def test_tiles_show_what_is_known():
    tiles = {tile.name: tile for tile in summary(failed()).tiles}
    assert (tiles["replicas differ by"].value, tiles["replicas differ by"].tone) == (
        "infinite",
        "bad",
    )
    assert [tile.name for tile in summary(interrupted()).tiles] == ["time"]
    tiles = {tile.name: tile for tile in summary(with_mutants(escaped=("local_norm",))).tiles}
    assert (tiles["mutants"].value, tiles["mutants"].tone) == ("5 / 6", "bad")
    assert (tiles["layouts differ by"].value, tiles["layouts differ by"].tone) == ("0", "good")
    assert {tile.name: tile for tile in summary(fast()).tiles}["layouts differ by"].tone == "flag"
    receipt = clean()
    receipt["cases"][0]["samples"][2]["same_collectives"] = False
    tiles = {tile.name: tile for tile in summary(receipt).tiles}
    assert tiles["collectives"].note == "not in the same order on all ranks"


def test_cells_have_the_worst_numbers():
    hung = cell(case_of(failed(), "megatron_conditional", "zero1_overlap"), LIMITS)
    assert hung.numbers == ["hang", "after 47 steps"]
    drifted = cell(case_of(failed(), "dist_adamw_muon_random", "zero2_overlap"), LIMITS)
    assert drifted.numbers == [
        "replicas, reference, state",
        "ranks infinite apart",
        "layouts 3.6e-4 apart",
        "infinite of 3e-4",
    ]


# --- plots -----------------------------------------------------------------------------------


def test_the_scale_is_logarithmic_and_has_a_place_for_zero_and_infinity():
    scale = Scale(low=-8, high=-3, last_step=1000, infinite=True)
    assert scale.y(1e-8) == scale.bottom
    assert scale.y(1e-3) == scale.top
    steps = [scale.y(10.0**power) for power in range(-8, -2)]
    gaps = [a - b for a, b in pairwise(steps)]
    assert max(gaps) - min(gaps) < 0.2
    assert scale.y(math.inf) < scale.top < scale.y(1e-5) < scale.bottom < scale.y(0) < HEIGHT
    assert scale.y(0, -1) < scale.y(0) < scale.y(0, 1)
    assert scale.x(0) == plots.LEFT
    assert scale.x(1000) == WIDTH - plots.RIGHT
    assert [label for _, label in scale.ticks()] == [f"1e{p}" for p in range(-8, -2)]


def test_ticks_are_few_and_at_round_powers():
    labels = [label for _, label in Scale(-17, 6, 10, False).ticks()]
    assert labels == ["1e-16", "1e-12", "1e-8", "1e-4", "1e0", "1e4"]


@pytest.mark.parametrize("make", [clean, fast, failed])
def test_everything_drawn_lies_within_the_panel(make):
    receipt = make()
    for scenario in receipt["scenarios"]:
        cases = [case for case in receipt["cases"] if case["scenario"] == scenario]
        drawn = plot(cases, LIMITS)
        for panel in drawn.panels:
            places = [(dot.x, dot.y) for line in panel.lines for dot in line.dots]
            places += [place for zeros in panel.zeros for place in zeros.places]
            assert all(plots.LEFT <= x <= WIDTH - plots.RIGHT for x, _ in places)
            assert all(plots.TOP <= y <= HEIGHT - plots.BOTTOM for _, y in places)
            assert drawn.scale.top < panel.limit[0] < drawn.scale.bottom


def test_layouts_with_the_same_bits_share_a_line():
    receipt = large()
    cases = [case for case in receipt["cases"] if case["scenario"] == "dist_adamw_muon"]
    drawn = plot(cases, LIMITS)
    assert drawn.legend == [(0, "all 6 layouts, on one line")]
    for panel in drawn.panels:
        assert [line.style for line in panel.lines] == ["reference"]
        assert {zeros.style: len(zeros.places) for zeros in panel.zeros} == {
            "replicas": 10,
            "layouts": 10,
        }
    cases[2]["samples"][-1]["reference"]["mu_b"] *= 1.01
    assert [len(group) for group in alike(cases)] == [5, 1]
    assert [name for _, name in plot(cases, LIMITS).legend][1] == "zero1"


def test_a_difference_leaves_zero_where_it_was_zero_last():
    drifted = case_of(failed(), "dist_adamw_muon_random", "zero2_overlap")
    panels = {panel.title.split(":")[0]: panel for panel in plot([drifted], LIMITS).panels}
    scale = plot([drifted], LIMITS).scale
    [line] = [line for line in panels["mu_a"].lines if line.style == "replicas"]
    assert len(line.dots) == 9
    assert line.dots[0].y == scale.y(0, -1)
    assert line.dots[1].y == scale.y(1.86e-9)
    [line] = [line for line in panels["state"].lines if line.style == "replicas"]
    assert [dot.y for dot in line.dots] == [scale.y(0, -1), scale.y(math.inf), scale.y(math.inf)]
    assert "at most infinite" in panels["state"].description
    assert not [line for line in panels["adam"].lines if line.style == "replicas"]


def test_a_plot_says_from_where_on_nothing_was_compared():
    receipt = large()
    live = [case for case in receipt["cases"] if case["scenario"] == "empty_expert"]
    drawn = plot(live, LIMITS)
    assert {panel.not_compared_from for panel in drawn.panels} == {drawn.scale.x(100)}
    assert plot([], LIMITS) is None
    assert plot([live[0] | {"samples": []}], LIMITS) is None


def test_a_single_sample_and_a_family_that_is_not_there():
    case = deepcopy(case_of(clean(), "dist_adamw_muon", "zero2"))
    case["samples"] = case["samples"][:1]
    sample = case["samples"][0]
    sample |= {"step": 1, "max_mu_b_abs_diff": None}
    sample["reference"]["mu_b"] = sample["layouts"]["mu_b"] = None
    drawn = plot([case], LIMITS)
    assert [panel.title[:4] for panel in drawn.panels] == ["adam", "mu_a", "stat"]
    assert [label for _, label in drawn.x_ticks] == ["0", "1"]


# --- presence --------------------------------------------------------------------------------


def test_cells_of_the_heat_map():
    assert cells([2, 0, 2], 2).count("M") == 2
    assert cells([2, 0, 2], 2).startswith("M0 1h")
    assert f"M{2 * CELL} 1h" in cells([2, 0, 2], 2)
    assert cells([2, 0, 2], 1) == ""


def test_none_some_and_all_are_told_apart_by_style_and_shade():
    levels = [level(number, 4) for number in range(5)]
    assert [each.style for each in levels] == ["none", "some", "some", "some", "all"]
    assert [each.label for each in levels] == ["no rank", "1 of 4", "2 of 4", "3 of 4", "all 4"]
    shades = [each.shade for each in levels[1:]]
    assert shades == sorted(shades)
    assert shades[-1] - shades[-2] > 0.3


def test_rows_of_the_heat_map():
    presence = clean()["scenarios"]["dist_adamw_muon"]["presence"]
    drawn = heat_map(presence, 2)
    assert [row.name for row in drawn.rows] == presence["params"]
    assert drawn.width == 64 * CELL
    assert drawn.rows[0].description == (
        "adam: a gradient on all ranks in 16 steps, on some in 32, on none in 16"
    )
    assert sum(each.path.count("M") for each in drawn.rows[0].levels) == 64
    assert heat_map({"params": [], "ranks_with_gradient": []}, 2) is None
    assert heat_map({"params": ["a"], "ranks_with_gradient": [[]]}, 2) is None


def test_many_parameters_with_the_same_presence_share_a_row():
    presence = clean()["scenarios"]["megatron_conditional"]["presence"]
    drawn = heat_map(presence, 2)
    assert [(row.name, row.others) for row in drawn.rows] == [
        ("embedding.weight", "+3"),
        ("layers.0.norm_1.weight", "+6"),
        ("layers.1.norm_1.weight", "+6"),
        ("layers.2.norm_1.weight", "+6"),
    ]
    names = [name for row in drawn.rows for name in row.tip.split("\n")]
    assert sorted(names) == sorted(presence["params"])


# --- traffic ---------------------------------------------------------------------------------


def test_bars_are_shares_of_the_longest():
    cases = [case for case in clean()["cases"] if case["scenario"] == "dist_adamw_muon"]
    drawn = traffic(cases)
    assert [kind for _, kind in drawn.legend] == ["all_reduce", "all_gather", "all_to_all"]
    alone, none, zero2 = (row.bars[0] for row in drawn.rows)  # bytes sent
    assert alone.segments == []
    assert sum(part.width for part in zero2.segments) == pytest.approx(100, abs=0.1)
    assert none.segments[0].width == pytest.approx(100 * 4_816_000 / 8_829_333, abs=0.1)
    assert zero2.segments[1].start == zero2.segments[0].width
    assert zero2.total == "8.83 kB"
    assert none.description == "all_reduce 4.82 kB per step"
    assert [part.tip.split()[0] for part in zero2.segments] == [kind for _, kind in drawn.legend]
    assert traffic(cases[:1]) is None
    cases[1]["collectives"]["gossip"] = cases[1]["collectives"]["all_reduce"]
    assert traffic(cases).legend[-1] == (5, "gossip")


# --- failures --------------------------------------------------------------------------------


def test_where_ranks_part():
    assert parting(dumps(3)) is None
    assert parting(dumps(1)) is None
    assert parting({}) is None
    number, told = parting(dumps(3, stuck=True))
    assert number == 697
    assert told == (
        "Ranks part at operation 697: ranks 0 and 1 launched reduce bucket 3 of 0 (all_to_all of "
        "1,540 float32); rank 2 launched presence of 0 (all_reduce of 1,540 int32)."
    )
    behind = dumps(2)
    del behind["1"]["records"][-1]
    assert parting(behind)[0] == 699
    assert parting(behind)[1].endswith("; rank 1 launched nothing.")


def test_who_is_odd():
    assert [p.odd for p in positions({"0": "a", "1": "b", "2": "b"})] == [True, False, False]
    assert [p.odd for p in positions({"0": "a", "1": "b"})] == [False, False]
    assert [p.rank for p in positions({"10": "a", "9": "a"})] == ["9", "10"]
    assert positions({}) == []


# --- words -----------------------------------------------------------------------------------


def test_numbers_in_words():
    numbers = (0, math.inf, 3.14e-7, 2e-5, 3e-4, 0.0123, 0.25, 1.0, 12.3, 456.7, 12345.0)
    assert [short(number) for number in numbers] == [
        "0", "infinite", "3.1e-7", "2e-5", "3e-4", "0.012", "0.25", "1", "12", "457", "1.2e4",
    ]  # fmt: skip
    assert [size(n) for n in (0, 812, 999.4, 9216, 1_500_000, 3e9)] == [
        "0 B", "812 B", "999 B", "9.22 kB", "1.5 MB", "3 GB",
    ]  # fmt: skip
    seconds = (0, 1.2e-5, 0.0034, 0.9999, 7.5, 59.96, 725, 3840)
    assert [duration(n) for n in seconds] == [
        "0 s", "12 µs", "3.4 ms", "1 s", "7.5 s", "1 min 0 s", "12 min 5 s", "1 h 4 min",
    ]  # fmt: skip
    assert [count(n, "run") for n in (0, 1, 1260)] == ["0 runs", "1 run", "1,260 runs"]
    assert moment("2026-03-05T09:06:53Z") == "5 March 2026, 09:06 UTC"
    assert moment("2026-03-05T09:06:53.25+00:00") == "5 March 2026, 09:06 UTC"
    assert [enumeration(list("abcde")[:n]) for n in (1, 2, 3, 5)] == [
        "a", "a and b", "a, b and c", "a, b, c and 2 more",
    ]  # fmt: skip
    assert [ranks([2]), ranks([0, 3])] == ["rank 2", "ranks 0 and 3"]
