"""Which inference server computes the hidden states that a run stores (train/data/served_states.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class StatesServerConfig:
    """A server that computes the hidden states which `cache_hidden_states` stores.

    Attributes:
        url: base URL of its API, such as http://localhost:8000/v1; null computes the states here.
        folder: where this machine sees the server's `shared_storage_path`. Files are removed once they were read.
        model: the backbone's name there; null is backbone.name_or_path.
        key_variable: environment variable of the API key; null is OPENAI_API_KEY, which local servers do not need.
        concurrency: documents that are asked for at a time.
    """

    url: str | None = None
    folder: str | None = None
    model: str | None = None
    key_variable: str | None = None
    concurrency: int = within(1, 4096, default=16)

    def check(self, *, stores: bool) -> None:
        """Raise ValueError on settings that name no server, or states that nobody stores."""
        if self.url is None:
            if self != StatesServerConfig():
                raise ValueError("states_server has settings and no url; give the URL of its API, or leave them out.")
            return
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"states_server.url={self.url!r} was given; give a URL such as http://localhost:8000/v1.")
        if not stores:
            raise ValueError("states_server was given without cache_hidden_states: true; give both, or neither.")
        if self.folder is None or not Path(self.folder).is_dir():
            raise ValueError(
                f"states_server.folder={self.folder!r} was given; give the folder in which this machine sees the "
                f"files of the server's shared_storage_path."
            )
        if self.key_variable and not os.environ.get(self.key_variable):
            raise ValueError(f"states_server.key_variable={self.key_variable} was given and is not set; set it.")
