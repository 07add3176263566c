"""Dumps of a capture's values in the layouts of five other tools, their files as those tools write them.

B batch, S sequence, F channels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import ModelSite, Site

BUCKET = 64
SHARDED = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM, Site.ATTN_CONTEXT)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A tensor that a tool sees: which module, which point, and what of mm2's it is."""

    module: str
    point: str
    element: str
    site: Site | ModelSite
    values: torch.Tensor  # [B,S,F]

    @property
    def path(self) -> str:
        """Path of the module in the whole model."""
        return self.module if self.module == "lm_head" else f"model.{self.module}"


def shown_by_modules(source: Capture, *, moe: str) -> Iterator[Shown]:
    """Return the tensors that hooks on modules see in a chained run of the whole model."""

    def show(module: str, site: Site | ModelSite, point: str = "output", element: str = "") -> Shown:
        values = source.read(layer if isinstance(site, Site) else None, site)
        return Shown(module=module, point=point, element=element, site=site, values=values)

    layer = 0
    yield show("embed_tokens", ModelSite.EMBEDDING)
    for layer in source.layers:
        name = f"layers.{layer}"
        yield show(name, Site.INPUT, "input", "0")
        yield show(f"{name}.input_layernorm", Site.INPUT_NORM)
        for site in (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM):
            yield show(f"{name}.self_attn.{site}", site)
        yield show(f"{name}.self_attn.o_proj", Site.ATTN_CONTEXT, "input", "0")
        yield show(f"{name}.self_attn.o_proj", Site.ATTN_DELTA)
        yield show(f"{name}.post_attention_layernorm", Site.ATTN_RESIDUAL, "input", "0")
        yield show(f"{name}.post_attention_layernorm", Site.POST_NORM)
        yield show(f"{name}.{moe}.gate", Site.ROUTER_LOGITS, element="0")
        yield show(f"{name}.{moe}.gate", Site.ROUTER_WEIGHTS, element="1")
        yield show(f"{name}.{moe}.gate", Site.ROUTER_EXPERTS, element="2")
        yield show(f"{name}.{moe}", Site.MOE_DELTA)
        yield show(name, Site.OUTPUT)
    yield show("norm", ModelSite.FINAL_NORM)
    yield show("lm_head", ModelSite.LOGITS)


def padded(values: torch.Tensor, mask: torch.Tensor, *, side: str = "right") -> torch.Tensor:
    """[B,S,F] as [B,BUCKET,F], NaN (or -1) on padding."""
    filler = float("nan") if values.is_floating_point() else -1
    whole = values.new_full((values.shape[0], BUCKET, values.shape[2]), filler)
    for row, real in enumerate(mask.bool()):
        length = int(real.sum())
        place = slice(0, length) if side == "right" else slice(BUCKET - length, BUCKET)
        whole[row, place] = values[row, real]
    return whole


