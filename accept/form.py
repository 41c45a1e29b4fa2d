"""The form of `score.json`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from draftsmith.accept.figures import Row
from draftsmith.errors import RequestError

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


def read_score(path: Path) -> dict[str, Any]:
    """The content of a `score.json`.

    Raises:
        RequestError: there is none, or it is of another form.
    """
    try:
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        TypeAdapter(Score).validate_python(plain)
    except OSError as error:
        raise RequestError(f"{path}: can't be read ({error.strerror}); give a score.json") from None
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise RequestError(
            f"{path}: not the form of a score.json ({place or 'the whole'}: "
            f"{error.errors()[0]['msg'].lower()}); `draftsmith score … --json FILE` writes one"
        ) from None
    except ValueError as error:
        raise RequestError(f"{path}: damaged ({error}); score again") from None
    return plain
