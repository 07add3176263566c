"""The target protocol: how a port is found, called and loaded, what it may do, and how its mistakes are told."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.errors import TargetError, UsageError
from neuron.ports.returned import find_key_values, find_output
from neuron.ports.sources import import_file, import_module
from neuron.ports.targets import PortTarget, find_target

SUBCLASS = "class Port(ReferenceLayer): pass\n"
IN_PLACE = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        hidden_states += self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        attention_mask.zero_()
        position_ids.add_(1000)
        hidden_states += self.block_sparse_moe(self.post_attention_layernorm(hidden_states))
        return hidden_states
"""
SHORT = ("--seq-len", "12,7", "--json")


def assert_equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert {site: torch.equal(mine[site], other[site]) for site in other} == dict.fromkeys(other, True)


class TestNotation:
    @pytest.mark.parametrize("name", ["nosuch", "port.py", ":Port", "port.py:", ""])
    def test_other_notation_is_wrong_usage(self, name: str) -> None:
        expected = r"unknown.*builtin, reference, nxdi:.*traced:FILE, PATH\.py:NAME or package\.module:NAME"
        with pytest.raises(UsageError, match=expected):
            find_target(name)

    def test_near_name_is_suggested(self) -> None:
        with pytest.raises(UsageError, match="Did you mean builtin"):
            find_target("buitlin")

    def test_path_with_a_colon_is_read_from_its_end(self, tmp_path: Path, write_port: Any) -> None:
        (tmp_path / "a:b").mkdir()
        found = find_target(write_port(SUBCLASS, file="a:b/port.py"))
        assert isinstance(found, PortTarget)
        assert getattr(found.factory, "__name__", None) == "Port"

    def test_file_module_or_function_and_name(self, tensors_of: Any, write_port: Any) -> None:
        function = "def build(config, layer_idx):\n    return ReferenceLayer(config, layer_idx)\n"
        expected = tensors_of("reference")
        assert "moe_delta" in expected
        assert_equal(tensors_of("minimax_tools.reference.layer:ReferenceLayer"), expected)
        assert_equal(tensors_of(write_port(SUBCLASS)), expected)
        assert set(tensors_of(write_port(function, name="build", file="function.py"))) == set(expected)


