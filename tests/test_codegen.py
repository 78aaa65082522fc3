"""What the kernels compile to on GPUs that need not be here, from the compiled text.

Nothing runs: these are bounds on bytes, widths and instructions, not on time.
"""

import dataclasses
import importlib.util
import pathlib
import sys

import pytest
import torch

from zeroshard.triton_kernels import adamw, launch, norm

ROOT = pathlib.Path(__file__).resolve().parents[1]


def import_codegen():
    spec = importlib.util.spec_from_file_location("codegen", ROOT / "benchmarks" / "codegen.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


codegen = import_codegen()

CASES = codegen.cases()
UPDATES = [case for case in CASES if case.kernel == "adamw_kernel"]
NORMS = [case for case in CASES if case.kernel == "norm_kernel"]
NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "split": 2, "none": 0}
NARROWEST = {32: 128, 16: 64, 8: 32}  # bits of an access, by bits of an element
SCALES = 2 * 4 / 256  # bytes an element: two fp32 for each 256
INSTRUCTIONS = {"fp32": 70, "bf16": 110, "int8": 125}  # at least 4 % above what was measured
# Bytes per multiprocessor: 3.35 TB/s for 1 us of latency are 25 KB for each of 132.
IN_FLIGHT = 40_000

_found = {}


def found(case):
    """What a case compiles to; each is compiled once."""
    key = (case.target, case.label)
    if key not in _found:
        _found[key] = codegen.inspect(case, codegen.compile_case(case))
    return _found[key]


def by_case(cases):
    ids = [f"{case.target}-{case.label.replace(' ', '-')}" for case in cases]
    return pytest.mark.parametrize("case", cases, ids=ids)


def switches(case):
    return [case.constants[name] for name in ("GRAD", "PARAM", "MASTER", "MOMENTS")]


@by_case(CASES)
def test_accesses_are_wide(case):
    for access in found(case).accesses:
        if access.pointer not in codegen.PER_BLOCK:
            needed = NARROWEST[codegen.element_bits(case, access.pointer)]
            assert access.bits >= needed, access


@by_case(UPDATES)
def test_an_update_moves_each_byte_of_its_state_once(case):
    grad, param, master, moments = switches(case)
    scales = SCALES if moments == "int8" else 0
    kept = NBYTES[master] + 2 * NBYTES[moments] + scales
    param_read = 0 if master == "fp32" else NBYTES[param]  # the master says all
    assert found(case).read_bytes == NBYTES[grad] + param_read + kept
    assert found(case).written_bytes == NBYTES[param] + kept


@pytest.mark.parametrize(
    ("mode", "floor"),
    [
        (("bf16", "bf16", "fp32", "fp32"), 28),
        (("fp32", "bf16", "split", "fp32"), 28),
        (("bf16", "bf16", "split", "fp32"), 26),
        (("bf16", "bf16", "split", "int8"), 14 + 2 * SCALES),
    ],
)
def test_bytes_of_the_common_modes(mode, floor):
    here = found(codegen.adamw_case(*mode, codegen.MAIN_TARGET))
    assert here.read_bytes + here.written_bytes == floor


@by_case(NORMS)
def test_a_norm_reads_each_element_once(case):
    assert found(case).read_bytes == 4
    assert found(case).written_bytes == 4 / 256


@by_case(CASES)
def test_no_registers_spill(case):
    assert found(case).spills == 0


@by_case([case for case in UPDATES if case.constants["MOMENTS"] != "int8"])
def test_elementwise_modes_need_neither_shared_memory_nor_barriers(case):
    assert found(case).shared_bytes == 0
    assert found(case).barriers == 0


@by_case(CASES)
def test_no_multiplication_is_fused_with_an_addition(case):
    assert found(case).fused == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_fusing_would_be_seen(target, moments):
    case = codegen.adamw_case("fp32", "bf16", "split", moments, target)
    assert codegen.inspect(case, codegen.compile_case(case, fuse=True)).fused > 0


@by_case(CASES)
def test_offsets_are_64_bit(case):
    assert found(case).offsets_are_64_bit


