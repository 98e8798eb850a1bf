"""Operands of reductions: their structure, their dtypes, and what NumPy makes of them."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_hoplite.collectives.operands import (
    Leaf,
    Op,
    OperandError,
    Signature,
    accumulators,
    as_bytes,
    check,
    flatten,
    prepare,
    promote,
    results,
    streamable,
    unflatten,
)
from dask_hoplite.exceptions import HopliteError

Point = namedtuple("Point", "x y")
Nothing = namedtuple("Nothing", "")
Other = namedtuple("Other", "x y")

NUMERIC = ["?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"]]
OPS = ["sum", "prod", "min", "max", "mean", np.hypot, np.logical_and, np.bitwise_or, np.subtract]
TIMES = ["M8[s]", "m8[ms]"]


def signature(value) -> Signature:
    return flatten(value)[0]


def of_dtype(dtype) -> Signature:
    return Signature(Leaf("array", (3,), np.dtype(dtype)))


def by_numpy(op: Op, stacked):
    """What NumPy makes of stacked operands."""
    with np.errstate(all="ignore"):
        return np.mean(stacked, axis=0) if op.mean else op.ufunc.reduce(stacked, axis=0)


def streamed(values, op: Op):
    """What a reduction makes of operands, in blocks of three elements."""
    taken = [flatten(value) for value in values]
    whole = functools.reduce(promote, (each for each, _ in taken))
    assert streamable(whole, op)
    dtypes = accumulators(whole, op)
    first, *others = (prepare(arrays, dtypes) for _, arrays in taken)
    accumulated = [array.copy() for array in first]
    with np.errstate(all="ignore"):
        for other in others:
            for mine, theirs in zip(accumulated, other, strict=True):
                for i in range(0, len(mine), 3):
                    block = mine[i : i + 3]
                    op.combine(block, theirs[i : i + 3], out=block)
        for mine in accumulated:
            op.finish(mine, len(values))
    return unflatten(whole, prepare(accumulated, results(whole, op)))


def same(a, b):
    """Whether two values are alike in structure, dtypes and bits."""
    (first, ours), (second, theirs) = flatten(a), flatten(b)
    return first == second and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind in "fcmM")
        for x, y in zip(ours, theirs, strict=True)
    )


# Operations


@pytest.mark.parametrize(
    "name, ufunc",
    [
        ("sum", np.add),
        ("prod", np.multiply),
        ("min", np.minimum),
        ("max", np.maximum),
        ("mean", np.add),
    ],
)
def test_operations_by_name(name, ufunc):
    op = Op.of(name)
    assert (op.name, op.ufunc, op.function, op.mean) == (name, ufunc, None, name == "mean")


def test_operations_that_are_given():
    assert Op.of(np.hypot) == Op("hypot", ufunc=np.hypot)
    assert Op.of(operator.add) == Op("add", function=operator.add)
    partial = functools.partial(operator.add)
    assert Op.of(partial).name == repr(partial)
    assert Op.of(Op.of("mean")) == Op.of("mean")


@pytest.mark.parametrize("wrong", ["SUM", "", "add"])
def test_unknown_names(wrong):
    with pytest.raises(ValueError, match=r"no operation.*'sum', 'prod', 'min', 'max', 'mean'"):
        Op.of(wrong)


@pytest.mark.parametrize(
    "wrong", [None, 3, ["sum"], np.sin, np.divmod, np.modf, np.matmul, sum, np.sum, np.max, np.mean]
)
def test_what_is_no_operation(wrong):
    with pytest.raises(TypeError, match=r"'sum', 'prod'.*np\.hypot.*callable"):
        Op.of(wrong)


def test_reducing_functions_are_told_from_operations():
    with pytest.raises(TypeError, match="'max' is meant"):
        Op.of(np.max)


@pytest.mark.parametrize("op", [*OPS, operator.add, functools.partial(operator.mul)])
def test_operations_can_be_sent(op):
    op = Op.of(op)
    again = pickle.loads(pickle.dumps(op))
    assert again.name == op.name
    assert again.ufunc is op.ufunc
    assert again.mean == op.mean
    assert (again.function and again.function(2, 3)) == (op.function and op.function(2, 3))


def test_combine_in_place_or_not():
    op = Op.of("sum")
    a, b, out = np.arange(3), np.arange(3), np.zeros(3, int)
    op.combine(a, b, out)
    assert (out == [0, 2, 4]).all() and (a == b).all()
    op.combine(a, b, out=b)
    assert (b == [0, 2, 4]).all()
    op.combine(a, a, out=a)
    assert (a == [0, 2, 4]).all()
    with pytest.raises(TypeError, match="whole values"):
        Op.of(operator.add).combine(a, b, out)


@pytest.mark.parametrize("dtype", [*np.typecodes["AllFloat"], "m8[s]"])
def test_finish_divides_means_only(dtype):
    block = np.array([7, -9, 0]).astype(dtype)
    for op in "sum", "min", np.hypot:
        Op.of(op).finish(block, 2)
    assert (block == np.array([7, -9, 0]).astype(dtype)).all()
    Op.of("mean").finish(block, 2)
    expected = np.array([7, -9, 0]).astype(dtype) / 2
    assert (block == expected).all() and block.dtype == dtype


# Structures


def structures(leaves):
    keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.booleans()))
    return st.recursive(
        st.none() | leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.builds(Point, inner, inner),
            st.just(Nothing()),
        ),
        max_leaves=8,
    )


arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"),
        hnp.complex_number_dtypes(endianness="?"),
        hnp.datetime64_dtypes(endianness="?"),
        hnp.timedelta64_dtypes(endianness="?"),
        hnp.unicode_string_dtypes(max_len=3),
    ),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
scalars = st.one_of(st.booleans(), st.integers(), st.floats(), st.complex_numbers())


@settings(deadline=None)
@given(structures(arrays | scalars))
def test_round_trip(value):
    taken, parts = flatten(value)
    assert len(parts) == len(taken.leaves) == len(taken.paths) == len(set(taken.paths))
    again = unflatten(taken, [part.reshape(-1) for part in parts])
    assert same(again, value)
    assert pickle.loads(pickle.dumps(taken)) == taken
    assert hash(pickle.loads(pickle.dumps(taken))) == hash(taken)
    assert signature(copy.deepcopy(value)) == taken
    assert taken.differs(signature(again)) is None
    native = promote(taken, taken)
    assert promote(native, native) == native
    for path, leaf, part in zip(taken.paths, taken.leaves, parts, strict=True):
        found = eval(f"value{path}", {"value": value})
        assert np.shape(found) == leaf.shape == part.shape
        assert leaf.kind == ("array" if isinstance(found, np.ndarray) else "scalar")


@settings(deadline=None)
@given(structures(arrays | scalars), structures(arrays | scalars))
def test_differences_go_both_ways(a, b):
    a, b = signature(a), signature(b)
    assert (a.differs(b) is None) == (b.differs(a) is None)
    if a.differs(b) is None:
        assert promote(a, b).differs(a) is None
        assert [leaf.dtype for leaf in promote(a, b).leaves] == [
            leaf.dtype for leaf in promote(b, a).leaves
        ]
    else:
        assert a != b
        with pytest.raises(OperandError):
            promote(a, b)


def test_memory_is_shared():
    a, b = np.arange(6.0).reshape(2, 3), np.arange(3)
    taken, parts = flatten({"a": a, "b": [b, (b.T, None)]})
    assert parts[0] is a and parts[1] is b
    flat = [np.zeros(6), np.ones(3), np.ones(3)]
    value = unflatten(taken, flat)
    assert value["a"].shape == (2, 3) and value["b"][1][1] is None
    assert np.shares_memory(value["a"], flat[0])
    assert np.shares_memory(value["b"][1][0], flat[2])


def test_order_of_keys_does_not_matter():
    a = {"x": np.zeros(2), "y": np.ones(3), 3: None, "z": {"p": 1, "q": 2.5}}
    b = {"z": {"q": 2.5, "p": 1}, 3: None, "y": np.ones(3), "x": np.zeros(2)}
    assert signature(a) == signature(b)
    assert signature(a).paths == ("['x']", "['y']", "['z']['p']", "['z']['q']")
    assert same(unflatten(signature(a), flatten(b)[1]), a)


def test_other_dicts_become_plain_ones():
    for kind in OrderedDict, functools.partial(defaultdict, list):
        value = kind({"a": np.arange(3)})
        again = unflatten(*flatten(value))
        assert type(again) is dict and same(again, value)
        assert signature(value) == signature({"a": np.arange(3)})


def test_numbers_become_those_of_numpy():
    value = unflatten(*flatten([True, 3, 2.5, 1j, np.float32(1), np.datetime64(3, "s")]))
    assert [type(x) for x in value] == [
        np.bool_,
        np.int64,
        np.float64,
        np.complex128,
        np.float32,
        np.datetime64,
    ]
    assert value == [True, 3, 2.5, 1j, 1, np.datetime64(3, "s")]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, Fraction(1, 3), Decimal("0.1")])
def test_numbers_that_numpy_lacks_stay_what_they_are(value):
    taken, parts = flatten([value])
    assert taken.leaves[0].dtype == object
    assert unflatten(taken, parts) == [value] and type(unflatten(taken, parts)[0]) is type(value)


def test_none_is_structure():
    taken, parts = flatten(None)
    assert parts == [] == list(taken.leaves) and unflatten(taken, []) is None
    assert streamable(taken, Op.of("sum")) and accumulators(taken, Op.of("sum")) == ()
    assert signature([None, 1]).differs(signature([None, 2])) is None
    assert "None" in signature([None]).differs(signature([1]))


def test_wrong_number_of_arrays():
    with pytest.raises(ValueError, match="shorter"):
        unflatten(signature([1, 2]), [np.ones(1)])


def test_memmap_is_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 2))
    taken, (part,) = flatten(mapped)
    assert taken == signature(np.zeros((2, 2), np.float32))
    assert type(part) is np.ndarray and np.shares_memory(part, mapped)


@pytest.mark.parametrize(
    "wrong, what",
    [
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.ma.masked, "MaskedConstant"),
        (np.ones((1, 1)).view(np.matrix), "matrix"),
        (np.rec.array([(1, 2)]), "recarray"),
        ({1, 2}, "set"),
        (Counter("aa"), "Counter"),
        (UserDict(), "UserDict"),
        (object(), "object"),
        (np.float64, "type"),
        (range(3), "range"),
        (bytearray(3), "bytearray"),
    ],
)
def test_what_is_no_operand(wrong, what):
    assert issubclass(OperandError, HopliteError) and issubclass(OperandError, ValueError)
    with pytest.raises(OperandError, match=rf"the value is a .*{what}"):
        flatten(wrong)
    with pytest.raises(OperandError, match=rf"^\['layers'\]\[1\]\.y is a .*{what}"):
        flatten({"layers": [1, Point(2, wrong)]})


def test_what_holds_itself_is_no_operand():
    value: list = []
    value.append(value)
    with pytest.raises(OperandError, match="holds itself"):
        flatten(value)


MISMATCHES = [
    (np.ones((2, 3)), np.ones((3, 2)), r"the value is of shape \(2, 3\) .* \(3, 2\)"),
    (np.ones(1), 1.0, r"shape \(1,\) in the first and \(\) in"),
    ([1, 2], [1, 2, 3], "the value has 2 items in the first and 3 in the second"),
    ([1], (1,), "is a list in the first and a tuple in the second"),
    ([1], 1, "is a list in the first and a scalar"),
    ([np.ones(2)], [[1]], r"\[0\] is a NumPy array in the first and a list in the second"),
    ({"a": 1}, {"a": 1, "b": 2, "c": 3}, "has no other keys .* and the keys 'b', 'c' in"),
    ({"a": 1}, {"b": 1}, "has the key 'a' in the first and the key 'b' in the second"),
    ({1: 1, 1.5: 2}, {True: 1, 1.5: 2}, "keys 1.5, 1 in .* True, 1.5 in"),
    (Point(1, 2), Other(1, 2), r"Point in the first and a .*Other in"),
    (Point(1, 2), (1, 2), r"Point in the first and a tuple in"),
    ({"l": [1, 2]}, {"l": [1, 2.5]}, r"\['l'\]\[1\] is of dtype int64 .* float64 in"),
    (True, 1, "bool in the first and int64"),
    (np.ones(1, "u4"), np.ones(1, "i4"), "uint32"),
    (1.0, 1j, "complex"),
    (np.ones(1, "m8[s]"), np.ones(1, "M8[s]"), "timedelta64"),
    (np.ones(1, "m8[D]"), np.ones(1, "m8[M]"), r"timedelta64\[D\] .* timedelta64\[M\]"),
    (np.ones(1, "i4,i4"), np.ones(1, "i4,i4,i4"), "dtype"),
    (np.array("a"), np.array(b"a"), "dtype"),
]


@pytest.mark.parametrize("a, b, what", MISMATCHES)
def test_mismatches(a, b, what):
    a, b = signature(a), signature(b)
    with pytest.raises(OperandError, match=what) as caught:
        check("left-1", a, ("right", 2), b)
    assert "'left-1'" in str(caught.value) and "('right', 2)" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(OperandError, match=what):
        promote(a, b)
    assert b.differs(a) is not None


def test_many_keys_are_not_all_named():
    a, b = signature(dict.fromkeys(range(100), 1)), signature({"other": 1})
    assert len(a.differs(b)) < 200 and "..." in a.differs(b)


@pytest.mark.parametrize(
    "a, b, common",
    [
        ("f4", "f8", "f8"),
        (">f8", ">f8", "=f8"),
        ("<i2", ">i4", "=i4"),
        ("u1", "u8", "u8"),
        ("F", "D", "D"),
        ("m8[s]", "m8[ms]", "m8[ms]"),
        ("M8[D]", "M8[s]", "M8[s]"),
        ("U3", "U5", "U5"),
        ("i4,i4", "i4,i4", "i4,i4"),
        ("O", "i8", "O"),
    ],
)
def test_sizes_and_byte_orders_may_differ(a, b, common):
    a, b = of_dtype(a), of_dtype(b)
    check("a", a, "b", b)
    for together in promote(a, b), promote(b, a):
        assert together.leaves[0].dtype == np.dtype(common)
        assert together.leaves[0].dtype.isnative


def test_a_number_may_meet_an_array_of_no_dimension():
    a, b = signature([np.array(1.0)]), signature([1.0])
    check("a", a, "b", b)
    assert promote(a, b) == promote(b, a) == b
    assert promote(a, a) == a


def test_the_same_class_out_of_two_pickles():
    again = namedtuple("Point", "x y", module=Point.__module__)
    check("a", signature(Point(1, 2)), "b", signature(again(1, 2)))
    wider = namedtuple("Point", "x y z", module=Point.__module__)
    with pytest.raises(OperandError, match="'z'"):
        check("a", signature(Point(1, 2)), "b", signature(wider(1, 2, 3)))


def test_signatures_are_small():
    taken = signature({f"layer{i}": np.ones((100, 100)) for i in range(100)})
    assert len(pickle.dumps(taken)) < 5000


# Dtypes


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("dtype", [*NUMERIC, *TIMES, ">i2", ">f4", ">c16", ">M8[s]"])
def test_dtypes_are_those_of_numpy(dtype, op):
    op = Op.of(op)
    one = of_dtype(dtype)
    assert streamable(one, op)
    try:
        expected = by_numpy(op, np.ones((2, 1), dtype)).dtype
    except TypeError:
        with pytest.raises(OperandError) as caught:
            accumulators(one, op)
        for word in op.name, str(np.dtype(dtype)):
            assert word in str(caught.value)
        with pytest.raises(OperandError):
            results(one, op)
        return
    assert results(one, op) == (expected,) and expected.isnative
    (accumulator,) = accumulators(one, op)
    if op.mean:
        total = np.add.reduce(np.ones((2, 1), dtype), axis=0).dtype
        small = {"i": np.float64, "u": np.float64, "e": np.float32}
        assert accumulator == small.get(np.dtype(dtype).char, small.get(total.kind, total))
    else:
        assert accumulator == expected
    block = np.ones(1, accumulator)
    op.combine(block, block, out=block)
    assert op.ufunc(block, block).dtype == accumulator


def test_dtypes_by_hand():
    def table(op):
        taken = signature([np.ones(1, d) for d in ("?", "i4", "u2", "f2", ">f4", "c8")])
        return ["".join(d.str[1:] for d in f(taken, Op.of(op))) for f in (accumulators, results)]

    assert table("sum") == ["i8i8u8f2f4c8"] * 2
    assert table("max") == ["b1i4u2f2f4c8"] * 2
    assert table("mean") == ["f8f8f8f4f4c8", "f8f8f8f2f4c8"]
    assert table(np.logical_or) == ["b1b1b1b1b1b1"] * 2


@pytest.mark.parametrize(
    "op, value",
    [
        (np.less, np.ones(2)),
        (np.ldexp, np.ones(2, "i1")),
        (np.bitwise_or, 1.0),
        (np.hypot, 1j),
        ("sum", np.datetime64(1, "s")),
        ("mean", np.datetime64(1, "s")),
        ("sum", "text"),
        ("mean", 10**30),
        ("sum", np.zeros(2, "i4,i4")),
    ],
)
def test_what_an_operation_cannot_reduce(op, value):
    op = Op.of(op)
    with pytest.raises(OperandError, match=rf"{op.name} cannot reduce \['a'\]\[0\] of dtype"):
        accumulators(signature({"a": [value]}), op)


# Whole objects


def joined(a, b):
    return f"{a}{b}"


def test_what_streams():
    value = {"a": np.ones(2), "b": [1, 2.5, np.datetime64(1, "s")]}
    for op in OPS:
        assert streamable(signature(value), Op.of(op))
        for other in "text", b"bytes", 10**30, np.array([1, None]), np.zeros(2, "i4,i4"):
            assert not streamable(signature([value, other]), Op.of(op))
    assert not streamable(signature(value), Op.of(joined))
    assert not streamable(signature(value), Op.of(np.frompyfunc(joined, 2, 1)))


def test_whole_values_by_a_callable():
    assert Op.of(joined).whole({1}, "x") == "{1}x"


def test_whole_values_by_a_ufunc():
    a = {"n": 10**30, "f": Fraction(1, 3), "o": np.array([[1, 2**80]]), "x": np.ones(2, "i4")}
    b = {"n": 5, "f": Fraction(1, 6), "o": np.array([[1, 2.5]], object), "x": np.ones(2, "i1")}
    before = copy.deepcopy((a, b))
    total = Op.of("sum").whole(a, b)
    assert total["n"] == 10**30 + 5 and type(total["n"]) is int
    assert total["f"] == Fraction(1, 2)
    assert total["o"].tolist() == [[2, 2**80 + 2.5]] and total["o"].dtype == object
    assert total["x"].dtype == np.int64, "what streams is as if it did"
    assert Op.of("max").whole(a, b)["n"] == 10**30
    assert same(before[0], a) and same(before[1], b)
    again = Op.of("sum").whole(total, b)
    assert again["n"] == 10**30 + 10 and again["x"].tolist() == [3, 3]


def test_whole_values_by_a_ufunc_of_python():
    op = Op.of(np.frompyfunc(joined, 2, 1))
    assert op.whole([1, np.array([1, 2])], [2, np.array([3, 4])])[0] == "12"


def test_whole_values_that_do_not_go_together():
    with pytest.raises(OperandError, match="2 items in the first and 1 in"):
        Op.of("sum").whole([10**30, 2], [10**30])
    with pytest.raises(OperandError, match=r"hypot cannot reduce \[0\] of dtype object"):
        Op.of(np.hypot).whole([10**30], [10**30])
    with pytest.raises(OperandError, match="min cannot reduce the value of dtype"):
        Op.of("min").whole(b"a", b"b")
    with pytest.raises(OperandError, match="mean"):
        Op.of("mean").whole(10**30, 10**30)


# Memory


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0),
        np.arange(12.0).reshape(3, 4),
        np.arange(12.0)[2:9],
        np.arange(12.0).reshape(12, 1),
        np.float64(3),
        np.array(3.0),
        np.empty((3, 0)),
        np.frombuffer(np.arange(3.0).tobytes()),
    ],
)
def test_what_is_not_copied(array):
    array = np.asarray(array)
    (flat,) = prepare([array], [np.dtype(float)])
    assert flat.ndim == 1 and flat.flags.c_contiguous
    assert array.size == 0 or np.shares_memory(flat, array)
    assert flat.flags.writeable == array.flags.writeable
    assert flat.tolist() == array.ravel().tolist()
    assert as_bytes(flat).nbytes == array.nbytes


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0)[::2],
        np.arange(12.0)[::-1],
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(12.0).reshape(3, 4)[:, 1:3],
        np.broadcast_to(np.float64(3), (2, 3)),
        np.arange(12, dtype=">f8"),
        np.arange(12, dtype="f4"),
        np.arange(12, dtype=">i2").reshape(3, 4).T,
        np.array(True),
        np.empty((0, 2), ">i4"),
    ],
)
def test_what_is_copied(array):
    array.flags.writeable = False
    before = array.tolist()
    (flat,) = prepare([array], [np.dtype(float)])
    assert flat.ndim == 1 and flat.flags.c_contiguous and flat.dtype.isnative
    assert flat.dtype == float and flat.flags.writeable
    assert not np.shares_memory(flat, array)
    assert flat.tolist() == array.ravel().tolist()
    flat[:] = 7
    assert array.tolist() == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", NUMERIC)
def test_any_number_is_true_or_false(dtype):
    (flat,) = prepare([np.array([0, 1]).astype(dtype)], [np.dtype(bool)])
    assert flat.tolist() == [False, True]


@pytest.mark.parametrize("dtype", [*NUMERIC, *TIMES, "U3", "i4,f8"])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_bytes(dtype, length):
    array = np.zeros(length, dtype)
    view = as_bytes(array)
    assert (view.format, view.ndim, view.nbytes, view.itemsize) == ("B", 1, array.nbytes, 1)
    assert not view.readonly and view.c_contiguous
    if length:
        view[:] = np.ones(length, dtype).tobytes()
        assert (array == np.ones(length, dtype)).all()
    array.flags.writeable = False
    assert as_bytes(array).readonly


def test_bytes_of_one_element_of_many():
    (flat,) = prepare([np.arange(10.0)[::5][:1]], [np.dtype(float)])
    assert as_bytes(flat).nbytes == 8


# All of it, against NumPy


def stackable(dtypes):
    """Some arrays of one shape, laid out in all ways, of dtypes that go together."""
    return hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4).flatmap(
        lambda shape: st.lists(
            st.builds(
                lambda array, order: order(array),
                dtypes.flatmap(lambda dtype: hnp.arrays(dtype, shape)),
                st.sampled_from([np.ascontiguousarray, np.asfortranarray, spread]),
            ).map(lambda array: array.reshape(shape)),
            min_size=1,
            max_size=5,
        )
    )


def spread(array):
    """The same values with gaps between them."""
    return np.repeat(array[..., None], 2, axis=-1)[..., 0]


INTEGERS = [st.sampled_from(codes) for codes in (["?"], ["i1", ">i2", "<i4", "i8"], ["u1", ">u8"])]
FLOATS = [st.sampled_from(codes) for codes in (["f4", ">f8", "f2"], ["F", ">c16"])]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(deadline=None)
@given(
    operands=st.one_of(*map(stackable, INTEGERS)),
    op=st.sampled_from(["sum", "prod", "min", "max", np.logical_and, np.bitwise_or]),
)
def test_integers_are_reduced_as_by_numpy(operands, op):
    op = Op.of(op)
    result = streamed(operands, op)
    expected = np.asarray(by_numpy(op, np.stack(operands)))
    assert result.dtype == expected.dtype and result.shape == expected.shape
    assert (result == expected).all(), "to the bit, overflow and all"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(deadline=None)
@given(operands=st.one_of(*map(stackable, FLOATS)), op=st.sampled_from(["min", "max", "logical"]))
def test_floats_are_compared_as_by_numpy(operands, op):
    op = Op.of(np.logical_and if op == "logical" else op)
    result = streamed(operands, op)
    expected = np.asarray(by_numpy(op, np.stack(operands)))
    assert result.dtype == expected.dtype and result.shape == expected.shape
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("op", ["sum", "prod", "mean", np.hypot])
@pytest.mark.parametrize("dtype", ["?", "i2", "u8", "f2", "f4", ">f8", "g", "F", ">c16", "m8[s]"])
def test_sums_are_those_of_numpy(dtype, op):
    op = Op.of(op)
    rng = np.random.default_rng(0)
    operands = [rng.integers(0, 9, (3, 5)).astype(dtype) for _ in range(6)]
    try:
        expected = by_numpy(op, np.stack(operands))
    except TypeError:
        with pytest.raises(OperandError):
            streamed(operands, op)
        return
    result = streamed(operands, op)
    assert result.dtype == expected.dtype
    if op.ufunc is np.hypot:  # rounds
        np.testing.assert_allclose(result, expected, rtol=1e-2 if dtype in ("?", "f2") else 1e-6)
    else:
        np.testing.assert_array_equal(result, expected)


def test_nan_and_overflow():
    a, b = np.array([1, np.nan, 3]), np.array([np.nan, 2, 5])
    for op in "min", "max", "sum", "mean":
        assert np.isnan(streamed([a, b], Op.of(op))).tolist() == [True, True, False]
    huge = np.array([2**63 - 1])
    assert streamed([huge, np.array([1])], Op.of("sum")).tolist() == [-(2**63)]
    assert streamed([np.array([200], "u1")] * 2, Op.of("sum")).tolist() == [400]
    nat = np.array(["NaT", 3], "m8[s]")
    assert np.isnat(streamed([nat, nat], Op.of("max"))).tolist() == [True, False]


def test_structures_are_reduced_leaf_by_leaf():
    def operand(i):
        return {"n": i, "w": [np.full((2, 2), i, "f4"), Point(i / 2, None)], "e": np.empty((0, 3))}

    total = streamed([operand(i) for i in range(5)], Op.of("sum"))
    assert total["n"] == 10 and type(total["n"]) is np.int64
    assert (total["w"][0] == 10).all() and total["w"][0].dtype == np.float32
    assert total["w"][1] == Point(5, None) and total["e"].shape == (0, 3)


# Torch


def test_torch_is_not_loaded_for_arrays():
    script = """
