"""Numbers and errors as words."""

import re
import sys

GIB = 2**30


def gib(size):
    return f"{size / GIB:.1f} GiB"


def numbers(version):
    """The leading numbers of a version, to compare: "6.17.0-1018-oem" is (6, 17, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version or "").group().split(".") if part)


def last_line(text):
    return text.strip().rpartition("\n")[2]


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def say(text):
    print(f"autoresearch: {text}", file=sys.stderr, flush=True)


SENSORS = {"clock_mhz": "{:,.0f} MHz", "temp_c": "{:.0f} °C", "critical_c": "critical {:.0f} °C", "watts": "{:.0f} W"}


def sensors(now, *names):
    """What telemetry.read_amd has read, of these names, as "600 MHz, 41 °C"; what is not known is left out."""
    return ", ".join(SENSORS[name].format(now[name]) for name in names if name in now)
