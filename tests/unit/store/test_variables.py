"""What the environment says of stores: a wrong value is one line that names the variable, never a panic."""

import pytest

from minilm_cache.errors import InvalidConfigError, MiniLMCacheError
from minilm_cache.store.remote import open_store
from minilm_cache.store.urls import hide_secrets, without_secrets

SERVERS = [
    "minio:9000",
    "localhost",
    "127.0.0.1:9000",
    "http//h",
    "http://",
    "",
    "http://h:99999",
    "ftp://h",
    "x:1",
]
BAD: list[tuple[str, str, str]] = [
    *(
        ("s3", name, value)
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3")
        for value in SERVERS
    ),
    *(("s3", "AWS_METADATA_ENDPOINT", value) for value in SERVERS),
    *(("gs", "GOOGLE_BASE_URL", value) for value in SERVERS),
    *(
        ("az", name, value)
        for name in ("AZURE_STORAGE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")
        for value in SERVERS
    ),
    ("s3", "AWS_ENDPOINT_URL", " http://h "),
    ("s3", "AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
    ("az", "AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:10000"),
    ("s3", "AWS_ALLOW_HTTP", "perhaps"),
    ("s3", "AWS_SKIP_SIGNATURE", "perhaps"),
    ("s3", "AWS_TIMEOUT", "30"),
    ("s3", "AWS_POOL_MAX_IDLE_PER_HOST", "many"),
    ("s3", "AWS_CHECKSUM_ALGORITHM", "md5"),
    ("s3", "AWS_SERVER_SIDE_ENCRYPTION", "nonsense"),
    ("s3", "AWS_ACCESS_KEY_ID", "key\n"),
    ("s3", "AWS_SECRET_ACCESS_KEY", "secret "),
    ("s3", "AWS_SESSION_TOKEN", "a\nb"),
    ("gs", "GOOGLE_BEARER_TOKEN", "a\nb"),
    ("gs", "GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json"),
    ("gs", "GOOGLE_SERVICE_ACCOUNT_KEY", "{"),
    ("gs", "GOOGLE_TIMEOUT", "30"),
    ("az", "AZURE_STORAGE_ACCOUNT_KEY", "no base64 !"),
    ("az", "AZURE_CREDENTIAL_TYPE", "perhaps"),
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ALLOW_HTTP", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


@pytest.mark.parametrize(("scheme", "name", "value"), BAD)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], scheme: str, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfigError, match=name if "CREDENTIALS" not in name else "GOOGLE_") as caught:
        open_store(f"{scheme}://bucket/path")
    assert "\n" not in str(caught.value)
    assert "panicked" not in capfd.readouterr().err


def test_http_is_allowed_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    with pytest.raises(InvalidConfigError, match="AWS_ALLOW_HTTP=true"):
        open_store("s3://bucket/path")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "True")
    assert open_store("s3://bucket/path").url == "s3://bucket/path"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:9000")
    with pytest.raises(InvalidConfigError, match="holds a user name or a password") as caught:
        open_store("s3://bucket/path")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket:80/x", "s3://a b/x", "s3://b\n/x", "s3://KEY:xyz/zyx@b/x"])
def test_a_bucket_has_a_plain_name(url: str) -> None:
    with pytest.raises(MiniLMCacheError) as caught:
        open_store(url)
    assert "zyx" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3:/KEY:SECRET@bucket/x",
        "s3:///KEY:SECRET@bucket",
        "s3://KEY:SEC/SECRET@bucket",
        "S3:/KEY:SECRET@bucket",
        "s3:KEY:SECRET@bucket",
        "//KEY:SECRET@bucket",
        "s3:\\\\KEY:SECRET@bucket",
        "https://host/path?token=SECRET",
        "s3://bucket/x?sig=SECRET#SECRET",
    ],
)
def test_messages_show_no_password(text: str) -> None:
    assert "SECRET" not in hide_secrets(f"cannot open {text}: it is not there. Check the URL.")
    assert "SECRET" not in without_secrets(text) or "://" not in text


@pytest.mark.parametrize(
    "text", ["error: a/b:c.txt is not there", "12:30:01 x@y.z", "3x384:ff1200@x", "see https://x.y/z."]
)
def test_messages_without_secrets_stay(text: str) -> None:
    assert hide_secrets(text) == text
