"""Attack a server by peers that have a token, and try what it does not permit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiops.access.tokens import AccessToken, TokenRole, TokenTable
from aiops.lab.torture.attacked import AttackedServer, AttackPlan
from aiops.wire.token_keys import keys_of

_TOKENS = {TokenRole.OBSERVE: "one that watches", TokenRole.TRAIN: "one that trains"}


class AttackedByRoles(AttackedServer):
    """One server; hostile peers have a token that lets them observe, or train.

    They try to push all the same, and to direct the server.
    """

    def __init__(self, plan: AttackPlan) -> None:
        super().__init__(replace(plan, token=True))
        self._role = (TokenRole.OBSERVE, TokenRole.TRAIN)[plan.seed % 2]

    @property
    def exact(self) -> bool:
        """True if hostile peers may only observe."""
        return self._role is TokenRole.OBSERVE

    def settings(self) -> dict[str, Any]:
        """Return those of the server, which has a file of tokens."""
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-tokens-"))
        file = Path(folder) / "tokens.toml"
        tokens = [AccessToken(r.word, r, keys_of(token)) for r, token in _TOKENS.items()]
        file.touch(mode=0o600)
        file.write_text(TokenTable(tokens).format(lambda date: ""), encoding="utf-8")
        return {**super().settings(), "tokens": file}

    async def begin(self) -> None:
        """Start the server; let hostile peers have a token."""
        await super().begin()
        door = self.doors[self.machine.host]
        target = door.target._replace(knows=_TOKENS[self._role], directs=True)
        self.doors[self.machine.host] = door._replace(target=target)
