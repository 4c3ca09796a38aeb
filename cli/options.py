"""Options of commands, derived from settings.

Default, bounds and help text are defined only at the field of the settings. Options that are not settings
(where to write, what to print) are parameters of the command itself.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from minilm_cache.cli.early import refuse_no_extra
from minilm_cache.errors import InvalidConfigError
from minilm_cache.objectives.spec import Repeated
from minilm_cache.settings import FrozenSettings, decimal_number, flag_of, whole_number
from minilm_cache.train.config import presets

_Number = TypeVar("_Number", int, float)
Given = dict[str, Any]
"""Values of settings that were given on the command line, by name of the field."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="ray: run the work as tasks of the Ray cluster that RAY_ADDRESS names. Without RAY_ADDRESS, Ray "
        "starts a cluster on this machine.",
    ),
]
GpusOption = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-task",
        min=0.01,
        help="GPUs that each task of the cluster takes, such as 0.5. [default: 1, or 0 where it has none]",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Resume unfinished work, or refuse a folder that exists.")
]


def out_option(text: str) -> Any:  # noqa: ANN401 - what typer's own function returns
    """Return the option of where something is written, for `Annotated`."""
    return typer.Option("--out", "-o", help=text)


StoreOption = Annotated[
    str | None,
    typer.Option(
        envvar="MINILM_CACHE_STORE", help="URL of a store to pull the cache from, if it is there already."
    ),
]


def check_engine(engine: str | None, gpus_per_task: float | None) -> None:
    """Raise InvalidConfigError for an engine that is unknown or not installed, or GPUs without an engine."""
    if engine not in (None, "ray"):
        raise InvalidConfigError(f"--engine {engine}: unknown engine. Use ray, or leave it out.")
    if engine is None and gpus_per_task is not None:
        raise InvalidConfigError("--gpus-per-task is about tasks of a cluster. Add --engine ray.")
    if engine is not None:
        refuse_no_extra("ray", for_what="--engine ray")


CacheOrUrlArgument = Annotated[
    str | None,
    typer.Argument(metavar="[CACHE]", help="Folder or URL of the cache. [default: the newest complete one]"),
]
ComparedModelsArgument = Annotated[
    list[str], typer.Argument(metavar="TEACHER MODEL...", help="mini, hub ids, folders of models or of runs.")
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        help="Recipe of a paper; other options override its settings.",
        metavar="|".join(presets()),
        rich_help_panel="Recipe",
    ),
]


def _show_every_option(context: Any, is_requested: bool) -> None:  # noqa: ANN401 - typer's own, unexported class
    """Print the help text with every option, and end the command."""
    if is_requested:
        context.meta[_EVERY_OPTION] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=_show_every_option, help="Show every option and exit."
    ),
]
_EVERY_OPTION: Final = "minilm_cache.every_option"
"""Key of a context that says that the help text shows every option."""
_UNSET: Final = re.compile(r" None means (?:that )?(?P<default>[^.]*(?:\.\d[^.]*)*)\.$")
"""End of a description: what an option means when it is not given."""


