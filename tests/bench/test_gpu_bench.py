"""`samestep bench step` and `samestep bench orthogonalize`, as far as a CPU can try them."""

import io
import json
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samestep import cli
from samestep.kernels import choice
from samestep.lab import bench
from samestep.lab.bench import orthogonalize, step, step_contestants
from samestep.lab.bench.gpu import measure, report
from samestep.lab.bench.gpu.measure import Ceilings, kernels, reason, take_turn, times_of
from samestep.lab.bench.gpu.options import make_importable, peer, revisions
from samestep.lab.bench.orthogonalize import CONTESTANTS as FUNCTIONS
from samestep.lab.bench.orthogonalize import Measurement, Shape
from samestep.lab.bench.orthogonalize import Result as FunctionResult
from samestep.lab.bench.step import verdicts
from samestep.lab.bench.step_contestants import as_matrices, make_parameters
from samestep.lab.common.floor import Floor, least_flops, step_floor
from samestep.models.parameter_sets import SETS, count
from tests.ranks import run_forked

CPU = torch.device("cpu")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
STEP = ["bench", "step", "--device", "cpu", "--set", "tiny", "--rounds", "2", "--warmup", "1"]
ORTHOGONALIZE = ["bench", "orthogonalize", *STEP[2:4], "--shape", "2x4x8", *STEP[6:]]

pytestmark = pytest.mark.usefixtures("no_torchrun")


# Both commands


def test_step(tmp_path, capsys):
    assert cli.main([*STEP, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "step.json").read_text())
    assert content["kind"] == "samestep step"
    assert content["command"].startswith("samestep bench step --device cpu --set tiny")
    assert content["device"]["type"] == "cpu"
    assert content["kernels_missing"] == "kernels are for CUDA, and the device is cpu"
    [outcome] = content["sets"]
    found = {each["name"]: each for each in outcome["contestants"]}
    for name in ("ours", "ours-float16", "ours-variance", "ours-plain-torch", "torch"):
        assert found[name]["failed"] is None
        assert found[name]["ms"]["low"] <= found[name]["ms"]["median"] <= found[name]["ms"]["high"]
        assert len(found[name]["turns_ms"]) == 2
        assert found[name]["state_bytes"] > 4 * outcome["matrix_parameters"]
        assert 0.4 < found[name]["gaussian"]["low"] < 1 < found[name]["power_law"]["high"] < 1.5
        assert name in shown
    assert found["ours"]["gaussian"]["distance"] < 1e-5
    assert found["ours-variance"]["gaussian"]["distance"] is None
    assert found["ours-adamw"]["tflops"] is None
    assert found["nanochat"]["failed"] == reason(
        ImportError("no nanochat here; --peer-path names a checkout")
    )
    assert f"dion-gns is out: {found['dion-gns']['failed']}" in shown
    assert found["speedrun"]["failed"] == reason(
        ImportError("no train_gpt.py of modded-nanogpt here; --peer-path names a checkout")
    )
    polar = found["ours"]["polar_distances"]
    assert len(polar) == 4 + 1 + 1  # of tiny, that has so many blocks of each shape
    assert found["ours-float16"]["polar_distances"] == pytest.approx(polar, abs=0.02)
    assert found["ours-remainder"]["polar_distances"][:1] == pytest.approx(polar[:1], abs=0.2)
    assert found["ours-remainder"]["state_bytes"] < found["ours"]["state_bytes"] * 1.6
    assert (tmp_path / "step.png").read_bytes().startswith(PNG_SIGNATURE)


