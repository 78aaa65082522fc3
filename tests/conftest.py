"""Settings that every test relies on; they must be made before torch is imported."""

import gc
import os

# Ranks are forks of this process, so it must not own threads: one for OpenMP and BLAS each.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Asking whether there is a GPU must not initialise CUDA, which no fork survives.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def nothing_stays():
    """Optimizers made in this process live in cycles, and every later fork would inherit them."""
    yield
    gc.collect()


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
