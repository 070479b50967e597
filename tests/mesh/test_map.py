"""The map: table, picture, and the command that shows them."""

import io
from importlib import util

import pytest
from hypothesis import given

from samestep import cli
from samestep.mesh import Degrees
from samestep.mesh import map as mesh_map
from samestep.mesh.picture import draw
from tests.mesh.strategies import degrees

pytestmark = pytest.mark.usefixtures("no_torchrun")


def test_the_map_as_text():
    lines = mesh_map.text(Degrees(8, ep=2, tp=2), ["a"] * 4 + ["b"] * 4).splitlines()
    assert lines[0] == "pipe1.data2.expert2.model2"
    assert " ".join(lines[1].split()) == (
        "rank host data expert model data peers expert peers model peers"
    )
    assert " ".join(lines[6].split()) == "4 b 1 0 0 0 4 4 6 4 5"


@given(degrees())
def test_every_rank_has_a_row_with_its_peers(degrees):
    head = mesh_map.header(degrees)
    table = list(mesh_map.rows(degrees))
    assert [row[0] for row in table] == [str(rank) for rank in range(degrees.world)]
    for rank, row in enumerate(table):
        assert len(row) == len(head)
        cells = dict(zip(head, row, strict=True))
        for axis, size in degrees.axes.items():
            assert cells[axis] == str(degrees.coordinates(rank)[axis])
            if size in (2, 3):
                assert cells[f"{axis} peers"].split() == list(map(str, degrees.peers(rank, axis)))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2), "0 1 2"),
        ((4, 5, 6, 7), "4-7"),
        ((1, 3, 5, 7), "1-7 by 2"),
        ((0, 1, 4, 5), "0 1 4 5"),
    ],
)
def test_ranks_in_few_characters(ranks, text):
    assert mesh_map.shortened(ranks) == text


def test_without_rich_the_map_is_plain_text(monkeypatch):
    find = util.find_spec
    monkeypatch.setattr(mesh_map, "find_spec", lambda name: None if name == "rich" else find(name))
    plain, large = Degrees(4, tp=2), Degrees(100)
    stream = io.StringIO()
    mesh_map.show(plain, stream)
    assert stream.getvalue() == f"{mesh_map.text(plain)}\n"
    assert mesh_map.text(large).endswith("\nand 36 more ranks")


def test_the_picture():
    small, large = draw(Degrees(2, tp=2)), draw(Degrees(16, pp=2, ep=2, tp=2), ["x"] * 16)
    assert small[:8] == large[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(large) > len(small)


def test_the_command_shows_map_facts_and_verdict(capsys, tmp_path):
    flags = "--tp 2 --ep 2 --sp --heads 4 --experts 8 --ranks-per-host 4 --picture "
    flags += str(tmp_path / "new" / "map.png")
    assert cli.main(["mesh", *flags.split()]) == 0
    out = capsys.readouterr().out
    assert "pipe1.data2.expert2.model2" in out
    assert "host1" in out
    assert "expert_parallel_active: True" in out
    assert out.endswith("contract: all sizes fit\n")
    assert (tmp_path / "new" / "map.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_ends_with_2_if_the_model_does_not_fit(capsys):
    assert cli.main(["mesh", "--tp", "4", "--heads", "6", "--no-sp"]) == 2
    out = capsys.readouterr().out
    assert "DOES NOT FIT: heads 6 % tp 4 = 2: take heads 4 or 8, or tp 2\n" in out
    assert out.endswith("contract: 2 of 2 sizes do not fit\n")


def test_the_command_without_sizes(capsys):
    assert cli.main(["mesh"]) == 0
    assert "no sizes of a model were given" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 3", "tp 3 does not divide a world of 8 ranks"),
        ("--sp", "--sp shares the sequence among the ranks of tp, but tp is 1"),
        ("--tp two", "argument --tp: invalid int value: 'two'"),
        ("--tensor 2", "unrecognized arguments: --tensor 2"),
        ("--heads -1", "heads must be a whole number, at least 0, got -1"),
        ("--ranks-per-host 0", "--ranks-per-host must be at least 1, got 0"),
        (
            "--tp 4 --ranks-per-host 2",
            "tp 4: ranks 0, 1, 2, 3 span host0 (ranks 0, 1) and host1 (ranks 2, 3), and 1 more "
            "groups do. Choose ep x tp from 1, 2, or allow it with --across-hosts",
        ),
        (
            "--world-size 512 --picture map.png",
            "a picture can show at most 256 ranks, and the mesh has 512",
        ),
        ("--picture setup.cfg/map.png --world-size 2", ""),
    ],
)
def test_bad_requests_are_one_line_and_status_2(capsys, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").write_text("")
    assert cli.main(["mesh", *flags.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["setup.cfg"]


def test_the_command_allows_groups_across_hosts(capsys):
    assert cli.main(["mesh", "--tp", "4", "--ranks-per-host", "2", "--across-hosts"]) == 0
