"""Which folder may know which, and what planning must not load (docs/design.md, Folders and imports)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("scheduling", "kernels", "actors", "dashboards", "jobs")

ALLOWED = {
    "scheduling": {"scheduling"},
    "kernels": {"kernels"},
    "actors.config": {"actors.config", "scheduling"},
    "actors.stage": {"actors.stage", "actors.config", "scheduling", "kernels"},
    "actors.controller": {"actors.controller", "actors.stage", "actors.config", "scheduling"},
    "dashboards": {"dashboards", "scheduling"},
    "jobs": {"jobs", "actors", "scheduling", "dashboards"},
}
"""Layer -> layers whose modules it may import."""

RAY_FILES = {
    "actors/stage/rank/actor.py",
    "actors/controller/actor.py",
    "actors/controller/ranks/placement.py",
    "jobs/training/controllers.py",
    "jobs/cluster/session.py",
    "jobs/cluster/submission.py",
    "jobs/training/train.py",
    "jobs/data/executors.py",
    "jobs/drill/nodes.py",
}
"""Ray is a shell: the only files that may import it."""


def sources() -> list[Path]:
    """All modules of the package."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module name that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which layer is meant"
            yield node.module or ""


def layer_of(dotted: str) -> str:
    """The longest known layer that a dotted name inside the package belongs to."""
    return max((layer for layer in ALLOWED if f"{dotted}.".startswith(f"{layer}.")), key=len, default=dotted)


def permitted(layer: str, target: str) -> bool:
    """Whether a layer may import a dotted name."""
    return any(f"{target}.".startswith(f"{allowed}.") for allowed in ALLOWED[layer])


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    layer = layer_of(dotted)
    if layer not in ALLOWED:
        assert path.name == "__init__.py"
        return
    for name in imported(path):
        if name.startswith("braid."):
            target = name.removeprefix("braid.")
            assert permitted(layer, target), f"{path.relative_to(ROOT)}: {layer} must not import {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_bare_folder_names(path: Path) -> None:
    """`import kernels` would work from the checkout and nowhere else."""
    for name in imported(path):
        assert name.split(".")[0] not in FOLDERS, f"{path}: write braid.{name}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_tests_use_the_package_name(path: Path) -> None:
    for name in imported(path):
        assert name.split(".")[0] not in FOLDERS, f"{path}: write braid.{name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_ray_is_a_shell(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    if any(name.split(".")[0] == "ray" for name in imported(path)):
        assert relative in RAY_FILES, f"{relative} imports ray; keep Ray in {sorted(RAY_FILES)}"


@pytest.mark.parametrize("layer", ["scheduling", "dashboards"])
def test_no_heavy_imports_in_source(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        heavy = {name.split(".")[0] for name in imported(path)} & {"torch", "ray", "triton"}
        assert not heavy, f"{path} imports {heavy}"


def loaded_after(statement: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_scheduling_loads_neither_torch_nor_ray() -> None:
    modules = [
        ".".join(["braid", *path.relative_to(ROOT).with_suffix("").parts])
        for path in (ROOT / "scheduling").rglob("*.py")
        if path.name != "__init__.py"
    ]
    loaded = loaded_after("\n".join(f"import {name}" for name in modules))
    assert "braid" in loaded
    assert not loaded & {"torch", "ray", "triton", "pydantic"}


def test_the_package_itself_is_light() -> None:
    assert not loaded_after("import braid") & {"torch", "ray", "pydantic", "numpy"}


def test_the_command_line_starts_without_torch_and_ray() -> None:
    assert not loaded_after("import braid.jobs.cli") & {"torch", "ray"}


def test_the_controller_starts_without_torch_and_ray() -> None:
    """It never touches a tensor; and a wrong configuration is refused before torch is loaded."""
    controller = "braid.actors.controller.controller, braid.actors.controller.ranks.processes"
    modules = f"{controller}, braid.jobs.training.train"
    assert not loaded_after(f"import {modules}") & {"torch", "ray", "aiohttp", "prometheus_client"}


def test_layers_are_built_where_triton_is_not_installed() -> None:
    absent = "import sys; sys.modules['triton'] = None"
    modules = "import torch, braid.actors.stage.rank.worker, braid.kernels.family"
    choice = "family = braid.kernels.family.operator_family('auto', torch.device('cpu'), torch.float32)"
    assert "torch" in loaded_after(f"{absent}\n{modules}\n{choice}\nfamily.swiglu()(torch.ones(2, 4))")


def test_tests_of_gpus_need_torch_numpy_and_pytest_alone() -> None:
    modules = sorted(f"tests.gpu.{path.stem}" for path in (ROOT / "tests" / "gpu").glob("[a-z]*.py"))
    loaded = loaded_after("\n".join(f"import {name}" for name in modules))
    assert "torch" in loaded
    assert not loaded & {"ray", "pydantic", "typer", "rich", "yaml", "scipy", "aiohttp", "pyarrow", "triton"}


def test_links_cover_the_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "braid" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_files_stay_readable() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long, f"split these files: {long}"
