"""The wheel: one top-level name, and the kernels in it."""

import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_the_wheel_has_one_top_level_name_and_every_kernel(tmp_path):
    """A top-level `triton_kernels` would shadow the package of that name that vLLM imports."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"zeroshard"}
    kernels = {f"zeroshard/triton_kernels/{p.name}" for p in (ROOT / "triton_kernels").glob("*.py")}
    assert kernels
    assert kernels <= set(names)
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "zeroshard").glob("**/*.py")}
    assert modules <= set(names)
    assert "zeroshard/py.typed" in names


def test_the_kernel_folder_is_a_namespace_portion():
    assert (ROOT / "zeroshard" / "triton_kernels").is_symlink()
    assert not (ROOT / "triton_kernels" / "__init__.py").exists()
