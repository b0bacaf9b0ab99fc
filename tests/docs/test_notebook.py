"""examples/first_run.ipynb runs as it is, with fewer steps, and is stored without outputs."""

import os
from pathlib import Path

import pytest
from launched import launcher  # the mark of tests that start the launcher, which follow one another

from engine.processes.start import free_port

pytest.importorskip("ipykernel", reason="pip install -r requirements-test.txt")
nbclient = pytest.importorskip("nbclient", reason="pip install -r requirements-test.txt")
nbformat = pytest.importorskip("nbformat", reason="pip install -r requirements-test.txt")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"
# 2 epochs of 6 steps would take minutes on shared cores; these are seconds
OPTIONS = "--steps 2 --limit-samples 240 --val-fraction 0.02 --image-size 32 --trace-every 0"


def cells(kind: str) -> list:
    return [each for each in nbformat.read(NOTEBOOK, 4).cells if each.cell_type == kind]


def test_it_is_stored_without_outputs():
    assert cells("code") and not any(each.outputs or each.execution_count for each in cells("code"))


@pytest.mark.all("starts the kernel of a notebook")
@pytest.mark.slow
def test_it_runs(tmp_path):
    assert launcher(2, "0")[1:3] == ["-m", "deepspeed.launcher.runner"]  # as the notebook does
    notebook = nbformat.read(NOTEBOOK, 4)
    (at,) = [
        i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])
    ]
    port = ["--num_gpus", "2", "--master_port", str(free_port())]
    given = f"LAUNCHER, OPTIONS, RUN_DIR = {port}, {OPTIONS.split()}, {str(tmp_path / 'run')!r}"
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(given))  # as papermill does
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(cwd=str(NOTEBOOK.parent), env={**os.environ})

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    pictures = [each for each in outputs if "image/png" in each.get("data", {})]
    assert "Zero-shot retrieval" in printed and "red heart" in printed
    # the launcher's ranks have ended as any program does; a library that finds fault with that says so
    assert "leaked" not in printed, printed[-3000:]
    # the curve, the queries of both held-out sets, the answers to the query
    assert len(pictures) == 4
    assert (tmp_path / "run" / "done").is_file()
