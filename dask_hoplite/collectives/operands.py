"""Operands of a reduction: what they look like, and how two of them become one.

An operand is a NumPy array, a number, a Torch tensor in the memory of the CPU, or dicts, lists,
tuples and named tuples of those, as deep as one likes. Operands that are reduced together have the
same structure, and each leaf of it the same shape and kind of numbers in all of them.

The result is that of NumPy's ``ufunc.reduce`` over the stacked operands, leaf by leaf:

- Sums and products of integers that are smaller than ``int64`` (and of booleans) are formed in
  ``int64``, those of unsigned ones in ``uint64``. What overflows there wraps around, silently.
- NaN goes through to the result, also that of "min" and "max", and so does NaT.
- Operands of one kind but different sizes, such as ``float32`` and ``float64``, are brought to
  their common type first, in native byte order. Those of different kinds, such as ``int64`` and
  ``float64``, are refused: it is more often a mistake than meant.
- "mean" of integers is formed in ``float64``, that of ``float16`` in ``float32``, as by
  :func:`numpy.mean`.
- Floating-point operands are combined in whatever order they come, so results may differ in their
  last bits. For the same reason an operation must be associative and commutative to make sense.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Number
from typing import Any

import numpy as np

from dask_hoplite.exceptions import HopliteError

#: Kinds of dtypes whose values are plain bytes that ufuncs work on, block by block
STREAMABLE = frozenset("biufcmM")

#: Dicts that a plain dict may stand for in the result
_DICTS = (dict, OrderedDict, defaultdict)

_UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "mean": np.add,
}

_ALLOWED = (
    f"An operation is one of {', '.join(map(repr, _UFUNCS))}, a NumPy ufunc of two arguments and "
    "one result such as np.hypot, or a callable that makes one value of two"
)

#: Callables that would take the second operand for something else, and what is meant by them
_MISTAKEN = {
    builtins.sum: "sum",
    np.sum: "sum",
    np.prod: "prod",
    np.min: "min",
    np.max: "max",
    np.mean: "mean",
}


class OperandError(HopliteError, ValueError):
    """Operands do not go together, or not with the operation."""


# Operations


@dataclass(frozen=True, slots=True)
class Op:
    """What combines two operands. Made by :meth:`of`.

    Parameters
    ----------
    name : str
        For people.
    ufunc : numpy.ufunc, optional
        What combines arrays, element by element.
    function : callable, optional
        What combines whole values, if there is no ufunc.
    mean : bool
        Whether the result is to be divided by the number of operands.
    """

    name: str
    ufunc: np.ufunc | None = None
    function: Callable[[Any, Any], Any] | None = None
    mean: bool = False

    @classmethod
    def of(cls, op: str | np.ufunc | Callable[[Any, Any], Any] | Op) -> Op:
        """What the user means.

        Raises
        ------
        ValueError
            If no operation has this name.
        TypeError
            If it is nothing that combines two values.
        """
        if isinstance(op, Op):
            return op
        if isinstance(op, str):
            if op not in _UFUNCS:
                raise ValueError(f"There is no operation {op!r}. {_ALLOWED}.")
            return cls(op, ufunc=_UFUNCS[op], mean=op == "mean")
        if isinstance(op, np.ufunc):
            if (op.nin, op.nout) != (2, 1):
                takes = f"takes {op.nin} and gives {op.nout}"
                raise TypeError(f"The ufunc {op.__name__} {takes}. {_ALLOWED}.")
            if op.signature is not None:
                raise TypeError(f"The ufunc {op.__name__} is not elementwise. {_ALLOWED}.")
            return cls(op.__name__, ufunc=op)
        if not callable(op):
            raise TypeError(f"{op!r} is no operation. {_ALLOWED}.")
        for mistaken, name in _MISTAKEN.items():
            if op is mistaken:
                hint = f"is of one array, not of two values; {name!r} is meant"
                raise TypeError(f"{op!r} {hint}. {_ALLOWED}.")
        return cls(getattr(op, "__name__", None) or repr(op), function=op)

    def combine(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """Combine two equally long blocks of the accumulator's dtype.

        Parameters
        ----------
        a, b : numpy.ndarray
            What is combined.
        out : numpy.ndarray
            Where the result goes; may be one of them.
        """
        if self.ufunc is None:
            raise TypeError(f"{self.name} combines whole values, not blocks")
        self.ufunc(a, b, out=out)

    def finish(self, block: np.ndarray, count: int) -> None:
        """Make the result of what was accumulated over ``count`` operands, in place."""
        if self.mean:
            # As np.mean does it. Python's number spares floats the way through float64.
            divisor = count if block.dtype.kind == "f" else np.intp(count)
            np.true_divide(block, divisor, out=block, casting="unsafe")

    def whole(self, a: Any, b: Any) -> Any:
        """Combine two values that do not stream. Changes neither, if the callable does not.

        Raises
        ------
        OperandError
            If they do not go together, or the ufunc cannot combine them.
        """
        if self.function is not None:
            return self.function(a, b)
        if self.ufunc is None or self.mean:
            raise OperandError(f"{self.name} needs numbers that NumPy has a dtype for")
        (first, ours), (second, theirs) = flatten(a), flatten(b)
        if what := first.differs(second):
            raise OperandError(f"Operands of {self.name} do not match: {what}")
        signature = promote(first, second)
        combined = []
        leaves = zip(signature.paths, signature.leaves, ours, theirs, strict=True)
        for path, leaf, x, y in leaves:
            if leaf.dtype.kind in STREAMABLE and not _makes_objects(self.ufunc):
                # As where they stream, lest other leaves decide about the result of this one
                dtype = _accumulator(path, leaf, self)
                x, y = prepare([x, y], [dtype, dtype])
            try:
                # A ufunc makes no array but a scalar of what has no dimension
                combined.append(self.ufunc(x.reshape(-1), y.reshape(-1)))
            except (TypeError, AttributeError) as error:  # of objects that lack the method
                raise _cannot(self, leaf.dtype, path) from error
        return unflatten(signature, combined)


# Structures


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array in a structure.

    Parameters
    ----------
    kind : str
        What it is to the user: "array", "scalar" (of Python or NumPy) or "tensor" (of Torch).
    shape : tuple of int
    dtype : numpy.dtype
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Branch:
    """A dict, list, tuple or named tuple in a structure.

    Parameters
    ----------
    type : type
        What it is.
    keys : tuple
        Keys of a dict in the order of the children; names of a named tuple's fields.
    children : tuple
        What is in it: branches, leaves and None.
    """

    type: type
    keys: tuple[Any, ...]
    children: tuple[Tree, ...]

    @property
    def steps(self) -> list[str]:
        """How each child is reached, in the words of Python."""
        if self.type is dict:
            return [f"[{key!r}]" for key in self.keys]
        return [f".{key}" for key in self.keys] or [f"[{i}]" for i in range(len(self.children))]

    def same_type(self, other: Branch) -> bool:
        """Whether both are the same thing.

        A named tuple's class need not be the same object, as it may have come in a pickle.
        """
        if self.type in (dict, list, tuple) or other.type in (dict, list, tuple):
            return self.type is other.type
        return _name(self.type) == _name(other.type)


Tree = Branch | Leaf | None


@dataclass(frozen=True, slots=True)
class Signature:
    """The structure of a value, and the shape and dtype of each of its leaves.

    Equal are those that agree in all; for what can be reduced together, see :meth:`differs`.

    Parameters
    ----------
    tree : Branch, Leaf or None
    """

    tree: Tree

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves in the order of the arrays of :func:`flatten`."""
        return tuple(leaf for _, leaf in _walk(self.tree, ""))

    @property
    def paths(self) -> tuple[str, ...]:
        """Where each leaf is, such as ``['layers'][0]``. Empty if there is nothing around it."""
        return tuple(path for path, _ in _walk(self.tree, ""))

    def block(self, number: int, blocks: int) -> Signature:
        """That of one of so many blocks, along the first axis of each leaf.

        Raises
        ------
        OperandError
            If a leaf has no axis.
        """
        return Signature(_block(self.tree, "", number, blocks))

    def differs(self, other: Signature) -> str | None:
        """What keeps the two from being reduced together, in words. None if nothing does.

        Sizes and byte orders of numbers may differ, and a scalar may meet an array of no
        dimension.
        """
        return _differs(self.tree, other.tree, "")


