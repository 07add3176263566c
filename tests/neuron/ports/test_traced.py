"""Compiled layers: `mm2-test trace` writes one, `--target traced:FILE` judges it as it would the port."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.capture.reader import Capture
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test
from neuron.ports.targets import find_target

EXAMPLE = Path(__file__).parents[3] / "scripts" / "examples" / "port.py"
ROWS = ("--seq-len", "12,7")

Trace = Callable[..., Any]


@pytest.fixture
def trace(tmp_path: Path, command: Any) -> Trace:
    """Traces a layer of a model, of the small one and the example port by default; the command's result."""

    def run_trace(model: Path, *arguments: object, layer: int = 0, file: str = "traced.pt2") -> Any:
        place = ("--model", model, "--layer", layer, "--output", tmp_path / file)
        return command(mm2_test, "trace", *place, "--json", "--quiet", *arguments)

    return run_trace


def write_traced(file: Path, *options: object) -> None:
    """Trace layer 1 to a file."""
    given = ("trace", "--layer", 1, *options, "--output", file, "--quiet")
    result = click.testing.CliRunner().invoke(mm2_test, [str(word) for word in given])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def traced_once(small: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Layer 1 of the small model through the example port, for rows of 12 and 7 tokens."""
    file = tmp_path_factory.mktemp("traced") / "traced.pt2"
    write_traced(file, "--model", small, "--target", f"{EXAMPLE}:DecoderLayer", *ROWS)
    return file.read_bytes()


@pytest.fixture
def traced(traced_once: bytes, tmp_path: Path) -> Path:
    """A file of this test's own: layer 1 of the small model through the example port."""
    file = tmp_path / "traced.pt2"
    file.write_bytes(traced_once)
    return file


@pytest.fixture
def run_traced(run: Any, small: Path) -> Any:
    """Runs layer 1 of the small model through a target on random numbers; later arguments win."""

    def run_target(target: object, *arguments: object) -> Any:
        given = ("--layer", 1, "--model", small, *ROWS, *arguments)
        return run("single-layer", *given, "--random-input", "--target", target, "--json", "--quiet")

    return run_target


@pytest.fixture
def output_of(run_traced: Any) -> Any:
    """The tensors that a run of layer 1 stored."""

    def read(target: str) -> dict[str, torch.Tensor]:
        result = run_traced(target)
        assert result.exit_code == 0, result.stderr
        return load_file(Path(json.loads(result.stdout)["directory"]) / "layer_1.safetensors")

    return read


def assert_refused(result: Any, *texts: str) -> None:
    assert result.exit_code == 3
    assert [text for text in texts if text not in result.stderr] == []


def test_gives_bit_for_bit_what_the_port_gives_at_every_site(output_of: Any, traced: Path) -> None:
    own, compiled = (output_of(target) for target in (f"{EXAMPLE}:DecoderLayer", f"traced:{traced}"))
    assert len(own) == 18
    assert {site: torch.equal(own[site], compiled[site]) for site in own} == dict.fromkeys(own, True)


@pytest.mark.slow
def test_is_judged_by_a_golden_with_a_file_for_each_layer(
    trace: Trace, run: Any, on_small: Any, small_fp8: Path, small_golden: Path, tmp_path: Path
) -> None:
    for layer in (1, 2):
        arguments = ("--golden", small_golden, "--target", f"{EXAMPLE}:DecoderLayer")
        result = trace(small_fp8, *arguments, layer=layer, file=f"layer_{layer}.pt2")
        assert result.exit_code == 0, result.stderr
    sweep = ("sweep", *on_small, "--target", f"traced:{tmp_path}/layer_{{layer}}.pt2", "--json")
    record = json.loads(run(*sweep, "--layers", "1:3").stdout)
    assert (record["verdict"], record["compared"], record["of"]) == ("pass", 34, 34)
    assert_refused(run(*sweep, "--layers", "1:4"), "layer_3.pt2 does not exist")


@pytest.mark.parametrize("file", ["of_{layer}/[b] *.pt2", "[b].pt2"])
def test_layer_may_stand_anywhere_in_the_path(
    run_traced: Any, traced: Path, tmp_path: Path, file: str
) -> None:
    path = tmp_path / "own" / file.format(layer=1)
    path.parent.mkdir(parents=True)
    traced.rename(path)
    # What a pattern of the shell would take for one more of them.
    (path.parent / "b x.pt2").write_text("no archive")
    result = run_traced(f"traced:{tmp_path}/own/{file}")
    assert result.exit_code == 0, result.stderr


def test_file_of_another_layer_counts_for_the_digest(traced: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"of_{layer}" for layer in (1, 12)]
    digests = []
    for folder in folders:
        folder.mkdir()
        (folder / "l.pt2").write_bytes(traced.read_bytes())
        digests.append(find_target(f"traced:{tmp_path}/of_{{layer}}/l.pt2").source_digest)
    assert digests[0] != digests[1]


@pytest.fixture(scope="module")
def wrong(on_small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1 of a port whose key norm is halved, for the golden's rows."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "port.py").write_text("""
from minimax_tools.reference.layer import ReferenceLayer

class Port(ReferenceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        tensors["self_attn.k_norm.weight"] = tensors["self_attn.k_norm.weight"] * 0.5
        return tensors
""")
    write_traced(folder / "traced.pt2", *on_small, "--target", f"{folder}/port.py:Port")
    return folder / "traced.pt2"


def test_mistake_is_blamed_on_its_site(judge_layer: Any, wrong: Path) -> None:
    exit_code, record = judge_layer(f"traced:{wrong}")
    assert (exit_code, [blame["sites"] for blame in record["blame"]]) == (1, [["k_norm"]])


def test_component_cannot_be_fed(run: Any, on_small: Any, wrong: Path) -> None:
    given = ("component", "--layer", 1, "--component", "experts", *on_small, "--target", f"traced:{wrong}")
    assert_refused(run(*given), "cannot be fed at", "mm2-test single-layer")


def test_file_says_what_it_holds(trace: Trace, small: Path, tmp_path: Path) -> None:
    record = json.loads(trace(small, "--target", "reference", *ROWS, "--dtype", "float32", layer=2).stdout)
    assert (record["program"], record["port"], record["layer"]) == ("torch.export", "reference", 2)
    assert (record["shape"], record["dtype"]) == ([2, 12, 64], "float32")
    assert len(record["sites"]) == 16
    with zipfile.ZipFile(tmp_path / "traced.pt2") as archive:
        assert json.loads(archive.read(_description(archive)))["layer"] == 2


@pytest.mark.slow
def test_effect_of_the_sites_is_told(trace: Trace, small: Path, write_port: Any, tmp_path: Path) -> None:
    arguments = (*ROWS, "--check-capture")
    assert json.loads(trace(small, "--target", "reference", *arguments).stdout)["effect_of_sites"] == 0
    # One that computes something else where it is watched, as a fusion that a further output breaks would.
    watched = """
class Port(ReferenceLayer):
    def forward(self, *arguments):
        output = super().forward(*arguments)
        return output + 1 if self.block_sparse_moe._forward_hooks else output
"""
    record = json.loads(trace(small, "--target", write_port(watched), *arguments).stdout)
    assert record["effect_of_sites"] == pytest.approx(1, abs=0.1)
    assert not list(tmp_path.glob("*.bare"))


def test_black_box_of_flat_rows_gives_its_output_alone(
    trace: Trace, output_of: Any, write_port: Any, small: Path, tmp_path: Path
) -> None:
    source = """
class Port(ReferenceLayer):
    sites = {}

    def forward(self, states, mask, positions):
        return super().forward(states, mask, positions).flatten(0, 1), None
"""
    assert trace(small, "--target", write_port(source), *ROWS, layer=1).exit_code == 0
    found = output_of(f"traced:{tmp_path}/traced.pt2")
    assert set(found) == {"input", "output"}
    assert torch.equal(found["output"], output_of("reference")["output"])


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--layer", 2), ("expected layer 2, found layer 1", "layer_{layer}.pt2")),
        (("--seq-len", "12"), ("expected hidden states [2, 12, 64], found [1, 12, 64]",)),
        (("--dtype", "float32"), ("expected bfloat16, found float32",)),
        (("--decode", 2), ("does not accept past_key_value",)),
    ],
)
def test_other_run_than_was_traced_is_refused(
    run_traced: Any, traced: Path, arguments: tuple[object, ...], texts: tuple[str, ...]
) -> None:
    assert_refused(run_traced(f"traced:{traced}", *arguments), *texts)


def test_weights_of_another_model_are_refused(run_traced: Any, traced: Path, tmp_path: Path) -> None:
    model = SyntheticModel(
        hidden_size=64, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, vocab_size=512
    )
    other = tmp_path / "other"
    synthesize(other, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=1)
    texts = ("holds weights of another model", "layer 1 has other norms, router gate or bias")
    assert_refused(run_traced(f"traced:{traced}", "--model", other), *texts)


def test_files_of_others_are_refused(run_traced: Any, tmp_path: Path) -> None:
    plain, text = tmp_path / "plain.pt2", tmp_path / "text.pt2"
    torch.export.save(torch.export.export(torch.nn.Identity(), (torch.zeros(1),)), plain)
    text.write_text("no archive")
    for path in (plain, text):
        assert_refused(run_traced(f"traced:{path}"), "is no file of mm2-test trace")
    assert_refused(run_traced(f"traced:{tmp_path}/none.pt2"), "does not exist")


def test_neuron_program_says_where_it_can_run(run_traced: Any, traced: Path, tmp_path: Path) -> None:
    if _has_torch_neuronx():
        pytest.skip("torch-neuronx is installed: it would load the program")
    copy = tmp_path / "rewritten.pt2"
    with zipfile.ZipFile(traced) as archive, zipfile.ZipFile(copy, "w") as written:
        for entry in archive.namelist():
            content = archive.read(entry)
            if entry == _description(archive):
                content = json.dumps({**json.loads(content), "program": "torch_neuronx.trace"}).encode()
            written.writestr(entry, content)
    text = "compiled by torch_neuronx, which is not installed here"
    assert_refused(run_traced(f"traced:{copy}"), text)


def test_damaged_weight_is_no_fault_of_the_port(run_traced: Any, traced: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(traced) as archive:
        weights = [entry for entry in archive.infolist() if "/weights/weight_" in entry.filename]
        largest = max(weights, key=lambda entry: entry.file_size)
        content = archive.read(largest)
    flipped = bytes(byte ^ 0x40 for byte in content[len(content) // 2 :][:8])
    whole = traced.read_bytes()
    middle = whole.index(content) + len(content) // 2
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(whole[:middle] + flipped + whole[middle + 8 :])
    text = f"damaged.pt2 is damaged: {largest.filename.partition('/')[2]}"
    assert_refused(run_traced(f"traced:{damaged}"), text)


def test_program_that_does_not_load_is_told(run_traced: Any, traced: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt2"
    with zipfile.ZipFile(traced) as archive, zipfile.ZipFile(damaged, "w") as copy:
        name = _description(archive)
        copy.writestr(name, archive.read(name))
    assert_refused(run_traced(f"traced:{damaged}"), "damaged.pt2 cannot be loaded")


OTHER_SHAPE = "returned another shape: expected [2, 12, 64] or [24, 64], found [12, 2, 64]"


@pytest.mark.parametrize(
    ("statement", "texts"),
    [
        ("raise ValueError('odd')", ("failed while it ran", "ValueError: odd")),
        ("return output.transpose(0, 1)", (OTHER_SHAPE,)),
        # Another shape only where the compiler looks.
        (
            "return output.transpose(0, 1) if torch.compiler.is_exporting() else output",
            ("layer 0 returned another shape: expected [2, 12, 64]",),
        ),
    ],
)
def test_mistake_of_the_port_itself_is_told_as_such_and_leaves_no_file(
    trace: Trace, write_port: Any, small: Path, tmp_path: Path, statement: str, texts: tuple[str, ...]
) -> None:
    source = f"""
class Port(ReferenceLayer):
    def forward(self, states, mask, positions):
        output = super().forward(states, mask, positions)
        {statement}
"""
    result = trace(small, "--target", write_port(source), *ROWS)
    assert_refused(result, *texts)
    assert "cannot be compiled" not in result.stderr
    assert not list(tmp_path.glob("*traced*"))


def test_graph_that_cannot_be_compiled_is_shown_under_debug_alone_and_leaves_no_file(
    trace: Trace, write_port: Any, small: Path, tmp_path: Path
) -> None:
    source = """
class Port(ReferenceLayer):
    def forward(self, states, mask, positions):
        output = super().forward(states, mask, positions)
        return output + 1 if float(output.sum()) > 0 else output
"""
    for debug, shows_graph in (((), False), (("--debug",), True)):
        result = trace(small, "--target", write_port(source), *ROWS, *debug)
        assert_refused(result, "cannot be compiled by torch.export")
        assert ("torch.ops.aten" in result.stderr) is shows_graph
        assert not list(tmp_path.glob("*traced*"))


@pytest.mark.slow
def test_is_no_part_of_a_rank(process: Any, traced: Path, small: Path) -> None:
    arguments = ("--layer", 1, "--model", small, *ROWS, "--random-input", "--backend", "cpu")
    done = process("single-layer", *arguments, "--target", f"traced:{traced}", "--tp-degree", 2)
    assert done.returncode == 3
    assert "is a whole layer, not one rank's part of it" in done.stderr


def test_traced_target_is_not_traced_again(trace: Trace, small: Path, traced: Path) -> None:
    result = trace(small, "--target", f"traced:{traced}", *ROWS, file="again.pt2")
    assert result.exit_code == 2
    assert "is traced already" in result.stderr


def test_capture_is_not_resumed_with_another_program(run_traced: Any, traced: Path) -> None:
    digests = []
    for is_another in (False, True):
        if is_another:
            # Other bytes in its place.
            with zipfile.ZipFile(traced, "a") as archive:
                archive.writestr(_description(archive).replace("mm2.json", "another.txt"), "program")
        directory = json.loads(run_traced(f"traced:{traced}").stdout)["directory"]
        digests.append(Capture.open(Path(directory)).description.provenance.target_digest)
    assert digests[0] != digests[1]


@pytest.mark.slow
def test_program_for_the_cpu_is_refused_on_xla(
    needs_xla: None, serve: Any, traced: Path, small: Path, tmp_path: Path
) -> None:
    arguments = ("--layer", 1, "--model", small, *ROWS, "--random-input", "--backend", "xla-cpu")
    store = ("--captures", tmp_path / "captures")
    [result] = serve([("single-layer", *arguments, *store, "--target", f"traced:{traced}")])
    assert result["exit_code"] == 3
    assert "expected --backend cpu" in result["stderr"]


def _description(archive: zipfile.ZipFile) -> str:
    return next(name for name in archive.namelist() if name.endswith("mm2.json"))


def _has_torch_neuronx() -> bool:
    try:
        import torch_neuronx  # noqa: F401
    except Exception:  # a placeholder raises what it likes
        return False
    return True
