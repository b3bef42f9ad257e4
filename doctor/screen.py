"""What the checks found as one screen, and the checks themselves as a table."""

import textwrap

from doctor.check import LEVELS
from doctor.checks import CHECKS

TITLES = {"gfx1151": "Strix Halo (gfx1151)", "amd": "AMD GPU", "nvidia": "NVIDIA GPU", "none": "no GPU"}
DEMONSTRATION = (
    "No GPU: ./run.sh runs the demonstration, the same program on a small model and text, a minute on the CPU. It shows the whole loop; "
    "its numbers compare only with other demonstrations."
)


def title(machine):
    names = [d["name"] for d in machine.canary.get("devices", [])] or machine.parts
    name = f"{TITLES.get(machine.hardware, machine.hardware)}{': ' + ', '.join(names) if names else ''}"
    return f"{name}; Linux {machine.read('proc/sys/kernel/osrelease')}; torch {machine.torch.get('version') or 'not installed'}"


def screen(machine, rows, width=118):
    """The table as text: faults with why and mend, then what is fine, shortly. What stops a run keeps torch from being asked too."""
    faults = sorted((row for row in rows if row.level != "fine"), key=lambda row: LEVELS.index(row.level))
    lines = [title(machine)]
    if machine.hardware == "none":
        lines += textwrap.wrap(DEMONSTRATION, width)

    def part(label, text):
        return textwrap.wrap(text, width, initial_indent=f"{'':14}{label:5} ", subsequent_indent=" " * 20, break_on_hyphens=False)

    for row in faults:
        lines += textwrap.wrap(f"{row.level.upper():7} {row.check}: {row.seen}", width, subsequent_indent=" " * 8, break_on_hyphens=False)
        lines += part("why", row.why) * bool(row.why) + part("mend", row.mend) * bool(row.mend)
    fine = "; ".join(f"{row.check} {row.seen}" for row in rows if row.level == "fine")
    lines += textwrap.wrap("fine    " + fine, width, subsequent_indent=" " * 8, break_on_hyphens=False)
    count = sum(row.level == "stop" for row in rows)
    if not count:
        verdict = "Nothing stops a run." if faults else "All is well."
    else:
        verdict = f"{count} of these stop{'s' * (count == 1)} a run."
        if machine.hardware != "none" and not machine.canary:
            verdict += " Until then torch was not asked to use the GPU."
    return "\n".join([*lines, verdict])


def listing():
    """docs/doctor.md's table of checks."""
    head = ["| check | on | why it matters | what mends it |", "|---|---|---|---|"]
    rows = [f"| `{c.name}` ({c.level}) | {c.where.replace(' ', ', ')} | {c.why} | {c.mend.replace('|', chr(92) + '|')} |" for c in CHECKS]
    return "\n".join(head + rows)
