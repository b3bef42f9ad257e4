"""What GPU a machine has, by its device files, whether or not torch can use it."""

import contextlib
import glob
import os


def amd_nodes(root="/"):
    """The GPUs that AMD's driver offers for computing, in its order: their properties as texts, and "gfx", the part's name."""
    nodes = []
    for path in sorted(glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/properties")), key=lambda p: int(p.split("/")[-2])):
        with contextlib.suppress(OSError, ValueError), open(path, errors="replace") as f:
            properties = dict(line.split()[:2] for line in f if " " in line.strip())
            version = int(properties.get("gfx_target_version", 0))
            if version:  # the CPU's own node says 0; 110501 is gfx1151, 90010 gfx90a
                nodes.append(properties | {"gfx": f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"})
    return nodes


def has_nvidia(root="/"):
    """Whether there is an NVIDIA GPU, also through Windows' subsystem for Linux."""
    if any(glob.glob(os.path.join(root, pattern)) for pattern in ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*")):
        return True
    return all(os.path.exists(os.path.join(root, path)) for path in ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"))


def gpu_hardware(root="/"):
    """What GPU is in this machine: "AMD gfx1151", "NVIDIA", or None.

    AUTORESEARCH_HARDWARE (gfx1151, amd, nvidia or none), which run.sh sets and understands too, is taken at its word.
    """
    told = os.environ.get("AUTORESEARCH_HARDWARE")
    if told:
        return {"none": None, "nvidia": "NVIDIA", "amd": "AMD"}.get(told, f"AMD {told}")
    if nodes := amd_nodes(root):
        return f"AMD {nodes[0]['gfx']}"
    return "NVIDIA" if has_nvidia(root) else None