def test_orthogonalize(tmp_path, capsys):
    assert cli.main([*ORTHOGONALIZE, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "orthogonalize.json").read_text())
    [outcome] = content["shapes"]
    found = {each["name"]: each for each in outcome["contestants"]}
    for name in ("ours", "ours-float16", "torch-single", "torch-batched", "torch-gram"):
        assert found[name]["failed"] is None
        assert 0.5 < found[name]["gaussian"]["low"] < found[name]["power_law"]["high"] < 1.5
    assert found["ours"]["gaussian"]["distance"] < 1e-2  # of 16-bit input and output
    assert found["torch-single"]["power_law"] == found["torch-batched"]["power_law"]
    peers = [each for each in found.values() if each["failed"] is None and not each["ours"]]
    best = min(peers, key=lambda each: each["ms"]["median"])
    assert outcome["best_peer"] == best["name"]
    assert content["geometric_mean_of_leads"] == pytest.approx(outcome["lead"])
    assert "gram is out: ImportError" in shown
    assert "geometric mean" in shown
    assert (tmp_path / "orthogonalize.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step --device cpu --set large", "--set: 'large' is unknown; choose from gpt-1280"),
        ("step --device cpu --set tiny --rounds -1", "--rounds must be at least 1, got -1"),
        ("step --device cpu --set tiny --warmup 0", "--warmup must be at least 1, got 0"),
        ("step --device cpu --set tiny --variants mine", "--variants: 'mine' is unknown"),
        ("step --device cpu", "--device cpu only works with --set tiny"),
        ("step", "--device cuda needs a CUDA device, and there is none here"),
        ("step --rounds few", "argument --rounds: invalid int value"),
        ("step --peer-path nowhere", "--peer-path 'nowhere' is not a folder"),
        ("orthogonalize", "--device cuda needs a CUDA device, and there is none here"),
        ("orthogonalize --device cpu --rounds 0", "--rounds must be at least 1, got 0"),
        ("orthogonalize --device cpu --shape 2x0x3", "--shape must be like 12x768x3072, got"),
        ("orthogonalize --device cpu", "--device cpu only works with --shape of at most"),
    ],
)
def test_what_cannot_be_done(capsys, monkeypatch, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", *words.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("name", ["step", "orthogonalize"])
def test_commands_need_torch_alone(name):
    """Imported afresh, with every extra hidden, in a process whose modules end with it."""

    def job(_rank):
        for package in ("gpu", "step", "step_contestants", "orthogonalize"):
            delattr(bench, package)
            inside = f"samestep.lab.bench.{package}."
            for module in [each for each in sys.modules if f"{each}.".startswith(inside)]:
                del sys.modules[module]
        sys.modules.update(dict.fromkeys(cli.EXTRAS))
        with redirect_stdout(io.StringIO()) as shown:
            module = import_module(f"samestep.lab.bench.{name}")
            with pytest.raises(SystemExit) as ended:
                module.parse(["--help"], f"samestep bench {name}")
        return ended.value.code, shown.getvalue()

    [(status, shown)] = run_forked(1, job)
    assert status == 0
    assert f"usage: samestep bench {name}" in shown


def test_without_extras_there_is_text_and_no_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    words = ["--variants", "ours", "--out", str(tmp_path)]
    assert cli.main([*STEP, *words]) == 0
    assert cli.main([*ORTHOGONALIZE, *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("No picture: matplotlib is not installed.") == 2
    assert "not measured  the lead on 1 of 1 shapes" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["orthogonalize.json", "step.json"]
    assert find_spec("rich") is not None  # or this would test nothing


def test_plain_table():
    text = report.plain_table("title", ["", "ms"], [["ours", "1.25"], ["a peer", "10.50"]])
    assert text == "title\n           ms\nours     1.25\na peer  10.50"


# Peers


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Packages that look like peers, in a folder."""
    files = {
        "nanochat/optim.py": """
            import torch
            class MuonAdamW:
                def __init__(self, groups):
                    self.groups, self.state = groups, {}
                def step(self):
                    for group in self.groups:
                        for p in group["params"]:
                            g = p.grad
                            if group["kind"] == "muon":
                                assert p.ndim == 2 and group["ns_steps"] == 5
                                u, _, v = torch.linalg.svd(g, full_matrices=False)
                                g = u @ v
                            self.state[p] = {"sum": g}
                            p.data -= 0.1 * g
            """,
        "dion/__init__.py": """
            class Muon:
                def __init__(self, groups, **options):
                    if options.get("use_gram_newton_schulz"):
                        raise RuntimeError("no kernels\\nhere")
                    self.groups, self.state = groups, {}
                def step(self):
                    for group in self.groups:
                        for p in group["params"]:
                            p.data -= p.grad
            """,
        "dion/cuda_graph.py": """
            class CudaGraphOptimizer:
                def __init__(self, optimizer, warmup_steps):
                    self.optimizer, self.left = optimizer, warmup_steps
                    self.state = optimizer.state
                def step(self):
                    self.left -= 1
                    if self.left < 0:
                        raise RuntimeError("captured")
                    self.optimizer.step()
            """,
        "triton_kernels.py": "XXT = XTX = ba_plus_cAA = transpose_add = transpose_copy = None",
        "train_gpt.py": """
            raise SystemExit("a training begins")
            polar_express_coeffs = [1]
            def polar_express(g):
                u, _, v = torch.linalg.svd(g.float(), full_matrices=False)
                return (u @ v).to(g.dtype)
            @dataclass
            class ParamConfig:
                optim: str
            class NorMuonAndAdam:
                def __init__(self, named, param_table, scatter_order, work_order,
                             adam_defaults, normuon_defaults):
                    self.named = [(p, ParamConfig(param_table[n]["optim"])) for n, p in named]
                    assert list(param_table) == scatter_order == work_order
                    self.param_states = {p: {"step": 0} for p, _ in self.named}
                def step(self):
                    for p, config in self.named:
                        assert p.dtype == p.grad.dtype == torch.bfloat16
                        normuon = config.optim == "normuon"
                        update = polar_express(p.grad.view(p.reshape)) if normuon else p.grad
                        p.data -= 0.1 * update.view_as(p)
                        p.grad = None
            """,
        "dion/newton_schulz_triton.py": "newton_schulz_triton = lambda X: X.mul_(2)",
        "gram_newton_schulz/__init__.py": """
            import torch
            POLAR_EXPRESS_COEFFICIENTS = YOU_COEFFICIENTS = [(1.5, -0.5, 0.0)] * 30
            class GramNewtonSchulz:
                def __init__(self, ns_use_kernels=True, **options):
                    if ns_use_kernels:
                        import quack_that_nobody_has
                def __call__(self, X):
                    u, _, v = torch.linalg.svd(X.float(), full_matrices=False)
                    return (u @ v).bfloat16()
            """,
        "COMMIT": "abc123\n",
    }
    for name, text in files.items():
        path = tmp_path / "peers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        path.write_text("\n".join(line[indent:] for line in lines) + "\n")
    (tmp_path / "peers/nanochat/__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path / "peers"
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("nanochat", "dion", "gram_newton_schulz", "triton_kernels"):
            del sys.modules[name]


def test_peers_step_or_say_why_not(fakes, monkeypatch):
    config = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", config)
    make_importable([fakes])
    assert config.recompile_limit >= 64
    assert revisions([fakes, fakes / "dion"]) == {str(fakes): "abc123", str(fakes / "dion"): None}
    names = ("nanochat", "dion-triton", "dion-graph", "dion-gns", "speedrun")
    chosen = [each for each in step_contestants.CONTESTANTS if each.name in names]
    field = step.Field(make_parameters(SETS["tiny"], CPU), CPU, lambda line: None)
    nanochat, dion, graph, gram, speedrun = field.run(chosen, rounds=2, warmup=1)
    assert nanochat.failed is None
    assert nanochat.ms is not None
    assert nanochat.accuracy[1].low == pytest.approx(1, abs=1e-3)
    assert nanochat.state_bytes == 4 * count(SETS["tiny"].matrices + SETS["tiny"].others)
    assert "Muon was not running: singular values of an update spread by" in str(dion.failed)
    assert gram.failed == "RuntimeError: no kernels"
    assert dion.ms is None
    assert "Muon was not running" in str(graph.failed)  # two steps, one of which was looked at
    assert speedrun.failed is None
    assert speedrun.accuracy[0].distance is None
    assert speedrun.polar[:2] == pytest.approx([0, 0], abs=0.02)  # of bfloat16


def test_peers_are_compiled_afresh_for_every_set(tmp_path, monkeypatch):
    forgotten = []
    monkeypatch.setattr(report, "make_importable", lambda paths: None)
    monkeypatch.setattr(step, "forget_compiled", lambda: forgotten.append(1))
    words = ["--variants", "torch-adamw", "--peer-path", str(tmp_path), "--out", str(tmp_path)]
    assert cli.main([*STEP, *words]) == 0
    assert forgotten == [1]


def test_peers_orthogonalize_or_say_why_not(fakes, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", SimpleNamespace())
    make_importable([fakes])
    names = ("dion-triton", "dion-polar", "gram", "gram-torch")
    chosen = [each for each in FUNCTIONS if each.name in names]
    dion, polar, gram, plain = Measurement((2, 4, 8), CPU).run(chosen, rounds=1, warmup=1)
    assert dion.failed == "ArithmeticError: the orthogonalization overwrote its input"
    assert polar.failed == "ImportError: no dion.polar_express here; --peer-path names a checkout"
    assert gram.failed == "ModuleNotFoundError: No module named 'quack_that_nobody_has'"
    assert plain.failed is None
    assert plain.accuracy[0].distance < 1e-2


def test_what_is_missing_inside_a_peer_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "peer_of_a_test.py").write_text("import another_that_nobody_has")
    with pytest.raises(ModuleNotFoundError, match="another_that_nobody_has"):
        peer("peer_of_a_test")
    assert reason(ValueError()) == "ValueError"


# What a step must show


class Broken:
    """An optimizer that goes wrong in one of several ways."""

    def __init__(self, parameters, way):
        self.parameters, self.way, self.state, self.steps = parameters, way, {}, 0

    def step(self):
        self.steps += 1
        if self.way == "late" and self.steps > 3:
            raise MemoryError("no more")
        for number, p in enumerate(self.parameters.all):
            if self.way != "some" or number:
                p.data.sub_(p.grad if self.way != "nan" else p.grad * float("nan"))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("nan", "NotAStepError: parameters are not finite after the step"),
        ("some", "NotAStepError: 1 of 9 parameters did not change"),
        ("late", "MemoryError: no more"),
    ],
)
def test_broken_contestants_are_found_and_end_nobody_else(way, message):
    def build(parameters):
        if way == "some":
            parameters.all[0].data.zero_()
        return step_contestants.Entry([Broken(parameters, way)])

    broken = step_contestants.Contestant("broken", "", build, "adamw")
    fine = next(each for each in step_contestants.CONTESTANTS if each.name == "torch-adamw")
    field = step.Field(make_parameters(SETS["tiny"], CPU), CPU, lambda line: None)
    first, second = field.run([broken, fine], rounds=3, warmup=1)
    assert first.failed == message
    assert first.ms is None
    if way != "nan":  # which the other one cannot undo
        assert second.failed is None
        assert len(second.turns) == 3


def test_stacks_are_views():
    parameters = make_parameters(SETS["tiny"], CPU)
    stack = parameters.matrices[-1]
    views = as_matrices(parameters.matrices)
    assert len(views) == len(parameters.matrices) + 1
    nn.init.ones_(views[-1])
    assert stack[-1].eq(1).all()
    assert not stack[0].eq(1).any()
    assert torch.equal(views[-1].grad, stack.grad[-1])


def test_sets_are_those_of_the_models():
    assert count(SETS["gpt-1280"].matrices) == 20 * 12 * 1280**2
    assert count(SETS["gpt-2048"].matrices + SETS["gpt-2048"].others) == pytest.approx(1.34e9, 0.01)
    assert count(SETS["llama-8b-slice"].matrices) == 4 * 218_103_808
    assert SETS["moe-64"].matrices[4] == (64, 512, 1024)


def test_kernels_can_be_switched_off(monkeypatch):
    gpu, off = torch.device("cuda"), f"{choice.SWITCH}=0 is set"
    monkeypatch.delenv(choice.SWITCH, raising=False)
    for before in (None, "1"):
        if before is not None:
            monkeypatch.setenv(choice.SWITCH, before)
        with kernels(False, CPU):
            assert choice.missing(gpu) == off
        assert choice.missing(gpu) != off


# Numbers


def test_floors():
    assert least_flops(10, 10) == 20 * 10**3
    assert least_flops(40, 10) == least_flops(10, 40) == 38 * 10**3
    floor = step_floor([(2, 10, 40)], [(5, 3)], clips=True)
    assert floor == Floor(2 * 38 * 10**3, 800 * 28 + 15 * 32)
    assert step_floor((), [(5, 3)], clips=False) == Floor(0, 15 * 28)
    assert Floor(1e12, 2e12).ms(Ceilings(flops=1e15, bytes=4e12, hot_flops=8e14)) == pytest.approx(
        501
    )


def test_times():
    times = times_of([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (times.median, times.low, times.high, times.middle_half) == (3.0, 1.0, 100.0, 2.0)
    assert times_of([2.0]).middle_half == 0
    calls = []
    turn = take_turn(lambda: calls.append(1), CPU, calls=3)
    assert len(calls) == 3
    assert turn.ms == turn.host_ms > 0


def test_accuracy():
    matrix = measure.power_law(6, 4, CPU)
    values = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(values / values[0], 1 / torch.arange(1.0, 5.0))
    assert float(matrix.norm()) == pytest.approx(24**0.5, rel=1e-5)
    exact = measure.polynomial(matrix, measure.Reference([(1.5, -0.5, 0.0)] * 40, 1.01))
    found = measure.accuracy_of(exact, exact)
    assert found == pytest.approx((1, 1, 1, 0), abs=1e-9)
    found = measure.accuracy_of(-3 * exact, exact, scaled=True)
    assert found == pytest.approx((1, 1, 1, 0), abs=1e-9)
    assert measure.accuracy_of(torch.diag(torch.tensor([1.0, 2.0])), None)[:2] == (1, 2)
    for shape in ((4, 6), (6, 4), (5, 5)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        exact = measure.polar_factor(matrix)
        torch.testing.assert_close(exact, left @ right)
        assert measure.distance_to(exact, 3 * exact) == pytest.approx(0, abs=1e-9)
        assert measure.distance_to(exact, matrix) > 0.1


def result(name, ms, **numbers):
    contestant = next(each for each in step_contestants.CONTESTANTS if each.name == name)
    times = None if ms is None else times_of([ms])
    return step.Result(contestant, times=times, **numbers)


def test_bars_of_the_step():
    results = [
        result("ours", 60.0, extra_bytes=12, state_bytes=10),
        result("ours-graph", 59.0),
        result("ours-variance", 66.0),
        result("torch", 130.0),
        result("dion-gns-graph", 70.8),
        result("nanochat", None, failed="ImportError"),
        result("speedrun", 20.0),  # of other dtypes: no rival
        result("ours-adamw", 10.4),
        result("torch-adamw", 10.0),
    ]
    judged = {each.what: each for each in verdicts("gpt-2048", results)}
    assert {what: each.met for what, each in judged.items()} == {
        "milliseconds of a step": True,
        "times as fast as the best peer": False,
        "AdamW against torch's fused": True,
        "variance and caution against plain": False,
        "extra memory against state": True,
    }
    assert judged["times as fast as the best peer"].line() == (
        "NOT MET      times as fast as the best peer: 1.2, bar >= 1.25"
    )
    assert verdicts("gpt-1280", results[:1])[1].line().startswith("not measured")
    assert len(verdicts("moe-64", results)) == 3
    assert [each.met for each in verdicts("moe-64", [])] == [None] * 3


def test_bars_of_orthogonalization():
    def function(name, ms):
        contestant = next(each for each in FUNCTIONS if each.name == name)
        return FunctionResult(contestant, times=times_of([ms]))

    first = [function("ours", 1.0), function("ours-float16", 0.5), function("torch-gram", 1.8)]
    second = [function("ours", 2.0), function("torch-gram", 3.0), function("gram", 1.6)]
    leads = [
        orthogonalize.lead(Shape(1, 2, 3), first),
        orthogonalize.lead(Shape(2, 2, 3), second),
    ]
    assert [(each.best_peer, each.ratio) for each in leads] == [("torch-gram", 1.8), ("gram", 0.8)]
    assert orthogonalize.geometric_mean(leads) == pytest.approx(1.2)
    every, mean = orthogonalize.lines(leads, 2)
    assert every.startswith("NOT MET")
    assert "least 0.80 x gram on 2x2x3" in every
    assert "geometric mean: 1.20" in mean
    assert orthogonalize.lead(Shape(1, 2, 3), first[:2]) is None