class GroupedCommand(TyperCommand):
    """A command whose `--help` shows options under headings."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own, unexported classes
        """Run the command; a terminal first shows that its libraries are loading, which takes seconds."""
        if sys.stderr.isatty():
            print("loading ...", end="\r", file=sys.stderr, flush=True)  # noqa: T201 - the next line covers it
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's own, unexported classes
        """Return the words of the usage line; arguments are shown as their metavars, without braces."""
        return [_without_braces(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own, unexported classes
        """Write arguments and options, each group under its heading."""
        groups: dict[str, list[tuple[str, str]]] = {}
        common = None if _EVERY_OPTION in ctx.meta else getattr(self.callback, "common", None)
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            is_argument = param.param_type_name == "argument"
            if record is not None and (common is None or is_argument or param.name in common):
                if is_argument:
                    record = (str(param.metavar), record[1])
                heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Command"
                groups.setdefault(heading, []).append(record)
        for heading, records in sorted(groups.items(), key=lambda group: group[0] != "Arguments"):
            with formatter.section(heading):
                formatter.write_dl(records)


def _without_braces(piece: str) -> str:
    """Return an argument of the usage line without what typer adds: `{RUN...}...`, `[[CACHE]]`."""
    if piece.startswith("{"):
        return piece.removesuffix("...")[1:-1]
    return piece[1:-1] if piece.startswith("[[") else piece


def options(
    *models: type[FrozenSettings],
    leave_out: Mapping[type[FrozenSettings], Collection[str]] | None = None,
    rename: Mapping[type[FrozenSettings], Mapping[str, str]] | None = None,
    common: Collection[str] | None = None,
    may_lack: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of settings.

    The command is called with one dictionary of given values for each class of settings, and with its own
    parameters by keyword. A name that several classes share is one option for all of them.

    Args:
        models: classes of the settings.
        leave_out: fields that the command sets itself, by class. None means that all fields are options.
        rename: names of options by class and field, where another class uses the field's name for something
            else. None means that all options are named after their fields.
        common: names of the options that `-h` shows; `--help-all` shows all of them. None means that `-h`
            shows all.
        may_lack: whether required settings may come from elsewhere, so that no option is required.
    """
    names = {
        (model, field): (rename or {}).get(model, {}).get(field, field)
        for model in models
        for field in _in_groups(model)
        if field not in (leave_out or {}).get(model, ())
    }
    sources: dict[str, list[tuple[type[FrozenSettings], str]]] = {}
    for (model, field), name in names.items():
        sources.setdefault(name, []).append((model, field))
    derived = {name: _parameter(name, fields, may_lack=may_lack) for name, fields in sources.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command_parameters = list(inspect.signature(command).parameters.values())[len(models) :]

        @functools.wraps(command)
        def run(**values: Any) -> None:  # noqa: ANN401 - values of any option
            given: list[Given] = [{} for _ in models]
            for (model, field), name in names.items():
                if values[name] is not None and values[name] != []:
                    given[models.index(model)][field] = values[name]
            command(*given, **{parameter.name: values[parameter.name] for parameter in command_parameters})

        parameters = [*derived.values(), *command_parameters]
        if common is not None:
            unknown = {*common} - {parameter.name for parameter in parameters}
            assert not unknown, unknown
            run.common = {*common, "help_all", "help"}  # type: ignore[attr-defined] # of a function
            parameters.append(_HELP_ALL)
        del run.__wrapped__  # otherwise typer would read the command's own signature
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        return run

    return decorate


_HELP_ALL: Final = inspect.Parameter(
    "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAllOption
)


def _in_groups(model: type[FrozenSettings]) -> list[str]:
    """Return the fields of a class by group, its own group last; in each group, required fields are first."""
    classes = [*model.__mro__[1:], model]
    groups = [settings.group for settings in classes if issubclass(settings, FrozenSettings)]
    return sorted(
        model.model_fields,
        key=lambda name: (groups.index(_group(model, name)), not model.model_fields[name].is_required()),
    )


def _group(model: type[FrozenSettings], field: str) -> str:
    """Return the heading of a field: the group of the class that declares it."""
    declaring = next(base for base in model.__mro__ if field in inspect.get_annotations(base))
    assert issubclass(declaring, FrozenSettings)
    return declaring.group


def _parameter(
    name: str, fields: Sequence[tuple[type[FrozenSettings], str]], *, may_lack: bool
) -> inspect.Parameter:
    """Return the option of a field, or of several that share a name, as a parameter that typer reads."""
    model, field = fields[0]
    info = model.model_fields[field]
    kind, metavar = _option_type(info.annotation)
    if any(isinstance(each, Repeated) for each in info.metadata):
        kind = list[str]
    flag = flag_of(name, info)
    number = next((each for each in _PARSERS if each in (kind, *get_args(kind))), None)
    option = typer.Option(
        flag,
        help=_help_text([settings.model_fields[field] for settings, field in fields]),
        metavar=metavar or (None if number is None else f"<{number.__name__}>"),
        parser=None if number is None else _PARSERS[number],
        rich_help_panel=_group(model, field),
    )
    is_required = info.is_required() and not may_lack
    annotation = kind if is_required else kind | None
    default = inspect.Parameter.empty if is_required else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


def _typed(read: Callable[[str], _Number]) -> Callable[[str], _Number]:
    """Return a function that reads numbers like another one, and raises typer.BadParameter for ValueError."""

    def typed(text: str) -> _Number:
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return typed


typed_number, typed_decimal = _typed(whole_number), _typed(decimal_number)
_PARSERS: Final[Mapping[type, Callable[[str], float]]] = {int: typed_number, float: typed_decimal}


def _option_type(annotation: Any) -> tuple[Any, str | None]:  # noqa: ANN401 - any type of a field
    """Return the type that typer parses, and the placeholder of a value in the help text.

    None means the placeholder that typer uses for the type.
    """
    if get_origin(annotation) is Annotated:
        return _option_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return _option_type(parts[0]) if len(parts) == 1 else (str, None)
    if get_origin(annotation) is Literal:
        return str, "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        inner, metavar = _option_type(get_args(annotation)[0])
        return list[inner], metavar or f"<{inner.__name__}>"  # type: ignore[valid-type]
    return annotation, None


def _help_text(fields: Sequence[FieldInfo]) -> str:
    """Return the descriptions of fields that share an option as a line of help that ends with the default."""
    info = fields[-1]
    texts = dict.fromkeys(field.description or "" for field in fields)
    text = " ".join(" ".join(texts).replace("`", "").split())
    unset = _UNSET.search(text)
    if unset is not None:
        return f"{text[: unset.start()]} [default: {unset['default']}]"
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    default = extra.get("default", None if info.is_required() else info.default)
    if default is None or default == () or default is False:
        return text
    if default is True:
        return f"{text} [default: on]"
    return f"{text} [default: {', '.join(map(str, default)) if isinstance(default, tuple) else default}]"
