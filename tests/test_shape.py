"""The shape of the code: imports go down, one module talks to the ranks, one reads the stage."""

import ast
import pathlib
import subprocess
import sys

import pytest

import zeroshard

PACKAGE = pathlib.Path(zeroshard.__file__).parent
LAYERS = [
    ["errors", "imitation", "ownership"],
    ["config", "param_groups", "meta", "tracing"],
    ["layout", "formats", "schedule", "boxes", "units"],
    ["transport", "triton_kernels", "storage", "wrappers", "walk"],
    ["conversions", "chunks"],
    ["shard_reductions"],
    ["shard_tensor"],
    ["place", "torch_update", "kernel_update", "clipping", "modules", "state_shard"],
    ["parameters"],
    ["update"],
    ["gradient_shards", "autograd_hooks", "backward", "sharding", "module_state", "masters"],
    ["reduction", "construction", "step_plan", "waiting", "liveness"],
    ["gradients", "sharded_model"],
    ["engine"],
    ["state", "accounts", "join"],
    ["optimizer"],
    ["weight_files", "adapters", "agreement", "outputs"],
    ["gather", "hub_names", "folders"],
    ["initialise"],
    ["weights", "export", "ema"],
    ["checkpoint"],
    ["integrations", "memory"],
    ["__init__", "doctor"],
    ["cli_doctor", "cli_memory"],
    ["cli_measure"],
    ["cli"],
    ["__main__"],
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}


def sources():
    kernels = (PACKAGE / "triton_kernels").glob("*.py")  # behind a link
    for path in sorted({*PACKAGE.rglob("*.py"), *kernels}):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text())


def module_of(path):
    return path.parts[0] if len(path.parts) > 1 else path.stem


def imports_of(path, tree):
    """The package's modules that a file imports, as first-level names."""
    depth = len(path.parts)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        inside = path.parts[: depth - node.level]
        if node.module:
            yield (*inside, *node.module.split("."))[0]
        else:
            yield from (inside[0] if inside else alias.name for alias in node.names)


def test_every_module_has_a_layer():
    assert {module_of(path) for path, _ in sources()} == set(LAYER)


def test_imports_go_strictly_downward():
    for path, tree in sources():
        module = module_of(path)
        for imported in imports_of(path, tree):
            if imported != module:
                assert LAYER[imported] < LAYER[module], f"{path} imports {imported}"


def test_only_transport_calls_torch_distributed():
    for path, tree in sources():
        if module_of(path) == "transport":
            continue
        names = {
            alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
        }
        names |= {
            n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level
        }
        assert not {name for name in names if name == "torch.distributed"} or path.name in (
            "join.py",  # the type of a property
            "optimizer.py",  # the type of its argument
        ), path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert not called.startswith(("dist.", "torch.distributed.")), f"{path}: {called}"


def test_the_stage_is_read_in_config_and_schedule_only():
    readers = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "stage":
                readers.add(path.stem)
    assert readers == {"config", "schedule", "accounts"}
    accounts = (PACKAGE / "accounts.py").read_text()
    assert accounts.count(".stage") == 1, "they only print it"


def test_one_module_changes_the_size_of_storages():
    """Whoever follows memory would miss what another one does."""
    for path, _ in sources():
        if path.stem != "ownership" and module_of(path) != "memory":
            assert ".resize_(" not in (PACKAGE / path).read_text(), path


@pytest.mark.parametrize("module", ["layout", "formats", "schedule", "boxes"])
def test_pure_modules_make_no_tensor(module):
    assert "import torch" not in (PACKAGE / f"{module}.py").read_text()


def test_all_equals_the_public_names():
    public = {name for name in vars(zeroshard) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(zeroshard, name), type(sys))}
    assert set(zeroshard.__all__) == (public - modules) | {"errors"}


def test_public_names_have_docstrings():
    for name in zeroshard.__all__:
        thing = getattr(zeroshard, name)
        assert thing.__doc__, name
        if isinstance(thing, type):
            for attribute, value in vars(thing).items():
                if callable(value) and not attribute.startswith("_"):
                    assert value.__doc__, f"{name}.{attribute}"


def test_importing_touches_neither_triton_nor_cuda():
    check = (
        "import sys, torch, zeroshard; assert 'triton' not in sys.modules, 'triton was imported'; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True, timeout=120)


def test_importing_works_without_triton():
    check = "import sys; sys.modules['triton'] = None; import zeroshard; zeroshard.AdamW"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


def test_no_function_is_left_unwritten():
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                assert node.id != "NotImplementedError", path


def test_files_functions_and_classes_stay_small():
    for path, tree in sources():
        assert (PACKAGE / path).read_text().count("\n") <= 450, path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                is_kernel = "kernel" in [ast.unparse(mark) for mark in node.decorator_list]
                longest = 100 if is_kernel else 90  # twenty lines of it are its signature
                assert node.end_lineno - node.lineno <= longest, f"{path}: {node.name}"
