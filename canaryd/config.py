"""The daemon's configuration: models of `configs/canaryd.yaml`, and environment variables over it.

`CANARYD_HTTP__PORT=9600` sets `http.port`. Every error is one `ConfigError` whose message names the key, where it was
set, the value, and what would be legal. Durations are seconds; sizes are bytes or text like "256MiB".
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from canaryd.errors import ConfigError

ENV_PREFIX = "CANARYD_"
PORT_FILE = "http.port"
"""In `state_dir`: the port that was really bound."""
_ENV_NOT_OURS = re.compile(r"CANARYD_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)")
"""What Kubernetes puts into every container of a namespace that has a Service named `canaryd`."""
_ENV_CLIENT = re.compile(r"CANARYD_(CLIENT|ENGINE|DEMO|TEST)_\w+")
"""Read by the engine's side and by tests, which may share an environment with the daemon."""
_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB)?")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MAX_FILE_BYTES = 1 << 20
_MAX_SOCKET_DIR = 90
"""An AF_UNIX path may have 107 bytes; `/engine.sock` and some room come behind the directory."""


def _size(value: object) -> object:
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if not match:
            raise ValueError("not a size")
        return int(match[1]) * _UNITS[match[2] or "B"]
    return value


def _path(value: object) -> object:
    if isinstance(value, str) and value:
        return Path(value)
    raise ValueError("not a path")


def _word(value: object) -> object:
    """YAML reads the words on and off as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _switch(value: object) -> object:
    """YAML reads a bare `on` or `off` as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


_Size = Annotated[int, BeforeValidator(_size)]
_Path = Annotated[Path, BeforeValidator(_path)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class HttpConfig(_Model):
    """Where `/metrics` and the other pages are served."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="an address to listen on, such as 127.0.0.1 or 0.0.0.0"
    )
    port: int = Field(default=9847, ge=0, le=65535, description="a port from 1 to 65535, or 0 for any free one")
    max_connections: int = Field(default=16, ge=1, le=256, description="a whole number from 1 to 256")
    timeout: float = Field(default=5.0, ge=0.1, le=60, description="seconds from 0.1 to 60")


class PeersConfig(_Model):
    """Which local users' engines may attach, besides the daemon's own user."""

    uids: list[Annotated[int, Field(ge=0)]] = Field(default=[], max_length=64, description="a list of numeric user ids")


class WatchConfig(_Model):
    """How fast the pool is watched, and what that may cost the engine."""

    tick: float = Field(default=0.1, ge=0.01, le=10, description="seconds from 0.01 to 10")
    max_engine_loss: float = Field(
        default=0.005, gt=0, le=0.5, description="a share of engine time above 0 and up to 0.5"
    )
    max_host_share: float = Field(default=0.2, gt=0, le=1, description="a share of one core above 0 and up to 1")
    max_age_live: float = Field(default=5.0, ge=0.1, le=86400, description="seconds from 0.1 to 86400")
    max_age_idle: float = Field(
        default=60.0,
        ge=0.1,
        le=86400,
        validate_default=True,  # it may be the other one that was set
        description="seconds from 0.1 to 86400, and not below watch.max_age_live",
    )
    bytes_per_burst: _Size = Field(
        default=2 << 30, ge=1 << 16, le=1 << 40, description='a size from 64 KiB to 1 TiB, such as 268435456 or "2GiB"'
    )
    host_bytes_per_burst: _Size = Field(
        default=32 << 20, ge=1 << 16, le=1 << 30, description='a size from 64 KiB to 1 GiB, such as 16777216 or "32MiB"'
    )

    @field_validator("max_age_idle")
    @classmethod
    def _idle_not_below_live(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("max_age_live", 0.0):
            raise ValueError("below watch.max_age_live")
        return value


class WorkersConfig(_Model):
    """The processes that map pools and run kernels."""

    host: Annotated[Literal["auto", "on", "off"], BeforeValidator(_word)] = Field(
        default="auto", description="auto (at the first host pool), on, or off"
    )
    gpus: Annotated[Literal["auto", "off"] | list[str], BeforeValidator(_word)] = Field(
        default="auto", description="auto, off, or a list of GPU UUIDs"
    )
    backend: Literal["auto", "reference", "triton"] = Field(default="auto", description="auto, reference or triton")
    nice: int = Field(default=10, ge=0, le=19, description="a whole number from 0 to 19")
    hang_timeout: float = Field(default=15.0, ge=1, le=600, description="seconds from 1 to 600")
    startup_timeout: float = Field(default=180.0, ge=1, le=3600, description="seconds from 1 to 3600")
    restart_backoff: float = Field(default=0.5, ge=0.05, le=60, description="seconds from 0.05 to 60")
    restart_backoff_max: float = Field(default=30.0, ge=0.05, le=3600, description="seconds from 0.05 to 3600")
    queue_bytes: _Size = Field(
        default=64 << 20, ge=17 << 20, le=4 << 30, description='a size from 17 MiB to 4 GiB, such as "64MiB"'
    )

    @field_validator("gpus")
    @classmethod
    def _uuids(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and not all(re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}", uuid) for uuid in value):
            raise ValueError("not a list of UUIDs as nvidia-smi -L prints them")
        return value


class SelftestConfig(_Model):
    """How often each worker proves that its kernels still see a fault."""

    interval: float = Field(default=60.0, ge=1, le=86400, description="seconds from 1 to 86400")


class FindingsConfig(_Model):
    """The findings file in `state_dir`."""

    file_bytes: _Size = Field(
        default=16 << 20, ge=1 << 12, le=1 << 34, description='a size of 4 KiB or more, such as "16MiB"'
    )
    files: int = Field(default=4, ge=1, le=100, description="a whole number from 1 to 100")
    max_open: int = Field(default=1000, ge=1, le=1000000, description="a whole number from 1 to 1000000")


class EnginesConfig(_Model):
    """How engines that fall silent or end are treated."""

    stalled_after: float = Field(default=1.0, ge=0.2, le=3600, description="seconds from 0.2 to 3600")
    keep_gone: float = Field(default=300.0, ge=0, le=86400, description="seconds from 0 to 86400")
    max_sessions: int = Field(default=64, ge=1, le=1024, description="a whole number from 1 to 1024")


class LogsConfig(_Model):
    """Log lines on stderr."""

    format: Literal["text", "json"] = Field(default="text", description="text or json")
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )


class Config(_Model):
    """The whole configuration, with defaults that work for one engine on one machine."""

    socket_dir: _Path = Field(default=Path("/run/canaryd"), description="an absolute path of at most 90 bytes")
    state_dir: _Path = Field(default=Path("/var/lib/canaryd"), description="an absolute path")
    scheme: Literal["native", "sglang"] = Field(default="native", description="native or sglang")
    http: HttpConfig = HttpConfig()
    peers: PeersConfig = PeersConfig()
    watch: WatchConfig = WatchConfig()
    workers: WorkersConfig = WorkersConfig()
    selftest: SelftestConfig = SelftestConfig()
    findings: FindingsConfig = FindingsConfig()
    engines: EnginesConfig = EnginesConfig()
    logs: LogsConfig = LogsConfig()

    @field_validator("socket_dir", "state_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError("not an absolute path")
        return value

    @field_validator("socket_dir")
    @classmethod
    def _short(cls, value: Path) -> Path:
        if len(os.fsencode(value)) > _MAX_SOCKET_DIR:
            raise ValueError("too long for a Unix socket")
        return value


def load(path: Path | None, environment: Mapping[str, str]) -> Config:
    """The configuration from a YAML file (None: defaults only) with `CANARYD_…` variables over it.

    Raises:
        ConfigError: the file cannot be read, or a key or variable is unknown or has an illegal value.
    """
    document = {} if path is None else _read(path)
    origins = _overlay(document, environment)
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        source = "the defaults" if path is None else str(path)
        raise ConfigError("\n".join(_explain(error, document, origins, source))) from error


def dump(config: Config) -> str:
    """The configuration as YAML that `load` accepts."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


# --- the file -------------------------------------------------------------------------------------------------------


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _value in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Pass an existing file to --config.") from error
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES} bytes; this is not a canaryd configuration.")
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping of keys such as http and watch, got {type(document).__name__}.")
    return document


