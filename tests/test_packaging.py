"""The packages that `pip install .` brings along; it replaces nothing on a Neuron image or a GPU box.

pip resolves in an environment whose packages are stated by their metadata alone: nothing large is fetched.
"""

from __future__ import annotations

import email.message
import email.parser
import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("compare", "gpu_reference", "minimax_tools", "mm2", "neuron", "reports")

# A package as `name==version`, and what it requires itself.
Scene = Mapping[str, tuple[str, ...]]

_TORCH_REQUIRES = (
    "filelock",
    "typing-extensions>=4.10.0",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)
_LIGHT: Scene = {
    "MarkupSafe==3.0.2": (),
    "PyYAML==6.0.2": (),
    "filelock==3.18.0": (),
    "fsspec==2025.5.1": (),
    "networkx==3.4.2": (),
    "packaging==25.0": (),
    "regex==2025.11.3": (),
    "sympy==1.14.0": ("mpmath<1.4,>=1.1.0",),
    "mpmath==1.3.0": (),
    "tqdm==4.67.1": (),
    "typing-extensions==4.14.1": (),
}
# AWS Neuron SDK 2.31, PyTorch/XLA line. Its own packages state no requirements: mm2's lead to none of them.
NEURON_IMAGE: Scene = {
    **_LIGHT,
    "torch==2.9.1": _TORCH_REQUIRES,
    "torch-xla==2.9.0": ("absl-py>=1.0.0", "numpy", "pyyaml", "requests"),
    "torch-neuronx==2.9.0.2.14.27725+e2ff0410": (),
    "neuronx-distributed==0.19.28093+fc70b593": (),
    "neuronx-distributed-inference==0.10.17970+8548ba25": (),
    "neuronx-cc==2.25.3371.0+f524f7f8": (),
    "libneuronxla==2.2.16974.0+a550bfe0": (),
    "transformers==4.57.3": (
        "filelock",
        "huggingface-hub<1.0,>=0.34.0",
        "numpy>=1.17",
        "packaging>=20.0",
        "pyyaml>=5.1",
        "regex!=2019.12.17",
        "requests",
        "tokenizers<=0.23.0,>=0.22.0",
        "safetensors>=0.4.3",
        "tqdm>=4.27",
    ),
    "huggingface-hub==0.36.0": (
        "filelock",
        "fsspec>=2023.5.0",
        "packaging>=20.9",
        "pyyaml>=5.1",
        "requests",
        "tqdm",
    ),
    "tokenizers==0.22.1": ("huggingface-hub<2.0,>=0.16.4",),
    "safetensors==0.6.2": (),
    "numpy==1.26.4": (),
    "absl-py==2.3.1": (),
    "requests==2.32.5": (),
    "jinja2==3.1.6": ("MarkupSafe>=2.0",),
    "click==8.1.8": (),
}
GPU_BOX: Scene = {
    **_LIGHT,
    "torch==2.13.0+cu130": (*_TORCH_REQUIRES, "setuptools>=77.0.3"),
    "setuptools==80.9.0": (),
    "transformers==5.23.0": (
        "huggingface-hub<3.0,>=1.31.0",
        "numpy>=1.17",
        "packaging>=20.0",
        "pyyaml>=5.1",
        "regex>=2025.10.22",
        "tokenizers<0.24.0,>=0.23.1",
        "typer",
        "safetensors>=0.8.0",
        "tqdm>=4.60",
    ),
    "accelerate==1.15.0": (
        "numpy>=1.17",
        "packaging>=20.0",
        "psutil",
        "pyyaml",
        "torch>=2.0.0",
        "huggingface_hub>=0.21.0",
        "safetensors>=0.4.3",
    ),
    "huggingface-hub==2.4.0": (
        "click<9.0.0,>=8.4.2",
        "filelock>=3.10.0",
        "fsspec>=2023.5.0",
        "httpx2<3,>=2.0.0",
        "packaging>=20.9",
        "pyyaml>=5.1",
        "tqdm>=4.42.1",
        "typing-extensions>=4.1.0",
    ),
    "httpx2==2.16.2": (),
    "tokenizers==0.23.3": ("huggingface-hub<3.0,>=0.16.4",),
    "safetensors==0.8.0": (),
    "numpy==2.4.6": (),
    "typer==0.29.2": ("click>=8.0.0",),
    "psutil==7.2.2": (),
    "jinja2==3.1.6": ("MarkupSafe>=2.0",),
}


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of this repository."""
    source = folder / "source"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "mm2-*")
    shutil.copytree(REPOSITORY, source, ignore=ignore)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("mm2-*.whl")
    return wheel


def add_dependency(wheel: Path, dependency: str, folder: Path) -> Path:
    """The wheel with one more core dependency: its metadata is all that pip resolves by."""
    changed = folder / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(changed, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith(".dist-info/METADATA"):
                lines = content.replace(
                    b"\nRequires-Dist:", f"\nRequires-Dist: {dependency}\nRequires-Dist:".encode(), 1
                )
                assert lines != content
                content = lines
            copy.writestr(name, content)
    return changed


def make_scene(folder: Path, scene: Scene) -> Path:
    """The interpreter of a new environment that states the packages of `scene`."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for pin, requires in scene.items():
        name, _, version = pin.partition("==")
        info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text(
            "\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires), ""])
        )
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").write_text("")
    return folder / "bin" / "python"