def bounds(size: int, blocks: int) -> list[tuple[int, int]]:
    """Where blocks begin and end, as :func:`numpy.array_split` makes them."""
    each, more = divmod(size, blocks)
    starts = [number * each + min(number, more) for number in range(blocks + 1)]
    return list(pairwise(starts))


def block_of(value: Any, number: int, blocks: int) -> Any:
    """One of so many blocks of a value, along the first axis of each leaf. Nothing is copied.

    Raises
    ------
    OperandError
        If it has a leaf without an axis, or that is no array.
    """
    signature, arrays = flatten(value)
    cut = signature.block(number, blocks)
    pieces = [array[slice(*bounds(len(array), blocks)[number])] for array in arrays]
    return unflatten(cut, pieces)


def weigh(value: Any, weight: float) -> Any:
    """A value, multiplied by a number: a new one, as NumPy makes it of a Python float.

    Raises
    ------
    OperandError
        If it has a leaf that is no number, or none that NumPy has a dtype for.
    """
    signature, arrays = flatten(value)
    weighed = []
    for path, array in zip(signature.paths, arrays, strict=True):
        if array.dtype.kind not in "biufc":
            raise OperandError(f"{_at(path)} of dtype {array.dtype} cannot have a weight")
        # Said, since before NumPy 2 it depends on whether there are dimensions
        dtype = np.dtype(float) if array.dtype.kind in "biu" else array.dtype.newbyteorder("=")
        with np.errstate(all="ignore"):
            weighed.append(np.multiply(array, weight, dtype=dtype))
    return unflatten(signature, weighed)


