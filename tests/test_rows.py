"""`each_row`: all rows run, and a test fails where one of them does."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row

ROWS = [1, 2, 3, 4]


def failure(test: Callable[..., Any], **fixtures: Any) -> BaseExceptionGroup:
    with pytest.raises(BaseExceptionGroup) as caught:
        test(**fixtures)
    return caught.value


def test_all_rows_run_and_those_that_fail_are_named() -> None:
    seen = []

    @each_row("number", ROWS)
    def test(number: int) -> None:
        seen.append(number)
        assert number % 2

    group = failure(test)
    assert seen == ROWS
    assert group.message == "2 of 4 rows failed: 2, 4"
    assert [error.__notes__ for error in group.exceptions] == [["in row 2"], ["in row 4"]]
    assert "assert" in str(group.exceptions[0])


def test_a_failure_of_pytest_is_one() -> None:
    @each_row("number", ROWS)
    def test(number: int) -> None:
        with pytest.raises(ZeroDivisionError):
            divmod(1, number - 3)

    assert failure(test).message == "3 of 4 rows failed: 1, 2, 4"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.fail.Exception("Timeout (>1.0s)")])
def test_what_ends_the_whole_test_ends_it(error: BaseException) -> None:
    seen = []

    @each_row("number", ROWS)
    def test(number: int) -> None:
        seen.append(number)
        raise error

    with pytest.raises(type(error)):
        test()
    assert seen == [1]


def test_several_make_a_product_and_rows_have_names() -> None:
    seen = []

    @each_row("a, b", [(1, "x"), pytest.param(2, b"\xff", id="own")])
    @each_row("c", [None, {}, test_a_failure_of_pytest_is_one])
    @each_row("d", [(5,)], ids=lambda value: f"d={value[0]}")
    def test(a: int, b: str, c: Any, d: Any) -> None:
        seen.append((a, b, d))
        raise ValueError

    names = ["None", "c1", test_a_failure_of_pytest_is_one.__name__]
    wanted = ", ".join(f"{ab}-{c}-d=5" for ab in ("1-x", "own") for c in names)
    assert failure(test).message == f"6 of 6 rows failed: {wanted}"
    assert seen == [(1, "x", (5,))] * 3 + [(2, b"\xff", (5,))] * 3


def test_rows_of_one_name_are_told_apart() -> None:
    @each_row("number", [1, 1])
    def test(number: int) -> None:
        raise ValueError

    assert failure(test).message == "2 of 2 rows failed: 1, 1#1"


def test_a_row_has_a_folder_and_changes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @each_row("number", ROWS)
    def test(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").touch()
        assert "AIOPS_TEST_NUMBER" not in os.environ
        monkeypatch.setenv("AIOPS_TEST_NUMBER", str(number))

    test(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert "AIOPS_TEST_NUMBER" not in os.environ
    assert len(list(tmp_path.iterdir())) == len(ROWS)


def test_coroutines_have_rows() -> None:
    @each_row("number", ROWS)
    async def test(number: int) -> None:
        await asyncio.sleep(0)
        assert number < 4

    with pytest.raises(BaseExceptionGroup, match="1 of 4 rows failed: 4"):
        asyncio.run(test())


class TestInAClass:
    seen = 0

    @each_row("number", ROWS)
    def test_each_row_has_its_own_instance(self, number: int) -> None:
        assert self.seen == 0
        self.seen = number

    @pytest.mark.parametrize("other", [1, 2])
    @each_row("number", ROWS)
    def test_it_is_a_test_for_each_of_other_parameters(self, number: int, other: int) -> None:
        assert number in ROWS
        assert other in (1, 2)


def test_skipped_rows() -> None:
    @each_row("number", ROWS)
    def test(number: int, least: int) -> None:
        if number > least:
            pytest.skip("so")
        assert number == 1

    test(least=1)
    assert failure(test, least=2).message == "1 of 4 rows failed: 2"
    with pytest.raises(pytest.skip.Exception, match="1: so; 2: so"):
        test(least=0)


def test_rows_are_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    @each_row("number", [1, 12, 3])
    def test(number: int) -> None:
        raise ValueError

    monkeypatch.setenv("AIOPS_TEST_ROWS", "1")
    assert failure(test).message == "2 of 2 rows failed: 1, 12"
    monkeypatch.setenv("AIOPS_TEST_ROWS", "4")
    with pytest.raises(pytest.skip.Exception):
        test()


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ("number", []),
        ("none", [1]),
        ("number, number", [(1, 2, 3)]),
        ("number", [pytest.param(1, marks=pytest.mark.slow)]),
    ],
)
def test_tables_that_cannot_be(names: str, values: list[Any]) -> None:
    with pytest.raises(AssertionError):

        @each_row(names, values)
        def test(number: int) -> None:
            pass


def test_a_row_reads_its_own_output_and_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    @each_row("number", ROWS)
    def test(
        number: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        print(number)
        logging.getLogger("rows").warning("%d", number)
        if number % 2:
            assert (capsys.readouterr().out, caplog.messages) == (f"{number}\n", [str(number)])

    test(capsys=capsys, caplog=caplog)