def would_install(python: Path, requirement: str) -> set[str]:
    """Names of what `pip install requirement` would put into the environment of `python`."""
    done = pip_dry_run(python, requirement)
    assert done.returncode == 0, done.stderr
    return {canonical(item["metadata"]["name"]) for item in json.loads(done.stdout)["install"]}


def pip_dry_run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--retries", "0", "--timeout", "20"]
    command = [*pip, "install", "--quiet", "--dry-run", "--report", "-", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def replaced(installed: set[str], scene: Scene) -> set[str]:
    """Packages of `scene` among those that would be installed: they would be replaced."""
    return installed & {canonical(pin.partition("==")[0]) for pin in scene}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def neuron_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scene(tmp_path_factory.mktemp("neuron_image"), NEURON_IMAGE)


@pytest.fixture(scope="module")
def gpu_box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scene(tmp_path_factory.mktemp("gpu_box"), GPU_BOX)


@pytest.fixture(scope="module")
def _package_index(neuron_image: Path) -> None:
    probe = pip_dry_run(neuron_image, "--no-deps", "rich")
    if probe.returncode != 0:
        pytest.skip(f"no package index can be reached, pip says: {probe.stderr.strip().splitlines()[-1]}")


@pytest.mark.usefixtures("_package_index")
class TestInstallation:
    def test_neuron_image_keeps_every_package(self, wheel: Path, neuron_image: Path) -> None:
        installed = would_install(neuron_image, str(wheel))
        assert installed >= {"mm2", "rich", "psutil"}
        assert replaced(installed, NEURON_IMAGE) == set()

    @pytest.mark.slow  # with the extra it keeps them too
    def test_gpu_box_keeps_every_package(self, wheel: Path, gpu_box: Path) -> None:
        installed = would_install(gpu_box, str(wheel))
        assert installed >= {"mm2", "rich", "click"}
        assert replaced(installed, GPU_BOX) == set()

    def test_gpu_box_keeps_every_package_with_the_golden_extra(self, wheel: Path, gpu_box: Path) -> None:
        installed = would_install(gpu_box, f"mm2[golden] @ {wheel.as_uri()}")
        assert replaced(installed, GPU_BOX) == set()

    def test_newer_hub_as_core_dependency_would_replace_the_neuron_images(
        self, tmp_path: Path, wheel: Path, neuron_image: Path, gpu_box: Path
    ) -> None:
        changed = str(add_dependency(wheel, "huggingface_hub>=1.31", tmp_path))
        assert replaced(would_install(neuron_image, changed), NEURON_IMAGE) >= {"huggingface-hub"}
        assert replaced(would_install(gpu_box, changed), GPU_BOX) == set()


def test_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = wheel.parent / "source"
    files = (path for package in PACKAGES for path in (source / package).rglob("*") if path.is_file())
    assert packed == {path.relative_to(source).as_posix() for path in files}


def test_wheel_declares_the_commands_and_the_pytest_plugin(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        lines = archive.read(name).decode().split("\n")
    assert {line for line in lines if "=" in line} == {
        "mm2-compare = compare.__main__:main",
        "mm2-diagnose = compare.diagnosis.__main__:main",
        "mm2-gpu = gpu_reference.__main__:main",
        "mm2-split = minimax_tools.__main__:main",
        "mm2-test = neuron.__main__:main",
        "verify_slice_loading.py = minimax_tools.__main__:verify_slice_loading",
        "mm2 = mm2.pytest_plugin",  # for pytest
    }


def test_core_asks_for_torch_and_light_libraries_only(metadata: email.message.Message) -> None:
    core = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {re.split(r"[^\w-]", text)[0] for text in core} <= {
        "cattrs",
        "click",
        "huggingface_hub",
        "jinja2",
        "numba",
        "numpy",
        "packaging",
        "psutil",
        "pyyaml",
        "rich",
        "safetensors",
        "scipy",
        "tokenizers",
        "tomli",
        "torch",
    }
    assert "torch>=2.9" in core
    versions = [text.partition(";")[0] for text in core]
    assert not [text for text in versions if re.search(r"<|==|~=", text)]


def test_extras_are_golden_remote_report_xla_pytest_and_dev(metadata: email.message.Message) -> None:
    required = metadata.get_all("Requires-Dist", [])
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "golden",
        "remote",
        "report",
        "xla",
        "pytest",
        "dev",
    }
    assert 'transformers>=5.23; extra == "golden"' in required
    assert 'accelerate>=1.15; extra == "golden"' in required
    assert [text for text in required if 'extra == "remote"' in text] == ['s3fs>=2024.2; extra == "remote"']
    xla = [text for text in required if 'extra == "xla"' in text]
    assert sorted(text.partition(";")[0] for text in xla) == ["torch==2.9.*", "torch_xla==2.9.*"]
    assert all('sys_platform == "linux" and platform_machine == "x86_64"' in text for text in xla)


def test_neuron_packages_are_required_nowhere(metadata: email.message.Message) -> None:
    assert not [text for text in metadata.get_all("Requires-Dist", []) if "neuron" in text.lower()]
