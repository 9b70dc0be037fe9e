"""The order of the levels: a module imports from lower ones only, so that reading downwards is always enough."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pcldnn

# From the bottom to the top. Modules of one line do not import each other; a package may import within itself.
LEVELS = [
    ["_kernels", "text"],  # arrays and integers only, and strings
    ["machine"],
    ["layout", "partition"],
    ["blocking"],
    ["winograd_blocking"],
    ["balance"],
    ["layers"],
    ["scaling"],
    ["launcher", "nodes", "faults", "trace", "commthread", "transfer", "safetensors"],
    ["shared", "serial", "grid", "traffic", "mpi"],
    ["hierarchy", "memory", "plan_table"],
    ["plan", "communicator"],
    ["exchange", "schedule"],
    ["units", "tuning"],
    ["weights", "overlap"],
    ["passes"],
    ["network"],
    ["optim", "checkpoint", "data"],
    ["models", "report", "digest", "evaluation"],
    ["recording", "run"],
    ["train"],
    ["arguments"],
    ["script"],
    ["replay", "check"],
    ["cli"],
    ["__main__"],
]
LEVEL_OF = {module: level for level, modules in enumerate(LEVELS) for module in modules}
PACKAGE = Path(pcldnn.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def home(path: Path) -> str:
    """The module or package directly under pcldnn that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """What a file imports, anywhere in it, of the modules directly under pcldnn."""
    package = ["pcldnn", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "pcldnn" else {module}
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "pcldnn" and len(part) > 1} & set(LEVEL_OF)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_go_down(path):
    own = home(path)
    assert own in LEVEL_OF, f"{own} has no level: state it in LEVELS"
    wrong = {name for name in imported(path) - {own} if LEVEL_OF[name] >= LEVEL_OF[own]}
    assert not wrong, f"pcldnn.{own} (level {LEVEL_OF[own]}) imports from its own level or above: {sorted(wrong)}"


def test_the_check_sees_imports():
    assert imported(PACKAGE / "network.py") >= {"layers", "plan", "layout", "machine", "partition", "passes"}
    assert imported(PACKAGE / "layers" / "conv.py") >= {"_kernels", "layout", "layers"}


def run(code, **environment):
    command = [sys.executable, "-c", code]
    options = {"env": {**os.environ, **environment}, "cwd": PACKAGE.parent}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, **options).stdout


def test_importing_pcldnn_is_light():
    loaded = run("import sys, pcldnn; print(*sys.modules)").split()
    assert not {"mpi4py", "numpy", "pcldnn._kernels"} & set(loaded)


def test_single_process_training_does_not_load_mpi():
    code = """
import sys, numpy as np, pcldnn
network = pcldnn.Network([pcldnn.Flatten(), pcldnn.Linear(4, 2)], (1, 2, 2))
network.prepare(3)
network.forward_loss(np.ones((3, 1, 2, 2), np.float32), [0, 1, 0])
network.backward()
network.update(pcldnn.SGD(0.1))
print(*sys.modules)
"""
    assert "mpi4py" not in run(code).split()


def test_every_public_name_loads():
    for name in pcldnn.__all__:
        assert getattr(pcldnn, name).__module__.startswith("pcldnn.")
    assert set(pcldnn.__all__) < set(dir(pcldnn))
    assert pcldnn.models.vgg_a
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        pcldnn.nonsense  # noqa: B018