class TestCalls:
    def test_factory_gets_config_and_layer_and_forward_gets_states_mask_and_positions(
        self, run_layer: Any, write_port: Any
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        assert (config.hidden_size, layer_idx) == (64, 0)
        super().__init__(config, layer_idx)

    def forward(self, hidden_states, attention_mask, position_ids):
        assert not self.training and not torch.is_grad_enabled()
        assert hidden_states.shape == (2, 12, 64) and hidden_states.dtype is torch.bfloat16
        lengths = attention_mask.sum(1).tolist()
        assert sorted(lengths) == [7, 12] and set(attention_mask.unique().tolist()) == {0, 1}
        assert position_ids[lengths.index(7), :7].tolist() == list(range(7))
        return super().forward(hidden_states, attention_mask, position_ids)
"""
        assert run_layer(write_port(source)).exit_code == 0

    def test_in_place_port_gives_what_a_plain_one_gives(
        self, run: Any, write_port: Any, small: Path, tmp_path: Path
    ) -> None:
        targets = {"in_place": write_port(IN_PLACE), "plain": "reference"}
        for name, target in targets.items():
            side = ("--model", small, "--target", target, "--output-dir", tmp_path / name)
            result = run("full", *side, *SHORT)
            assert result.exit_code == 0, result.stderr
        for file in ("layer_0", "layer_1", "layer_3", "model"):
            assert_equal(*(load_file(tmp_path / name / f"{file}.safetensors") for name in targets))

    @pytest.mark.slow
    def test_plain_and_in_place_ports_pass_on_xla_with_one_set_of_graphs(
        self, needs_xla: None, serve: Any, write_port: Any, on_small: Any, tmp_path: Path
    ) -> None:
        common = ("multi-layer", "--layers", "0:3", *on_small, "--backend", "xla-cpu", "--captures", tmp_path)
        targets = ("reference", write_port(IN_PLACE))
        for result in serve([(*common, "--target", target, "--json") for target in targets]):
            record = json.loads(result["stdout"])
            assert (result["exit_code"], record["verdict"]) == (0, "pass")
            assert (record["graphs"]["later_layers"], record["graphs"]["fallbacks"]) == (0, [])

    def test_what_a_port_prints_is_no_result(
        self, run_layer: Any, write_port: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        source = """
print("imported")

class Port(ReferenceLayer):
    def forward(self, *args):
        print("running")
        os.system("echo from a process of its own")
        return super().forward(*args)
"""
        result = run_layer(write_port(source))
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["complete"]
        captured = capfd.readouterr()
        assert captured.out == ""
        for text in ("imported", "running", "from a process of its own"):
            assert text in result.stderr + captured.err


class TestReturned:
    SOURCE = """
class Port(ReferenceLayer):
    def forward(self, *arguments):
        output = super().forward(*arguments)
        return {returned}
"""
    DENSE = torch.ones(2, 3, 8)
    WITHOUT_VALUES = (
        (DENSE.to_sparse, "found a sparse tensor"),
        (lambda: TestReturned.DENSE.to("meta"), "found a tensor on the meta device"),
        # torch 2.13 warns of it where it is made.
        (
            lambda: torch.quantize_per_tensor(TestReturned.DENSE, 0.1, 0, torch.qint8),
            "found a quantised tensor",
        ),
    )

    @pytest.mark.parametrize(
        "returned",
        ["(output, None)", "[output, 1]", "output.flatten(0, 1)", "(output.flatten(0, 1), 'cache')"],
    )
    def test_output_may_come_first_of_several_and_flat(
        self, tensors_of: Any, write_port: Any, returned: str
    ) -> None:
        found = tensors_of(write_port(self.SOURCE.format(returned=returned)))["output"]
        assert torch.equal(found, tensors_of("reference")["output"])

    @pytest.mark.parametrize(
        ("returned", "text"),
        [
            ("None", "returned no tensor"),
            ("()", "returned no tensor"),
            ("output[:, :-1]", "expected [2, 12, 64] or [24, 64], found [2, 11, 64]"),
            (
                "output.to('meta')",
                "cannot be compared: expected a dense tensor with values, found a tensor on the meta device",
            ),
        ],
    )
    def test_other_output_is_refused(self, run_layer: Any, write_port: Any, returned: str, text: str) -> None:
        result = run_layer(write_port(self.SOURCE.format(returned=returned)))
        assert result.exit_code == 3
        assert text in result.stderr

    @pytest.mark.filterwarnings("ignore:.*quantize_per_tensor|.*TypedStorage|.*qint8:Warning")
    @pytest.mark.parametrize(("make", "found"), WITHOUT_VALUES, ids=["sparse", "meta", "quantised"])
    def test_output_without_values_is_refused(self, make: Any, found: str) -> None:
        with pytest.raises(TargetError, match=f"the output of port cannot be compared: .*{found}"):
            find_output(make(), (2, 3, 8), what="port")

    def test_keys_without_values_are_refused(self) -> None:
        keys = torch.ones(2, 1, 3, 4)
        with pytest.raises(TargetError, match="keys or values of port cannot be compared"):
            find_key_values((self.DENSE, (keys, keys.to("meta"))), (2, 3), what="port")


class TestState:
    """A port may keep state of its own between calls: buffers that are no weights, or plain attributes."""

    COUNTING = """
class Port(ReferenceLayer):
    reuse = {reuse}

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, *arguments):
        self.calls += 1
        with open({counts!r}, "a") as file:
            print(int(self.calls), file=file)
        return super().forward(*arguments)

def build(config, layer_idx):
    return Port(config, layer_idx)

