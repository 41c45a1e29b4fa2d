"""The form of `score.json`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.accept.figures import Row

SCHEMA = 1


@dataclass(frozen=True)
class Score:
    """The form of `score.json`."""

    target: str
    drafter: str
    dtype: str
    machine: dict[str, Any]
    prompts: str
    lossless: bool | None
    decode: list[Row]
    replay: list[Row]
    by_domain: dict[str, dict[str, Any]]
    verdict: dict[str, Any]
    waterfall: dict[str, float] | None
    rejected: list[dict[str, Any]]
    kv_bytes_per_token: dict[str, int | None]
    schema: int = SCHEMA
    runtime: str = "torch"
    verify: str = "greedy"
    settings: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    batch: int = 1
    quality: dict[str, Any] | None = None
    samples: dict[str, Any] | None = None
    energy: dict[str, float] | None = None

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
