"""A run's generations: which of its versions survived, and which server may change it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from aiops.common.generations import generation_text
from aiops.model.parts import LARGEST
from aiops.state.directory import MAX_HISTORY, GenerationFile
from aiops.wire.handshake import generation_proof, proves_generation
from aiops.wire.messages import Hello, Welcome
from aiops.wire.standby_messages import Fence, StandbyHello

Claim: TypeAlias = Hello | StandbyHello | Fence
"""The messages that say which generation of a run has begun."""


class Generations:
    """The generations of one run, up to that of the server that has it now.

    Parameters
    ----------
    run
        The run's name.
    file
        Where its latest generations began.
    """

    def __init__(self, run: str, file: GenerationFile) -> None:
        self._run, self._file = run, file

    @property
    def proof(self) -> bytes:
        """Proves to servers of the run that its present generation has begun; empty if none has."""
        if not self._file.secret:
            return b""
        return generation_proof(self._file.secret, self._run, self._file.generation)

    def lead_proof(self, generation: int) -> bytes:
        """Return the proof for followers that this is their lead; empty: there is no secret yet."""
        if not self._file.secret:
            return b""
        return generation_proof(self._file.secret, self._run, generation, lead=True)

    def supersedes(self, claim: Claim) -> bool:
        """Return whether a later server of this run has begun, as the peer that says so has proof.

        Such a server counts the same versions on, so this one must change the run no more.
        """
        return self._later(claim) and self._proven(claim)

    def refusal(self, claim: Claim) -> str:
        """Return the reason for which a peer's claim is refused, as a sentence; empty: it is not.

        Without a right proof it is the peer's word alone that there is a later server.
        """
        if not self._later(claim) or self._proven(claim):
            return ""
        own, claimed = map(generation_text, (self._file.generation, claim.generation))
        return (
            f"this is generation {own} of run {self._run}, and generation {claimed} was claimed"
            " without a proof of it that is right: this server goes on; connect to the server of"
            " that generation, or begin with a new client"
        )

    def _later(self, claim: Claim) -> bool:
        return claim.run == self._run and claim.generation > self._file.generation

    def _proven(self, claim: Claim) -> bool:
        given = claim.generation_proof
        return proves_generation(given, self._file.secret, self._run, claim.generation)

    def restarted(self, hello: Hello) -> bool:
        """Return whether a client knows this run from an earlier generation."""
        return hello.run == self._run and hello.generation < self._file.generation

    def intact(self, known: int, tables: int) -> tuple[int, ...]:
        """Return up to which versions a client's are what they were.

        Parameters
        ----------
        known
            The generation by which they came.
        tables
            The number of the model's tables.

        Returns
        -------
        The versions of the model and of each table: the lowest at which a generation since has
        begun, `LARGEST` if there is none. Empty: all are lost, or that is not known any more.
        """
        starts = self._file.starts
        since = [start for start in starts if start.generation > known]
        if not since:
            return (LARGEST,) * (1 + tables)
        if len(since) == len(starts) == MAX_HISTORY:  # there may have been earlier ones since
            return ()
        # An update that was made twice has a version of its own each time, so the lowest counts.
        return tuple(map(min, zip(*(start.versions for start in since), strict=False)))

    def told(self, welcome: Welcome, hello: Hello, acks: str) -> Welcome:
        """Return a welcome that says what the client's versions and pushes have come to."""
        lost = max(0, hello.acked - welcome.last_seq) if self.restarted(hello) else 0
        known = hello.generation if hello.run == self._run else self._file.generation
        return replace(
            welcome,
            generation=self._file.generation,
            generation_proof=self.proof,
            intact=self.intact(known, len(welcome.tables)),
            acks=acks,
            rolled_back=lost,
        )