build.reuse = {reuse}
"""

    @pytest.mark.parametrize(
        ("name", "reuse", "calls"),
        [("Port", False, "1 1 1"), ("Port", True, "1 2 3"), ("build", True, "1 2 3")],
    )
    def test_state_lasts_as_long_as_the_module(
        self, run: Any, write_port: Any, small: Path, tmp_path: Path, name: str, reuse: bool, calls: str
    ) -> None:
        counts = tmp_path / "counts"
        target = write_port(self.COUNTING.format(reuse=reuse, counts=str(counts)), name=name)
        side = ("--model", small, "--target", target, "--backend", "cpu")
        result = run("multi-layer", "--layers", "0:3", *side, "--seq-len", 4)
        assert (result.exit_code, counts.read_text().split()) == (0, calls.split()), result.stderr

    def test_reused_port_holds_each_layers_own_weights(
        self, run: Any, write_port: Any, on_small: Any
    ) -> None:
        target = write_port("class Port(ReferenceLayer):\n    reuse = True\n")
        assert run("sweep", *on_small, "--target", target).exit_code == 0

    def test_persistent_state_is_a_weight_that_the_conversion_owes(
        self, run_layer: Any, write_port: Any
    ) -> None:
        port = self.COUNTING.format(reuse=False, counts="").replace(", persistent=False", "")
        result = run_layer(write_port(port))
        assert result.exit_code == 3
        assert "1 missing: calls" in result.stderr


class TestDtypes:
    # Gate and bias of a router, in the dtypes that it declares.
    ROUTER = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        moe = self.block_sparse_moe
        moe.gate.weight = nn.Parameter(moe.gate.weight.to(torch.{gate}))
        moe.e_score_correction_bias = nn.Buffer(moe.e_score_correction_bias.to(torch.{bias}))
        moe.gate.forward = lambda states: states.float() @ moe.gate.weight.T.float()
"""

    def test_default_dtype_is_the_runs_while_building_only(self, tensors_of: Any, write_port: Any) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        assert torch.get_default_dtype() is torch.float32
        super().__init__(config, layer_idx)
"""
        assert tensors_of(write_port(source), "--dtype", "float32")["output"].dtype is torch.float32
        assert torch.get_default_dtype() is torch.float32

    def test_build_dtype_is_the_default_dtype_instead(self, tensors_of: Any, write_port: Any) -> None:
        source = """
class Port(ReferenceLayer):
    build_dtype = torch.float32

    def __init__(self, config, layer_idx):
        assert torch.get_default_dtype() is torch.float32
        super().__init__(config, layer_idx)
        self.bfloat16()
        moe = self.block_sparse_moe
        moe.gate.float()
        moe.e_score_correction_bias = nn.Buffer(moe.e_score_correction_bias.float())
"""
        assert_equal(tensors_of(write_port(source)), tensors_of("reference"))

    def test_build_dtype_that_is_none_is_refused(self, run_layer: Any, write_port: Any) -> None:
        result = run_layer(write_port("class Port(ReferenceLayer):\n    build_dtype = 'float32'\n"))
        assert result.exit_code == 3
        assert "build_dtype is no dtype: expected a torch.dtype" in result.stderr
        assert "found 'float32'" in result.stderr

    def test_declared_float32_stays_float32_and_nothing_is_cast_behind_the_ports_back(
        self, tensors_of: Any, write_port: Any
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn.q_norm.weight = nn.Parameter(self.self_attn.q_norm.weight.float())

    def forward(self, *arguments):
        dtypes = {name: tensor.dtype for name, tensor in self.state_dict().items()}
        float32 = {name for name, dtype in dtypes.items() if dtype is torch.float32}
        assert float32 == {
            "self_attn.q_norm.weight",
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.e_score_correction_bias",
        }
        assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
        return super().forward(*arguments)
"""
        assert tensors_of(write_port(source))["q_norm"].dtype is torch.float32

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_router_dtypes_are_recorded_as_loaded(self, run_layer: Any, write_port: Any, dtype: str) -> None:
        source = self.ROUTER.format(gate=dtype, bias=dtype)
        record = json.loads(run_layer(write_port(source)).stdout)
        assert record["observed_dtypes"] == {"router_gate": dtype, "correction_bias": dtype}

    def test_golden_run_notes_a_rounded_correction_bias(self, judge_layer: Any, write_port: Any) -> None:
        _, record = judge_layer(write_port(self.ROUTER.format(gate="float32", bias="bfloat16")))
        told = "the port holds correction_bias in bfloat16, the golden in float32: "
        assert any(note.startswith(told) for note in record["notes"])
        assert [one["name"] for one in record["router_dtypes"]] == ["correction_bias"]