@by_case([case for case in UPDATES if not codegen.is_amd(case)])
def test_loads_of_state_wait_for_the_chunk_table_only(case):
    assert found(case).load_gates == {"rows"}


@by_case(CASES)
def test_enough_reads_are_in_flight(case):
    assert found(case).in_flight_bytes >= IN_FLIGHT, found(case)


@by_case([case for case in UPDATES if not codegen.is_amd(case)])
def test_instructions_per_element(case):
    assert found(case).instructions <= INSTRUCTIONS[case.constants["MOMENTS"]]


@by_case(NORMS)
def test_instructions_per_element_of_a_norm(case):
    assert found(case).instructions <= 50


# --- what is compiled here is what is launched


@pytest.fixture
def launched(monkeypatch):
    """The kernel, arguments and options of each launch, which does not happen."""
    calls = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **options: calls.append((self.name, arguments, options))

    kernels = {name: Kernel(name) for name in ("adamw_kernel", "norm_kernel")}
    monkeypatch.setattr(launch, "load", lambda: kernels)
    monkeypatch.setattr(launch, "_compiled", {})
    return calls


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = {
    **{torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32"},
    **{torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8"},
}


def assert_launched(call, case):
    name, arguments, options = call
    tensors = arguments[: len(case.pointers)]
    constants = arguments[len(case.pointers) + len(case.numbers) :]
    assert name == case.kernel
    assert [TYPES[tensor.dtype] for tensor in tensors] == list(case.pointers.values())
    assert list(constants) == list(case.constants.values())
    assert options == {"num_warps": case.num_warps, "enable_fp_fusion": False}
    names = [*case.pointers, *case.numbers, *case.constants]
    assert codegen.load()[name].arg_names == names


@by_case([case for case in UPDATES if case.target == codegen.MAIN_TARGET])
def test_an_update_is_launched_as_it_is_compiled_here(case, launched):
    grad, param, master, moments = switches(case)
    kept = {**DTYPES, "split": torch.int16, "none": torch.float32}
    first = {**DTYPES, "int8": torch.int8}[moments]
    second = {**DTYPES, "int8": torch.uint8}[moments]
    state = adamw.State(
        *(torch.zeros(256, dtype=dtype) for dtype in (DTYPES[grad], DTYPES[param], kept[master])),
        *(torch.zeros(256, dtype=dtype) for dtype in (first, second)),
        *(torch.zeros(1), torch.zeros(1)),
    )
    rows, scalars = torch.zeros(1, adamw.ROW_COLUMNS, dtype=torch.int32), torch.zeros(1, 12)
    adamw.launch_adamw(state, rows, scalars, torch.ones(1), 0, 1, 0, master, moments)
    assert_launched(launched[0], case)


@by_case([case for case in NORMS if case.target == codegen.MAIN_TARGET])
def test_a_norm_is_launched_as_it_is_compiled_here(case, launched):
    orders = {kind: order for order, kind in norm.KINDS.items()}
    norm.launch_norm(torch.zeros(256), orders[case.constants["KIND"]])
    assert_launched(launched[0], case)


# --- the tool itself


def test_the_fast_path_leaves_out_calls_and_subroutines():
    lines = (
        *("FADD R1, R2, R3", "MUFU.RSQ R4, R1", "@!P0 BRA 0x0060"),
        *("MOV R5, 0x50", "CALL.REL.NOINC 0x00b0", "BRA 0x0080"),
        *("FMUL R6, R4, R1", "FFMA R6, R6, R4, R1"),
        *("STG.E [R8.64], R6", "EXIT", "BRA 0x00a0"),
        *("FMUL R7, R7, R7", "RET.REL.NODEC R5 0x0"),
    )
    sass = "\n".join(f"/*{16 * number:04x}*/  {line} ;" for number, line in enumerate(lines))
    fast = codegen.fast_path(sass)
    assert "MUFU.RSQ R4, R1 " in fast
    assert "FFMA R6, R6, R4, R1 " in fast
    assert not [line for line in fast if "CALL" in line or "R5" in line or "R7" in line]


NARROW = """
ld.param.b64 %rd1, [k_param_0];
ld.param.b64 %rd2, [k_param_1];
ld.global.b32 { %r1 }, [ %rd2 + 0 ];
shl.b32 %r2, %r1, 8;
mad.wide.s32 %rd3, %r2, 4, %rd1;
@%p1 ld.global.v4.b32 { %r3, %r4, %r5, %r6 }, [ %rd3 + 0 ];
"""
WIDE = NARROW.replace("shl.b32 %r2, %r1, 8;", "mul.wide.s32 %rd4, %r1, 256;").replace(
    "mad.wide.s32 %rd3, %r2, 4, %rd1;", "add.s64 %rd3, %rd1, %rd4;"
)


@pytest.mark.parametrize(("ptx", "wraps"), [(NARROW, True), (WIDE, False)])
def test_an_offset_that_wraps_is_seen(ptx, wraps):
    text = codegen.read_ptx(ptx, ["grad", "rows"])
    assert text.memory == [("%rd2", False, 32, ""), ("%rd3", False, 128, "%p1")]
    assert text.pointers("%rd3") == {"grad"}
    assert text.pointers("%rd3", through_loads=True) == {"grad", "rows"}
    assert text.wrapping(codegen.offset_origins(text)) == ({"%r2"} if wraps else set())


def test_no_access_goes_unseen():
    volatile = "ld.volatile.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];"
    assert codegen.read_ptx(volatile, []).memory == [("%rd1", False, 128, "")]
    with pytest.raises(ValueError, match=r"loads and stores only, got atom\.global"):
        codegen.read_ptx("atom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 + 0 ], %r2;", [])
    head = "define amdgpu_kernel void @k(ptr addrspace(1) %0)\n"
    volatile = "%1 = load volatile <4 x float>, ptr addrspace(1) %0, align 16"
    assert codegen.read_llvm(head + volatile, ["flat"]).memory == [("%0", False, 128, "")]
    buffer = "%1 = tail call <4 x float> @llvm.amdgcn.raw.ptr.buffer.load.v4f32(ptr %2)"
    with pytest.raises(ValueError, match="loads and stores only"):
        codegen.read_llvm(head + buffer, ["flat"])


def test_resident_warps():
    # 64 K registers: 40 a thread are 1280 a warp, 51 warps, 12 programs of 4.
    assert codegen.resident_warps(40, 4) == 48
    assert codegen.resident_warps(41, 4) == 40
    assert codegen.resident_warps(24, 4) == 64
    assert codegen.resident_warps(24, 1) == 32
    assert codegen.resident_waves(64, 2) == 32
    assert codegen.resident_waves(73, 2) == 24


def test_interpreted_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        codegen.compile_case(CASES[0])


def test_a_missing_tool_is_named():
    with pytest.raises(FileNotFoundError, match=r"Triton .* has no disassembler: expected it at /"):
        codegen.tool("disassembler")


def test_an_access_must_belong_to_one_pointer():
    case = codegen.norm_case("2", "sm_90")
    compiled = codegen.compile_case(case)
    stranger = dataclasses.replace(case, pointers={"flat": "*fp32"}, numbers=())
    with pytest.raises(ValueError, match="expected one pointer"):
        codegen.inspect(stranger, compiled)


def test_a_table_replaces_the_one_before():
    document = f"above\n{codegen.BEGIN}\nold\n{codegen.END}\nbelow\n"
    new = codegen.replace_table(document, "new")
    assert new == f"above\n{codegen.BEGIN}\nnew\n{codegen.END}\nbelow\n"
    with pytest.raises(ValueError, match="expected one"):
        codegen.replace_table("nothing", "new")


def test_the_table_in_the_docs_names_every_case():
    document = codegen.DOCS.read_text()
    written = document.split(codegen.BEGIN)[1].split(codegen.END)[0]
    rows = [line.split(" | ")[:2] for line in written.splitlines() if line.startswith("| ")]
    assert rows[1:] == [[f"| {case.target}", case.label] for case in CASES]
    assert "Compiled by Triton 3." in written
