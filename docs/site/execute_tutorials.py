#!/usr/bin/env python3
"""Executes the tutorials, and writes them with their outputs where the hook of the site finds them.

    python docs/site/execute_tutorials.py build/tutorials

The interpreter has to have this package, torch, transformers, nbclient and ipykernel: that of the tests. A cell that raises is an
error, and so are one that takes longer than two minutes, and an output with a warning or with the name of the directory in use.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
_CELL_SECONDS = 120


def execute(path: Path, directory: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs.

    Args:
        path: The notebook.
        directory: What is ``/mnt/nvme`` for its readers: on a drive, in a directory that exists. The notebook makes it.

    Raises:
        CellExecutionError: If a cell raises.
        CellTimeoutError: If a cell takes too long.
    """
    notebook = nbformat.read(path, as_version=4)
    # The kernel is this interpreter, whatever kernels are installed; commands that cells run are those beside it.
    beside = f"{Path(sys.executable).parent}{os.pathsep}{TUTORIALS.parents[1] / 'bin'}{os.pathsep}{os.environ['PATH']}"
    paths = os.pathsep.join(filter(None, (str(TUTORIALS.parents[1]), os.environ.get("PYTHONPATH"))))
    own = {"DEEPNVME_TUTORIAL": str(directory), "PATH": beside, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    own["PYTHONWARNINGS"] = "ignore:IProgress not found"  # progress bars of others: without widgets they are text
    own["DEEPNVME_PROGRESS"] = "off"  # our own come where a machine is slow, and name the directory in use
    client = nbclient.NotebookClient(
        notebook,
        timeout=_CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory.parent)}},
        extra_arguments=["--log-level=ERROR"],
    )
    client.execute(env={**os.environ, **own})
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("destination", type=Path)
    destination: Path = parser.parse_args().destination
    destination.mkdir(parents=True, exist_ok=True)
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=destination) as directory:
            place = Path(directory).resolve() / "nvme"
            notebook = execute(path, place)
        outputs = [str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
        wrong = [output for output in outputs if "Warning" in output or str(place) in output]
        if wrong or not outputs:
            sys.exit(f"{path.name}: {wrong[0] if wrong else 'no cell has an output'}")
        nbformat.write(notebook, destination / path.name)
        print(f"{path.name}: {time.perf_counter() - begun:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
