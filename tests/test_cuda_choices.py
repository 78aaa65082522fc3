"""What a GPU would choose, on tensors of the CPU. Each entry of the table has a test of it."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from zeroshard.memory import ghosts
from zeroshard.memory.cuda_attention import attention, kernel_of
from zeroshard.memory.cuda_autocast import IN_FP32, IN_FP32_BY_DTYPE
from zeroshard.memory.cuda_choices import CHOICES, cuda_choices
from zeroshard.memory.ghosts import Ghosts


@pytest.fixture
def as_on_a_gpu():
    with cuda_choices(), Ghosts(kernels_of="cuda"):
        yield


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def test_every_entry_has_a_test_of_its_name():
    tested = [name for name in globals() if name.startswith("test_")]
    for choice in CHOICES:
        assert any(name.startswith(f"test_{choice.name}_") for name in tested), choice.name
        assert choice.what


# --- attention

Q = (2, 4, 32, 16)


@pytest.mark.parametrize(
    ("dtype", "shapes", "options", "kernel"),
    [
        (torch.bfloat16, (Q, Q, Q), {}, "flash"),
        (torch.float16, (Q, Q, Q), {"is_causal": True}, "flash"),
        (torch.bfloat16, (Q, (2, 2, 32, 16), (2, 2, 32, 16)), {"enable_gqa": True}, "flash"),
        (torch.bfloat16, (Q, (2, 2, 32, 16), (2, 2, 32, 16)), {}, "math"),
        (torch.bfloat16, (Q, (2, 3, 32, 16), (2, 3, 32, 16)), {"enable_gqa": True}, "math"),
        (torch.bfloat16, (Q, Q, Q), {"mask": torch.ones(32, 32, dtype=torch.bool)}, "efficient"),
        (torch.bfloat16, (Q, (2, 4, 40, 16), (2, 4, 40, 16)), {"is_causal": True}, "efficient"),
        (torch.bfloat16, (Q, Q, (2, 4, 32, 8)), {}, "efficient"),
        (torch.bfloat16, ((2, 4, 32, 512),) * 3, {}, "efficient"),
        (torch.bfloat16, ((2, 4, 32, 12),) * 3, {}, "flash"),
        (torch.float32, (Q, Q, Q), {}, "efficient"),
        (torch.float32, ((2, 4, 32, 12),) * 3, {}, "efficient"),
        (torch.float32, ((2, 4, 32, 10),) * 3, {}, "math"),
        (torch.float32, (Q, (2, 2, 32, 16), (2, 2, 32, 16)), {"enable_gqa": True}, "math"),
        (torch.float64, (Q, Q, Q), {}, "math"),
        (torch.bfloat16, ((4, 32, 16),) * 3, {}, "math"),
        (torch.bfloat16, (Q, Q, Q), {"mask": torch.ones(32, 1).expand(32, 32)}, "math"),
    ],
)
def test_attention_takes_the_kernel_that_fits(dtype, shapes, options, kernel):
    assert kernel_of(*(torch.empty(shape, dtype=dtype) for shape in shapes), **options) == kernel


@pytest.mark.parametrize(
    ("allowed", "kernel"),
    [("FLASH_ATTENTION", "flash"), ("EFFICIENT_ATTENTION", "efficient"), ("MATH", "math")],
)
def test_attention_respects_what_the_user_allows(allowed, kernel):
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, allowed)):
        assert kernel_of(*(torch.empty(Q, dtype=torch.bfloat16) for _ in range(3))) == kernel


@pytest.mark.usefixtures("as_on_a_gpu")
def test_attention_without_a_mask_keeps_a_sum_for_each_row():
    out = functional.scaled_dot_product_attention(*(rows(*Q) for _ in range(3)), is_causal=True)
    assert out.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"
    kept = out.grad_fn._saved_logsumexp
    assert (kept.shape, kept.dtype) == ((2, 4, 32), torch.float32)
    out.sum().backward()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_attention_pads_heads_to_multiples_of_eight():
    query = rows(2, 4, 32, 12)
    out = functional.scaled_dot_product_attention(query, query, query)
    assert out.shape == query.shape
    assert out._base is not None
    assert out._base.shape == (2, 4, 32, 16)
    out.sum().backward()
    assert query.grad.shape == query.shape


@pytest.mark.parametrize(("length", "padded"), [(32, 32), (20, 24)])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_attention_with_a_mask_keeps_the_mask_in_the_type_of_the_rows(length, padded):
    query = rows(2, 4, length, 16)
    mask = torch.ones(2, 1, length, length, dtype=torch.bool)
    out = functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    assert out.grad_fn.name() == "ScaledDotProductEfficientAttentionBackward0"
    kept = out.grad_fn._saved_attn_bias
    assert (kept.shape, kept.dtype) == ((2, 4, length, length), torch.bfloat16)
    assert kept.untyped_storage().nbytes() == 2 * length * padded * 2  # one for all heads
    assert out.grad_fn._saved_log_sumexp.shape == (2, 4, 32)  # a multiple of 32
    out.sum().backward()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_attention_that_trains_nothing_keeps_nothing():
    with torch.no_grad():
        query = rows(2, 4, 20, 16, dtype=torch.float32)
        out = functional.scaled_dot_product_attention(query, query, query)
    assert out.grad_fn is None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_by_multiplications_is_torchs_own(masked, heads):
    query = rows(2, 4, 32, 10, dtype=torch.float32)
    key, value = (rows(2, heads, 32, 10, dtype=torch.float32) for _ in range(2))
    mask = torch.rand(2, 1, 32, 32) > 0.3 if masked else None
    arguments = (query, key, value, mask, 0.0, not masked)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = functional.scaled_dot_product_attention(*arguments, enable_gqa=heads == 2)
    assert torch.equal(attention(*arguments, enable_gqa=heads == 2), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_attention_is_rewritten_in_a_recomputation_too(use_reentrant):
    query = rows(*Q)
    seen = []

    def block(x):
        out = functional.scaled_dot_product_attention(x, x, x)
        seen.append(out.grad_fn and out.grad_fn.name())
        return out

    out = torch.utils.checkpoint.checkpoint(block, query, use_reentrant=use_reentrant)
    out.sum().backward()
    assert seen[-1] == "ScaledDotProductFlashAttentionBackward0"


# --- dropout and norms


def test_dropout_keeps_a_byte_an_element():
    x = rows(8, 8)
    with cuda_choices():
        out = nn.Dropout(0.5)(x)
        assert out.grad_fn.name() == "NativeDropoutBackward0"
        assert out.grad_fn._saved_result1.dtype == torch.bool
        for module in (nn.Dropout(0.0), nn.Dropout(0.5).eval()):
            assert torch.equal(module(x), x)
        assert not nn.Dropout(1.0)(x).any()
    out.sum().backward()
    dropped = out == 0
    assert torch.equal(x.grad == 0, dropped)
    assert torch.equal(x.grad[~dropped], torch.full_like(x.grad[~dropped], 2.0))


def test_dropout_makes_on_ghosts_what_it_makes_of_values():
    x = torch.randn(8, 8).t()
    real = torch.native_dropout(x, 0.5, True)
    with Ghosts() as world:
        made = torch.native_dropout(world.haunt(x), 0.5, True)
    assert [describe(t) for t in made] == [describe(t) for t in real]


def describe(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_rms_norm_is_one_kernel_that_keeps_a_number_for_each_row():
    x = rows(4, 8, 16)
    norm = nn.RMSNorm(16, dtype=torch.bfloat16)
    out = norm(x)
    *others, kept = out.grad_fn.saved_tensors
    assert others == [x, norm.weight]
    assert (kept.shape, kept.dtype) == ((4, 8, 1), torch.float32)
    out.sum().backward()
    assert describe(x.grad) == describe(x)
    assert describe(norm.weight.grad) == describe(norm.weight)


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_rms_norm_of_two_dtypes_is_torchs_own(eps):
    x, weight = rows(4, 16), torch.randn(16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fused kernel cannot do this
        expected = functional.rms_norm(x, (16,), weight, eps)
    with cuda_choices():
        found = functional.rms_norm(x, (16,), weight, eps)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_statistics_of_a_norm_are_fp32(monkeypatch):
    monkeypatch.setattr(ghosts, "REAL_NBYTES", 0)
    out = nn.LayerNorm(16, dtype=torch.bfloat16)(rows(4, 16))
    assert out.grad_fn._saved_result1.dtype == torch.float32


# --- autocast


def test_autocast_of_a_gpu_is_on_and_casts_as_there():
    x, linear = torch.randn(4, 16), nn.Linear(16, 16)
    with cuda_choices():
        with torch.autocast("cuda", torch.bfloat16):
            y = linear(x)
            assert y.dtype == torch.bfloat16
            for wide in (
                functional.layer_norm(y, (16,)),
                functional.softmax(y, -1),
                y.log_softmax(-1),
                y.sum(),
                y.sum(-1),
                y.pow(2),
                y.exp(),
                functional.softplus(y),
            ):
                assert wide.dtype == torch.float32
            assert y.softmax(-1, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert functional.gelu(y).dtype == torch.bfloat16
            assert functional.cross_entropy(y, torch.zeros(4, dtype=torch.long)).dtype == (
                torch.float32
            )
            with torch.autocast("cuda", enabled=False):
                assert linear(x).dtype == torch.float32
        with torch.autocast("cuda"):
            assert linear(x).dtype == torch.float16
        assert linear(x).dtype == torch.float32


def test_autocast_keeps_one_copy_of_a_weight():
    linear = nn.Linear(16, 16)
    with cuda_choices(), torch.autocast("cuda", torch.bfloat16):
        first, second = (linear(torch.randn(4, 16)) for _ in range(2))

    def weight(out):
        (turned,) = (f for f, _ in out.grad_fn.next_functions if f and f.name() == "TBackward0")
        return turned.next_functions[0][0]

    assert weight(first) is weight(second)


def test_autocast_is_off_again_behind_it():
    with cuda_choices():
        pass
    with pytest.warns(UserWarning, match="Disabling autocast"), torch.autocast("cuda"):
        assert nn.Linear(4, 4)(torch.randn(4, 4)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        narrow = torch.randn(4, 4).bfloat16()
        assert functional.layer_norm(narrow, (4,)).dtype == torch.bfloat16


def test_autocast_knows_operations_that_torch_casts_on_a_gpu():
    casting = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    assert {f"aten::{name}" for name in (*IN_FP32, *IN_FP32_BY_DTYPE)} <= casting


# --- devices


def test_devices_of_a_gpu_are_the_cpu():
    with cuda_choices():
        model = nn.Linear(4, 4, device="cuda").to("cuda:1").cuda()
        with torch.device("cuda"):
            inside = torch.ones(2)
        made = (
            torch.zeros(2, device="cuda"),
            torch.zeros(2).to("cuda:0", torch.float64),
            torch.zeros(2).to(torch.device("cuda")),
            torch.zeros(2).cuda(),
            torch.tensor([1], device=torch.device("cuda", 0)),
            torch.zeros(2).new_zeros(3, device="cuda"),
            inside,
            *model.parameters(),
        )
        assert {tensor.device.type for tensor in made} == {"cpu"}
        assert torch.zeros(2, device="meta").is_meta


# --- scope


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
@pytest.mark.parametrize("fails", [False, True])
def test_an_entry_leaves_nothing_behind(choice, fails):
    names = ("scaled_dot_product_attention", "dropout", "rms_norm", "layer_norm", "softmax.int")

    def kernels():
        return [torch._C._dispatch_dump(f"aten::{name}") for name in names]

    before, init = kernels(), torch.autocast.__init__
    try:
        with choice.applied():
            changed = kernels() != before
            assert changed or choice.name == "devices"
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    assert kernels() == before
    assert torch.autocast.__init__ is init
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


def test_each_fake_kernel_of_a_gpu_gives_what_its_gradient_needs():
    query = rows(2, 4, 32, 16)
    with cuda_choices(), Ghosts(kernels_of="cuda"):
        for mask in (None, torch.ones(32, 32, dtype=torch.bool)):
            functional.scaled_dot_product_attention(query, query, query, mask).sum().backward()
    assert describe(query.grad)[:3] == describe(query)[:3]
