"""Tensors travel as their own bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tracing_support import trace

from endoscope.tracing.serialize import dumps, loads

torch = pytest.importorskip("torch")

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
    "bool", "uint8", "int8", "int16", "int32", "int64",
]  # fmt: skip


def both(value: Any) -> list[Any]:
    """Send a value in one piece and with its buffers apart."""
    buffers: list[Any] = []
    data = dumps(value, buffers=buffers)
    return [loads(dumps(value), str), loads(data, str, [bytes(buffer) for buffer in buffers])]


def same(one: Any, other: Any) -> bool:
    bits = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(getattr(torch, dtype))
    for got in both(tensor):
        assert same(got, tensor)
        assert got.device.type == "cpu"
        got.zero_()


def test_case_30_a_view_takes_only_its_own_bytes() -> None:
    large = torch.rand(1000, 1000)
    for view in (large[3], large[:, 3], large[3:4, ::2], large.t()[5], large[0, 0]):
        assert len(dumps(view)) < 6_000
        buffers: list[Any] = []
        assert len(dumps(view, buffers=buffers)) < 500
        assert sum(memoryview(buffer).nbytes for buffer in buffers) == view.numel() * 4
        for got in both(view):
            assert torch.equal(got, view)
            assert got.untyped_storage().nbytes() == view.numel() * 4


def test_transposed_conjugated_negated_and_expanded() -> None:
    complex_ = torch.randn(3, 4, dtype=torch.complex64)
    for tensor in (torch.rand(3, 4).t(), complex_.conj(), complex_.conj().imag, torch.rand(3, 1).expand(3, 5)):
        for got in both(tensor):
            assert same(got, tensor)
            got.zero_()


def test_gradients_and_parameters() -> None:
    leaf = torch.rand(2, requires_grad=True)
    for got in both({"leaf": leaf, "grown": leaf * 2, "parameter": torch.nn.Parameter(torch.rand(2))}):
        assert got["leaf"].requires_grad
        assert got["grown"].requires_grad
        assert got["grown"].is_leaf
        assert type(got["parameter"]) is torch.nn.Parameter
    frozen = torch.nn.Parameter(torch.rand(2), requires_grad=False)
    assert not both(frozen)[0].requires_grad


def test_one_tensor_under_two_names_stays_one() -> None:
    tensor = torch.rand(3)
    for got in both([tensor, tensor]):
        assert got[0] is got[1]


def test_an_inference_tensor_and_a_default_device() -> None:
    with torch.inference_mode():
        tensor = torch.rand(3)
    with torch.device("meta"):
        got = loads(dumps(tensor), str)
    assert torch.equal(got, tensor)
    got.add_(1)


def test_other_tensors_go_torchs_own_way() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(loads(dumps(sparse), str).to_dense(), torch.eye(3))
    assert loads(dumps(torch.empty(3, device="meta")), str).device.type == "meta"


def test_case_34_a_device_that_is_not_here_gives_the_cpu() -> None:
    from endoscope.tracing.tensors import rebuild_tensor

    got = rebuild_tensor(bytearray(torch.ones(2).numpy().tobytes()), "float32", (2,), "cuda:77", False, False)
    assert got.device.type == "cpu"
    assert torch.equal(got, torch.ones(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_case_34_a_cuda_tensor_travels() -> None:
    """To the engine as it is, and home to the CPU."""
    tensor = torch.rand(3, device="cuda")
    there, home = both(tensor)
    assert there.device == tensor.device
    assert torch.equal(there, tensor)
    assert home.device.type == "cpu"
    assert torch.equal(home, tensor.cpu())
    large = [torch.rand(1 << 15, device="cuda"), torch.rand(3), *torch.rand(64, 3, device="cuda")]
    for got, right in zip(both(large)[1], large, strict=True):
        assert got.device.type == "cpu"
        assert torch.equal(got, right.cpu())


def test_in_a_block() -> None:
    vector = torch.arange(4.0)[1:3]
    with trace("p"):
        doubled = vector * 2
        vector += 1
    assert doubled.tolist() == [2.0, 4.0]
    assert vector.tolist() == [2.0, 3.0]


def many(count: int, shape: tuple[int, ...] = (1, 3), dtype: Any = None) -> list[Any]:
    return [torch.rand(shape).to(dtype or torch.float32) for _ in range(count)]


LISTS = {
    "alike": many(40),
    "of growing shape": [*many(1, (7, 3)), *many(30), *many(5, (2, 3)), *many(20)],
    "of numbers": many(40, ()),
    "of nothing": many(40, (0, 3)),
    "of two dtypes": [*many(20), *many(20, dtype=torch.bfloat16), *many(3)],
    "one of them large": [*many(20), torch.rand(300, 300), *many(20)],
    "one of them with a gradient": [*many(20), torch.rand(1, 3, requires_grad=True)],
    "one of them no tensor": [*many(20), 5, *many(3)],
    "of views": list(torch.rand(50, 3).split(1)) + list(torch.rand(3, 50).t().split(1)),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_many_tensors(kind: str) -> None:
    for got in both(LISTS[kind]):
        assert len(got) == len(LISTS[kind])
        for one, other in zip(got, LISTS[kind], strict=True):
            assert same(one, other) if isinstance(other, torch.Tensor) else one == other
        tensors = [each for each in got if isinstance(each, torch.Tensor)]
        assert len({each.untyped_storage().data_ptr() for each in tensors if each.numel()}) == len(
            [each for each in tensors if each.numel()]
        )


def test_a_list_of_many_tensors_in_two_places_is_one() -> None:
    rows = many(40)
    for got in both({"a": rows, "b": [rows, 1], "other": list(rows), "one": rows[7], "twice": [rows[3]] * 20}):
        assert got["b"][0] is got["a"]
        assert got["other"] is not got["a"]
        assert all(one is other for one, other in zip(got["other"], got["a"], strict=True))
        assert got["one"] is got["a"][7]
        assert all(each is got["a"][3] for each in got["twice"])
        got["a"].append(1)
        assert len(got["other"]) == 40


def test_what_was_received_may_be_used_again() -> None:
    buffers: list[Any] = []
    rows = many(40)
    data = dumps(rows, buffers=buffers)
    received = [bytearray(buffer) for buffer in buffers]
    got = loads(data, str, received)
    for buffer in received:
        buffer[:] = bytes(len(buffer))
    assert all(same(one, other) for one, other in zip(got, rows, strict=True))


class Growing:
    """Its state is a list that is made anew whenever it is pickled."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        self.given.append(state)

    def __reduce__(self) -> Any:
        return Growing, (), list(self.given)


def test_a_list_that_pickling_has_made_is_not_taken_for_the_next_one() -> None:
    values = [Growing() for _ in range(5)]
    for number, value in enumerate(values):
        value.given = [torch.full((2,), float(number)) for _ in range(20 + number)]
    for got in both(values):
        assert [len(each.given[0]) for each in got] == [20, 21, 22, 23, 24]
        assert [each.given[0][0][0].item() for each in got] == [0.0, 1.0, 2.0, 3.0, 4.0]
