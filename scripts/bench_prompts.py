"""Right and wrong whole ports, judged prompt by prompt as `mm2-test prompts` does.

    python scripts/bench_prompts.py --model MODEL --prompts 12 --seed 2
    python scripts/bench_prompts.py --model MODEL --target port.py:Model --target wrong.py:Model=4

A target is right, or, with `=PASS`, wrong from that pass on: 0 is the prefill. Rows are held-out text of a trained
model, or random tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from figures import Figure, benchmark_parser, print_figures

from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.golden_rows import GoldenRows
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.machine.progress import NoProgress
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import Provenance
from minimax_tools.results.prompt_results import PromptRanking
from minimax_tools.results.results import Verdict
from minimax_tools.text.answered_prompts import AnsweredPrompt, token_rows
from minimax_tools.text.tokenizer import encode_texts
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime
from neuron.model_runs.model_executor import ModelExecutor
from neuron.ports.targets import find_model_target
from neuron.prompt_runs.prompt_run import PortRecord, PromptRun
from neuron.runs.port_setup import ModelSetup

RIGHT = str(Path(__file__).parent / "examples" / "model_port.py") + ":Model"
_LENGTHS = (12, 60)
_DECODED = 4


def draw_rows(folder: Path, spec: ModelSpec, *, number: int, seed: int) -> list[list[int]]:
    """Draw rows of 12 to 59 tokens: pieces of the model's held-out text, or random ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*_LENGTHS, (number,), generator=generator).tolist()
    held_out = folder / "held_out.json"
    if not held_out.is_file():
        return [torch.randint(spec.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    texts = json.loads(held_out.read_text(encoding="utf-8"))
    tokens = [token for row in encode_texts(folder, texts, chat=False) for token in row]
    starts = [int(torch.randint(len(tokens) - length, (1,), generator=generator)) for length in lengths]
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def judge_port(name: str, run: PromptRun, folder: Path, reader: CheckpointReader) -> PromptRanking:
    """Run a port on the CPU, and judge its prompts."""
    target = find_model_target(name)
    setup = ModelSetup(
        target=target, spec=run.spec, model_source=str(folder), folder=folder, dtype=torch.bfloat16, sites=()
    )
    model = fingerprint_model(reader, run.spec, range(0))
    provenance = Provenance(
        model=model, model_source="", backend="cpu", device="", dtypes={}, target=name, target_digest=""
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        open_runtime("cpu", ranks=Ranks()) as runtime,
        ModelExecutor(setup, runtime=runtime, reader=reader) as executor,
    ):
        record = PortRecord.open(Path(directory), provenance)
        run.run(executor, record, NoProgress())
        return run.rank(record, num_known=0)


def port_figures(name: str, ranking: PromptRanking, *, wrong_from: int | None) -> list[Figure]:
    """Return how many prompts differ, by how much, and whether they begin where the port is wrong."""
    results, differing = ranking.results, ranking.differing
    largest = [Figure.plain(f"{name}: largest error of noise", max(result.excess for result in results))]
    if wrong_from is None:
        shares = [phase.share_outside / phase.share_limit for result in results for phase in result.phases]
        return [
            *largest,
            Figure.plain(f"{name}: largest share outside, of its limit", max(shares)),
            Figure.exactly(f"{name}: prompts flagged of {len(results)}", len(differing), wanted=0),
            Figure.exactly(f"{name}: flagged together", ranking.is_beyond_together, wanted=0),
        ]
    early = [
        result.number
        for result in differing
        if result.first is not None and result.step_of(result.first) < wrong_from
    ]
    return [
        *largest,
        Figure.plain(f"{name}: prompts flagged of {len(results)}", len(differing)),
        Figure.exactly(f"{name}: fails", ranking.verdict is Verdict.FAIL, wanted=1),
        Figure.exactly(f"{name}: flagged before pass {wrong_from}", len(early), wanted=0),
    ]


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=int, default=12, help="number of prompts (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--padding-side", choices=["left", "right"], default="right", help="default: right")
    parser.add_argument("--target", action="append", help="PATH.py:NAME[=PASS]; default: the example port")
    arguments = parser.parse_args()
    spec = ModelSpec.from_folder(arguments.model)
    rows = draw_rows(arguments.model, spec, number=arguments.prompts, seed=arguments.seed)
    inputs = pad_rows(rows, padding_side="right", buckets=(), pad_token_id=0, source="rows")
    prompts: list[AnsweredPrompt] = token_rows(arguments.model, inputs, num_decoded=_DECODED)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as kept, CheckpointReader(arguments.model) as reader:
        goldens = GoldenRows(
            store=LogitsStore.open(Path(kept), reader=reader, spec=spec), reader=reader, spec=spec
        )
        goldens.make([prompt.row for prompt in prompts])
        run = PromptRun(
            prompts=tuple(prompts),
            spec=spec,
            goldens=goldens,
            padding_side=arguments.padding_side,
            buckets=(),
            batch_size=4,
        )
        for target in arguments.target or [RIGHT]:
            name, _, wrong_from = target.partition("=")
            ranking = judge_port(name, run, arguments.model, reader)
            figures += port_figures(
                name.rpartition(":")[2], ranking, wrong_from=int(wrong_from) if wrong_from else None
            )
    return print_figures("prompts", figures, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
