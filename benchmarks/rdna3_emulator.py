"""Runs gfx1151 code objects that Triton compiled, on a CPU, instruction by instruction, and counts what was executed.

The emulator is tinygrad's (`test/mockgpu/amd/emu.py`, MIT), which compiles each instruction of RDNA3's own pseudocode to a
small C function. It is used from a clone of its repository on the path (`TINYGRAD_PATH`), with clang installed. This file is
what lies between it and a code object of Triton's:

- loading: the segments of the ELF file, the kernel descriptor, the arguments and the initial registers (`CodeObject`);
- instructions that Triton emits and the emulator lacks: buffer loads and stores, 16-bit LDS loads to the high half,
  permlanex16 with selectors from literals and registers (`_supplement`), DPP's row_xmask (`_with_row_xmask`);
- three places where it does other than the hardware, for code that Triton emits: DPP reading the register that it writes,
  one scratch for all waves of a workgroup, LDS reads of idle lanes (`_mended`);
- what it costs: the executed instructions by class, issue cycles, and the bound that issue alone sets (`Cost`).

    from rdna3_emulator import launch
    cost = launch(compiled, grid, arguments)     # of triton.compile(..., GPUTarget("hip", "gfx1151", 32)); CPU tensors

Everything is exact to the instruction and nothing is timed: no caches, latencies, stalls or occupancy. Figures that come from
it are modelled, good for ranking variants of a kernel.
"""

import collections
import contextlib
import ctypes
import io
import itertools
import mmap
import re
import struct
from types import SimpleNamespace

import numpy as np
from elftools.elf.elffile import ELFFile

LANES = 32
VGPRS, SGPRS = 256, 260
EXEC, PC_LOW, PC_HIGH, NULL, LITERAL = 126, 256, 257, 124, 255  # register numbers, as operands name them
SGPR_BUFFER, VGPR_BUFFER, MEMORY_BUFFER, LDS_BUFFER, SCRATCH_BUFFER = range(5)  # in the order of the emulator's arguments


# --- loading and launching ------------------------------------------------------------------------------------------


class CodeObject:
    """One kernel of a code object, in executable form: its segments in memory and what its descriptor says."""

    def __init__(self, elf_bytes, name):
        elf = ELFFile(io.BytesIO(elf_bytes))
        segments = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        self.size = max(s["p_vaddr"] + s["p_memsz"] for s in segments)
        self.memory = mmap.mmap(-1, self.size + 65536)  # the decoder reads ahead
        for s in segments:
            self.memory[s["p_vaddr"] : s["p_vaddr"] + s["p_filesz"]] = s.data()
        symbols = itertools.chain.from_iterable(
            table.iter_symbols() for table in map(elf.get_section_by_name, (".symtab", ".dynsym")) if table
        )
        descriptor = next(s["st_value"] for s in symbols if s.name == f"{name}.kd")
        self.lds, self.scratch, self.kernarg = struct.unpack_from("<III", self.memory, descriptor)
        (entry,) = struct.unpack_from("<q", self.memory, descriptor + 16)
        (self.rsrc2,) = struct.unpack_from("<I", self.memory, descriptor + 52)
        (self.properties,) = struct.unpack_from("<H", self.memory, descriptor + 56)
        self.entry = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + descriptor + entry

    def user_sgprs(self, kernarg_address):
        """The registers that the packet processor fills: those the descriptor enables, in order; ours are zero but for the arguments."""
        enabled = ((1, 4), (2, 2), (4, 2), (8, 2), (16, 2), (32, 2), (64, 1))  # bit of the descriptor, registers; 8: kernel arguments
        address = [kernarg_address & 0xFFFFFFFF, kernarg_address >> 32]
        return [r for bit, count in enabled if self.properties & bit for r in (address if bit == 8 else [0] * count)]


_SCALARS = {"i1": "<?", "u1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q",
            "fp16": "<e", "fp32": "<f", "fp64": "<d"}  # fmt: skip


HIDDEN_BYTES = 256  # of arguments that a kernel which asks for the grid's size has after its own (code object version 5)


