"""Each kind of change between two receipts is found, and nothing where there is none."""

import io
import json
from copy import deepcopy

import pytest
from rich.console import Console

from samestep.lab.stress.compare import Change, changes_table, compare, read_receipt
from tests.stress.example_receipt import (
    EXAMPLES,
    case_of,
    clean,
    failed,
    fast,
    finding,
    interrupted,
    with_mutants,
)

CASE = ("dist_adamw_muon", "zero2")
WHERE = "/".join(CASE)


def changes(change, make=clean):
    """What `compare` finds after a receipt was changed in place, and the opposite way."""
    before = make()
    after = deepcopy(before)
    change(after)
    return compare(before, after), compare(after, before)


def of_case(**entries):
    """A change of one case's entries."""
    return lambda receipt: case_of(receipt, *CASE).update(entries)


@pytest.mark.parametrize("name", EXAMPLES)
def test_equal_receipts_have_no_changes(name):
    assert compare(EXAMPLES[name](), EXAMPLES[name]()) == []


def test_what_differs_between_any_two_runs_is_no_change():
    def later(receipt):
        receipt["ran"] |= {"started": "2026-03-15T00:00:00Z", "command": ["other"]}
        receipt["ran"]["seconds"] *= 1.4
        receipt["asked"]["out"] = "elsewhere"
        for case in receipt["cases"]:
            case["seconds"] /= 1.4
            for kind in case["collectives"].values():
                kind["waited"] *= 3
            for sample in case["samples"]:
                sample["reference"]["adam"] *= 1.9

    assert changes(later) == ([], [])


def test_the_verdict_comes_first():
    there, back = changes(lambda receipt: receipt.update(verdict="failed"))
    assert there == [Change("worse", "", "verdict", "clean", "failed")]
    assert back == [Change("better", "", "verdict", "failed", "clean")]


def test_a_case_that_is_gone_is_worse_unless_it_was_not_asked_for():
    def lose(receipt):
        receipt["cases"].remove(case_of(receipt, *CASE))

    there, back = changes(lose)
    assert there == [Change("worse", WHERE, "run", "exact", "gone")]
    assert back == [Change("better", WHERE, "run", "not there", "exact")]

    def choose(receipt):
        lose(receipt)
        receipt["asked"]["layout"] = "none"

    there, back = changes(choose)
    assert there[0] == Change("changed", WHERE, "run", "exact", "gone")
    assert there[1] == Change("changed", "", "asked layout", "all", "none")
    assert [change.severity for change in back] == ["changed", "changed"]


def test_a_new_case_that_fails_is_worse():
    before = clean()
    before["cases"].remove(case_of(before, *CASE))
    after = clean()
    case_of(after, *CASE)["status"] = "failed"
    assert compare(before, after) == [Change("worse", WHERE, "run", "not there", "failed")]


def test_status_with_its_findings():
    found = [finding("hang", 7, "it hangs"), finding("error", 1234, "it broke")]
    there, back = changes(of_case(status="failed", findings=found))
    told = "failed: hang after step 7 and error after step 1,234"
    assert there == [Change("worse", WHERE, "status", "exact", told)]
    assert back == [Change("better", WHERE, "status", told, "exact")]
    for better, worse in (
        ("exact", "within_tolerance"),
        ("within_tolerance", "interrupted"),
        ("interrupted", "failed"),
    ):
        before = clean()
        case_of(before, *CASE)["status"] = better
        after = deepcopy(before)
        case_of(after, *CASE)["status"] = worse
        assert [change.severity for change in compare(before, after)] == ["worse"]


def test_a_case_that_fails_for_another_reason():
    before = failed()
    after = deepcopy(before)
    case = case_of(after, "megatron_conditional", "zero2_overlap")
    case["findings"] = [finding("plan", 0, "the plans differ")]
    assert compare(before, after) == [
        Change(
            "changed",
            "megatron_conditional/zero2_overlap",
            "findings",
            "failed: error after step 0",
            "failed: plan after step 0",
        )
    ]


def test_replicas_that_are_not_the_same_any_more():
    def drift(receipt):
        samples = case_of(receipt, *CASE)["samples"]
        samples[3] |= {"max_mu_a_abs_diff": 1e-9, "max_abs_param_diff": 1e-9}
        samples[4] |= {"max_abs_state_diff": "infinite"}

    there, back = changes(drift)
    what = "difference between replicas: mu_a, state"
    assert there == [Change("worse", WHERE, what, "0", "infinite (state, step 500)")]
    assert back == [Change("better", WHERE, what, "infinite (state, step 500)", "0")]


