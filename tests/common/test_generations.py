"""The numbers of generations: they rise, and those of copies are not the same."""

from hypothesis import given
from hypothesis import strategies as st

from aiops.common.generations import (
    DRAWN,
    before_term,
    generation_text,
    next_start,
    next_term,
    term,
)
from tests.strategies import DETERMINISTIC

DRAWS = st.integers(0, DRAWN - 1)


@DETERMINISTIC
@given(st.integers(0, 1 << 50), DRAWS, DRAWS)
def test_they_rise(generation: int, first: int, second: int) -> None:
    for later in (next_start, next_term):
        assert later(generation, first) > generation
        assert (later(generation, first) == later(generation, second)) == (first == second)


@DETERMINISTIC
@given(DRAWS, st.lists(DRAWS, max_size=50))
def test_a_promotion_is_later_than_starts_of_the_old_server(drawn: int, starts: list[int]) -> None:
    old = generation = next_start(next_term(0, 5), 7)
    for each in starts:
        old = next_start(old, each)
    assert next_term(generation, drawn) > old
    assert (term(old), term(next_term(generation, drawn))) == (1, 2)


def test_the_number_before_a_term() -> None:
    promoted = next_term(next_term(0, 5), 7)
    for generation in (promoted, next_start(promoted, DRAWN - 1)):
        assert (term(before_term(generation)), term(before_term(generation) + 1)) == (1, 2)
    assert before_term(next_start(0, 3)) == 0


def test_people_read_the_term_and_the_starts() -> None:
    first = next_start(0, 99)
    assert generation_text(next_start(first, 4)) == "2"
    promoted = next_term(first, 7)
    assert generation_text(promoted) == "1.0"
    assert generation_text(next_start(promoted, 1)) == "1.1"


def test_those_of_earlier_releases() -> None:
    assert generation_text(3) == "3"
    assert next_start(3, 0) > 3
    assert next_start((2 << 16) + 3, 5) > (2 << 16) + 3, "after two promotions"
