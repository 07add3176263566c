"""Plans that slices are cut by: one of stages, as `mm2-split plan` writes it, or one of tensor names."""

from __future__ import annotations

from pathlib import Path

from minimax_tools.errors import UsageError
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.cut import SliceCut, cut_slice
from minimax_tools.slices.layout import FileFormat
from minimax_tools.slices.source import open_source
from minimax_tools.slices.splitter import ModelSplitter, SplitConfig, read_split_plans
from minimax_tools.slices.stored_weights import StoredWeights


class StagePlan:
    """A plan that `mm2-split plan` wrote."""

    def __init__(self, path: Path, model: str | None, file_format: FileFormat) -> None:
        self._path = path
        self._model = model
        self._file_format = file_format
        # The tensor lists of all slices take a hundred megabytes, so without --all-nodes only one node's is read.
        self._whole_plan: PartitionPlan | None = None

    def read_all_nodes(self) -> tuple[str, ...]:
        """Return the nodes that hold something, after checking that their slices make up the checkpoint."""
        self._whole_plan = _read_whole_plan(self._path, self._model)
        return tuple(slice_.node.name for slice_ in self._whole_plan.used)

    def cut(self, node: str, *, shard_size_bytes: int | None) -> SliceCut:
        """Cut a node's slice."""
        plan = self._whole_plan or PartitionPlan.read(self._path, tensors_of=node)
        source = StoredWeights.of_slice(self._model or plan.model, plan.slice_of(node))
        return cut_slice(plan, node, source, file_format=self._file_format, shard_size_bytes=shard_size_bytes)


class NamesPlan:
    """A plan that lists each node's tensors by name, as `ModelSplitter` takes it."""

    def __init__(self, path: Path, model: str | None, file_format: FileFormat) -> None:
        if model is None:
            raise UsageError(
                "a plan of names does not say of which checkpoint it is", expected="--model FOLDER"
            )
        self._config = SplitConfig(model_name=model, model_path=model, split_plan=read_split_plans(path))
        self._splitter = ModelSplitter(file_format=file_format)

    def read_all_nodes(self) -> tuple[str, ...]:
        """Return the nodes that hold something, after checking that their slices make up the checkpoint."""
        headers = StoredWeights.of(str(self._config.model_path)).headers
        ModelSplitter.validate_split_plan({*headers.names, *headers.absent}, self._config.split_plan)
        return tuple(self._config.split_plan)

    def cut(self, node: str, *, shard_size_bytes: int | None) -> SliceCut:
        """Cut a node's slice."""
        return self._splitter.cut_shard(self._config, node, shard_size_bytes=shard_size_bytes)


def _read_whole_plan(plan_file: Path, model: str | None) -> PartitionPlan:
    """Read a plan, and verify against the checkpoint that its slices cover all tensors."""
    plan = PartitionPlan.read(plan_file)
    source = open_source(model or plan.model)
    plan.validate(source.entries, source.architecture, folder=source.folder)
    return plan
