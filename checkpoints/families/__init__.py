"""The supported families; a new one joins by being a file in this folder."""

import pkgutil
from functools import cache
from importlib import import_module

from draftsmith.checkpoints.families.base import Family
from draftsmith.errors import RequestError


@cache
def families() -> dict[str, Family]:
    """All family tables by `model_type`."""
    tables = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            family: Family = import_module(f"{__name__}.{module.name}").FAMILY
            tables[family.name] = family
    return tables


def family_of(model_type: str, place: str) -> Family:
    """The table of a `model_type`; `place` names the model in the error."""
    try:
        return families()[model_type]
    except KeyError:
        raise RequestError(
            f"{place}: family {model_type!r} is not supported; supported are "
            f"{', '.join(sorted(families()))}"
        ) from None