import sys, numpy as np
from dask_hoplite.collectives.operands import flatten, unflatten
unflatten(*flatten({"a": np.ones(3), "b": 2}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_tensors_are_viewed():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    taken, (part,) = flatten([tensor])
    assert taken.leaves[0] == Leaf("tensor", (2, 3), np.dtype("f4"))
    assert part.ctypes.data == tensor.data_ptr()
    flat = np.zeros(6, "f4")
    (again,) = unflatten(taken, [flat])
    assert isinstance(again, torch.Tensor) and again.shape == (2, 3)
    assert again.data_ptr() == flat.ctypes.data
    parameter = torch.nn.Parameter(torch.ones(()))
    assert signature(parameter).leaves[0].shape == ()
    assert pickle.loads(pickle.dumps(taken)) == taken


def test_tensors_are_reduced():
    torch = pytest.importorskip("torch")
    total = streamed(
        [{"w": torch.full((2, 2), i).T, "b": torch.ones(())} for i in range(3)], Op.of("sum")
    )
    assert total["w"].dtype == torch.int64 and total["w"].tolist() == [[3, 3], [3, 3]]
    assert total["b"].shape == () and total["b"] == 3
    for dtype in torch.bool, torch.uint8, torch.float16, torch.complex64:
        for op in "sum", "max", "mean":
            mine = [torch.ones(3, dtype=dtype)] * 2
            expected = by_numpy(Op.of(op), np.stack([x.numpy() for x in mine]))
            assert streamed(mine, Op.of(op)).numpy().dtype == expected.dtype


def test_conjugates_are_resolved():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1 + 2j, 3j]).conj()
    assert flatten(tensor)[1][0].tolist() == [1 - 2j, -3j]
    assert flatten(tensor.imag)[1][0].tolist() == [-2, -3]


def test_tensors_that_numpy_cannot_view():
    torch = pytest.importorskip("torch")
    for tensor, what in [
        (torch.ones(2, dtype=torch.bfloat16), "bfloat16"),
        (torch.ones(2).to_sparse(), "make it dense"),
        (torch.ones(2, device="meta"), "device meta"),
    ]:
        with pytest.raises(OperandError, match=rf"^\['w'\] is a Torch tensor.*{what}"):
            flatten({"w": tensor})


def test_tensors_do_not_meet_arrays():
    torch = pytest.importorskip("torch")
    with pytest.raises(OperandError, match="a Torch tensor in the first and a NumPy array in"):
        check("a", signature(torch.ones(2)), "b", signature(np.ones(2)))
