"""Resolves argument numbers and names to parameters, as `jax.jit` does.

In:     the user's function; `static_argnums`, `static_argnames`, `batch_argnums`, `donate_argnums`; a call's arguments.
Out:    `Parameters` of the function, `Static` of its parameters, `SplitCall` of a call's arguments.
Method: from the signature, once. A parameter has one number and one name, whether it is passed by position or by name.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError, BatchError, TraceError


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function.

    Attributes:
        names: Names in order, keyword-only ones last; behind a `*rest` those have no number and are left out.
        rest: Name of `*rest`; None: there is none.
        takes_any_name: Whether the function has `**others`.
        optional: Numbers of the parameters with a default.
    """

    names: tuple[str, ...]
    rest: str | None
    takes_any_name: bool
    optional: tuple[int, ...]

    def name_of(self, number: int) -> str:
        """Name of a parameter; "rest/0" for the first of `*rest`."""
        return self.names[number] if number < len(self.names) else f"{self.rest}/{number - len(self.names)}"

    def number_of(self, name: str) -> int | None:
        """Number of a parameter; None: it has none."""
        return self.names.index(name) if name in self.names else None

    def numbers(self, argnums: object) -> tuple[int, ...]:
        """The user's numbers as a tuple, negative ones counted from the end unless there is a `*rest`.

        Raises:
            TypeError: They are no integers.
            IndexError: There are fewer parameters.
        """
        counted = integers(argnums)
        if self.rest is not None:
            return counted
        outside = [n for n in counted if not -len(self.names) <= n < len(self.names)]
        if outside:
            raise IndexError(outside[0])
        return tuple(n % len(self.names) for n in counted)

    def __str__(self) -> str:
        return ", ".join(f"{number} ({name})" for number, name in enumerate(self.names)) or "none"


def integers(argnums: object) -> tuple[int, ...]:
    """The user's integers, one, several or None, as a tuple. Raises `TypeError`: they are no integers."""
    try:
        return (operator.index(argnums),)  # type: ignore[arg-type]
    except TypeError:
        return () if argnums is None else tuple(map(operator.index, argnums))  # type: ignore[call-overload]


def parameters_of(fn: Callable[..., Any]) -> Parameters:
    """The parameters of `fn`; a function without a signature takes anything."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return Parameters((), "arg", True, ())
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY and rest is None]
    numbered = [*by_position, *by_name]
    return Parameters(
        tuple(p.name for p in numbered),
        rest,
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        tuple(number for number, p in enumerate(numbered) if p.default is not p.empty),
    )


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a call whose arrays are passed to the program.

    Attributes:
        name: "batch"; "rest/0" is the first of `*rest`.
        number: Number of its parameter; None: it has none.
    """

    name: str
    number: int | None


@dataclass(frozen=True, slots=True)
class SplitCall:
    """The arguments of a call, separated into those with arrays and static ones.

    Attributes:
        args: Positional arguments, without static ones.
        kwargs: Keyword arguments, without static ones.
        arguments: One for each of `args` and `kwargs`, in the order of the leaves of `(args, kwargs)`.
        static: Name and value of each static argument.
        positions: Positions of the static arguments that were passed by position.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    arguments: tuple[Argument, ...]
    static: tuple[tuple[str, object], ...]
    positions: tuple[int, ...] = ()

    def joined(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of the whole call, with `args` and `kwargs` for those that are not static."""
        rest, values = iter(args), [value for _, value in self.static]
        at = dict(zip(self.positions, values, strict=False))
        by_position = tuple(at[n] if n in at else next(rest) for n in range(len(args) + len(at)))
        return by_position, {**kwargs, **dict(self.static[len(at) :])}