# --- the environment ------------------------------------------------------------------------------------------------


def _keys(model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Every leaf key of the configuration and the description of what is legal there."""
    keys: dict[tuple[str, ...], str] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.update(_keys(field.annotation, (*prefix, name)))
        else:
            keys[(*prefix, name)] = field.description or ""
    return keys


def _variable(key: tuple[str, ...]) -> str:
    return ENV_PREFIX + "__".join(key).upper()


def _overlay(document: dict[str, Any], environment: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """Set the variables' values in `document`; returns which key was set by which variable."""
    variables = {_variable(key): key for key in _keys()}
    origins: dict[tuple[str, ...], str] = {}
    for name in sorted(environment):
        if not name.startswith(ENV_PREFIX) or _ENV_NOT_OURS.fullmatch(name) or _ENV_CLIENT.fullmatch(name):
            continue
        key = variables.get(name)
        if key is None:
            raise ConfigError(f"unknown environment variable {name}.{_near(name, list(variables))}")
        target = document
        for part in key[:-1]:
            section = target.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{name} sets a key of {part!r}, which is not a section: {section!r}.")
            target = section
        target[key[-1]] = _parse(name, environment[name])
        origins[key] = name
    return origins


def _parse(name: str, text: str) -> object:
    if name.endswith("_DIR"):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"environment variable {name}: not valid YAML: {text!r}") from error


# --- messages -------------------------------------------------------------------------------------------------------


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else f" Known: {', '.join(known)}."


def _explain(
    error: ValidationError, document: Mapping[str, Any], origins: Mapping[tuple[str, ...], str], source: str
) -> list[str]:
    legal = _keys()
    lines: dict[tuple[str, ...], str] = {}
    for item in error.errors(include_url=False):
        path = tuple(str(part) for part in item["loc"])
        key = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in legal), path)
        where = origins.get(key, source)
        name = ".".join(key)
        if item["type"] == "extra_forbidden":
            section = key[:-1]
            known = [".".join(each) for each in legal if each[: len(section)] == section]
            sections = sorted({each[0] for each in legal}) if not section else []
            lines[key] = f"{name} ({where}): unknown key.{_near(name, known + sections)}"
        elif key in legal:
            value = _lookup(document, key)
            if value is None and key not in origins:
                value, where = item["input"], "the default, which another key contradicts"
            lines.setdefault(key, f"{name} ({where}): {value!r} is not legal; it must be {legal[key]}.")
        else:
            names = ", ".join(".".join(each) for each in legal if each[: len(key)] == key)
            lines[key] = f"{name} ({where}): {item['input']!r} is not legal; it must be a section with keys {names}."
    return list(lines.values())


def _lookup(document: Mapping[str, Any], key: tuple[str, ...]) -> object:
    value: Any = document
    for part in key:
        value = value.get(part) if isinstance(value, dict) else None
    return value
