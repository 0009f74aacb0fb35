"""Kernels: products against measured ones, shapes that fill the cores and shapes that do not, dtypes of operands."""

import numpy as np
import pytest

from autopar.cost.kernels import FusedProducts, MemoryPass, Product, kernel_seconds, product_seconds
from autopar.errors import ClusterError
from autopar.mesh import Achieved, Device, find_device
from autopar.mesh.catalog import SUSTAINED

IDEAL = Device("d", 1e12, memory_bytes_per_second=1e9)
# What one H100 reached, launches included, in TFLOP/s of bfloat16: (count, rows, columns, depth). From the table of
# measured products in OpenXLA's cost model for sm_90 (matmul_interpolator_data.h).
MEASURED = [
    (1, 4096, 4096, 4096, 783.3),
    (1, 2048, 2048, 2048, 632.0),
    (1, 1024, 1024, 2048, 350.0),
    (1, 4096, 512, 1024, 370.8),
    (1, 1024, 2048, 256, 139.5),
    (1, 256, 2048, 256, 41.8),
    (1, 256, 1024, 4096, 172.3),
    (1, 512, 4096, 1024, 373.3),
    (2, 512, 512, 2048, 216.5),
    (2, 4096, 4096, 2048, 763.0),
    (4, 4096, 4096, 256, 503.9),
    (4, 256, 256, 4096, 171.6),
    (4, 1024, 256, 1024, 218.2),
    (4, 1024, 1024, 2048, 626.1),
]


def product(count, rows, columns, depth, dtype="bfloat16", **fields):
    size = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}[dtype]
    num_bytes = size * count * (rows * depth + depth * columns + rows * columns)
    return Product(count, rows, columns, depth, num_bytes, (dtype, dtype), **fields)


def test_attention_of_few_tokens_is_slower_for_its_flops():
    """As published for the second and third FlashAttention on H100, causal, heads of 128: 0.44 to 0.6 of the peak."""
    h100 = find_device("h100").device
    shares = []
    for tokens in (2048, 4096, 16384):
        flops, num_bytes = 2.0 * tokens**2 * 128 * 128, 8.0 * tokens * 128 * 128
        seconds = kernel_seconds(FusedProducts(flops, num_bytes, ("bfloat16",) * 3), h100)
        shares.append(flops / seconds / 989.5e12)
    assert shares == sorted(shares) and 0.4 < shares[0] < 0.46 and 0.53 < shares[2] < 0.6


def test_products_of_eight_bits_reach_less_of_their_peak():
    """Bekman's tables of H100: 794.5 of 989 TFLOP/s in 16 bits, 1402.6 of 1979 in 8."""
    h100 = find_device("h100").device
    wide, narrow = (product_seconds(product(1, 8192, 8192, 8192, d), h100) for d in ("bfloat16", "float8_e4m3fn"))
    assert wide / narrow == pytest.approx(1402.6 / 794.5, rel=0.02)


def test_gradients_of_weights_read_their_operand_the_other_way_round():
    slow = Device("d", 1e12, achieved=Achieved(turned=0.5))
    plain, turned = product(1, 64, 64, 64), product(1, 64, 64, 64, is_turned=True)
    assert product_seconds(turned, slow) == 2 * product_seconds(plain, slow) == 2 * product_seconds(turned, IDEAL)


def test_a_device_without_measurements_is_a_roofline():
    assert kernel_seconds(Product(1, 1000, 1000, 500_000, 0, ("float32",)), IDEAL) == 1.0
    assert kernel_seconds(MemoryPass(1e9), IDEAL) == 1.0
    assert kernel_seconds(FusedProducts(1e12, 0, ("float32",)), IDEAL) == 1.0
    assert kernel_seconds(FusedProducts(0, 1e9, ("float32",)), IDEAL) == 1.0


def test_products_as_measured():
    h100 = find_device("h100").device
    # The measurement ran products one at a time, cool; training holds a part of that (`catalog.SUSTAINED`).
    cool = Achieved(**{f: getattr(h100.achieved, f) for f in h100.achieved.__slots__} | {"product": 0.866})
    device = Device("h", h100.peak_flops, 8e10, h100.memory_bytes_per_second, cool)
    errors = []
    for count, rows, columns, depth, tflops in MEASURED:
        seconds = kernel_seconds(product(count, rows, columns, depth), device)
        errors.append(abs(2 * count * rows * columns * depth / seconds / (tflops * 1e12) - 1))
    assert np.mean(errors) < 0.08, errors
    assert max(errors) < 0.25, errors


def test_the_rate_is_that_of_the_operands():
    h100 = find_device("h100").device
    narrow, half, wide = (
        kernel_seconds(product(1, 8192, 8192, 8192, dtype), h100) for dtype in ("float8_e4m3fn", "bfloat16", "float32")
    )
    assert 1.7 < half / narrow < 2.1
    assert 1.8 < wide / half < 2.2, "float32 is multiplied as TF32, as JAX does by default"
    assert kernel_seconds(product(1, 8192, 8192, 8192, "float32", highest=True), h100) > 5 * wide


def test_one_tile_more_is_one_wave_more():
    device = Device("d", 1e12, achieved=Achieved(cores=4, tile=(128, 128), balance=1000.0))
    full, over = (kernel_seconds(Product(1, 128, columns, 512, 0, ("float32",)), device) for columns in (512, 520))
    assert over > 1.3 * full
    assert full == pytest.approx(2 * 128 * 512 * 512 / 1e12)


