"""Hostile processes write in mailboxes: a server serves on, and one that does not is found out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aiops.client.sync.compiled_exchange import takes_mailboxes
from aiops.compiled.loading import COMPILED
from aiops.errors import UsageError
from aiops.lab.processes import PipedProcess
from aiops.lab.torture import hostile_neighbour, hostile_poster, mailbox_trial, seed_campaign
from aiops.lab.torture.attack_trial import AttackResult
from aiops.lab.torture.hostile_poster import KINDS_OF_HARM, post_on
from aiops.lab.torture.mailbox_trial import MODELS, MailboxTrial, draw_mailboxes
from aiops.lab.torture.said import unraisable_noted
from aiops.lab.torture.seed_campaign import SeedCampaign
from aiops.net.mailboxes import MailboxTable
from aiops.serving.peer import Peer
from aiops.store.snapshots import Lease
from aiops.wire.shared_payloads import SharedPayloads
from tests.seeds import by_turns, seeds

PEERS = 6

pytestmark = pytest.mark.skipif(not takes_mailboxes(), reason="there are no mailboxes here")


@pytest.fixture(autouse=True)
def children_begun() -> None:
    """Have the tests' processes of Python forked before descriptors are counted."""
    with PipedProcess("a child", post_on):
        pass


def carried_out(seed: int, variant: str, *, state: bool = False) -> AttackResult:
    """Return the result of a trial with one hostile process."""
    plan = replace(draw_mailboxes(seed, (variant,)), peers=PEERS, together=1, state=state)
    return MailboxTrial(plan).run()


@pytest.mark.parametrize(("variant", "seed"), by_turns([*MODELS], seeds(2)))
def test_a_server_serves_on(variant: str, seed: int) -> None:
    """`AIOPS_SEEDS=100 pytest tests/lab/torture/test_mailboxes.py` does it for long."""
    result = carried_out(seed, variant, state=seed % 2 == 1)
    assert result.wrong == []
    assert result.sessions == PEERS
    assert set(result.acts) == set(KINDS_OF_HARM)
    assert result.compiled > result.acts.total() // 4


def leaves_leases(patch: pytest.MonkeyPatch) -> None:
    """A client that is gone keeps what it was lent."""
    patch.setattr(Peer, "lost", lambda self: None)


def gives_back_all(patch: pytest.MonkeyPatch) -> None:
    """What is lent may be written to at once."""
    patch.setattr(Lease, "lend", Lease.release)


def keeps_mailboxes(patch: pytest.MonkeyPatch) -> None:
    """A mailbox that is announced twice is mapped for ever."""
    kept, taken = list[Any](), SharedPayloads.taken_mailbox

    def take(self: SharedPayloads) -> Any:
        found = taken(self)
        kept.append(found)
        return found

    patch.setattr(SharedPayloads, "taken_mailbox", take)


def opens_none(patch: pytest.MonkeyPatch) -> None:
    """No mailbox is opened for a hostile process."""
    opens = MailboxTable.open

    def open_for(self: MailboxTable, link: Any, lender: Any) -> None:
        admitted = lender.handshake.admitted
        if admitted is not None and admitted.hello.name == "honest":
            opens(self, link, lender)

    patch.setattr(MailboxTable, "open", open_for)
    patch.setattr("aiops.lab.torture.mailbox_trial._OPENS", 0.2)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (leaves_leases, "versions are alive"),
        (gives_back_all, "while it was lent"),
        (keeps_mailboxes, "leave something"),
        (opens_none, "hostile connections had a mailbox"),
    ],
)
def test_a_server_that_breaks_is_found_out(
    broken: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiops.lab.torture.mailbox_trial._SETTLES", 10.0)
    broken(monkeypatch)
    result = carried_out(1, "lent")
    assert any(said in wrong for wrong in result.wrong), result.wrong


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (COMPILED, "0", "no mailboxes here"),
        ("AIOPS_NO_SHM", "1", "no mailboxes here"),
        ("AIOPS_TOKEN", "a" * 16, "AIOPS_TOKEN is set"),
    ],
)
def test_where_it_cannot_be_nothing_begins(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    campaign = SeedCampaign("mailboxes", 10, None, 0, 2, tuple(MODELS))
    with pytest.raises(UsageError, match=said):
        campaign.run()


def test_other_kinds_need_no_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system of seals is asked for when memory is made, and not before."""
    import fcntl

    for name in ("F_ADD_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"):
        monkeypatch.delattr(fcntl, name)
    for module in (hostile_neighbour, hostile_poster, mailbox_trial, seed_campaign):
        spec = importlib.util.find_spec(module.__name__)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_what_nobody_hears_is_noted() -> None:
    class Ends:
        def __del__(self) -> None:
            raise ValueError("at its end")

    wrong, before = list[str](), sys.unraisablehook
    with unraisable_noted(wrong):
        Ends()
    assert wrong == ["unheard: ValueError: at its end"]
    assert sys.unraisablehook is before
