"""A plan asks the hub for one small file; where the hub cannot be reached, it says so immediately.

The hub's own client tries again and again for half a minute.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

SECONDS = 2.0
"""How long a connection may take to open."""


@contextlib.contextmanager
def without_waiting(name_or_path: str) -> Iterator[None]:
    """The hub's client reads its cache alone while this is open, where a backbone is on a hub that does not answer."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not (Path(name_or_path).exists() or answers(constants.ENDPOINT))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def answers(endpoint: str) -> bool:
    """Whether a connection to a URL's host can be opened. Behind a proxy only the proxy knows: then it is assumed."""
    if getproxies():
        return True
    url = urlsplit(endpoint)
    try:
        with socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), SECONDS):
            return True
    except OSError:
        return False
