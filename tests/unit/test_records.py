"""What crosses Ray: every error pickles with its text, every record pickles and is frozen, slotted and plain."""

import dataclasses
import enum
import inspect
import pickle
import types
import typing

import pytest

from termrsi import errors, records

ERRORS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, BaseException)]
RECORDS = [r for _, r in inspect.getmembers(records, inspect.isclass) if dataclasses.is_dataclass(r)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("arguments", [("what",), ("what", "where"), ("what", "where", "valid"), ("what", "", "valid")])
def test_errors_pickle_with_their_text(kind: type[errors.TermrsiError], arguments: tuple[str, ...]) -> None:
    error = kind(*arguments)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.what, copy.where, copy.valid) == (error.what, error.where, error.valid)


def test_the_text_of_an_error() -> None:
    assert str(errors.TermrsiError("a")) == "a"
    assert str(errors.TermrsiError("a", "b")) == "b: a"
    assert str(errors.TermrsiError("a", "b", "c")) == "b: a; c"


def test_every_error_is_in_the_tree_and_the_tree_is_in_the_docstring() -> None:
    assert all(issubclass(e, errors.TermrsiError) for e in ERRORS)
    assert errors.__doc__ is not None
    assert all(e.__name__ in errors.__doc__ for e in ERRORS)


def sample(annotation: object) -> object:
    """A value of a field's type: never the default, never empty, so that nothing goes unpickled."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return (sample(arguments[0]), sample(arguments[0]))
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if origin in (typing.Union, types.UnionType):
        return sample(next(a for a in arguments if a is not type(None)))
    if annotation is object:
        return b"handle"
    assert isinstance(annotation, type), f"{annotation} is no plain type"
    if dataclasses.is_dataclass(annotation):
        return make(annotation)
    if issubclass(annotation, enum.Enum):
        return next(iter(annotation))
    return {bool: True, int: 7, float: 0.5, str: "é\n", bytes: b"\0\xff"}[annotation]


def make(record: type) -> object:
    types_of = typing.get_type_hints(record)
    names = [f.name for f in dataclasses.fields(record) if types_of[f.name] != tuple[record, ...]]  # one of its own kind: see below
    return record(**{name: sample(types_of[name]) for name in names})


def test_a_verdict_of_verdicts_pickles() -> None:
    whole = records.Verdict(False, 0.5, parts=(records.Verdict(True, 1.0), records.Verdict(False, 0.0)))
    assert pickle.loads(pickle.dumps(whole)) == whole


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
def test_records_pickle(record: type) -> None:
    value = make(record)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
def test_records_are_frozen_and_slotted(record: type) -> None:
    value = make(record)
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    assert not hasattr(value, "__dict__")


def test_there_are_records_at_all() -> None:
    assert {"TaskSpec", "Rollout", "ScoredRollout", "Sample", "Chunk", "Snapshot"} <= {r.__name__ for r in RECORDS}


def test_what_an_agent_may_know_of_a_task_has_no_verifier() -> None:
    names = {f.name for f in dataclasses.fields(records.TaskSpec)}
    assert not {n for n in names if any(secret in n for secret in ("verif", "test", "oracle", "solution", "check"))}