def _block(tree: Tree, path: str, number: int, blocks: int) -> Tree:
    if isinstance(tree, Branch):
        pairs = zip(tree.steps, tree.children, strict=True)
        children = [_block(child, path + step, number, blocks) for step, child in pairs]
        return Branch(tree.type, tree.keys, tuple(children))
    if isinstance(tree, Leaf):
        if not tree.shape:
            raise OperandError(f"{_at(path)} has no axis along which it could be cut into blocks")
        begin, end = bounds(tree.shape[0], blocks)[number]
        return Leaf(tree.kind, (end - begin, *tree.shape[1:]), tree.dtype)
    return None


def _name(type: type) -> str:
    module, name = type.__module__, type.__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _at(path: str) -> str:
    return path or "the value"


def _walk(tree: Tree, path: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(tree, Leaf):
        yield path, tree
    elif isinstance(tree, Branch):
        for step, child in zip(tree.steps, tree.children, strict=True):
            yield from _walk(child, path + step)


def _differs(a: Tree, b: Tree, path: str) -> str | None:
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        return _leaves_differ(a, b, path)
    if a is None and b is None:
        return None
    if not (isinstance(a, Branch) and isinstance(b, Branch) and a.same_type(b)):
        return f"{_at(path)} is {_noun(a)} in the first and {_noun(b)} in the second"
    if a.keys != b.keys:
        return f"{_at(path)} has {_keys(a, b)} in the first and {_keys(b, a)} in the second"
    if len(a.children) != len(b.children):
        ours, theirs = len(a.children), len(b.children)
        return f"{_at(path)} has {ours} items in the first and {theirs} in the second"
    for step, x, y in zip(a.steps, a.children, b.children, strict=True):
        if what := _differs(x, y, path + step):
            return what
    return None


def _noun(tree: Tree) -> str:
    if tree is None:
        return "None"
    if isinstance(tree, Branch):
        return f"a {_name(tree.type)}"
    return {"array": "a NumPy array", "scalar": "a scalar", "tensor": "a Torch tensor"}[tree.kind]


def _keys(a: Branch, b: Branch) -> str:
    """Those keys of a that b has not; all, if that does not tell them apart."""
    keys = [key for key in a.keys if key not in b.keys]
    if not keys and set(a.keys) != set(b.keys):
        return "no other keys"
    keys = keys or list(a.keys)
    more = ", ..." if len(keys) > 5 else ""
    return f"the key{'s' if len(keys) > 1 else ''} {', '.join(map(repr, keys[:5]))}{more}"


def _leaves_differ(a: Leaf, b: Leaf, path: str) -> str | None:
    if (a.kind == "tensor") != (b.kind == "tensor"):
        return f"{_at(path)} is {_noun(a)} in the first and {_noun(b)} in the second"
    if a.shape != b.shape:
        return f"{_at(path)} is of shape {a.shape} in the first and {b.shape} in the second"
    kinds = {a.dtype.kind, b.dtype.kind}
    # Python's integers are objects beyond 64 bits, so the same sum may have both
    if (len(kinds) == 1 or "O" in kinds) and _common(a.dtype, b.dtype) is not None:
        return None
    return f"{_at(path)} is of dtype {a.dtype} in the first and {b.dtype} in the second"


def _common(a: np.dtype, b: np.dtype) -> np.dtype | None:
    try:
        return np.result_type(a, b).newbyteorder("=")
    except TypeError:  # timedeltas in months and in days, or records
        return None


def flatten(value: Any) -> tuple[Signature, list[np.ndarray]]:
    """Take a value apart.

    Parameters
    ----------
    value : object
        Arrays, numbers, Torch tensors, or dicts, lists, tuples, named tuples of those or of None.
        Keys of dicts are sorted (by name of type and repr), as two dicts that were filled in
        different orders are the same.

    Returns
    -------
    signature : Signature
    arrays : list of numpy.ndarray
        The leaves. They share the memory of the value wherever NumPy can view it.

    Raises
    ------
    OperandError
        If something in it is none of these.
    """
    arrays: list[np.ndarray] = []
    try:
        return Signature(_tree(value, "", arrays)), arrays
    except RecursionError:
        raise OperandError("The value is nested too deeply, or holds itself") from None


def _tree(value: Any, path: str, arrays: list[np.ndarray]) -> Tree:
    if value is None:
        return None
    branch = _branch(value)
    if branch is None:
        what, array = _leaf(value, path)
        arrays.append(array)
        return Leaf(what, array.shape, array.dtype)
    kind, keys, items = branch
    steps = Branch(kind, keys, (None,) * len(items)).steps
    children = [_tree(x, path + step, arrays) for x, step in zip(items, steps, strict=True)]
    return Branch(kind, keys, tuple(children))


def _branch(value: Any) -> tuple[type, tuple[Any, ...], Sequence[Any]] | None:
    """Type, keys and items of what has items."""
    kind = type(value)
    if kind in _DICTS:
        keys = tuple(sorted(value, key=lambda key: (_name(type(key)), repr(key))))
        return dict, keys, [value[key] for key in keys]
    if kind in (list, tuple):
        return kind, (), value
    if isinstance(value, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        return kind, tuple(kind._fields), value
    return None


def _leaf(value: Any, path: str) -> tuple[str, np.ndarray]:
    """The kind of a leaf, and the array of it."""
    kind = type(value)
    if kind is np.ndarray:
        return "array", value
    if kind is np.memmap:
        return "array", value.view(np.ndarray)
    if isinstance(value, np.ndarray):
        why = "whose arithmetic is its own; give a plain array, such as np.asarray makes"
        raise OperandError(f"{_at(path)} is a {_name(kind)}, {why}")
    if isinstance(value, np.generic | str | bytes):
        return "scalar", np.asarray(value)
    if isinstance(value, Number):
        return "scalar", _number(value)
    torch = sys.modules.get("torch")  # who has a tensor has loaded it
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor", _tensor(torch, value, path)
    allowed = "arrays, numbers, Torch tensors, and dicts, lists and tuples of those"
    raise OperandError(f"{_at(path)} is a {_name(kind)}; operands are {allowed}")


def _number(value: Number) -> np.ndarray:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        array = np.empty((), object)  # NumPy takes some for uint64, depending on the value
        array[()] = value
        return array
    return np.asarray(value)


def _tensor(torch: Any, value: Any, path: str) -> np.ndarray:
    what = f"{_at(path)} is a Torch tensor of {value.dtype}"
    if value.device.type != "cpu":
        raise OperandError(f"{what} on the device {value.device}; move it to the CPU first")
    if value.layout != torch.strided:
        raise OperandError(f"{what} and layout {value.layout}; make it dense first")
    try:
        return value.detach().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise OperandError(f"{what}, which NumPy cannot view: {error}") from error


def unflatten(signature: Signature, arrays: Iterable[np.ndarray]) -> Any:
    """Put a value together. The inverse of :func:`flatten`.

    Parameters
    ----------
    signature : Signature
    arrays : iterable of numpy.ndarray
        One per leaf, of as many elements, in any shape and dtype. They are not copied: arrays and
        tensors of the value share their memory.

    Returns
    -------
    value : object
        Numbers are NumPy scalars, whatever they were, as ``ufunc.reduce`` makes them; Python's
        objects, such as large integers, stay what they are.
    """
    leaves = iter(list(zip(signature.leaves, signature.paths, arrays, strict=True)))
    return _value(signature.tree, leaves)


def _value(tree: Tree, leaves: Iterator[tuple[Leaf, str, np.ndarray]]) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Branch):
        children = [_value(child, leaves) for child in tree.children]
        if tree.type is dict:
            return dict(zip(tree.keys, children, strict=True))
        make: Any = tree.type
        # A named tuple takes its fields one by one
        return make._make(children) if hasattr(make, "_make") else make(children)
    leaf, path, array = next(leaves)
    array = array.reshape(leaf.shape)
    if leaf.kind == "scalar":
        return array[()]
    if leaf.kind == "tensor":
        import torch

        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise OperandError(f"{_at(path)} would be a Torch tensor: {error}") from error
    return array


# Operands together


def check(key_a: object, a: Signature, key_b: object, b: Signature) -> None:
    """See whether two operands can be reduced together.

    Raises
    ------
    OperandError
        If not; names both.
    """
    if what := a.differs(b):
        raise OperandError(f"{key_a!r} and {key_b!r} cannot be reduced together: {what}")


def promote(a: Signature, b: Signature) -> Signature:
    """The signature that two operands have in common, as that of their stack.

    Raises
    ------
    OperandError
        If they do not match.
    """
    if what := a.differs(b):
        raise OperandError(f"Operands do not match: {what}")
    return Signature(_promote(a.tree, b.tree))


def _promote(a: Tree, b: Tree) -> Tree:
    if isinstance(a, Branch) and isinstance(b, Branch):
        children = zip(a.children, b.children, strict=True)
        return Branch(a.type, a.keys, tuple(_promote(x, y) for x, y in children))
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        kind = "scalar" if b.kind == "scalar" else a.kind
        return Leaf(kind, a.shape, np.result_type(a.dtype, b.dtype).newbyteorder("="))
    return None


def streamable(signature: Signature, op: Op) -> bool:
    """Whether operands are combined block by block, and not as whole objects."""
    if op.ufunc is None or _makes_objects(op.ufunc):
        return False
    return all(leaf.dtype.kind in STREAMABLE for leaf in signature.leaves)


def _makes_objects(ufunc: np.ufunc) -> bool:
    """Whether it is of Python's objects only, like those of np.frompyfunc."""
    return all(loop.endswith("O") for loop in ufunc.types)


def accumulators(signature: Signature, op: Op) -> tuple[np.dtype, ...]:
    """In which dtype each leaf is accumulated: that of ``ufunc.reduce``, or of ``np.mean``.

    Raises
    ------
    OperandError
        If the operation cannot reduce a leaf.
    """
    leaves = zip(signature.paths, signature.leaves, strict=True)
    return tuple(_accumulator(path, leaf, op) for path, leaf in leaves)


def results(signature: Signature, op: Op) -> tuple[np.dtype, ...]:
    """Which dtype each leaf of the result has.

    Only that of a mean of ``float16`` is not what it is accumulated in; :func:`prepare` casts it.

    Raises
    ------
    OperandError
        If the operation cannot reduce a leaf.
    """
    half = np.dtype(np.float16)
    return tuple(
        half if op.mean and leaf.dtype == half else dtype
        for leaf, dtype in zip(signature.leaves, accumulators(signature, op), strict=True)
    )


def _accumulator(path: str, leaf: Leaf, op: Op) -> np.dtype:
    dtype = leaf.dtype
    if op.ufunc is None or dtype.kind not in STREAMABLE:
        raise _cannot(op, dtype, path)
    if op.mean and dtype.kind in "biu":
        return np.dtype(np.float64)
    if op.mean and dtype == np.float16:
        return np.dtype(np.float32)
    # What NumPy does depends on the ufunc and is not to be had without doing it
    try:
        with np.errstate(all="ignore"):
            some = op.ufunc.reduce(np.ones((2, 1), dtype), axis=0)
            again = op.ufunc(some, some)
    except (TypeError, ValueError) as error:
        raise _cannot(op, dtype, path) from error
    if again.dtype != some.dtype or some.dtype.kind not in STREAMABLE:
        raise _cannot(op, dtype, path)
    return some.dtype


def _cannot(op: Op, dtype: np.dtype, path: str) -> OperandError:
    return OperandError(f"{op.name} cannot reduce {_at(path)} of dtype {dtype}")


# Bytes


def prepare(arrays: Iterable[np.ndarray], dtypes: Iterable[np.dtype]) -> list[np.ndarray]:
    """Bring the arrays of an operand to one dimension, C order and given dtypes.

    Returns
    -------
    arrays : list of numpy.ndarray
        They share memory with those that are so already, so whoever did not make these must not
        write to them.
    """
    return [
        array.astype(dtype, order="C", casting="unsafe", subok=False, copy=False).reshape(-1)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array of one dimension, as bytes.

    Also of dtypes that have no buffer protocol, such as ``datetime64``.
    """
    octets: Any = array.view(np.uint8)  # mypy knows no buffers before Python 3.12
    return memoryview(octets)


def combine_here(op: Op, values: Sequence[Any]) -> Any:
    """Reduce values that are all in one place.

    Raises
    ------
    OperandError
        If they do not go together, or not with the operation.
    """
    if op.ufunc is None:
        return functools.reduce(op.whole, values)
    flat = [flatten(value) for value in values]
    signature = functools.reduce(promote, (signature for signature, _ in flat))
    if not streamable(signature, op):
        return functools.reduce(op.whole, values)
    dtypes = accumulators(signature, op)
    first, *others = (prepare(arrays, dtypes) for _, arrays in flat)
    sums = [array.copy() for array in first]
    with np.errstate(all="ignore"):
        for other in others:
            for into, array in zip(sums, other, strict=True):
                op.combine(into, array, into)
        for into in sums:
            op.finish(into, len(values))
    return unflatten(signature, prepare(sums, results(signature, op)))
