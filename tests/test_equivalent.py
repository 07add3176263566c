"""Checkpoints whose tensors change but not what they compute: mm2's verdict on a port does not change either.

| change | tensors | result |
|---|---|---|
| scale_norms | a norm's channels against the linear layers that read them | same bits |
| scale_values | rows of v_proj against columns of o_proj | same bits |
| scale_experts | rows of w3 against columns of w2 | same bits |
| scale_keys | k_norm against q_norm; a rotated pair of channels is scaled alike | same bits |
| scale_stream | embedding, o_proj, w2 and eps: the whole residual stream | same bits |
| permute_experts | experts in another order | other order of summation |
| permute_heads | key-value groups, and query heads within a group | other order of summation |
| permute_channels | channels of the residual stream | other order of summation |

Scales are powers of two, which change no mantissa: products and sums keep their bits while they stay in the dtype's
range. Single channels of the residual stream cannot be scaled, because RMSNorm's mean mixes them. An exact change
cannot give an attention sink, because softmax sees only values that the change must keep.

H hidden, N heads, K kv heads, D head_dim, E experts, I intermediate.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click.testing
import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.files import new_folder
from minimax_tools.model import weight_names
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import synthesize, write_json, write_shards
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

Tensors = dict[str, torch.Tensor]
# Changes tensors and the values of config.json in place; a generator draws the numbers.
Rewrite = Callable[[Tensors, dict[str, Any], ModelSpec, torch.Generator], None]

# Exponents of two: of most channels, and of the few massive ones.
_ORDINARY_EXPONENTS = (-1, 0, 1)
_MASSIVE_EXPONENT = 6
_NUM_MASSIVE = 3
_STREAM_EXPONENT = 5


def scale_norms(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale the channels of each norm of the stream, three of them by 64, and undo it in the next linear layers."""
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        attention = [f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"]
        experts = [
            prefix + weight_names.expert_weight(expert, matrix)
            for expert in range(spec.num_local_experts)
            for matrix in (weight_names.EXPERT_GATE, weight_names.EXPERT_UP)
        ]
        _scale_norm(tensors, prefix + weight_names.INPUT_NORM, attention, generator)
        readers = [prefix + weight_names.GATE, *experts]
        _scale_norm(tensors, prefix + weight_names.POST_NORM, readers, generator)
    _scale_norm(tensors, weight_names.FINAL_NORM, [weight_names.LM_HEAD], generator)


def scale_values(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale the rows of v_proj, and undo it in the columns of o_proj."""
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        scale = _draw_scale(spec.key_value_width, generator)
        _multiply(tensors, prefix + weight_names.V_PROJ, scale[:, None])
        _multiply(tensors, prefix + weight_names.O_PROJ, 1 / _for_query_heads(scale, spec))


def scale_experts(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale the rows of every expert's w3, and undo it in the columns of w2."""
    for layer in range(spec.num_hidden_layers):
        for expert in range(spec.num_local_experts):
            up, down = (
                weight_names.layer_prefix(layer) + weight_names.expert_weight(expert, matrix)
                for matrix in (weight_names.EXPERT_UP, weight_names.EXPERT_DOWN)
            )
            scale = _draw_scale(spec.intermediate_size, generator)
            _multiply(tensors, up, scale[:, None])
            _multiply(tensors, down, 1 / scale)


def scale_keys(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale k_norm, and undo it in q_norm: keys gain massive channels, attention's scores stay."""
    half = spec.rotary_dim // 2
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        scale = _draw_scale(spec.key_value_width, generator).unflatten(0, (-1, spec.head_dim))
        # Rotation mixes channel i with i + rotary_dim / 2.
        scale[:, half : 2 * half] = scale[:, :half]
        _multiply(tensors, prefix + weight_names.K_NORM, scale.flatten())
        _multiply(tensors, prefix + weight_names.Q_NORM, 1 / _for_query_heads(scale.flatten(), spec))


def scale_stream(tensors: Tensors, config: dict[str, Any], spec: ModelSpec, _: torch.Generator) -> None:
    """Scale all inputs of the residual stream by 32, and eps by 32².

    q_proj and k_proj are scaled too, because their norms have the same eps.
    """
    factor = torch.tensor(2.0**_STREAM_EXPONENT)
    config["rms_norm_eps"] = spec.rms_norm_eps * float(factor) ** 2
    _multiply(tensors, weight_names.EMBEDDING, factor)
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        for name in (weight_names.O_PROJ, weight_names.Q_PROJ, weight_names.K_PROJ):
            _multiply(tensors, prefix + name, factor)
        for expert in range(spec.num_local_experts):
            _multiply(tensors, prefix + weight_names.expert_weight(expert, weight_names.EXPERT_DOWN), factor)


def permute_experts(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Put each layer's experts into another order, with their rows of gate and bias."""
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        order = torch.randperm(spec.num_local_experts, generator=generator)
        for name in (weight_names.GATE, weight_names.CORRECTION_BIAS):
            _take(tensors, prefix + name, order, dim=0)
        for matrix in weight_names.EXPERT_MATRICES:
            old = [tensors[prefix + weight_names.expert_weight(expert, matrix)] for expert in order.tolist()]
            for expert, tensor in enumerate(old):
                tensors[prefix + weight_names.expert_weight(expert, matrix)] = tensor


def permute_heads(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Put key-value groups into another order, and the query heads within each group."""
    group = spec.num_attention_heads // spec.num_key_value_heads
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        groups = torch.randperm(spec.num_key_value_heads, generator=generator)
        within = torch.stack([torch.randperm(group, generator=generator) for _ in groups])
        keys = _rows_of_heads(groups, spec.head_dim)
        queries = _rows_of_heads((groups[:, None] * group + within).flatten(), spec.head_dim)
        for name in (weight_names.K_PROJ, weight_names.V_PROJ, weight_names.K_NORM):
            _take(tensors, prefix + name, keys, dim=0)
        for name in (weight_names.Q_PROJ, weight_names.Q_NORM):
            _take(tensors, prefix + name, queries, dim=0)
        _take(tensors, prefix + weight_names.O_PROJ, queries, dim=1)


def permute_channels(
    tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator
) -> None:
    """Put the residual stream's channels into another order, the same in all layers."""
    order = torch.randperm(spec.hidden_size, generator=generator)
    for name, tensor in tensors.items():
        if name.endswith((weight_names.Q_NORM, weight_names.K_NORM, weight_names.CORRECTION_BIAS)):
            continue
        writes = name.endswith((weight_names.O_PROJ, f".{weight_names.EXPERT_DOWN}.weight"))
        _take(tensors, name, order, dim=0 if writes or tensor.dim() == 1 else 1)


CHANGES: Mapping[str, Rewrite] = MappingProxyType(
    {
        change.__name__: change
        for change in (
            *(scale_norms, scale_values, scale_experts, scale_keys, scale_stream),
            *(permute_experts, permute_heads, permute_channels),
        )
    }
)


def _scale_norm(tensors: Tensors, norm: str, readers: list[str], generator: torch.Generator) -> None:
    scale = _draw_scale(len(tensors[norm]), generator)
    _multiply(tensors, norm, scale)
    for name in readers:
        _multiply(tensors, name, 1 / scale)


def _draw_scale(width: int, generator: torch.Generator) -> torch.Tensor:
    """Draw powers of two [width], up to three of them massive."""
    choices = torch.tensor(_ORDINARY_EXPONENTS)
    exponents = choices[torch.randint(len(choices), (width,), generator=generator)]
    exponents[torch.randperm(width, generator=generator)[:_NUM_MASSIVE]] = _MASSIVE_EXPONENT
    scale: torch.Tensor = 2.0**exponents
    return scale


def _for_query_heads(scale: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Repeat a vector [K·D] for each query head of its group: [N·D]."""
    group = spec.num_attention_heads // spec.num_key_value_heads
    heads: torch.Tensor = scale.view(-1, spec.head_dim)
    return heads.repeat_interleave(group, dim=0).flatten()


def _rows_of_heads(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _multiply(tensors: Tensors, name: str, scale: torch.Tensor) -> None:
    tensors[name] = tensors[name] * scale.to(tensors[name].dtype)


def _take(tensors: Tensors, name: str, order: torch.Tensor, *, dim: int) -> None:
    tensors[name] = tensors[name].index_select(dim, order)


_CONFIG = "config.json"


class _ReadyTensors:
    """Maker that gives tensors as they are."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def make(self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Give the whole tensor `name`."""
        tensor = self._tensors[name]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{name} is not as planned"
        yield tensor


def rewrite_checkpoint(source: Path, output: Path, *, changes: Sequence[str], seed: int) -> None:
    """Write a checkpoint in BF16 or float32 to `output` with changes that keep what it computes.

    In FP8 a block has one scale for all its channels.
    """
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    spec = ModelSpec.from_folder(source)
    with CheckpointReader(source) as reader:
        tensors = {name: reader.read(name) for name in reader.index.names}
    generator = torch.Generator().manual_seed(seed)
    for change in changes:
        CHANGES[change](tensors, config, spec, generator)
    assert all(tensor.isfinite().all() for tensor in tensors.values()), (
        "the changes leave the range of the dtype"
    )
    plan = tuple(TensorSize.of(name, tensor) for name, tensor in sorted(tensors.items()))
    size_bytes = sum(tensor.size_bytes for tensor in plan)
    with new_folder(output, size_bytes=size_bytes, remedy="Name an --output with more room.") as folder:
        for path in source.iterdir():
            if path.is_file() and path.name != _CONFIG and "safetensors" not in path.name:
                shutil.copy(path, folder)
        write_json(folder / _CONFIG, config)
        write_shards(folder, plan, _ReadyTensors(tensors), shard_size_bytes=None)


Command = Callable[..., click.testing.Result]

# Kv heads and experts enough that an exchange of two shows.
SMALL = SyntheticModel(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    vocab_size=262,
)
EXACT = [name for name in CHANGES if name.startswith("scale")]
IDS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """Checkpoints of one model in BF16 and float32."""
    folder = tmp_path_factory.mktemp("sources")
    for dtype in (torch.bfloat16, torch.float32):
        synthesize(folder / str(dtype), model=SMALL, dtype=dtype, shard_size_bytes=None, seed=0)
    return {dtype: folder / str(dtype) for dtype in (torch.bfloat16, torch.float32)}


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found.float()


def rewritten(source: Path, tmp_path: Path, *changes: str) -> Path:
    rewrite_checkpoint(source, tmp_path / "changed", changes=changes, seed=7)
    return tmp_path / "changed"


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_powers_of_two_keep_every_bit(
    name: str, dtype: torch.dtype, sources: dict[torch.dtype, Path], tmp_path: Path
) -> None:
    source = sources[torch.bfloat16]
    changed = rewritten(source, tmp_path, name)
    assert torch.equal(logits(changed, dtype), logits(source, dtype))


@pytest.mark.parametrize("name", sorted(set(CHANGES) - set(EXACT)))
def test_permutation_keeps_logits_up_to_the_order_of_summation(
    name: str, sources: dict[torch.dtype, Path], tmp_path: Path
) -> None:
    source = sources[torch.float32]
    before = logits(source, torch.float32)
    after = logits(rewritten(source, tmp_path, name), torch.float32)
    assert float((after - before).abs().max()) < 1e-4 * float(before.abs().max())


def test_half_a_change_is_none(sources: dict[torch.dtype, Path], tmp_path: Path) -> None:
    # A check of the check: the same scales without what undoes them.
    source = sources[torch.float32]
    changed = rewritten(source, tmp_path, "scale_stream")
    (changed / "config.json").write_text((source / "config.json").read_text())
    assert not torch.equal(logits(changed, torch.float32), logits(source, torch.float32))


LEARNED = Path(__file__).parent / "models" / "learned"
PLANTED = Path(__file__).parent / "ports" / "planted.py"
CHAINS = {
    "scaled": [name for name in CHANGES if name.startswith("scale")],
    "permuted": [name for name in CHANGES if name.startswith("permute")],
}


@pytest.fixture(scope="module", params=[pytest.param("as trained", marks=pytest.mark.slow), *CHAINS])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The learned model, and it with its channels scaled, and with experts, heads and channels exchanged.

    Of each the checkpoint and its golden.
    """
    root = tmp_path_factory.mktemp("written")
    model = LEARNED
    if request.param in CHAINS:
        model = root / "model"
        rewrite_checkpoint(LEARNED, model, changes=CHAINS[request.param], seed=1)
    arguments = ["extract-all", "--model", model, "--prompts-file", LEARNED / "held_out.json"]
    arguments += ["--max-length", 96, "--output-dir", root / "golden", "--quiet"]
    result = click.testing.CliRunner().invoke(mm2_gpu, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return model, root / "golden"


@pytest.fixture
def sweep(written: tuple[Path, Path], command: Command, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Sweeps a port: the JSON."""

    def run(target: str) -> dict[str, Any]:
        model, golden = written
        sides = ("--model", model, "--golden", golden, "--target", target, "--backend", "cpu")
        result = command(mm2_test, "sweep", *sides, "--output-dir", tmp_path / "run", "--json", "--quiet")
        record: dict[str, Any] = json.loads(result.stdout)
        return record

    return run


@pytest.mark.parametrize("target", ["reference", pytest.param("builtin", marks=pytest.mark.slow)])
def test_right_port_passes(target: str, sweep: Callable[[str], dict[str, Any]]) -> None:
    record = sweep(target)
    assert (record["verdict"], record["blame"]) == ("pass", [])


@pytest.mark.parametrize(
    ("name", "site"),
    [
        # What the changes touch most.
        ("SwappedGateUp", "moe_delta"),
        pytest.param("TiledKeyValueHeads", "attn_context", marks=pytest.mark.slow),
        pytest.param("KeyNormDivisor", "k_norm", marks=pytest.mark.slow),
        # In the last layers hardly a choice hangs on the bias: the port's own logits tell.
        pytest.param("NoCorrectionBias", "router_experts", marks=pytest.mark.slow),
    ],
)
def test_wrong_port_fails_at_the_same_site_in_every_layer(
    name: str, site: str, sweep: Callable[[str], dict[str, Any]]
) -> None:
    record = sweep(f"{PLANTED}:{name}")
    assert record["verdict"] == "fail"
    assert [blame["layer"] for blame in record["blame"]] == [0, 1, 2, 3]
    assert all(blame["sites"][0] == site for blame in record["blame"])
