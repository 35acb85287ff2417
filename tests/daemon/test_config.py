"""Configuration: what is legal, and that every error names the key, the value and what would be legal."""

from __future__ import annotations

from pathlib import Path

import pytest

from canaryd import config
from canaryd.errors import ConfigError

ROOT = Path(__file__).parents[2]


def message(document: str, tmp_path: Path, **environment: str) -> str:
    """The error that a file and variables give."""
    path = tmp_path / "canaryd.yaml"
    path.write_text(document)
    with pytest.raises(ConfigError) as caught:
        config.load(path, environment)
    return str(caught.value)


def test_the_shipped_file_is_the_defaults() -> None:
    assert config.load(ROOT / "configs" / "canaryd.yaml", {}) == config.Config()


def test_the_shipped_file_shows_every_key() -> None:
    text = (ROOT / "configs" / "canaryd.yaml").read_text()
    assert all(f"{key[-1]}:" in text for key in config._keys())


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert config.load(tmp_path / "empty.yaml", {}) == config.Config()


def test_dump_is_read_back() -> None:
    before = config.load(None, {"CANARYD_WATCH__TICK": "0.25", "CANARYD_PEERS__UIDS": "[7, 9]"})
    path_free = config.dump(before)
    assert "tick: 0.25" in path_free
    assert config.Config.model_validate(config.yaml.safe_load(path_free)) == before


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("CANARYD_HTTP__PORT", "0", lambda c: c.http.port == 0),
        ("CANARYD_HTTP__HOST", "0.0.0.0", lambda c: c.http.host == "0.0.0.0"),
        ("CANARYD_SOCKET_DIR", "/tmp/1", lambda c: c.socket_dir == Path("/tmp/1")),
        ("CANARYD_STATE_DIR", "/tmp/x", lambda c: c.state_dir == Path("/tmp/x")),
        ("CANARYD_SCHEME", "sglang", lambda c: c.scheme == "sglang"),
        ("CANARYD_WATCH__MAX_AGE_LIVE", "3", lambda c: c.watch.max_age_live == 3.0),
        ("CANARYD_WATCH__BYTES_PER_BURST", "256MiB", lambda c: c.watch.bytes_per_burst == 256 << 20),
        ("CANARYD_WORKERS__HOST", "off", lambda c: c.workers.host == "off"),
        ("CANARYD_WORKERS__GPUS", "[GPU-0a1b2c3d-0000-1111-2222-333344445555]", lambda c: len(c.workers.gpus) == 1),
    ],
)
def test_variables_override(variable: str, value: str, read: object, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("http: {port: 1234}\nwatch: {tick: 0.2}\n")
    loaded = config.load(tmp_path / "c.yaml", {variable: value})
    assert read(loaded)  # type: ignore[operator]
    assert loaded.watch.tick == 0.2


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        ("http: {port: 99999}", ["http.port", "99999", "1 to 65535", "canaryd.yaml"]),
        ("http: {port: '80'}", ["http.port", "'80'", "1 to 65535"]),
        ("http: {prot: 1}", ["http.prot", "unknown key", "Did you mean http.port"]),
        ("htp: {port: 1}", ["htp", "unknown key", "Did you mean http"]),
        ("http: 9", ["http", "9", "http.port"]),
        ("watch: {tick: .nan}", ["watch.tick", "nan", "0.01 to 10"]),
        ("watch: {tick: 0}", ["watch.tick", "0", "0.01 to 10"]),
        (
            "watch: {max_age_live: 90}",
            ["watch.max_age_idle", "60.0", "the default", "not below watch.max_age_live"],
        ),
        ("watch: {bytes_per_burst: 5 apples}", ["watch.bytes_per_burst", "5 apples", "64 KiB"]),
        ("socket_dir: run", ["socket_dir", "run", "absolute"]),
        ("socket_dir: /" + "x" * 100, ["socket_dir", "90 bytes"]),
        ("scheme: md5", ["scheme", "md5", "native or sglang"]),
        ("workers: {gpus: [0]}", ["workers.gpus", "[0]", "UUIDs"]),
        ("workers: {gpus: ['GPU 0']}", ["workers.gpus", "GPU 0", "UUIDs"]),
        ("peers: {uids: [-1]}", ["peers.uids", "-1", "user ids"]),
        ("logs: {level: loud}", ["logs.level", "loud", "debug, info, warning or error"]),
        ("- a", ["must be a mapping"]),
        ("http: {port: 1, port: 2}", ["'port' stands twice"]),
        ("1: 2", ["key 1 is not text"]),
        ("http: [", ["not valid YAML"]),
        ("!!python/object/apply:os.system [id]", ["not valid YAML"]),
    ],
)
def test_errors_name_key_value_and_remedy(document: str, parts: list[str], tmp_path: Path) -> None:
    text = message(document, tmp_path)
    assert all(part in text for part in parts), text


def test_each_wrong_key_has_its_line(tmp_path: Path) -> None:
    lines = message("http: {port: -1}\nwatch: {tick: x}\nlogs: {leve: info}", tmp_path).splitlines()
    assert len(lines) == 3


def test_errors_name_the_variable(tmp_path: Path) -> None:
    assert "CANARYD_HTTP__PORT" in message("{}", tmp_path, CANARYD_HTTP__PORT="x")
    text = message("{}", tmp_path, CANARYD_HTTP__PROT="1")
    assert "unknown environment variable CANARYD_HTTP__PROT" in text
    assert "CANARYD_HTTP__PORT" in text
    assert "not a section" in message("http: 3", tmp_path, CANARYD_HTTP__PORT="1")


def test_what_kubernetes_injects_is_not_ours() -> None:
    injected = {
        "CANARYD_SERVICE_HOST": "10.0.0.1",
        "CANARYD_SERVICE_PORT_METRICS": "9847",
        "CANARYD_PORT": "tcp://10.0.0.1:9847",
        "CANARYD_PORT_9847_TCP_ADDR": "10.0.0.1",
    }
    assert config.load(None, injected) == config.Config()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        config.load(tmp_path / "nowhere.yaml", {})
