"""Where a server may listen, and for which names it answers.

A page in a browser may send requests to an address of its own site only. Whoever owns the site can make its name point
to 127.0.0.1 while the page is open ("DNS rebinding"). Then the page reaches servers on the machine of the person who
looks at it. The name of the site is still in the header Host. So a server answers only for names that cannot be
somebody else's: numbers, the loopback, the name of its own machine, and names that its owner gives.
"""

from __future__ import annotations

import ipaddress
import socket
import string
from collections.abc import Sequence
from urllib.parse import urlsplit

from .http_client import is_local

LEAST_TOKEN = 16
_NAME = frozenset(string.ascii_lowercase + string.digits + "-._")


def check_host(host: str, token: str | None) -> None:
    """Refuse an address that other machines can reach, if there is no token or only a short one.

    Raises:
        ValueError: other machines can reach the address, and there is no token of 16 characters or more.
    """
    if is_local(host):
        return
    if token is None:
        raise ValueError(
            f"{host} can be reached from other machines: name an environment variable that holds a token "
            "(--token-env NAME), or serve at 127.0.0.1"
        )
    if len(token) < LEAST_TOKEN:
        raise ValueError(
            f"{host} can be reached from other machines, but the token has {len(token)} characters: give it "
            f"{LEAST_TOKEN} or more, for example from `openssl rand -hex 32`"
        )


class HostNames:
    """The names for which a server answers.

    Args:
        host: address on which the server listens.
        more: other names for which it answers.

    Raises:
        ValueError: one of `more` is not a name or an address without a port.
    """

    def __init__(self, host: str, more: Sequence[str] = ()) -> None:
        self._local = is_local(host)
        self._names = {"localhost", host.lower()}
        if not self._local:
            machine = socket.gethostname().lower()
            self._names |= {machine, machine.partition(".")[0]}
        for name in more:
            bare = name.lower().removeprefix("[").removesuffix("]").removesuffix(".")
            if not bare or not (_is_address(bare) or _NAME.issuperset(bare)):
                raise ValueError(
                    f"--host-name {name!r} is not a name; give one without http:// and port, such as gpu-2"
                )
            self._names.add(bare)

    def match(self, header: str) -> bool:
        """Whether a header Host has one of the names. A server on the loopback answers for loopback addresses; any
        other server answers for all addresses, because no site can own a number."""
        try:
            parts = urlsplit(f"//{header}")
            name = (parts.hostname or "").removesuffix(".")
            # Reading the port checks it. Tunnels change the port, so its value does not matter.
            usable = parts.netloc == header and "@" not in header and (parts.port is None or parts.port > 0)
        except ValueError:
            return False
        if not usable:
            return False
        return name in self._names or (is_local(name) if self._local else _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
