"""analysis.ipynb, executed: it answers whatever is in results.tsv."""

import nbformat
import pytest
from conftest import PROJECT
from nbclient import NotebookClient

HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"


def executed(monkeypatch, path):
    monkeypatch.setenv("AUTORESEARCH_RESULTS", str(path))
    notebook = nbformat.read(PROJECT / "analysis.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(PROJECT)}}).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return "".join(o.get("text", "") for o in outputs), outputs


NIGHT = HEADER + (
    "aaaaaaa\t0.000000\t0.0\tcrash\ta crash first, with a \"quote\n"
    "bbbbbbb\t1.200000\t6.1\tkeep\tbaseline\n"
    "ccccccc\t1.250000\t6.1\tdiscard\ta\ttab inside\r\n"
    "ddddddd\t1.150000\t7.0\tkeep\thalf the batch\n"
    "eeeeeee\tnan\t6.0\tkeep\tnot a number\n"
    "fffffff\t-37.8\t6.0\tkeep\tabsurd\n"
    "ggggggg\t1.1\n"
)  # fmt: skip


@pytest.mark.parametrize(("content", "words"), [
    (None, ["0 rows", "no experiment yet", "No valid result yet"]),
    ("", ["0 rows"]),
    (HEADER, ["0 rows"]),
    ("\ufeff" + NIGHT, ["7 rows, 3 with a result", "baseline 1.200000, best 1.150000 (-0.050000): half the batch"]),
    (HEADER + "bbbbbbb\t1.3\t6\tdiscard\tnothing kept\n", ["1 rows, 1 with a result", "best 1.300000 (+0.000000): nothing kept"]),
])  # fmt: skip
def test_reads_any_results(monkeypatch, tmp_path, content, words):
    path = tmp_path / "results.tsv"
    if content is not None:
        path.write_bytes(content.encode("utf-8"))
    text, outputs = executed(monkeypatch, path)
    assert all(word in text for word in words), text
    assert any("image/png" in o.get("data", {}) for o in outputs)


def test_is_committed_without_outputs():
    notebook = nbformat.read(PROJECT / "analysis.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
