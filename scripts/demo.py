"""The main job, start to end on this machine: a golden, a correct port, and a wrong one.

Runs the installed commands as a user would:
- write a toy checkpoint and capture its golden with the noise floor
- judge mm2's device layer on XLA: it passes
- judge an example port in which gate and up are swapped in layer 5: it fails, and the mistake is named
- continue real text with a small trained model, in the golden and in mm2's device layer

Ends with 0 if each step ended as it should, and both texts are equal.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent
LEARNED = SCRIPTS.parent / "tests" / "models" / "learned"
PROMPTS = ("A class that ", "Return a list of ", "The default value is ")
NUM_NEW_TOKENS = 16
FAULTY_LAYER, FAULTY_SITE, FAULTY_NAME = 5, "moe_delta", "gate_up_swapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Folders and device of the demo."""

    folder: Path
    backend: str

    @property
    def model(self) -> Path:
        """The toy checkpoint."""
        return self.folder / "model"

    @property
    def captures(self) -> Path:
        """The folder of all captures."""
        return self.folder / "captures"

    @property
    def golden(self) -> Path:
        """The golden capture."""
        return self.captures / "gpu_reference" / "full_model"

    def device_run(self, name: str) -> Path:
        """Return the folder of a device capture."""
        return self.captures / "neuron" / name

    def sides(self, name: str) -> tuple[str | Path, ...]:
        """Return the options that name the golden and a device capture."""
        return "--golden", self.golden, "--run", self.device_run(name)


def main() -> int:
    """Run the demo; return 0 if every step ended as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("mm2-demo"), help="made anew (default: %(default)s)"
    )
    parser.add_argument(
        "--backend", default=_default_backend(), help="device of the runs (default: %(default)s)"
    )
    arguments = parser.parse_args()
    demo = Demo(folder=arguments.output_dir, backend=arguments.backend)
    began = time.monotonic()
    if demo.folder.exists():
        shutil.rmtree(demo.folder)

    _say("1. A toy checkpoint in the hub's layout: 8 layers, 32 experts, FP8 blocks")
    _run("mm2-split", "synthesize", "--output", demo.model, "--num-hidden-layers", 8, "--seed", 0)

    _say("2. Its golden: transformers' own model, every layer, with the noise floor, certified")
    options = ("--captures", demo.captures, "--certify", "--quiet")
    _run("mm2-gpu", "extract-all", "--model", demo.model, *options)

    _say(f"3. mm2's device layer on {demo.backend}, each layer from the golden's input: it should pass")
    passed = _sweep(demo, target="builtin", name="builtin") == 0

    _say("4. An example port with a real mistake, gate and up swapped in layer 5: it should fail")
    failed = (
        _sweep(demo, target=f"{SCRIPTS / 'examples' / 'swapped_port.py'}:DecoderLayer", name="swapped") == 1
    )

    _say("5. The name of the mistake: known mistakes are tried in the layer to blame")
    named = _diagnose(demo)

    blamed = _compare_with_classic_limits(demo)
    continued = _continue_real_text(demo)
    _say("Next")
    print(f"captures: {demo.golden} (golden), {demo.device_run('builtin')}, {demo.device_run('swapped')}")
    print("on your port:")
    print("  mm2-gpu extract-all --model YOUR_CHECKPOINT --max-memory 40GB     # on a GPU box")
    print("  mm2-test sweep --model YOUR_CHECKPOINT --golden GOLDEN --target port.py:DecoderLayer   # on trn")
    print(f"  mm2-test component --layer {FAULTY_LAYER} --component experts …    # the blamed part alone")
    print(f"\nThe demo took {time.monotonic() - began:.0f} s.")
    if passed and failed and named and blamed and continued:
        return 0
    print("The demo did not go as it should: see above.", file=sys.stderr)
    return 1


def _sweep(demo: Demo, *, target: str, name: str) -> int:
    """Run and judge all layers of a port; return the exit code: 0 if it is right, 1 if it differs."""
    sides = ("--model", demo.model, "--golden", demo.golden, "--target", target)
    options = ("--backend", demo.backend, "--output-dir", demo.device_run(name), "--quiet")
    return _run("mm2-test", "sweep", *sides, *options, allowed=(0, 1)).returncode


def _diagnose(demo: Demo) -> bool:
    """Print the diagnosis; return whether it names the mistake."""
    words = ("mm2-diagnose", "--model", demo.model, *demo.sides("swapped"), "--quiet")
    printed = _run(*words, allowed=(0, 1), reads=True).stdout
    print(printed, end="")
    return f"Layer {FAULTY_LAYER} matches {FAULTY_NAME}" in printed


def _compare_with_classic_limits(demo: Demo) -> bool:
    """Print the blame beside the classic limits' result; return whether only the blame is right."""
    _say("6. The same captures by the usual limits on layer outputs")
    noise = _comparison(demo, "swapped", "noise")
    faulty_classic = _outputs(_comparison(demo, "swapped", "classic"))
    clean_classic = _outputs(_comparison(demo, "builtin", "classic"))
    cosine = faulty_classic[FAULTY_LAYER]["metrics"]["cosine_similarity"]
    false_alarms = sum(site["status"] == "fail" for site in clean_classic.values())
    lowest_clean = min(site["metrics"]["cosine_similarity"] for site in clean_classic.values())
    print(
        f"cosine of layer {FAULTY_LAYER}'s output: {cosine:.4f}, above the limit of 0.99: the mistake passes"
    )
    print(f"  (lowest cosine of the correct port: {lowest_clean:.6f})")
    print(f"all five limits: they fail {false_alarms} of {len(clean_classic)} layers of the correct port")
    print(f"mm2: {noise['verdict']}, to blame: {_blamed(noise)}")
    return cosine > 0.99 and _blamed(noise) == f"layer {FAULTY_LAYER}: {FAULTY_SITE}"


