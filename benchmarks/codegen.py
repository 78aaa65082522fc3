"""What the kernels compile to, for GPUs that need not be here, as a Markdown table.

    python benchmarks/codegen.py [--write]

Compiles each mode of the update, and the norm, for every target and reads the compiled text: bytes
moved, width of accesses, registers, instructions. `--write` puts the table into docs/kernels.md.
Nothing is run, so nothing here is a time.
"""

import argparse
import os
import pathlib
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from zeroshard.triton_kernels import adamw, norm
from zeroshard.triton_kernels.launch import load, sizes_for

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
BEGIN = "<!-- begin: written by benchmarks/codegen.py -->"
END = "<!-- end: written by benchmarks/codegen.py -->"

WARP_SIZES = {"sm_80": 32, "sm_90": 32, "sm_100": 32, "gfx942": 64}
MAIN_TARGET = "sm_90"

FORMATS = (  # gradient, parameter, master
    ("fp32", "fp32", "none"),
    ("fp32", "bf16", "split"),
    ("bf16", "bf16", "split"),
    ("fp32", "bf16", "fp32"),
    ("bf16", "bf16", "fp32"),
    ("fp32", "bf16", "none"),
    ("fp32", "fp16", "fp32"),
    ("fp16", "fp16", "fp32"),
)
MOMENTS = ("fp32", "bf16", "int8")
COMMON_FORMATS = (FORMATS[1], FORMATS[2], FORMATS[3])  # those for the other targets