def test_many_small_products_are_slow():
    h100 = find_device("h100").device
    whole = kernel_seconds(product(1, 4096, 4096, 4096), h100)
    parts = kernel_seconds(product(64, 512, 512, 256), h100)
    flops = 64 * 512 * 512 * 256 / 4096**3
    assert parts / flops > 1.5 * whole


def test_convolutions_have_a_rate_of_their_own():
    device = Device("d", 1e12, achieved=Achieved(convolution=0.5))
    product = Product(1, 64, 64, 64, 0.0, ("float32", "float32"))
    convolution = Product(1, 64, 64, 64, 0.0, ("float32", "float32"), is_convolution=True)
    assert kernel_seconds(convolution, device) == pytest.approx(2 * kernel_seconds(product, device))


def test_what_a_program_takes_besides():
    """It is started by cores that cannot compute meanwhile only where devices share them; memory may have to be got."""
    own = Achieved(dispatch_seconds=1e-3, fresh_bytes_per_second=1e9)
    assert own.program_seconds(1e7) == pytest.approx(0.01)
    keeping = Achieved(fresh_bytes_per_second=1e9, kept_bytes=2e7)
    assert (keeping.program_seconds(1e7), keeping.program_seconds(4e7)) == (0.0, 0.04)
    assert Achieved(dispatch_seconds=1e-3).program_seconds(1e8) == 0.0
    shared = Achieved(dispatch_seconds=1e-3, array_seconds=1e-5, host_cores=2, fresh_bytes_per_second=1e9)
    assert shared.program_seconds(1e6) == pytest.approx(2e-3)
    assert shared.program_seconds(1e6, num_arrays=100) == pytest.approx(3e-3)
    copying = Achieved(copy_seconds=1e-4, host_cores=2, fresh_bytes_per_second=1e9, kept_bytes=2e7)
    assert [copying.crossing_seconds(size) for size in (1e7, 4e7)] == pytest.approx([1e-4, 0.0401])
    assert Achieved(copy_seconds=1e-4).crossing_seconds(1e7) == 0.0
    assert shared.crossing_seconds(1e6) == shared.program_seconds(1e6, num_arrays=2), "a profile of before"
    assert [shared.sharing_speed(busy, 8) for busy in (8, 4, 2, 1)] == [1.0, 2.0, 4.0, 4.0]
    assert own.sharing_speed(1, 8) == 1.0
    with pytest.raises(ClusterError, match="more than 0"):
        Achieved(fresh_bytes_per_second=0.0)


def test_compilers_that_fuse_less_go_through_memory_more_often():
    device = Device(
        "d", memory_bytes_per_second=1e9, achieved=Achieved(launch_seconds=1.0, passes=3.0, update_passes=2.0)
    )
    seconds = [kernel_seconds(MemoryPass(1e9, 1.0, on), device) for on in ("alone", "parameters", "samples")]
    assert seconds == [2.0, 4.0, 6.0]


def test_a_pass_over_what_lies_turned_takes_longer_where_loops_pick_it_up_one_by_one():
    turned = MemoryPass(3e9, 1.0, turned_bytes=1e9)
    device = Device("d", memory_bytes_per_second=1e9, achieved=Achieved(launch_seconds=1.0, turning=5.0))
    assert kernel_seconds(turned, device) == 8.0
    assert kernel_seconds(MemoryPass(3e9), device) == kernel_seconds(turned, Device("d", 1e12, 1e12, 1e9)) + 1.0 == 4.0
    assert kernel_seconds(MemoryPass(0.0), device) == 1.0


def test_products_on_tpu_v6e_hold_a_part_of_what_was_measured():
    """728 TFLOP/s by the device's clock, one product at a time; training holds a part of that, as on other devices."""
    size = 8192
    product = Product(1, size, size, size, 6.0 * size**2, ("bfloat16", "bfloat16"))
    seconds = kernel_seconds(product, find_device("v6e").device)
    assert 2 * size**3 / seconds == pytest.approx(SUSTAINED * 728e12, rel=1e-3)


def test_heads_of_128_fill_half_of_an_array_of_256():
    """Fused attention reaches less of the peak on TPUs whose arrays are twice as wide, but more than half as much."""
    kernel = FusedProducts(1e15, 0.0, ("bfloat16", "bfloat16"))
    parts = []
    for name in ("v5p", "v6e", "7x"):
        device = find_device(name).device
        parts.append(1e15 / kernel_seconds(kernel, device) / device.product_flops_per_second(["bfloat16"]))
    assert parts[0] / 2 < parts[1] < parts[0] and parts[2] == pytest.approx(parts[1], rel=0.01)


def test_long_samples_take_as_much_longer_on_tpu7x_as_was_published():
    """Llama 3.1 70B on 64 chips for each 16 samples of 131,072 tokens, or 256 of 8,192: attention is what differs."""
    device = find_device("7x").device
    flops = 3.5 * 2 * 131072 * 8192 * 80 * (16 * 131072)  # both passes, masked
    longer = kernel_seconds(FusedProducts(flops / 128, 0.0, ("bfloat16", "bfloat16")), device)
    assert longer * (1 - 8192 / 131072) == pytest.approx(34.0 - 12.3, rel=0.05)
