"""What GPU a machine has, by its device files."""

import contextlib
import glob
import os


def gpu_hardware(root="/"):
    """What GPU is in this machine, whether or not torch can use it: "AMD gfx1151", "NVIDIA", or None. Reads device files only.

    AUTORESEARCH_HARDWARE (gfx1151, amd, nvidia or none), which run.sh sets and understands too, is taken at its word.
    """
    told = os.environ.get("AUTORESEARCH_HARDWARE")
    if told:
        return {"none": None, "nvidia": "NVIDIA", "amd": "AMD"}.get(told, f"AMD {told}")
    for path in sorted(glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/properties"))):
        with contextlib.suppress(OSError, ValueError), open(path) as f:
            version = int(dict(line.split()[:2] for line in f if " " in line).get("gfx_target_version", 0))
            if version:  # the CPU's own node says 0; 110501 is 11.5.1
                return f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    if any(glob.glob(os.path.join(root, pattern)) for pattern in ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*")):
        return "NVIDIA"
    return None