def test_layouts_that_are_not_the_same_any_more():
    def drift(receipt):
        case_of(receipt, *CASE)["samples"][0]["layouts"]["adam"] = 2e-8

    there, back = changes(drift)
    what = "difference between layouts: adam"
    assert there == [Change("worse", WHERE, what, "0", "2e-8 (adam, step 100)")]
    assert [change.severity for change in back] == ["better"]


def test_a_difference_that_was_not_zero_may_move_but_not_double():
    def grow(factor):
        def change(receipt):
            for sample in case_of(receipt, "dist_adamw_muon_random", "zero1")["samples"]:
                sample["layouts"]["mu_b"] *= factor

        return change

    assert changes(grow(1.9), fast) == ([], [])
    there, back = changes(grow(2.1), fast)
    assert [change.what for change in there] == ["difference between layouts: mu_b"]
    assert back == []


def test_a_distance_to_the_reference_that_has_doubled_also_where_another_is_larger():
    def grow(receipt):
        for sample in case_of(receipt, *CASE)["samples"]:
            sample["reference"]["state"] *= 2.1

    there, back = changes(grow)
    [change] = there
    assert (change.severity, change.where) == ("worse", WHERE)
    assert change.what == "distance to the reference: state"
    assert "(state, step " in change.before
    assert back == []


def test_plan_and_schedule():
    there, _ = changes(of_case(fingerprint="abc"))
    [change] = there
    assert (change.severity, change.what, change.after) == ("changed", "plan", "abc")
    lines = case_of(clean(), *CASE)["schedule"]
    there, _ = changes(of_case(schedule=[*lines[:2], "Clip", *lines[2:]]))
    assert there == [
        Change(
            "changed",
            WHERE,
            "schedule from operation 2",
            "Average 0.0, of 4 operations",
            "Clip, of 5 operations",
        )
    ]
    there, back = changes(of_case(schedule=[*lines, "Clip"]))
    assert (there[0].before, there[0].after) == (
        "its end, of 4 operations",
        "Clip, of 5 operations",
    )
    assert back[0].after == "its end, of 4 operations"


def test_collectives_and_bytes_per_step():
    there, back = changes(of_case(collectives_per_step=15.0, bytes_per_step=9000.0))
    assert there == [
        Change("worse", WHERE, "collectives per step", "14", "15"),
        Change("worse", WHERE, "bytes per step", "8.83 kB", "9 kB"),
    ]
    assert [change.severity for change in back] == ["better", "better"]
    # Of a run that ended elsewhere the averages are of other steps.
    there, _ = changes(of_case(collectives_per_step=15.0, steps_taken=3))
    assert there == []


def test_other_work_is_neither_worse_nor_better():
    def more_ranks(receipt):
        receipt["ran"]["world_size"] = receipt["asked"]["world_size"] = 4
        case_of(receipt, *CASE).update(world_size=4, bytes_per_step=13000.0, seconds=100.0)

    there, _ = changes(more_ranks)
    assert {change.severity for change in there} == {"changed"}
    assert [change.what for change in there] == [
        "bytes per step",
        "asked world_size",
        "ran world_size",
    ]


def test_mutants():
    before, after = with_mutants(), with_mutants(escaped=("local_norm",))
    there, back = compare(before, after), compare(after, before)
    assert there[1:] == [
        Change("worse", "local_norm", "mutant", "caught by replicas and reference", "escaped")
    ]
    assert back[1].severity == "better"

    def other(receipt):
        receipt["mutants"][0] |= {"by": ["error"], "unpatched": "failed"}
        del receipt["mutants"][1]

    there, _ = changes(other, with_mutants)
    assert there == [
        Change("worse", "zeros_for_none", "mutant", "caught", "gone"),
        Change(
            "changed", "skips_missing", "mutant", "caught by hang and reference", "caught by error"
        ),
        Change("worse", "skips_missing", "without the mutant", "exact", "failed"),
    ]


def test_what_a_scenario_does():
    def other(receipt):
        scenario = receipt["scenarios"][CASE[0]]
        scenario["loop"] = "closed"
        scenario["presence"]["ranks_with_gradient"][0][0] += 1

    there, _ = changes(other)
    assert [(change.where, change.what) for change in there] == [
        (CASE[0], "loop"),
        (CASE[0], "presence of gradients"),
    ]