PER_BLOCK = ("exp_avg_scale", "exp_avg_sq_scale", "powers")  # fp32, one for 256 elements
TABLES = ("rows", "scalars", "coefficient")  # read once a program
FLAGS = ("found",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel with its switches, for one target."""

    label: str
    target: str
    kernel: str
    pointers: dict[str, str]  # Triton's type by name, in the order of the signature
    numbers: tuple[str, ...]
    constants: dict[str, object]
    num_warps: int
    elements_at_once: int  # that a thread loads before it uses one
    elements: int  # that a thread does in all


@dataclass(frozen=True, slots=True, order=True)
class Access:
    """A kind of load or store, as each thread does it."""

    pointer: str
    is_store: bool
    bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the compiled text of a case says. `in_flight` counts what a thread loads at once."""

    read_bytes: float  # per element, the scales of blocks included
    written_bytes: float  # per element
    accesses: frozenset[Access]
    load_gates: frozenset[str]  # what loads of state wait for; only followed in PTX
    offsets_are_64_bit: bool
    fused: int  # multiplications fused with an addition, outside of divisions and roots
    instructions: float  # per element, on the path of normal values
    registers: int
    resident_warps: int  # of a multiprocessor, as registers allow
    in_flight_bytes: int  # of reads, per multiprocessor
    shared_bytes: int
    barriers: int
    spills: int


# --- what there is to compile


def adamw_case(grad: str, param: str, master: str, moments: str, target: str) -> Case:
    """The update as `launch_adamw` launches it."""
    sizes = sizes_for(moments, target)
    types = {"fp32": "*fp32", "bf16": "*i16", "fp16": "*fp16", "split": "*i16", "none": "*fp32"}
    first = {**types, "int8": "*i8"}[moments]
    second = {**types, "int8": "*u8"}[moments]
    at_once = sizes.block // (sizes.num_warps * WARP_SIZES[target])
    return Case(
        label=f"adamw {grad} {param} {master} {moments}",
        target=target,
        kernel="adamw_kernel",
        pointers={
            "grad": types[grad],
            "param": types[param],
            "master": types[master],
            "exp_avg": first,
            "exp_avg_sq": second,
            "exp_avg_scale": "*fp32",
            "exp_avg_sq_scale": "*fp32",
            "rows": "*i32",
            "scalars": "*fp32",
            "coefficient": "*fp32",
        },
        numbers=("first_row", "seed"),
        constants={
            "GRAD": grad,
            "PARAM": param,
            "MASTER": master,
            "MOMENTS": moments,
            "ROW_BLOCKS": adamw.ROW_BLOCKS,
            "VECTORS": sizes.vectors,
            "BLOCK": sizes.block,
        },
        num_warps=sizes.num_warps,
        elements_at_once=at_once,
        elements=sizes.vectors * at_once,
    )


def norm_case(kind: str, target: str) -> Case:
    """The norm as `launch_norm` launches it."""
    num_warps = 4
    elements = norm.PROGRAM_BLOCKS * norm.BLOCK // (num_warps * WARP_SIZES[target])
    return Case(
        label=f"norm {kind}",
        target=target,
        kernel="norm_kernel",
        pointers={"flat": "*fp32", "powers": "*fp32", "found": "*fp32"},
        numbers=("num_blocks",),
        constants={"KIND": kind, "BLOCKS": norm.PROGRAM_BLOCKS},
        num_warps=num_warps,
        elements_at_once=elements,
        elements=elements,
    )


def cases() -> list[Case]:
    """Every mode for the main target, which comes first, and the common ones for the others."""
    found = []
    for target in WARP_SIZES:
        is_main = target == MAIN_TARGET
        for grad, param, master in FORMATS if is_main else COMMON_FORMATS:
            found += [adamw_case(grad, param, master, moments, target) for moments in MOMENTS]
        found += [norm_case(kind, target) for kind in (("1", "2", "inf") if is_main else ("2",))]
    return sorted(found, key=lambda case: case.target != MAIN_TARGET)


def compile_case(case: Case, *, fuse: bool = False):
    """Triton's compiled kernel, whose `asm` has the text.

    Raises:
        RuntimeError: under TRITON_INTERPRET, where nothing is compiled.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set: its kernels cannot be compiled; unset it")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = load()[case.kernel]
    signature = {
        **case.pointers,
        **dict.fromkeys(case.numbers, "i32"),
        **dict.fromkeys(case.constants, "constexpr"),
    }
    # What a launch finds of tensors at addresses that are multiples of 16.
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(case.pointers))}
    backend, arch = ("hip", case.target) if is_amd(case) else ("cuda", int(case.target[3:]))
    return triton.compile(
        ASTSource(function, signature, case.constants, attributes),
        target=GPUTarget(backend, arch, WARP_SIZES[case.target]),
        options={"num_warps": case.num_warps, "enable_fp_fusion": fuse},
    )


def is_amd(case: Case) -> bool:
    """Whether the target is one of AMD's."""
    return case.target.startswith("gfx")


# --- following a value back to where it comes from


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction that sets a register."""

    sources: tuple[str, ...]
    is_load: bool = False
    is_32_bit: bool = False  # arithmetic, which wraps


@dataclass(slots=True)
class Text:
    """The accesses of a compiled text, and how each register is made."""

    steps: dict[str, list[Step]] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)  # by register
    memory: list[tuple[str, bool, int, str]] = field(default_factory=list)
    """(address register, is store, bits, predicate register or "") of each access."""

    def walk(self, register: str, *, through_loads: bool = False) -> Iterator[str]:
        """All registers that `register` is made from, itself first."""
        seen, stack = {register}, [register]
        while stack:
            here = stack.pop()
            yield here
            for step in self.steps.get(here, ()):
                if step.is_load and not through_loads:
                    continue
                new = [source for source in step.sources if source not in seen]
                seen.update(new)
                stack += new

    def pointers(self, register: str, *, through_loads: bool = False) -> set[str]:
        """The names of the pointer parameters that `register` is made from."""
        made_from = self.walk(register, through_loads=through_loads)
        return {self.parameters[each] for each in made_from if each in self.parameters}

    def wrapping(self, origins: set[str]) -> set[str]:
        """The registers that 32-bit arithmetic makes from numbers of `origins`, loads apart."""
        users: dict[str, list[tuple[str, Step]]] = {}
        for register, steps in self.steps.items():
            for step in steps:
                for source in step.sources if not step.is_load else ():
                    users.setdefault(source, []).append((register, step))
        wrapping, reached, stack = set(), set(origins), list(origins)
        while stack:
            for register, step in users.get(stack.pop(), ()):
                if step.is_32_bit:
                    wrapping.add(register)
                if register not in reached:
                    reached.add(register)
                    stack.append(register)
        return wrapping


PTX_REGISTER = re.compile(r"%[a-z]+\d+|%ctaid\.x")
PTX_LINE = re.compile(r"^\s*(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s+([^;]*);", re.M)


def read_ptx(ptx: str, names: list[str]) -> Text:
    """The accesses of a kernel in PTX; `names` are those of its first parameters.

    Raises:
        ValueError: on global memory that is neither loaded nor stored, such as by atomics.
    """
    text = Text()
    for predicate, operation, operands in PTX_LINE.findall(ptx):
        registers = PTX_REGISTER.findall(operands)
        if operation.startswith("ld.param"):
            (number,) = re.findall(r"_param_(\d+)", operands)
            if int(number) < len(names):
                text.parameters[registers[0]] = names[int(number)]
        elif re.match(r"(ld|st)\..*\bglobal\b", operation):
            (address,) = re.findall(r"\[\s*(%rd\d+)", operands)
            words, bits = re.findall(r"(?:\.v(\d+))?\.[bfus](\d+)$", operation)[0]
            is_store = operation.startswith("st")
            text.memory.append((address, is_store, int(words or 1) * int(bits), predicate))
            for register in registers if not is_store else ():
                if register != address:
                    text.steps.setdefault(register, []).append(Step((address,), is_load=True))
        elif ".global" in operation and not operation.startswith("cvta"):
            raise ValueError(f"expected loads and stores only, got {operation}")
        elif registers and not operation.startswith(("st.", "bra", "bar")):
            made, *sources = registers
            moves = operation.startswith(("mov", "cvt", "ld"))
            step = Step(
                tuple(sources),
                is_load=operation.startswith("ld"),
                is_32_bit=made.startswith("%r") and made[2].isdigit() and not moves,
            )
            text.steps.setdefault(made, []).append(step)
    return text


LLVM_REGISTER = re.compile(r"%[\w.]+")
LLVM_ARITHMETIC = re.compile(r"^(add|sub|mul|shl|or|and|xor|[la]shr|[su]div|[su]rem)\b.*\bi32\b")
LLVM_SIZES = {"i8": 8, "i16": 16, "half": 16, "i32": 32, "float": 32, "i64": 64, "double": 64}


def llvm_bits(kind: str) -> int:
    """Bits of a type: `float`, `<4 x i16>`."""
    words, element = re.findall(r"^(?:<(\d+) x )?(\w+)>?$", kind)[0]
    return int(words or 1) * LLVM_SIZES[element]


def read_llvm(llvm: str, names: list[str]) -> Text:
    """The accesses of a kernel in LLVM's text; `names` are those of its first parameters.

    Raises:
        ValueError: on global memory that is neither loaded nor stored, such as by atomics.
    """
    text = Text()
    (arguments,) = re.findall(r"^define amdgpu_kernel void @\w+\((.*)\)", llvm, re.M)
    for argument, name in zip(LLVM_REGISTER.findall(arguments), names, strict=False):
        text.parameters[argument] = name
    for line in llvm.splitlines():
        line = line.strip().split(", !")[0].replace(" volatile", "")
        if re.search(r"\b(atomicrmw|cmpxchg)\b|call .*(buffer|global)\.(load|store|atomic)", line):
            raise ValueError(f"expected loads and stores only, got {line}")
        if store := re.match(r"store (<.*?>|\w+) .*, ptr addrspace\(1\) (%[\w.]+)", line):
            text.memory.append((store[2], True, llvm_bits(store[1]), ""))
        if not (match := re.match(r"(%[\w.]+) = (.*)", line)):
            continue
        made, operation = match.groups()
        if read := re.match(r"load (<.*?>|\w+), ptr addrspace\(1\) (%[\w.]+)", operation):
            text.memory.append((read[2], False, llvm_bits(read[1]), ""))
        sources = LLVM_REGISTER.findall(operation)
        if "@llvm.amdgcn.workgroup.id.x" in operation:
            sources.append("%ctaid.x")
        step = Step(
            tuple(sources),
            is_load=operation.startswith("load"),
            is_32_bit=bool(LLVM_ARITHMETIC.match(operation)),
        )
        text.steps.setdefault(made, []).append(step)
    return text


def offset_origins(text: Text) -> set[str]:
    """Where offsets come from: numbers of the chunk table, or without one the program's index.

    Raises:
        ValueError: where nothing is read from the table, or the index is not asked for.
    """
    from_table = {
        register
        for register, steps in text.steps.items()
        for step in steps
        if step.is_load and any(text.pointers(source) == {"rows"} for source in step.sources)
    }
    origins = from_table if "rows" in text.parameters.values() else {"%ctaid.x"}
    used = {source for steps in text.steps.values() for step in steps for source in step.sources}
    if origins.isdisjoint(used):
        raise ValueError("expected offsets from the chunk table or the program's index, found none")
    return origins


# --- what the machine code says


def tool(name: str) -> str:
    """The path of one of NVIDIA's tools in Triton's wheel.

    Raises:
        FileNotFoundError: where this Triton comes without.
    """
    import triton

    path = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"Triton {triton.__version__} has no {name}: expected it at {path}")
    return str(path)


def cuobjdump(cubin: bytes, option: str) -> str:
    """What cuobjdump prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


SASS_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")


def fast_path(sass: str) -> list[str]:
    """The instructions that run where all values are normal.

    A rounded division or root calls a subroutine for the values that its short form cannot do.
    So basic blocks with a call are left out, and the subroutines, which follow the kernel.
    """
    code = [(int(address, 16), line) for address, line in SASS_LINE.findall(sass)]
    text = "\n".join(line for _, line in code)
    subroutines = [int(a, 16) for a in re.findall(r"CALL\S* (?:`\()?0x([0-9a-f]+)", text)]
    targets = {int(a, 16) for a in re.findall(r"BRA\S* .*?0x([0-9a-f]+)", text)}
    last_exit = max(address for address, line in code if "EXIT" in line)
    end = min(subroutines, default=last_exit + 1)
    blocks: list[list[str]] = [[]]
    for address, line in code:
        if address >= end:
            break
        if address in targets:
            blocks.append([])
        blocks[-1].append(line)
        if "BRA" in line or "EXIT" in line:
            blocks.append([])
    fast = [block for block in blocks if not any("CALL" in line for line in block)]
    return [line for block in fast for line in block]


def resident_warps(registers: int, num_warps: int) -> int:
    """Of an NVIDIA multiprocessor: 64 K registers in units of 256 a warp, 64 warps, 32 programs."""
    by_registers = 65536 // (-(-registers // 8) * 256)
    return min(by_registers // num_warps, 64 // num_warps, 32) * num_warps


def resident_waves(registers: int, num_warps: int) -> int:
    """Of a CDNA3 compute unit: on each of 4 SIMDs 512 registers a lane in units of 8, 8 waves."""
    by_registers = 4 * min(512 // (-(-registers // 8) * 8), 8)
    return by_registers // num_warps * num_warps


def lost_additions(llvm: str, body: str) -> int:
    """Additions of LLVM's text that AMD's machine code does not have: they became fused.

    The instruction itself tells nothing: rounded divisions and roots are made of `v_fma`.
    """
    vectors = re.findall(r"= f(?:add|sub) (?:\w+ )*?(?:<(\d+) x )?float", llvm)
    packed = re.findall(r"^\s+v_(pk_)?(?:add|sub|subrev)_f32", body, re.M)
    return sum(int(v or 1) for v in vectors) - sum(2 if p else 1 for p in packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the backend of one vendor says."""

    text: Text
    fused: int
    instructions: int  # of a thread
    registers: int
    resident: int
    barriers: int
    spills: int


def read_nvidia(case: Case, compiled) -> Machine:
    """PTX for what is done, machine code for what it costs."""
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    usage = dict(re.findall(r"([A-Z]+):(\d+)", cuobjdump(cubin, "-res-usage")))
    registers = int(usage["REG"])
    return Machine(
        text=read_ptx(ptx, list(case.pointers)),
        fused=len(re.findall(r"\bfma\.", ptx)),
        instructions=len(fast_path(cuobjdump(cubin, "-sass"))),
        registers=registers,
        resident=resident_warps(registers, case.num_warps),
        barriers=len(re.findall(r"\bbar(?:rier)?\.", ptx)),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]),
    )


def read_amd(case: Case, compiled) -> Machine:
    """LLVM's text for what is done, machine code for what it costs."""
    llvm, code = compiled.asm["llir"], compiled.asm["amdgcn"]
    body = code[: code.index(".Lfunc_end0")]
    counts = {name: int(n) for name, n in re.findall(r"\.(\w+_count):\s+(\d+)", code)}
    fused = llvm.count("@llvm.fmuladd") + len(re.findall(r"= f\w+ (?:\w+ )*contract", llvm))
    return Machine(
        text=read_llvm(llvm, list(case.pointers)),
        fused=fused + lost_additions(llvm, body),
        instructions=len(re.findall(r"^\s+(?:[vs]|global|buffer|ds|flat|scratch)_\w+", body, re.M)),
        registers=counts["vgpr_count"],
        resident=resident_waves(counts["vgpr_count"], case.num_warps),
        barriers=len(re.findall(r"^\s+s_barrier", body, re.M)),
        spills=counts["vgpr_spill_count"] + counts["sgpr_spill_count"],
    )


def inspect(case: Case, compiled) -> Findings:
    """Read the compiled text of a case.

    Raises:
        ValueError: an access that cannot be followed to one parameter.
    """
    machine = read_amd(case, compiled) if is_amd(case) else read_nvidia(case, compiled)
    text = machine.text
    wrapping = text.wrapping(offset_origins(text))
    moved: dict[tuple[str, bool], float] = defaultdict(float)
    accesses, gates, wraps = set(), set(), False
    for address, is_store, bits, predicate in text.memory:
        pointers = text.pointers(address)
        if len(pointers) != 1:
            raise ValueError(f"{case.label}: an access to {sorted(pointers)}, expected one pointer")
        (pointer,) = pointers
        if pointer in TABLES or pointer in FLAGS:
            continue
        accesses.add(Access(pointer, is_store, bits))
        wraps = wraps or not wrapping.isdisjoint(text.walk(address))
        if pointer in PER_BLOCK:  # threads share one, and caches answer for all but the first
            moved[pointer, is_store] = 4 * case.elements / 256
        else:
            moved[pointer, is_store] += bits / 8
            if predicate and not is_store:
                gates |= text.pointers(predicate, through_loads=True)
    read = sum(nbytes for (_, is_store), nbytes in moved.items() if not is_store)
    written = sum(nbytes for (_, is_store), nbytes in moved.items() if is_store)
    threads = machine.resident * WARP_SIZES[case.target]
    return Findings(
        read_bytes=read / case.elements,
        written_bytes=written / case.elements,
        accesses=frozenset(accesses),
        load_gates=frozenset(gates),
        offsets_are_64_bit=not wraps,
        fused=machine.fused,
        instructions=machine.instructions / case.elements,
        registers=machine.registers,
        resident_warps=machine.resident,
        in_flight_bytes=int(threads * case.elements_at_once * read / case.elements),
        shared_bytes=compiled.metadata.shared,
        barriers=machine.barriers,
        spills=machine.spills,
    )


def element_bits(case: Case, pointer: str) -> int:
    """Bits of one element behind a pointer."""
    return int(re.findall(r"\d+$", case.pointers[pointer])[0])


def table(examined: Iterable[tuple[Case, Findings]]) -> str:
    """The Markdown between the markers of docs/kernels.md."""
    import triton

    columns = (
        *("target", "kernel", "read", "written", "access bits", "instructions", "registers"),
        *("warps", "KB in flight", "shared", "barriers"),
    )
    lines = [f"Compiled by Triton {triton.__version__}.", ""]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for case, found in examined:
        narrowest: dict[int, int] = {}
        for access in found.accesses:
            if access.pointer not in PER_BLOCK:
                bits = element_bits(case, access.pointer)
                narrowest[bits] = min(narrowest.get(bits, access.bits), access.bits)
        widths = ", ".join(f"{bits}: {narrowest[bits]}" for bits in sorted(narrowest, reverse=True))
        cells = (
            *(case.target, case.label, f"{found.read_bytes:.4g}", f"{found.written_bytes:.4g}"),
            *(widths, f"{found.instructions:.1f}", found.registers, found.resident_warps),
            *(f"{found.in_flight_bytes / 1000:.0f}", found.shared_bytes, found.barriers),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def replace_table(document: str, new: str) -> str:
    """`document` with `new` between its markers.

    Raises:
        ValueError: without one pair of markers.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"expected one {BEGIN} and one {END}")
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    arguments = parser.parse_args()
    new = table((case, inspect(case, compile_case(case))) for case in cases())
    print(new)
    if arguments.write:
        DOCS.write_text(replace_table(DOCS.read_text(), new))


if __name__ == "__main__":
    main()