@dataclass(frozen=True, slots=True)
class Static:
    """The static parameters, whose values are part of the program.

    Attributes:
        parameters: All parameters of the function.
        numbers: Numbers of the static ones; a negative one, possible with `*rest`, counts from the end of a call.
        names: Names of the static ones.
    """

    parameters: Parameters
    numbers: tuple[int, ...]
    names: tuple[str, ...]

    def split(self, args: Sequence[object], kwargs: Mapping[str, object]) -> SplitCall:
        """Separate a call's static arguments from the others."""
        apart = self.positions(len(args))
        named = {name: value for name, value in kwargs.items() if name not in self.names}
        return SplitCall(
            tuple(value for n, value in enumerate(args) if n not in apart),
            named,
            (
                *(Argument(self.parameters.name_of(n), n) for n in range(len(args)) if n not in apart),
                *(Argument(name, self.parameters.number_of(name)) for name in sorted(named)),
            ),
            (
                *((self.parameters.name_of(n), args[n]) for n in apart),
                *((name, kwargs[name]) for name in sorted(kwargs) if name in self.names),
            ),
            tuple(apart),
        )

    def positions(self, num_args: int) -> list[int]:
        """Positions of the static arguments among `num_args` positional ones."""
        counted = {n + num_args if n < 0 else n for n in self.numbers}
        return [n for n in range(num_args) if n in counted]

    def with_first(self) -> Static:
        """The same with the first parameter static too."""
        names = self.parameters.names[:1]
        return Static(self.parameters, (0, *self.numbers), (*names, *self.names))


def static_of(parameters: Parameters, argnums: object = (), argnames: Any = ()) -> Static:
    """Resolve the static parameters; a number implies its name and a name its number.

    Raises `AutoparError`: there is no such parameter.
    """
    try:
        numbers = parameters.numbers(argnums)
    except (TypeError, IndexError) as error:
        raise _no_parameter("static_argnums", argnums, parameters, error) from None
    names = (argnames,) if isinstance(argnames, str) else () if argnames is None else tuple(argnames)
    known = parameters.takes_any_name or parameters.rest is not None  # those behind `*rest` are not in `names`
    unknown = [name for name in names if not isinstance(name, str) or not (known or name in parameters.names)]
    if unknown:
        raise _no_parameter("static_argnames", argnames, parameters, TypeError(repr(unknown[0])))
    numbers += tuple(n for n in map(parameters.number_of, names) if n is not None and n not in numbers)
    names += tuple(parameters.name_of(n) for n in numbers if n >= 0 and parameters.name_of(n) not in names)
    return Static(parameters, numbers, names)


def chosen(option: str, argnums: Any, static: Static) -> Any:
    """Resolve `batch_argnums` or `donate_argnums` to numbers; `"auto"` stays.

    Raises `BatchError`: there is no such parameter, or it is static.
    """
    if isinstance(argnums, str) and argnums == "auto":
        return argnums
    try:
        numbers = static.parameters.numbers(argnums)
        if min(numbers, default=0) < 0:
            raise IndexError(min(numbers))
    except (TypeError, IndexError) as error:
        raise _no_parameter(option, argnums, static.parameters, error, BatchError) from None
    for number in numbers:
        if number in static.numbers:
            raise BatchError(
                f"`{option}` names a static argument.",
                given=f"{option}={argnums!r}, and argument {number} ({static.parameters.name_of(number)}) is static",
                wrong="a static argument is part of the program: it holds no arrays.",
                do="count as in jax.jit, static arguments too.",
                candidates={},
            )
    return numbers


def check_hashable(static: Iterable[tuple[str, object]], name: str) -> None:
    """Check that each static argument can be hashed, since programs are looked up by it.

    Raises `TraceError`: one cannot; names it.
    """
    for argument, value in static:
        try:
            hash(value)
        except TypeError as error:
            raise TraceError(
                f"static argument `{argument}` of `{name}` cannot be hashed.",
                given=f"{argument} = {value!r:.80}, a {type(value).__name__}",
                wrong=f"a program is made for each value of a static argument, and found again by its hash: {error}.",
                do="pass a tuple for a list, a frozen dataclass for a mutable one; or let it be no static argument.",
                path=argument,
            ) from None


def _no_parameter(
    option: str, given: object, parameters: Parameters, error: Exception, kind: type[AutoparError] = AutoparError
) -> AutoparError:
    what = f"there is no argument {error}" if isinstance(error, IndexError) else f"these are not its arguments: {error}"
    more = f", *{parameters.rest}" if parameters.rest is not None else ""
    facts: dict[str, Any] = {"candidates": {}} if kind is BatchError else {}
    return kind(
        f"`{option}` does not name arguments of the step.",
        given=f"{option}={given!r}; its arguments are {parameters}{more}",
        wrong=f"{what}.",
        do="pass names of these." if option == "static_argnames" else "pass positions of these, as integers from 0.",
        **facts,
    )