BUILDING, RUNNING = "cannot be built for layer 0", "layer 0 failed while it ran"
FORWARD = "def forward(self, states, mask, positions): "
CONVERSION = "def convert_state_dict(self, tensors, config, layer_idx): "
ON_META = """
def __init__(self, config, layer_idx):
    with torch.device('meta'):
        super().__init__(config, layer_idx)
        self.register_buffer('inv_freq', torch.ones(4), persistent=False)
"""
# Of a class `Port`, what fails in it; parts of the message.
ERRORS = [
    (
        "def __init__(self, config, layer_idx): config.nosuch_key",
        (BUILDING, "AttributeError", "nosuch_key", "NAME(config, layer_idx)"),
    ),
    ("def train(self, mode=True): raise ValueError('no modes')", (BUILDING, "ValueError: no modes")),
    (ON_META, ("built without memory", "device meta: inv_freq", "torch.device('meta')")),
    ("sites = property(lambda self: 1 / 0)", ("sites cannot be read", "ZeroDivisionError")),
    (CONVERSION + "return tensors['no.such']", ("convert_state_dict failed", "KeyError", "no.such")),
    (
        "def state_dict(self, **options): raise ValueError('no state')",
        ("layer 0 cannot be loaded", "ValueError: no state"),
    ),
    (
        "def to(self, device): raise ValueError('stays here')",
        ("layer 0 cannot be loaded", "ValueError: stays here"),
    ),
    (
        FORWARD + "raise ValueError('odd mask')",
        (RUNNING, "ValueError: odd mask", "attention_mask, position_ids"),
    ),
    (FORWARD + "raise SystemExit(0)", (RUNNING, "SystemExit: 0")),
]


class TestPortsOwnErrors:
    @pytest.mark.parametrize(
        ("source", "texts"),
        [
            *(
                (f"class Port(ReferenceLayer):\n{textwrap.indent(body, '    ')}\n", texts)
                for body, texts in ERRORS
            ),
            (
                "def Port(config, layer_idx): return 3\n",
                ("returned no module", "torch.nn.Module", "found int"),
            ),
            ("def Port(:\n", ("cannot be imported", "SyntaxError")),
        ],
    )
    def test_its_message_is_passed_on(
        self, run_layer: Any, write_port: Any, source: str, texts: tuple[str, ...]
    ) -> None:
        result = run_layer(write_port(source))
        assert result.exit_code == 3
        assert "Traceback" not in result.stderr
        assert [text for text in (*texts, "port.py") if text not in result.stderr] == []

    def test_debug_shows_the_ports_traceback(self, run_layer: Any, write_port: Any) -> None:
        source = f"class Port(ReferenceLayer):\n    {FORWARD}raise ValueError('odd')\n"
        result = run_layer(write_port(source), "--debug")
        assert result.exit_code == 3
        assert "Traceback" in result.stderr
        assert "raise ValueError('odd')" in result.stderr


def write_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_file_can_import_what_lies_beside_it(tmp_path: Path) -> None:
    write_file(tmp_path / "beside_of_first_port.py", "VALUE = 3\n")
    source = "from beside_of_first_port import VALUE\n\ndef build():\n    return VALUE\n"
    port = write_file(tmp_path / "port.py", source)
    assert import_file(port).find("build")() == 3


def test_what_lies_beside_the_file_comes_before_what_another_port_brought(tmp_path: Path) -> None:
    source = "def build():\n    import shared_name_of_ports\n    return shared_name_of_ports.VALUE\n"
    for name, value in (("first", 1), ("second", 2)):
        write_file(tmp_path / name / "shared_name_of_ports.py", f"VALUE = {value}\n")
        write_file(tmp_path / name / "port.py", source)
    import_file(tmp_path / "first" / "port.py")
    import_file(tmp_path / "second" / "port.py")
    assert import_file(tmp_path / "first" / "port.py").find("build")() == 1