def test_surroundings():
    def move(receipt):
        receipt["thresholds"]["adam"] = 1e-3
        receipt["asked"]["seed"] = 1
        receipt["ran"] |= {"actual_backend": "nccl", "device": "cuda", "machine": "other"}
        receipt["ran"]["fallback_reason"] = None
        receipt["ran"]["versions"]["torch"] = "2.14.0"
        receipt["ran"]["environment"] = {"OMP_NUM_THREADS": "2"}

    there, _ = changes(move)
    assert {change.severity for change in there} == {"changed"}
    assert [(change.what, change.before, change.after) for change in there] == [
        ("thresholds adam", "2e-05", "0.001"),
        ("asked seed", "0", "1"),
        ("ran actual_backend", "gloo", "nccl"),
        ("ran fallback_reason", "no CUDA device was found", "none"),
        ("ran device", "cpu", "cuda"),
        ("ran machine", "Linux-6.1.0-x86_64-with-glibc2.36", "other"),
        ("versions torch", "2.13.0+cpu", "2.14.0"),
        ("environment OMP_NUM_THREADS", "1", "2"),
        ("environment ONEDNN_JIT_PROFILE", "0", "none"),
    ]


def test_times_are_told_last_and_as_what_they_are():
    there, back = changes(of_case(seconds=7.0))
    assert there == [Change("changed", WHERE, "time (may be noise)", "4.5 s", "7 s")]
    assert back == [Change("changed", WHERE, "time (may be noise)", "7 s", "4.5 s")]


def test_the_order_of_changes():
    def everything(receipt):
        receipt["verdict"] = "failed"
        receipt["ran"]["machine"] = "other"
        receipt["ran"]["seconds"] = 1000.0
        receipt["mutants"][0]["caught"] = False
        receipt["cases"].pop()
        case = case_of(receipt, *CASE)
        case |= {"status": "failed", "fingerprint": "abc", "bytes_per_step": 1.0}
        case["samples"][0] |= {"max_adam_abs_diff": 1.0, "max_abs_param_diff": 1.0}
        case["samples"][0]["layouts"]["adam"] = 1.0
        case["samples"][0]["reference"]["adam"] = 1.0

    there, _ = changes(everything, with_mutants)
    assert [change.what.split(":")[0] for change in there] == [
        "verdict",
        "run",
        "status",
        "difference between replicas",
        "difference between layouts",
        "distance to the reference",
        "plan",
        "bytes per step",
        "mutant",
        "ran machine",
        "time (may be noise)",
    ]


def test_cases_of_the_same_name_are_kept_apart():
    def twice(receipt):
        receipt["cases"].append(deepcopy(case_of(receipt, *CASE)))

    there, _ = changes(twice)
    assert [change.where for change in there] == [f"{WHERE} (2)"]


def test_nothing_at_all_against_everything():
    there = compare(interrupted(), with_mutants())
    assert there[0].severity == "better"
    assert sum(change.what == "run" for change in there) == 6


def test_the_table_shows_every_change_and_no_markup():
    printed = Console(width=160, record=True, file=io.StringIO())
    shown = [
        Change("worse", WHERE, "status", "exact", "failed [bold]x[/bold]"),
        Change("changed", "", "ran machine", "a", "b"),
    ]
    printed.print(changes_table(shown))
    text = printed.export_text()
    for change in shown:
        for part in (change.severity, change.where, change.what, change.before, change.after):
            assert part in text
    printed.print(changes_table([]))
    assert "nothing changed" in printed.export_text()


def test_receipts_are_read(tmp_path):
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(clean()))
    assert read_receipt(path) == clean()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe\xfd", "codec can't decode"),
        (b"[]", "the receipt: it is [], not of type object"),
        (b'{"kind": NaN}', "NaN is not JSON"),
        (json.dumps(clean() | {"verdict": "fine"}).encode(), "verdict: it is 'fine'"),
    ],
)
def test_what_is_no_receipt_is_refused_with_its_path(tmp_path, content, why):
    path = tmp_path / "receipt.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_receipt(path)
    assert str(caught.value).startswith(f"{str(path)!r} is no receipt of `samestep stress`")
    assert why in str(caught.value)
