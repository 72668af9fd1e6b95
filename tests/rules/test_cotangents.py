"""Cotangents: every kind of them against the numbers that it stands for, made by explicit formulas."""

from itertools import combinations

import pytest
import torch

from pytorch_grad_cam_pcasvm.rules import cotangents as weights
from pytorch_grad_cam_pcasvm.rules.cotangents import (
    BehindDense,
    Cotangent,
    Outer,
    Part,
    Shared,
    added,
    by_rows,
    cotangent,
)

K = 3
SHAPE = 2, 4, 5, 6  # no two sizes are the same


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def padded(inner, dim, start):
    """Return numbers with zeros around them, up to SHAPE."""
    whole = torch.zeros(K, *SHAPE, dtype=torch.float64)
    whole.narrow(dim + 1, start, inner.shape[dim + 1]).copy_(inner)
    return whole


def part(dim, start, length, inner=None):
    inner = random(K, *(length if d == dim else size for d, size in enumerate(SHAPE))) if inner is None else inner
    return Part(lambda: inner, SHAPE, dim, start, length), padded(inner, dim, start)


def expanded(*sizes):
    base = random(K, *sizes)
    return Cotangent(base.expand(K, *SHAPE)), base.expand(K, *SHAPE).clone()


def outer(left, right):
    left, right = random(*left), random(*right)
    return Outer(left, right), torch.einsum(
        f"{'k' * (left.dim() > 4)}nhml,{'k' * (right.dim() > 4)}nhmd->knhld", left, right
    )


def dense(count=K):
    grad, weight = random(count, 2, 7), random(7, 4 * 5 * 6)
    return BehindDense(grad, weight, SHAPE), torch.einsum("kno,oi->kni", grad, weight).reshape(count, *SHAPE)


def shared(*sizes):
    """A step whose derivatives are those behind it times what every place of its input is multiplied by."""
    behind, x = random(K, *sizes), random(*SHAPE)
    whole = behind * x

    def summed(grad, dim):
        assert dim < len(SHAPE) - 1, "tokens do not lie along the last dimension"
        return (grad * x).sum(dim + 1, keepdim=True)

    return Shared(lambda: whole, summed, Cotangent(behind.expand(K, *SHAPE))), whole


KINDS = {
    "full": lambda: expanded(*SHAPE),
    "same along one": lambda: expanded(2, 4, 1, 6),
    "same along two": lambda: expanded(2, 4, 1, 1),
    "same along the first": lambda: expanded(1, 4, 5, 6),
    "same along others": lambda: expanded(1, 4, 1, 6),
    "same along all": lambda: expanded(1, 1, 1, 1),
    "part of the first": lambda: part(0, 1, 1),
    "part of the second": lambda: part(1, 1, 2),
    "part of the third": lambda: part(2, 2, 2),
    "part of the last": lambda: part(3, 3, 3),
    "part, the same along two": lambda: part(2, 1, 3, random(K, 2, 4, 1, 1).expand(-1, -1, -1, 3, 6)),
    "outer, targets at the right": lambda: outer((2, 4, 8, 5), (K, 2, 4, 8, 6)),
    "outer, targets at the left": lambda: outer((K, 2, 4, 8, 5), (2, 4, 8, 6)),
    "behind a dense layer": dense,
    "behind a dense layer, many targets": lambda: dense(weights.FEW + 1),
    "shared by all": lambda: shared(1, 1, 1, 1),
    "shared by some": lambda: shared(2, 4, 1, 6),
    "shared along the last, too": lambda: shared(2, 4, 1, 1),
}
SUBSETS = [list(dims) for count in (1, 2, 3, 4) for dims in combinations(range(4), count)]


@pytest.fixture(params=KINDS)
def both(request):
    """A cotangent and its numbers."""
    return KINDS[request.param]()


def close(actual, expected):
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_numbers(both):
    given, whole = both
    assert given.shape == SHAPE
    assert close(given.dense(), whole)


def test_sums(both):
    given, whole = both
    for dims in SUBSETS:
        assert close(given.sum(dims), whole.sum([dim + 1 for dim in dims], keepdim=True)), dims


def test_products(both):
    given, whole = both
    x = random(*SHAPE)
    for dims in SUBSETS:
        assert close(given.times(x, dims), (whole * x).sum([dim + 1 for dim in dims])), dims


def test_products_by_images_and_tokens(both):
    given, whole = both
    x = random(*SHAPE)
    for images in range(4):
        for tokens in set(range(4)) - {images}:
            expected = (whole * x).movedim((images + 1, tokens + 1), (1, 2)).flatten(3).sum(-1)
            assert close(given.along(x, images, tokens), expected), (images, tokens)


@pytest.mark.parametrize("sizes", [((2, 8, 5), (K, 2, 8, 6)), ((K, 2, 8, 5), (2, 8, 6))], ids=str)
def test_outer_products_without_heads(sizes):
    left, right = (random(*size) for size in sizes)
    x = random(2, 5, 6)
    expected = (torch.einsum("...ml,...md->...ld", left, right) * x).sum(-1)
    assert close(Outer(left, right).along(x, 0, 1), expected)


def test_some_positions(both):
    given, whole = both
    for dim, size in enumerate(SHAPE):
        for start in range(size):
            for length in range(1, size - start + 1):
                some, expected = given.narrow(dim, start, length), whole.narrow(dim + 1, start, length)
                assert some.shape == expected.shape[1:]
                assert close(some.dense(), expected), (dim, start, length)
                assert close(some.sum([dim]), expected.sum(dim + 1, keepdim=True))
                assert given.reaches(dim, start, length) or not expected.any()


def test_other_shapes(both):
    given, whole = both
    for shape in (SHAPE, (2, 4, 30), (2, 120), (8, 5, 6), (240,)):
        assert close(given.view(shape).dense(), whole.reshape(-1, *shape)), shape


def test_a_part_reaches_nothing_beside_it():
    given, _ = part(2, 2, 2)
    assert [given.reaches(2, start, 1) for start in range(5)] == [False, False, True, True, False]
    assert given.reaches(1, 0, 1)


@pytest.mark.parametrize("first", ["full", "same along one", "part of the third", "outer, targets at the right"])
@pytest.mark.parametrize("second", ["full", "part of the second", "part of the third", "behind a dense layer"])
def test_two_are_added(first, second):
    (one, numbers), (other, others) = KINDS[first](), KINDS[second]()
    assert close(added(one, other).dense(), numbers + others)
    assert close(one.dense(), numbers), "what is added to is changed"
    assert isinstance(added(one, other), Part) == (first == second == "part of the third")


def test_what_rules_give_is_taken():
    given, whole = part(2, 2, 2)
    assert cotangent(given) is cotangent(lambda: given) is given
    assert close(cotangent(whole).dense(), whole)
    assert close(cotangent(lambda: whole).dense(), whole)


@pytest.mark.parametrize(
    ("grad", "matrix"),
    [
        ((K, 2, 4, 5, 6), (2, 4, 6, 7)),
        ((K, 2, 5, 6), (2, 6, 7)),
        ((K, 5, 6), (6, 7)),
        ((K, 2, 5, 6), (6, 7)),
        ((K, 2, 5, 6), (1, 6, 7)),
        ((K, 2, 5, 6), (K, 2, 6, 7)),
    ],
    ids=str,
)
def test_products_of_rows(grad, matrix):
    grad, matrix = random(*grad), random(*matrix)
    assert close(by_rows(grad, matrix), torch.einsum("...md,...de->...me", grad, matrix))
