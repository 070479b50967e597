"""Meshes of one XLA program: which device has which part, and which meshes are refused."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.mesh import Degrees, DegreesError, SpmdMesh, SpmdMeshError, build_spmd
from samestep.mesh.predicates import predicates, trace_program
from samestep.xla import runtime
from samestep.xla.tiling import Tiling
from tests.mesh.strategies import degrees


def mesh_of(degrees, devices=None):
    world = degrees.world
    return SpmdMesh(degrees, tuple(devices or range(world)), ("slice0",) * world)


CUBE = Degrees(8, ep=2, tp=2)  # data, expert, model: two devices each


def test_parts_lie_along_their_axes():
    mesh = mesh_of(CUBE)
    # Neighbours are along model: device 1 has the second part of what model cuts.
    assert mesh.tiling((("model",), ())) == Tiling((2, 1), (0, 2, 4, 6, 1, 3, 5, 7))
    both = mesh.tiling((("model", "data", "expert"), ()))
    assert both == Tiling((8, 1), (0, 2, 4, 6, 1, 3, 5, 7))
    assert mesh.tiling((("data",), ("model",))).tile_of[5] == (1, 1)
    assert mesh.tiling(((), ())) == Tiling((1, 1), tuple(range(8)))


@given(degrees(), st.data())
def test_a_spec_is_read_back_off_its_tiling(degrees, data):
    """Whatever order the devices have; axes of one device cut nothing."""
    mesh = mesh_of(degrees, data.draw(st.permutations(range(degrees.world))))
    axes = data.draw(st.permutations([a for a, size in degrees.sizes.items() if size > 1]))
    stops = sorted(data.draw(st.lists(st.integers(0, len(axes)), min_size=2, max_size=2)))
    spec = (tuple(axes[: stops[0]]), tuple(axes[stops[0] : stops[1]]))
    assert mesh.spec_of(mesh.tiling(spec)) == spec


def test_what_lies_along_no_axes_has_no_spec():
    mesh = mesh_of(CUBE)
    crossed = Tiling((2, 1), (0, 3, 4, 7, 1, 2, 5, 6))  # like model, but for two of the devices
    assert mesh.spec_of(crossed) is None
    assert mesh.spec_of(Tiling((2, 1), (0, 1))) is None  # of other devices
    diagonal = Tiling((2, 2), (0, 2, 4, 6, 5, 7, 1, 3))
    assert mesh.spec_of(diagonal) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            (("modle",), ()),
            "the mesh has no axis 'modle'; its axes are pipe, replicate, data, expert",
        ),
        ((("model",), ("model",)), "uses the axis 'model' twice"),
    ],
)
def test_specs_that_mean_nothing(spec, message):
    with pytest.raises(SpmdMeshError, match=message):
        mesh_of(CUBE).tiling(spec)


@pytest.fixture
def devices(monkeypatch):
    """A program of eight devices in two slices."""
    found = {device: f"slice{device // 4}" for device in range(8)}
    monkeypatch.setattr(runtime, "spmd_devices", lambda: found)


def given_mesh(shape, names, ids=tuple(range(8))):
    return SimpleNamespace(mesh_shape=shape, axis_names=names, device_ids=ids)


@pytest.mark.usefixtures("devices")
def test_the_mesh_of_a_program():
    mesh = build_spmd(tp=2, ep=2, sequence_parallel=True)
    assert mesh.name == "pipe1.data2.expert2.model2"
    assert mesh.devices == tuple(range(8))
    assert mesh.slices == ("slice0",) * 4 + ("slice1",) * 4
    assert build_spmd().degrees.axes == {"data": 8}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"tp": 3}, DegreesError, "tp 3 does not divide a world of 8 ranks. What works"),
        (
            {"pp": 2},
            DegreesError,
            "pp is 2, and pipeline stages are not supported in one XLA program",
        ),
        (
            {"tp": 8},
            DegreesError,
            r"must stay inside a slice. tp 8: .* across_slices=True",
        ),
        ({"sequence_parallel": True}, DegreesError, "but tp is 1"),
    ],
)
def test_degrees_that_do_not_fit(asked, error, message):
    with pytest.raises(error, match=message):
        build_spmd(**asked)
    assert build_spmd(tp=8, across_slices=True).degrees.tp == 8


@pytest.mark.usefixtures("devices")
def test_a_mesh_of_torch_xla_is_taken_in_our_order():
    ids = (0, 4, 1, 5, 2, 6, 3, 7)  # by model, then data
    mesh = build_spmd(tp=4, mesh=given_mesh((4, 2), ("model", "data"), ids))
    assert mesh.devices == tuple(range(8))
    with_one = given_mesh((2, 1, 4), ("data", "expert", "model"))
    assert build_spmd(tp=4, mesh=with_one).devices == tuple(range(8))


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (given_mesh((2, 4), None), r"have no names: name them \(data 2, model 4\)"),
        (given_mesh((2, 4), ("dp", "tp")), "it has an axis 'dp', and ours are replicate, data"),
        (given_mesh((4, 2), ("data", "model")), "its axis 'model' has 2 devices, and it needs 4"),
        (given_mesh((8,), ("data",)), "its axis 'model' has 1 devices, and it needs 4"),
        (
            given_mesh((2, 4), ("data", "model"), (0, 1, 2, 3, 4, 5, 6, 6)),
            "has each once",
        ),
    ],
)
def test_meshes_of_torch_xla_that_do_not_fit(given, message):
    with pytest.raises(SpmdMeshError, match=message):
        build_spmd(tp=4, mesh=given)


def test_without_xla_one_sentence_says_why(monkeypatch):
    monkeypatch.setattr("samestep.xla.runtime.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="XLA devices cannot be made: torch_xla is not inst"):
        build_spmd(tp=2)


def test_the_line_of_a_program_and_what_it_did_otherwise():
    """A known bug: expert parallel was asked of a mesh that "follow tensor parallel" has not."""
    told = []
    facts = predicates(CUBE, experts=True)
    receipt = trace_program(mesh_of(CUBE), facts, observed={"expert_lane": True}, tell=told.append)
    assert receipt["ranks"] == told
    assert told[0].startswith(
        "program mesh=pipe1.data2.expert2.model2 devices=0,1,2,3,4,5,6,7 pipeline_active=False"
    )
    message = "the program has expert_parallel_active=True, and did expert_parallel_active=False"
    with pytest.raises(RanksDisagreeError, match=message):
        trace_program(
            mesh_of(CUBE), facts, observed={"expert_parallel_active": False}, tell=told.append
        )
