"""
analysis.ipynb, executed: it answers whatever is in results.tsv. It is committed with what it says of sample/.

    python tests/report/test_notebook.py        # write those outputs again, after a change of results.py, the notebook or the sample
"""

import base64
import io
import os
import re

import pytest
from conftest import PROJECT, made_once
from nights import HEADER, write_night
from PIL import Image

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
pytest.importorskip("ipykernel")

NOTEBOOK = PROJECT / "analysis.ipynb"
# Upstream's own columns and habits: no runs/, a crash first, a quote, a tab, CRLF, a status of its own.
UPSTREAM = (
    HEADER + "aaaaaaa\t0.000000\t0.0\tcrash\ta \"crash first\r\nbbbbbbb\t0.997900\t44.0\tkeep\tbaseline\r\n"
    "ccccccc\t0.993200\t44.2\tkeep\tincrease LR\tto 0.04\r\nddddddd\t1.005000\t44.0\tdiscard\tGeLU\r\neeeeeee\t1.0\t44.0\tpark\tlater\r\n"
)  # fmt: skip


def execute(ledgers):
    """The notebook's cells, executed over each ledger in turn, in one kernel. Returns the code cells of each."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    once = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = []
    for ledger in ledgers:
        choose = nbformat.v4.new_code_cell(f"import os\nos.environ['AUTORESEARCH_RESULTS'] = {str(ledger)!r}")
        notebook.cells += [choose, *(nbformat.v4.new_code_cell(cell.source) for cell in once)]
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(PROJECT)}}).execute()
    size = len(once) + 1
    return [notebook.cells[i * size + 1 : (i + 1) * size] for i in range(len(ledgers))]


def text(cells):
    return "\n".join(output.get("data", {}).get("text/html", "") + output.get("text", "") for cell in cells for output in cell.outputs)


def pictures(cells):
    found = [output["data"]["image/png"] for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The code cells over each of these ledgers."""
    names = ("none", "small", "upstream", "long", "sample")

    def make(folder):
        (folder / "upstream.tsv").write_bytes(UPSTREAM.encode())
        ledgers = [folder / "fresh" / "results.tsv", write_night(folder / "small", 12), folder / "upstream.tsv"]
        ledgers += [write_night(folder / "long", 700), PROJECT / "sample" / "results.tsv"]
        (folder / "small" / "runs" / "nov28.tsv").write_text(HEADER + "abcdef0\t1.25\t6.0\tkeep\tthe night before\n")
        for name, cells in zip(names, execute(ledgers)):
            nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")

    folder = made_once(tmp_path_factory, "nights", make)
    return {name: nbformat.read(folder / f"{name}.ipynb", as_version=4).cells for name in names}


@pytest.mark.parametrize(("name", "words"), [
    ("none", ["no experiment yet: ", "fresh/results.tsv is not there", "nothing yet", "Nothing to judge yet."]),
    ("small", ["12<small>", "noise floor", ">nov28<", "the night before", '<pre class="diff">', "runs/12 · "]),
    ("upstream", ["0.993200", "increase LR to 0.04", "a &quot;crash first", "1 × status &#x27;park&#x27;", "The noise floor is not known"]),
    ("long", ["700<small>", 'data-title="#">700<', "runs/700 · "]),
])  # fmt: skip
def test_answers(executed, name, words):
    found = text(executed[name])
    assert all(word in found for word in words), found[:3000]
    assert len(pictures(executed[name])) == 5 and all(image.width == 1600 for image in pictures(executed[name]))


def test_committed_with_the_sample_alone():
    """Outputs and nothing else: no counts, no times, no errors, no path of a machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs and cell.execution_count is None and not cell.metadata for cell in code)
    assert {output.output_type for cell in code for output in cell.outputs} == {"display_data"}
    assert not re.search(r"/(home|root|tmp|work)/", text(code)) and set(notebook.metadata) == {"kernelspec", "language_info"}
    assert NOTEBOOK.stat().st_size < 1_000_000 and sum(p.stat().st_size for p in (PROJECT / "sample").rglob("*") if p.is_file()) < 300_000


def test_committed_outputs_are_what_it_says(executed):
    committed = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert text(committed) == text(executed["sample"])
    assert [image.size for image in pictures(committed)] == [image.size for image in pictures(executed["sample"])]


def rewrite():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, done in zip(code, execute([os.path.join("sample", "results.tsv")])[0]):
        cell.execution_count, cell.metadata = None, {}
        cell.outputs = [nbformat.v4.new_output("display_data", output.data, metadata=output.metadata) for output in done.outputs]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    rewrite()