def _pack(types, values, size, grid, threads):
    """Kernel arguments in their layout: each aligned to its own size, tensors as addresses; `size` as the descriptor says."""
    if len(types) != len(values):
        raise ValueError(f"{len(values)} arguments for {len(types)} parameters {types}")
    packed, offset = bytearray(max(size, HIDDEN_BYTES)), 0
    for kind, value in zip(types, values):
        code, value = ("<Q", value.data_ptr()) if kind.startswith("*") else (_SCALARS[kind], value)
        width = struct.calcsize(code)
        offset = -(-offset // width) * width
        struct.pack_into(code, packed, offset, value)
        offset += width
    if size - HIDDEN_BYTES >= offset:
        struct.pack_into("<IIIHHH", packed, size - HIDDEN_BYTES, *grid, threads, 1, 1)
    return packed


def launch(compiled, grid, arguments):
    """Run every workgroup of the grid; returns the `Cost`. `arguments` without constexprs; tensors on the CPU are written in place."""
    import test.mockgpu.amd.emu as emulator  # of the tinygrad clone

    code = CodeObject(compiled.asm["hsaco"], compiled.metadata.name)
    types = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    grid, threads = (*grid, 1, 1)[:3], compiled.metadata.num_warps * LANES
    packed = _pack(types, arguments, code.kernarg, grid, threads)
    kernarg = (ctypes.c_char * len(packed)).from_buffer(packed)
    address = ctypes.addressof(kernarg)
    lds_granules = -(-max(compiled.metadata.shared, code.lds) // 512)  # dynamic LDS: the descriptor says 0, the launch packet tells
    rsrc2 = code.rsrc2 & ~(0x1FF << 15) | lds_granules << 15
    counts = collections.Counter()
    with _patched(emulator, code.scratch, counts):
        emulator.run_asm(
            code.entry, code.size, *grid, threads, 1, 1, address,
            rsrc2=rsrc2, scratch_size=code.scratch, arch="rdna3", user_data=code.user_sgprs(address),
        )  # fmt: skip
    return Cost(counts)


@contextlib.contextmanager
def _patched(emulator, scratch_size, counts):
    """The emulator's decoder answers with ours for a while: supplements, mended instructions, everything counted."""
    original, control = emulator._decode_at, emulator._dpp16_ctrl
    scratch = collections.defaultdict(lambda: ctypes.create_string_buffer(LANES * scratch_size))

    def decode(pc, arch):
        raw = ctypes.string_at(pc, 16)
        words = struct.unpack("<IIII", raw)
        name, run = _supplement(emulator, raw, words, arch)
        if run:
            buffers, decoded = [SGPR_BUFFER, VGPR_BUFFER, MEMORY_BUFFER, LDS_BUFFER], SimpleNamespace(op=None)
        else:
            name, run, buffers, decoded = _mended(emulator, original, pc, raw, words, arch, scratch)

        def counted(*args):
            counts[name] += 1
            run(*args)

        return (SimpleNamespace(arg=SimpleNamespace(globals=buffers)), SimpleNamespace(fxn=counted)), decoded

    emulator._decode_at, emulator._dpp16_ctrl = decode, _with_row_xmask(emulator, control)
    try:
        yield
    finally:
        emulator._decode_at, emulator._dpp16_ctrl = original, control


# --- instructions that the emulator lacks ---------------------------------------------------------------------------


class Wave:
    """A wave's registers, as the emulator holds them: sgpr (SGPRS,), vgpr (VGPRS, LANES), both uint32."""

    def __init__(self, sgpr, vgpr):
        self.sgpr = _view(sgpr, SGPRS)
        self.vgpr = _view(vgpr, VGPRS * LANES).reshape(VGPRS, LANES)

    def active(self):
        mask = int(self.sgpr[EXEC])
        return [lane for lane in range(LANES) if mask >> lane & 1]

    def scalar(self, register, literal=0):
        return literal if register == LITERAL else 0 if register == NULL else int(self.sgpr[register])

    def advance(self, size):
        pc = (int(self.sgpr[PC_LOW]) | int(self.sgpr[PC_HIGH]) << 32) + size
        self.sgpr[PC_LOW], self.sgpr[PC_HIGH] = pc & 0xFFFFFFFF, pc >> 32


def _view(pointer, count):
    return np.ctypeslib.as_array(ctypes.cast(pointer.value, ctypes.POINTER(ctypes.c_uint32)), (count,))


def _instruction(size):
    """Turns `execute(wave, lds_address)` into what the emulator calls for an instruction of `size` bytes."""

    def wrap(execute):
        def run(sgpr, vgpr, _memory, lds):
            wave = Wave(sgpr, vgpr)
            execute(wave, lds.value)
            wave.advance(size)

        return run

    return wrap


def _bits(word, low, count):
    return word >> low & (1 << count) - 1


_BUFFER_LOADS = {
    16: (1, False),
    17: (1, True),
    18: (2, False),
    19: (2, True),
    20: (4, False),
    21: (8, False),
    22: (12, False),
    23: (16, False),
}
_BUFFER_LOADS_D16 = {32: 0, 35: 16}  # 16 bits to the low or high half, the other half stays: bits to shift by
_BUFFER_STORES = {24: (1, 0), 25: (2, 0), 26: (4, 0), 27: (8, 0), 28: (12, 0), 29: (16, 0), 36: (1, 2), 37: (2, 2)}  # bytes, first byte
_BUFFER_INVALIDATES = (43, 44)


def _buffer(words):
    """MUBUF with an offset register (the form that Triton emits): (name, run)."""
    low, high = words[:2]
    op, immediate = _bits(low, 18, 8), _bits(low, 0, 12)
    vaddr, vdata, resource = _bits(high, 0, 8), _bits(high, 8, 8), _bits(high, 16, 5) * 4
    has_offset, has_index, soffset = _bits(high, 22, 1), _bits(high, 23, 1), _bits(high, 24, 8)
    if has_index:
        raise NotImplementedError("a buffer instruction with an index register")

    def each_lane(wave, size):
        """(lane, address, whether inside the buffer): an access beyond `records` bytes reads zero and writes nothing."""
        base = int(wave.sgpr[resource]) | (int(wave.sgpr[resource + 1]) & 0xFFFF) << 32
        records, scalar = int(wave.sgpr[resource + 2]), wave.scalar(soffset)
        for lane in wave.active():
            offset = (int(wave.vgpr[vaddr, lane]) if has_offset else 0) + immediate
            yield lane, base + offset + scalar, offset + size <= records

    if op in _BUFFER_LOADS:
        size, signed = _BUFFER_LOADS[op]

        def execute(wave, _):
            for lane, address, inside in each_lane(wave, size):
                value = int.from_bytes(ctypes.string_at(address, size) if inside else bytes(size), "little", signed=signed)
                for i in range(-(-size // 4)):
                    wave.vgpr[vdata + i, lane] = value >> 32 * i & 0xFFFFFFFF

        return f"buffer_load_b{8 * size}", _instruction(8)(execute)

    if op in _BUFFER_LOADS_D16:
        shift = _BUFFER_LOADS_D16[op]

        def execute(wave, _):
            for lane, address, inside in each_lane(wave, 2):
                value = int.from_bytes(ctypes.string_at(address, 2) if inside else bytes(2), "little")
                wave.vgpr[vdata, lane] = int(wave.vgpr[vdata, lane]) & 0xFFFF0000 >> shift | value << shift

        return "buffer_load_d16_b16", _instruction(8)(execute)

    if op in _BUFFER_STORES:
        size, first = _BUFFER_STORES[op]

        def execute(wave, _):
            for lane, address, inside in each_lane(wave, size):
                if inside:
                    data = wave.vgpr[vdata : vdata + -(-size // 4), lane].tobytes()
                    ctypes.memmove(address, data[first : first + size], size)

        return f"buffer_store_b{8 * size}", _instruction(8)(execute)

    if op in _BUFFER_INVALIDATES:
        return "buffer_gl_inv", _instruction(8)(lambda wave, _: None)
    raise NotImplementedError(f"buffer instruction {op}")


def _lds_load_high(words):
    """ds_load_u16_d16_hi: 16 bits to the high half of a register."""
    offset, address, target = _bits(words[0], 0, 16), _bits(words[1], 0, 8), _bits(words[1], 24, 8)

    def execute(wave, lds):
        for lane in wave.active():
            half = int.from_bytes(ctypes.string_at(lds + int(wave.vgpr[address, lane]) + offset, 2), "little")
            wave.vgpr[target, lane] = int(wave.vgpr[target, lane]) & 0xFFFF | half << 16

    return _instruction(8)(execute)


def _permlanex16(words):
    """Each lane reads a lane of the other row of 16, named by four bits of two scalar selectors."""
    low, high = words[:2]
    target, fetch_inactive, bound_control = _bits(low, 0, 8), _bits(low, 11, 1), _bits(low, 12, 1)
    source, *selectors = _bits(high, 0, 9), _bits(high, 9, 9), _bits(high, 18, 9)

    def execute(wave, _):
        select = wave.scalar(selectors[0], words[2]) | wave.scalar(selectors[1], words[2]) << 32
        value, old, mask = wave.vgpr[source - 256].copy(), wave.vgpr[target].copy(), int(wave.sgpr[EXEC])
        for lane in wave.active():
            other = _bits(select, 4 * (lane & 15), 4) + (0 if lane >= 16 else 16)
            valid = fetch_inactive or mask >> other & 1
            wave.vgpr[target, lane] = value[other] if valid else 0 if bound_control else old[lane]

    return _instruction(12 if LITERAL in selectors else 8)(execute)


def _with_row_xmask(emulator, original):
    """The emulator's DPP16 control, and row_xmask:n, by which lane i of a row reads lane i ^ n of it: 0x160 + n on RDNA."""

    def control(lane, dpp, *masks):
        if dpp & 0x1F0 != 0x160:
            return original(lane, dpp, *masks)
        itself = 0b11100100  # quad_perm:[0,1,2,3]
        source, *rest = original(lane, itself, *masks)
        return source ^ (dpp & 15), *rest

    return control


def _supplement(emulator, raw, words, arch):
    """(name, run) of an instruction that is executed here, or (name, None)."""
    if words[0] >> 26 == 0b111000:
        return _buffer(words)
    name = emulator._op_name(emulator.decode_inst(raw, arch)).lower()
    if name.startswith("ds_load_u16_d16_hi"):
        return name, _lds_load_high(words)
    if name.startswith("v_permlanex16"):
        return name, _permlanex16(words)
    return name, None


# --- where the emulator differs from the hardware -------------------------------------------------------------------


def _mended(emulator, original, pc, raw, words, arch, scratch):
    """(name, run, buffers, decoded) of an instruction of the emulator's own, set right where it needs to be."""
    kind = type(emulator.decode_inst(raw, arch)).__name__
    spare = _dpp_spare(pc, kind, raw, words) if "DPP" in kind else None
    (program, runtime), decoded = original(pc, arch)
    name = emulator._op_name(decoded).lower()
    run, buffers = runtime.fxn, list(program.arg.globals)
    if spare:
        run, buffers = _with_copy(run, buffers, *spare)
    if name.startswith("scratch_"):
        run = _with_own_scratch(run, buffers, scratch)
    if name.startswith("ds_"):
        run = _with_idle_lanes_at_zero(run, buffers, address=words[1] & 0xFF)
    return name, run, buffers, decoded


def _dpp_spare(pc, kind, raw, words):
    """DPP reads other lanes of its source. Where that is the register it writes, lanes written early would be read late: name a
    spare register as the source in the code (a private copy). (spare, source), or None if the two registers differ."""
    at = 8 if kind.startswith("VOP3") else 4
    source = raw[at]
    target = raw[0] if at == 8 else raw[2] >> 1 | (raw[3] & 1) << 7
    if source != target:
        return None
    named = {source, words[0] >> 9 & 0xFF, words[1] >> 9 & 0xFF, words[1] >> 18 & 0xFF}
    spare = next(r for r in range(VGPRS - 1, 0, -1) if r not in named)
    ctypes.memmove(pc + at, bytes([spare]), 1)
    return spare, source


def _with_copy(run, buffers, spare, source):
    """`run` with the source's value in the spare register, which keeps its own afterwards."""
    count = len(buffers)

    def copied(*args):
        vgpr = _view(args[count], VGPRS * LANES).reshape(VGPRS, LANES)
        kept = vgpr[spare].copy()
        vgpr[spare] = vgpr[source]
        run(*args[:count])
        vgpr[spare] = kept

    return copied, [*buffers, VGPR_BUFFER]


def _with_own_scratch(run, buffers, scratch):
    """The emulator has one scratch for all waves of a workgroup: a wave is known by its registers' address."""
    wave, at = buffers.index(VGPR_BUFFER), buffers.index(SCRATCH_BUFFER)

    def own(*args):
        address = ctypes.c_uint64(ctypes.addressof(scratch[args[wave].value]))
        run(*args[:at], address, *args[at + 1 :])

    return own


def _with_idle_lanes_at_zero(run, buffers, address):
    """The emulator reads LDS for idle lanes too, at whatever their address register holds: let it be 0 meanwhile."""
    sgpr_at, vgpr_at = buffers.index(SGPR_BUFFER), buffers.index(VGPR_BUFFER)

    def guarded(*args):
        mask = int(_view(args[sgpr_at], SGPRS)[EXEC])
        if mask == 0xFFFFFFFF:
            return run(*args)
        idle = [lane for lane in range(LANES) if not mask >> lane & 1]
        row = _view(args[vgpr_at], VGPRS * LANES).reshape(VGPRS, LANES)[address]
        kept = row[idle].copy()
        row[idle] = 0
        run(*args)
        row[idle] = kept

    return guarded


# --- what it costs --------------------------------------------------------------------------------------------------


class Cost:
    """Executed instructions by name, summed over waves, and issue cycles of them. Costs add up and subtract."""

    def __init__(self, counts=()):
        self.counts = collections.Counter(counts)

    def __add__(self, other):
        return Cost(self.counts + other.counts)

    def __sub__(self, other):
        """What `self` executes beyond `other`, by name: negative counts stay, so that sums come out right."""
        difference = Cost(self.counts)
        difference.counts.subtract(other.counts)
        return difference

    def count(self, *starts):
        return sum(n for name, n in self.counts.items() if name.startswith(starts))

    @property
    def instructions(self):
        return sum(self.counts.values())

    @property
    def wmma(self):
        return self.count("v_wmma")

    @property
    def scratch(self):
        return self.count("scratch_")

    @property
    def vector_cycles(self):
        """On one SIMD32: WMMA 16×16×16 is 8,192 flop at 256 a cycle, transcendentals run at a quarter of the rate."""
        return sum(n * _vector_cycles(name) for name, n in self.counts.items())

    @property
    def lds_cycles(self):
        """Of a compute unit's LDS port, 128 bytes a cycle: 4 bytes a lane; narrower accesses waste the rest."""
        return sum(n * _lds_cycles(name) for name, n in self.counts.items())

    @property
    def wmma_share(self):
        cycles = self.vector_cycles
        return 32 * self.wmma / cycles if cycles else 0.0

    def bound(self, flops, clock=2.9e9, simds=80, compute_units=40):
        """TFLOP/s of the whole chip if nothing but issue took time: an upper bound."""
        cycles = max(self.vector_cycles / simds, self.lds_cycles / compute_units)
        return flops * clock / cycles / 1e12


def _vector_cycles(name):
    if name.startswith("v_wmma"):
        return 32
    if re.match(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", name):
        return 4
    if name.startswith("v_") and "f64" in name:
        return 16
    return int(name.startswith("v_"))


def _lds_cycles(name):
    if not name.startswith("ds_"):
        return 0
    width = re.search(r"_b(\d+)", name)
    return (max(1, int(width[1]) // 32) if width else 1) * (2 if "2addr" in name else 1)