def filled(tokens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[T,F] with padding behind it."""
    filler = float("nan") if tokens.is_floating_point() else -1
    return torch.cat((tokens, tokens.new_full((num_rows - len(tokens), tokens.shape[1]), filler)))


def pieces_of(shown: Shown, values: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    """Return the piece of each rank."""
    if num_ranks == 1 or shown.site not in SHARDED:
        return [values.clone() for _ in range(num_ranks)]
    return [piece.clone() for piece in values.chunk(num_ranks, dim=-1)]


def write_nxdi(directory: Path, source: Capture, *, num_ranks: int = 1, has_metadata: bool = True) -> None:
    """Write one file for each tensor of a module's outputs and inputs; several ranks have a folder each."""
    mask = source.read_attention_mask()
    for shown in shown_by_modules(source, moe="mlp"):
        if shown.site in (Site.ROUTER_WEIGHTS, Site.ROUTER_EXPERTS):
            continue
        module = shown.module.replace(".mlp.gate", ".mlp.router.linear_router")
        if shown.site in (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ):
            module = module.replace(".self_attn.", ".self_attn.qkv_proj.")
        values = padded(shown.values, mask)
        if shown.site is Site.ROUTER_LOGITS:
            values = values.flatten(0, 1)
        if shown.site is ModelSite.LOGITS:
            # The head is given the token to sample from alone.
            values = shown.values[torch.arange(len(mask)), mask.sum(dim=1) - 1][:, None]
        for rank, piece in enumerate(pieces_of(shown, values, num_ranks)):
            folder = directory if num_ranks == 1 else directory / f"rank{rank}"
            save_nxdi(folder, module, shown.point, piece, has_metadata=has_metadata)
            if has_metadata and shown.site is Site.OUTPUT:
                # Of attention's outputs the first by name: a table of the rotary embedding.
                save_nxdi(folder, f"{module}.self_attn", "output", torch.ones(len(mask), BUCKET, 64))


def save_nxdi(
    folder: Path, module: str, point: str, tensor: torch.Tensor, *, step: int = 1, has_metadata: bool = True
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    phase = "cte" if step == 1 else "tkg"
    name = f"captured_tensors_{phase}_step_{step}_module_{module}_{point}.pt"
    torch.save(tensor, folder / name)
    if not has_metadata:
        return
    path = folder / "capture_metadata.json"
    record: dict[str, Any] = {"capture_session": {"created_at": 1.0, "version": "1.0"}, "tensors": {}}
    if path.exists():
        record = json.loads(path.read_text())
    record["tensors"][name] = {
        "step": step,
        "phase": phase,
        "tensor_type": point,
        "tensor_shape": list(tensor.shape),
        "tensor_dtype": str(tensor.dtype),
        "timestamp": 1.0,
        "module_name": module,
    }
    path.write_text(json.dumps(record))


# Row of the batch, and first and last+1 position of what a pass computes of it.
Chunk = tuple[int, int, int]


def take_chunks(values: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """The tokens of one pass, one after another."""
    return torch.cat([values[row, start:stop] for row, start, stop in chunks])


def one_pass(mask: torch.Tensor) -> list[list[Chunk]]:
    """Return a run of all prompts in one pass."""
    return [[(row, 0, int(real.sum())) for row, real in enumerate(mask)]]


def write_vllm_neuron(
    directory: Path,
    source: Capture,
    *,
    num_ranks: int = 1,
    passes: Sequence[Sequence[Chunk]] = (),
    names: Sequence[str] = ("0", "1"),
) -> None:
    """The first output of every module, the tokens of all prompts one after another; one row of each is decoded."""
    counts: Counter[str] = Counter()
    for chunks in passes or one_pass(source.read_attention_mask()):
        num_tokens = sum(stop - start for _, start, stop in chunks)
        bucket = 2 * BUCKET if num_tokens > BUCKET else BUCKET
        kind = f"decode_b{bucket}" if num_tokens == len(chunks) else f"prefill_s{bucket}"
        name = f"{kind}_{counts[kind]}"
        counts[kind] += 1
        folder = directory / "dp0" / name
        for shown in shown_by_modules(source, moe="block_sparse_moe"):
            if shown.point == "output" and shown.element in ("", "0"):
                (folder / shown.path).mkdir(parents=True)
                tokens = filled(take_chunks(shown.values, chunks), bucket)
                for rank, piece in enumerate(pieces_of(shown, tokens, num_ranks)):
                    torch.save(piece, folder / shown.path / f"rank{rank}.pt")
        positions = [place for _, start, stop in chunks for place in range(start, stop)]
        positions += [0] * (bucket - len(positions))
        meta = {"req_ids": [names[row] for row, _, _ in chunks], "positions": positions, "dp_rank": 0}
        (folder / f"{name}_meta.json").write_text(json.dumps(meta))


def write_msprobe(directory: Path, source: Capture, *, num_ranks: int = 1) -> None:
    """Inputs and outputs of every module, with dump.json and construct.json."""
    mask = source.read_attention_mask()
    data: dict[str, Any] = {}
    for shown in shown_by_modules(source, moe="mlp"):
        call = f"Module.{shown.path}.SomeClass.forward.0"
        file = f"{call}.{shown.point}.{shown.element or 0}.pt"
        values = padded(shown.values, mask)
        for rank, piece in enumerate(pieces_of(shown, values, num_ranks)):
            folder = directory / "step0" / f"rank{rank}" / "dump_tensor_data"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(piece, folder / file)
        entry = {"type": "torch.Tensor", "dtype": str(values.dtype), "shape": list(values.shape)}
        data.setdefault(call, {"input_args": [], "input_kwargs": {}, "output": []})
        data[call]["output" if shown.point == "output" else "input_args"].append({**entry, "data_name": file})
    for rank in range(num_ranks):
        folder = directory / "step0" / f"rank{rank}"
        record = {"task": "tensor", "level": "L0", "framework": "pytorch", "data": data}
        (folder / "dump.json").write_text(json.dumps(record))
        (folder / "construct.json").write_text(json.dumps(dict.fromkeys(data)))


def write_sglang(
    directory: Path,
    source: Capture,
    *,
    num_ranks: int = 1,
    passes: Sequence[Sequence[Chunk]] = (),
    has_request_ids: bool = True,
) -> None:
    """Write the dump of hooks on all modules: residuals beside the deltas that are to be added to them."""
    inputs = source.read_inputs()
    directory.mkdir(parents=True)
    index = 0

    def save(step: int, name: str, value: Any, site: Site | ModelSite | None, **tags: Any) -> None:
        nonlocal index
        index += 1
        shown = Shown(module="", point="", element="", site=site or Site.INPUT, values=value)
        pieces = pieces_of(shown, value, num_ranks) if torch.is_tensor(value) else [value] * num_ranks
        for rank, piece in enumerate(pieces):
            full = {"step": step, "rank": rank, "dump_index": index, "name": name}
            full |= {"recompute_status": "disabled", **tags}
            meta = {
                **full,
                "world_rank": rank,
                "world_size": num_ranks,
                "sglang_parallel_info": {"tp_rank": rank, "tp_size": num_ranks, "pp_rank": 0, "pp_size": 1},
            }
            file = "___".join(f"{key}={value}" for key, value in full.items()) + ".pt"
            torch.save({"value": piece, "meta": meta}, directory / file)

    for step, chunks in enumerate(passes or one_pass(source.read_attention_mask())):
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in chunks])
        save(step, "input_ids", take_chunks(inputs.input_ids[..., None], chunks)[:, 0], None)
        save(step, "seq_lens", torch.tensor([stop for _, _, stop in chunks]), None)
        save(step, "positions", positions, None)
        save(step, "req_pool_indices", torch.tensor([row + 3 for row, _, _ in chunks]), None)
        if has_request_ids:
            save(step, "rids", [f"{'ba'[row]}-request" for row, _, _ in chunks], None)
        for shown in shown_by_modules(source, moe="block_sparse_moe"):
            tags = {"layer_id": int(shown.path.split(".")[2])} if ".layers." in shown.path else {}
            layer = tags.get("layer_id", 0)
            hooked = f"non_intrusive__{shown.path}"
            if shown.site in (Site.INPUT, Site.ATTN_RESIDUAL, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS):
                continue
            if shown.site is ModelSite.LOGITS:
                last = shown.values[[row for row, _, _ in chunks], [stop - 1 for _, _, stop in chunks]]
                save(step, "non_intrusive__output.next_token_logits", last, None)
                continue
            tokens = take_chunks(shown.values, chunks)
            residual = take_chunks(source.read(layer, Site.ATTN_RESIDUAL), chunks)
            if shown.site is Site.Q_PROJ:
                # Attention is called with what a batch holds.
                save(step, "positions", positions, None, **tags)
            if shown.site is Site.OUTPUT:
                added = take_chunks(source.read(layer, Site.MOE_DELTA), chunks)
                save(step, f"{hooked}.output.0", added, None, **tags)
                save(step, f"{hooked}.output.1", residual, None, **tags)
            elif shown.site is Site.POST_NORM:
                save(step, f"{hooked}.output.0", tokens, shown.site, **tags)
                save(step, f"{hooked}.output.1", residual, None, **tags)
            elif shown.point == "input":
                save(step, f"{hooked}.inputs.{shown.element}", tokens, shown.site, **tags)
            else:
                save(step, f"{hooked}.output", tokens, shown.site, **tags)


def write_transformers(directory: Path, source: Capture, *, num_ranks: int = 1) -> None:
    """Inputs of every module and outputs of those without submodules, each in a file of its own."""
    mask = source.read_attention_mask()
    class_name = "MiniMaxM2ForCausalLM"
    whole = {Site.MOE_DELTA, Site.OUTPUT}
    for rank in range(num_ranks):
        folder = directory if num_ranks == 1 else directory / f"rank{rank}"
        folder.mkdir(parents=True)
        for shown in shown_by_modules(source, moe="mlp"):
            if shown.site in whole and shown.point == "output":
                continue
            values = pieces_of(shown, padded(shown.values, mask), num_ranks)[rank]
            if shown.element and shown.point == "output":
                values = values.flatten(0, 1)
            point = "inputs_args" if shown.point == "input" else "outputs"
            name = f"{class_name}.{shown.path}_{point}" + (f"_{shown.element}" if shown.element else "")
            save_file({"data": values.contiguous()}, folder / f"{name}.safetensors")
            # The norm behind the layers is fed the last one's output.
            if shown.path == "model.norm":
                last = padded(source.read(source.layers[-1], Site.OUTPUT), mask)
                save_file({"data": last}, folder / f"{class_name}.model.norm_inputs_args_0.safetensors")
        for name, tensor in (("input_ids", source.read_inputs().input_ids), ("attention_mask", mask)):
            wide = torch.cat((tensor, tensor.new_zeros(len(tensor), BUCKET - tensor.shape[1])), dim=1)
            save_file({"data": wide}, folder / f"{class_name}_inputs_kwargs_{name}.safetensors")
        tree = {"module_path": class_name, "children": []}
        (folder / f"{class_name}_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))


WRITERS: Mapping[str, Callable[..., None]] = {
    "nxdi": write_nxdi,
    "vllm-neuron": write_vllm_neuron,
    "msprobe": write_msprobe,
    "sglang": write_sglang,
    "transformers": write_transformers,
}