def _continue_real_text(demo: Demo) -> bool:
    """Print how a trained model continues text, as golden and as port; return whether both agree."""
    _say("7. Real text: a small model that learnt English from Python's manual (tests/models/learned)")
    folder = demo.folder / "text"
    prompts = [word for text in PROMPTS for word in ("--prompt", text)]
    options = ["--model", LEARNED, "--max-new-tokens", NUM_NEW_TOKENS, "--captures", folder]
    golden = _json("mm2-gpu", "full", *options, *prompts)
    port_options = ("--golden", folder / "gpu_reference" / "full_model", "--backend", "cpu")
    port = _json("mm2-test", "full", *options, *port_options)
    for prompt, row in zip(PROMPTS, golden["generation"]["rows"], strict=True):
        print(f"  {prompt}→ {row['text'].splitlines()[0]}")
    counts = [(row["num_alike"], row["num_compared"]) for row in port["generated"]]
    shares = " and ".join(f"{num_alike} of {num_compared}" for num_alike, num_compared in counts)
    print(
        f"mm2's device layer on the same prompts: {port['verdict']}, {shares} generated tokens are the golden's"
    )
    return bool(port["verdict"] == "pass" and all(alike == compared for alike, compared in counts))


def _json(*arguments: object, is_shown: bool = True) -> dict[str, Any]:
    """Run a command, and return what it prints with --json."""
    if is_shown:
        _show(*arguments)
    done = _run(*arguments, "--json", "--quiet", allowed=(0, 1), reads=True, is_shown=False)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def _comparison(demo: Demo, name: str, criteria: str) -> dict[str, Any]:
    return _json("mm2-compare", *demo.sides(name), "--criteria", criteria, is_shown=False)


def _outputs(record: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {site["layer"]: site for site in record["sites"] if site["site"] == "output"}


def _blamed(record: dict[str, Any]) -> str:
    return (
        "; ".join(f"layer {blame['layer']}: {', '.join(blame['sites'])}" for blame in record["blame"])
        or "nobody"
    )


def _default_backend() -> str:
    return "xla-cpu" if sys.platform == "linux" and platform.machine() == "x86_64" else "cpu"


def _say(text: str) -> None:
    print(f"\n━━ {text}", flush=True)


def _run(
    *arguments: object, allowed: tuple[int, ...] = (0,), reads: bool = False, is_shown: bool = True
) -> subprocess.CompletedProcess[str]:
    """Show a command and run it; its output is printed, or returned if it `reads` it."""
    if is_shown:
        _show(*arguments)
    name, *rest = map(str, arguments)
    # The command installed beside this Python, else the one on the path.
    beside = Path(sys.executable).parent / name
    words = [str(beside) if beside.exists() else name, *rest]
    done = subprocess.run(words, stdout=subprocess.PIPE if reads else None, text=True, check=False)
    if done.returncode not in allowed:
        sys.exit(f"{name} ended with {done.returncode}")
    return done


def _show(*arguments: object) -> None:
    print("$ " + shlex.join(map(str, arguments)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
