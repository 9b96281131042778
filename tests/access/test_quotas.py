"""Quotas of a token, with the time handed in."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from aiops.access.control import AccessControl
from aiops.access.quotas import DebtBucket, Meter, Quota
from aiops.access.tokens import AccessToken, TokenRole, TokenTable
from aiops.wire.token_keys import keys_of
from aiops.wire.traffic import Traffic
from tests.access.test_control import hello

TOKEN = AccessToken("t", TokenRole.TRAIN, keys_of("t"), None, None, 1000, 10)


@pytest.mark.parametrize("seed", range(5))
def test_a_sender_that_waits_as_told_keeps_to_the_rate(seed: int) -> None:
    random_, now, sent, largest = random.Random(seed), 100.0, 0, 0
    bucket = DebtBucket(1000, now)
    while now < 160:
        now += bucket.debt(now) + random_.choice((0.0, 0.0, 0.3, 2.0))
        amount = random_.randrange(1, 5000)
        bucket.spend(amount, now)
        sent, largest = sent + amount, max(largest, amount)
        assert sent <= 1000 * (now - 100) + 1000 + largest


def test_what_is_not_used_is_saved_up_for_a_second() -> None:
    bucket = DebtBucket(10, 0.0)
    bucket.spend(10, 0.0)
    assert bucket.debt(0.0) == 0
    bucket.spend(5, 0.0)
    assert bucket.debt(0.0) == pytest.approx(0.5)
    assert bucket.debt(0.5) == pytest.approx(0.0)
    bucket.spend(20, 1000.0)
    assert bucket.debt(1000.0) == pytest.approx(1.0)


def test_the_connections_of_a_token_share_its_quota() -> None:
    quota = Quota()
    quota.limit(TOKEN, 0.0)
    one, other = Traffic(), Traffic()
    one.received("hello", 5000, 0)  # before it was admitted: not counted
    meters = Meter(quota, one), Meter(quota, other)
    one.received("push", 100, 900)
    assert meters[0].read(0, 0.0) == 0
    other.sent("ack", 500, 500)  # both ways
    assert meters[1].read(0, 0.0) == pytest.approx(1.0)
    assert meters[0].read(0, 0.0) == pytest.approx(1.0)
    assert meters[1].read(22, 0.0) == pytest.approx(1.2), "the requests take longer than the bytes"


def test_the_time_of_a_wait_is_told() -> None:
    quota = Quota()
    quota.limit(TOKEN, 0.0)
    meter = Meter(quota, Traffic())
    meter.hold(1.0)
    assert (quota.waiting, quota.waited, meter.held(3.0)) == (1, 0.0, 2.0)
    meter.release(4.0)
    meter.release(5.0)
    assert (quota.waiting, quota.waited, meter.held(9.0)) == (0, 3.0, 3.0)


def test_a_changed_quota_counts_from_then_on() -> None:
    access = AccessControl(TokenTable([TOKEN]), lambda: 0.0)
    access.admit(1, hello("worker"), TOKEN.keys.id)
    traffic = Traffic()
    assert access.meter(1, traffic, 0.0) is not None
    assert access.meter(2, traffic, 0.0) is None, "it has not been admitted"
    free = replace(TOKEN, bytes_per_second=None, requests_per_second=None)
    access.change(TokenTable([free]))
    assert access.meter(1, traffic, 0.0) is None
    access.change(TokenTable([replace(free, requests_per_second=1)]))
    meter = access.meter(1, traffic, 0.0)
    assert meter is not None
    assert meter.read(3, 0.0) == pytest.approx(2.0)
