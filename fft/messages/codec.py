"""The codec of all messages: strict JSON that is refused as a whole if it has another form."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from fft.errors import FftError

T = TypeVar("T")


class UnreadableMessage(FftError):
    """Bytes from the bus are not a message of FFT."""


class Codec(Generic[T]):
    """JSON of the values of one type. The validator is made when it is first used: that is slow.

    Args:
        kind: The type, as pydantic takes it.
        limit: Maximum size of the data to decode, in bytes.
        omit: Omit fields that have their default value, or that are None.
    """

    def __init__(self, kind: Any, limit: int | None = None, omit: str = "") -> None:
        self._kind, self._limit, self._omit = kind, limit, {f"exclude_{omit}": True} if omit else {}

    @cached_property
    def adapter(self) -> TypeAdapter[T]:
        """The validator of pydantic."""
        return TypeAdapter(self._kind)

    def encode(self, value: T) -> bytes:
        """Encode canonically: equal values have equal bytes."""
        return self.adapter.dump_json(value, **self._omit)  # type: ignore[arg-type]

    def decode(self, data: bytes) -> T:
        """Decode the output of `encode`.

        Raises:
            UnreadableMessage: It is too long, not JSON, or not exactly in the form of the type.
        """
        if self._limit is not None and len(data) > self._limit:
            raise UnreadableMessage(f"message of {len(data)} bytes; the limit is {self._limit}")
        try:
            return self.adapter.validate_json(data)
        except ValidationError as error:
            raise unreadable(error) from None

    def plain(self, value: T) -> dict[str, Any]:
        """Convert a value to plain data for the trace."""
        data: dict[str, Any] = self.adapter.dump_python(value, mode="json")
        return data


def unreadable(error: ValidationError) -> UnreadableMessage:
    """Return the error for input that a codec refuses; it names the place in at most 500
    characters."""
    first = error.errors(include_url=False, include_input=False)[0]
    return UnreadableMessage(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:500])
