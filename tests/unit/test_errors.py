"""The tree of errors: its shape, its kinds, and that errors cross process boundaries."""

import pickle

import pytest

from minilm_cache import errors
from minilm_cache.errors import ErrorKind, MiniLMCacheError


def all_errors() -> list[type[MiniLMCacheError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, MiniLMCacheError) and value is not MiniLMCacheError]


def test_every_kind_belongs_to_exactly_one_error() -> None:
    kinds = [error.kind for error in all_errors()]

    assert sorted(kinds) == sorted(set(ErrorKind) - {ErrorKind.CODEC_RANGE})  # which is no longer raised


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_errors_survive_pickling(error: type[MiniLMCacheError]) -> None:
    copy = pickle.loads(pickle.dumps(error("what failed. What to do.")))  # noqa: S301 - of our own making

    assert type(copy) is error
    assert str(copy) == "what failed. What to do."
    assert copy.kind is error.kind


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidConfigError, ValueError),
        (errors.CacheNotFoundError, FileNotFoundError),
        (errors.VerificationError, errors.CacheCorruptError),
        (errors.StorageError, OSError),
        (errors.ShardBusyError, errors.StorageError),
        (errors.DivergedError, ArithmeticError),
    ],
)
def test_errors_are_also_what_callers_would_catch(
    error: type[MiniLMCacheError], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)


def test_exit_codes_are_those_of_the_command_line_contract() -> None:
    codes = {error.__name__: error.exit_code for error in all_errors()}

    assert {name: code for name, code in codes.items() if code != 1} == {
        "InvalidConfigError": 2,
        "VerificationError": 3,
        "InterruptedRunError": 130,
    }
