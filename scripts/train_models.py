"""Train the learned models that BENCHMARKS.md tells of, each in BF16 and in block FP8.

    python scripts/train_models.py --output-dir models            all of them, one after another
    python scripts/train_models.py --output-dir models b tiny     some of them

Each takes one core for 5 to 20 minutes. One torch version gives the same weights on one kind of machine: one thread,
a fixed number of steps, a seed for each model. `tiny` is the one that lies in tests/models/learned.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

RECIPES = {
    # Many heads, long text: the shape of the first report.
    "a": "--text prose --steps 798 --seed 0",
    # Widths of their own in every place, 32 experts, a vocabulary with merges, source code.
    "b": "--text python-asyncio-and-email --steps 400 --seed 1 --hidden-size 384 --num-attention-heads 6 "
    "--num-hidden-layers 6 --num-local-experts 32 --intermediate-size 48 --vocab-size 512",
    # A wide residual stream with massive channels, few experts, the language of lawyers.
    "c": "--text licences --steps 250 --seed 2 --hidden-size 1024 --num-hidden-layers 4 --num-local-experts 8 "
    "--num-experts-per-tok 2 --intermediate-size 128 --massive-channels 3",
    # Trained until its experts differ: more steps, two experts to a token.
    "d": "--text python-standard-library --steps 2500 --seed 3 --num-attention-heads 4 --rotary-dim 64 "
    "--num-hidden-layers 4 --num-experts-per-tok 2 --vocab-size 512",
    # Small enough to be committed.
    "tiny": "--text prose --steps 4000 --seed 4 --hidden-size 128 --num-attention-heads 4 --head-dim 32 "
    "--rotary-dim 16 --num-hidden-layers 4 --num-local-experts 8 --num-experts-per-tok 2 --vocab-size 320",
}


def main() -> int:
    """Train the models asked for; return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(RECIPES)}; else all")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("mm2-models"), help="gets learned_MODEL and learned_MODEL_fp8"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.models) - set(RECIPES))
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    for name in arguments.models or RECIPES:
        output = arguments.output_dir / f"learned_{name}"
        command = ["train", "--output", str(output), "--fp8-output", f"{output}_fp8", "--num-threads", "1"]
        code = _run([*command, *shlex.split(RECIPES[name])])
        if code:
            return code
    return 0


def _run(arguments: list[str]) -> int:
    print("$ mm2-split " + shlex.join(arguments), flush=True)
    program = [sys.executable, "-c", "from minimax_tools.cli import main; main()"]
    # Threads that wait for others must not spin: other processes may need the core.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    return subprocess.run([*program, *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
