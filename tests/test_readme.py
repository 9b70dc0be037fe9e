"""What README.md shows is true: its program runs, its files and commands exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_library_example(run_mpi, tmp_path):
    """The program runs as it stands, but for one epoch, on 2 ranks; and learns. Both print what one does there."""
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shorter = program.replace("epochs=5", "epochs=1").replace('"run.safetensors"', repr(str(tmp_path / "run.safetensors")))
    (tmp_path / "program.py").write_text(shorter.replace("if communicator.rank == 0:", "if True:"))
    done = run_mpi(2, tmp_path / "program.py", timeout=240)
    right = re.findall(r"([\d.]+) % right", done.stdout)
    assert len(right) == 2 and len(set(right)) == 1 and float(right[0]) > 80, done.output
    assert (tmp_path / "run.safetensors").exists()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_links_and_paths_exist(page):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    folder = (REPOSITORY / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []
    named = re.findall(r"(?<![\w/])((?:scripts|docs|tests|pcldnn)/[\w/.-]*\w\.(?:pyx|pxi|py|sh|h|md|png))\b", text)
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_first_screen_has_two_commands_and_a_picture():
    screen = "\n".join(README.splitlines()[:30])
    assert re.findall(r"^    (.*)$", screen, re.MULTILINE) == ["bash scripts/train.sh", "bash scripts/test.sh"]
    assert "(docs/training_curve.png)" in screen
