"""The page: analysis.ipynb, executed over a ledger, as one HTML file."""

import html
import os
import sys

from .reading import HERE

# What the page's policy forbids, it neither has nor could be made to do by a description or a log: scripts, and anything from elsewhere.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }}
body {{ color: #1f2328; background: #f6f8fa; }}
h1 {{ font-size: 1.7rem; margin: .5rem 0 1rem; line-height: 1.25; }}
h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .6rem; }}
p {{ margin: .6rem 0; max-width: 46rem; overflow-wrap: anywhere; }}
code {{ font: .9em ui-monospace, Menlo, Consolas, monospace; }}
div:has(> img) {{ overflow-x: auto; }}
img {{ display: block; width: 100%; min-width: 560px; height: auto; margin: .4rem 0; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e6edf3; background: #0d1117; }}
  img {{ filter: invert(.9) hue-rotate(180deg); }}
}}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def executed_notebook(path):
    """analysis.ipynb, executed over the ledger at `path`; ends the program with what its cell says if one fails."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this Python's kernel, whatever the user's own folder calls python3
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(HERE / "analysis.ipynb", as_version=4)
    more = ["--log-level=ERROR"]  # not the warning that it talks over loopback in plain text, which it does for seconds
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", extra_arguments=more, resources={"metadata": {"path": str(HERE)}})
    try:
        return client.execute(env=os.environ | {"AUTORESEARCH_RESULTS": str(path.resolve())})
    except CellExecutionError as e:
        sys.exit(f"FAIL: analysis.ipynb: {e.ename}: {e.evalue}")
    except RuntimeError as e:
        sys.exit(f"FAIL: analysis.ipynb: {e}")


def page(notebook, title):
    """An executed notebook as one HTML file that loads nothing and runs nothing."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input=True, exclude_output_prompt=True, exclude_anchor_links=True)
    return PAGE.format(title=html.escape(title), body=exporter.from_notebook_node(notebook)[0])
