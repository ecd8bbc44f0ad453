import numpy as np
import pytest

from blockcompact_jax.kernels import Layout, build_info
from blockcompact_jax.kernels.native import load_native

from .helpers import random_blocks
from .pool_memory import plain_memory, register_packed, register_plain


@pytest.fixture(params=build_info()["simd_available"])
def impl(request):
    """Each implementation that this machine has, forced for one test."""
    load_native().force_impl(request.param)
    yield request.param
    load_native().force_impl("")


@pytest.fixture(params=[0, -1], ids=["streamed", "cached"])
def stores(request):
    """Small calls written past the caches as large ones are, or as small ones are."""
    load_native().force_streaming_from(request.param)
    yield request.param
    load_native().force_streaming_from(-1)


@pytest.fixture
def rng():
    return np.random.default_rng(20)


@pytest.fixture(autouse=True)
def no_pool_is_left_open():
    yield
    assert load_native().num_pools() == 0


@pytest.fixture
def pair(rng):
    """A plain pool and a packed pool of one geometry, with their memories."""
    memory, view = plain_memory(random_blocks(rng, (2, 4, 2, 1, 32, 32), np.uint16), "nhd")
    store = random_blocks(rng, (2, 5, 1, 64, 32), np.uint16)
    with register_plain(memory, view) as plain, register_packed(store, Layout.AMX) as packed:
        yield plain, packed, memory, store


@pytest.fixture
def held():
    """Starts with uploads held; call it to let them run."""
    native = load_native()
    native.hold_uploads(True)
    yield lambda fault="": native.hold_uploads(False, fault)
    native.hold_uploads(False)


@pytest.fixture
def device():
    """The emulated device in the place of CUDA's."""
    native = load_native()
    emulated = native.EmulatedDevice()
    before = native.set_device_runtime(emulated.runtime)
    yield emulated
    emulated.hold(False)
    native.set_device_runtime(before)


@pytest.fixture
def on_device(device):
    """Registers arrays as memory of the device."""
    added = []

    def register(memory, view, *, device_ordinal=0, **options):
        device.add_memory(memory.ctypes.data, memory.nbytes, device_ordinal)
        added.append(memory)
        return register_plain(memory, view, **({"device": device_ordinal} | options))

    yield register
    for memory in added:
        device.remove_memory(memory.ctypes.data)