def test_edit_within_a_second_is_seen(tmp_path: Path) -> None:
    values = []
    for number in (1, 2, 3):
        port = write_file(tmp_path / "port.py", f"def build():\n    return {number}\n")
        values.append(import_file(port).find("build")())
    assert values == [1, 2, 3]


def test_digest_is_that_of_the_source(tmp_path: Path) -> None:
    first = import_file(write_file(tmp_path / "a" / "port.py", "def build(): pass\n")).digest()
    same = import_file(write_file(tmp_path / "b" / "port.py", "def build(): pass\n")).digest()
    other = import_file(write_file(tmp_path / "c" / "port.py", "def build(): ...\n")).digest()
    assert first == same != other


def test_digest_covers_what_the_port_imports_from_its_own_folder(tmp_path: Path) -> None:
    write_file(tmp_path / "kernels_of_the_port" / "__init__.py", "")
    kernel = write_file(tmp_path / "kernels_of_the_port" / "attention.py", "SCALE = 1\n")
    port = write_file(tmp_path / "port.py", "import kernels_of_the_port.attention\n\ndef build(): pass\n")
    before = import_file(port).digest()
    kernel.write_text("SCALE = 2\n")
    after = import_file(port).digest()
    write_file(tmp_path / "unrelated.py", "SCALE = 3\n")
    assert before != after == import_file(port).digest()


def test_digest_covers_what_the_import_brings_in_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port's base class may lie in another folder of its package."""
    write_file(tmp_path / "ported" / "__init__.py", "")
    write_file(tmp_path / "ported" / "a" / "layer.py", "from ported.b.base import build\n")
    base = write_file(tmp_path / "ported" / "b" / "base.py", "def build(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def digest() -> str:
        for name in [name for name in sys.modules if name.startswith("ported")]:
            monkeypatch.delitem(sys.modules, name)
        return import_module("ported.a.layer").digest()

    before = digest()
    base.write_text("def build(): return 'mended'\n")
    assert before != digest() == digest()


def test_digest_leaves_installed_libraries_out(tmp_path: Path) -> None:
    library = write_file(tmp_path / "venv" / "site-packages" / "library_of_the_port.py", "A = 1\n")
    source = f"import sys\nsys.path.insert(0, {str(library.parent)!r})\nimport library_of_the_port, json\n"
    port = write_file(tmp_path / "port.py", source + "def build(): pass\n")
    before = import_file(port).digest()
    library.write_text("A = 2\n")
    assert import_file(port).digest() == before


def test_second_import_has_the_digest_of_the_first(tmp_path: Path) -> None:
    """Python loads a module that the port imports once in a process; it is part of the source both times."""
    helper = write_file(tmp_path / "elsewhere" / "helper_of_the_port_loaded_once.py", "A = 1\n")
    source = f"import sys\nsys.path.insert(0, {str(helper.parent)!r})\nimport {helper.stem}\n"
    port = write_file(tmp_path / "home" / "port.py", source + "def build(): pass\n")
    first = import_file(port).digest()
    assert import_file(port).digest() == first
    helper.write_text("A = 2\n")
    assert import_file(port).digest() != first


def test_own_targets_have_digests_of_their_own() -> None:
    digests = [find_target(name).source_digest for name in ("builtin", "reference", "builtin")]
    assert digests[0] == digests[2] != digests[1]
    assert all(len(digest) == 64 for digest in digests)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"nosuch\.py, named by --target, does not exist\. Give --target"):
        import_file(tmp_path / "nosuch.py")
    with pytest.raises(TargetError, match=r"no_such_package\.port cannot be imported.*ModuleNotFoundError"):
        import_module("no_such_package.port")
    source = "from pathlib import Path\nLIMIT = 3\n\nclass DecoderLayer: ...\n\nclass Attention: ...\n"
    port = import_file(write_file(tmp_path / "port.py", source))
    with pytest.raises(TargetError, match=r"no 'Layer' to call: found the classes DecoderLayer, Attention\."):
        port.find("Layer")
    with pytest.raises(TargetError, match="no 'LIMIT' to call"):
        port.find("LIMIT")
