"""The S3 endpoint from wherever the user put it: probed for real against a server on loopback, never against AWS."""

from collections.abc import Iterator

import pytest

from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.observe import observe_machine
from mem_core.infrastructure.machine.store import probe_url
from mem_core.infrastructure.settings import S3_ENDPOINT_ORDER, Settings

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "hunter2secret", "AWS_DEFAULT_REGION": "us-east-1", "HOME": "/nonexistent"}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=url, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    yield url
    assert "Contents" not in client.list_objects_v2(Bucket="bucket"), "a probe was left behind"
    server.stop()


def probe(url: str, **environ: str) -> str:
    settings = Settings.from_environment({**KEYS, **environ})
    return probe_url(url, settings.storage_options(url))


@pytest.mark.parametrize("variable", S3_ENDPOINT_ORDER)
def test_each_variable_reaches_the_server(endpoint: str, variable: str) -> None:
    assert probe("s3://bucket/runs", **{variable: endpoint}) == ""


def test_of_two_that_conflict_the_documented_one_is_used(endpoint: str) -> None:
    first, second = S3_ENDPOINT_ORDER[:2]
    assert probe("s3://bucket/runs", **{first: endpoint, second: NOWHERE}) == ""


def test_a_bucket_that_is_not_there_is_a_problem_without_the_key(endpoint: str) -> None:
    problem = probe("s3://missing-bucket/runs", AWS_ENDPOINT_URL=endpoint)
    assert problem
    assert "hunter2" not in problem


def test_the_report_names_endpoint_and_variable(endpoint: str) -> None:
    settings = Settings.from_environment({**KEYS, "AWS_ENDPOINT_URL": endpoint, "MEM_HOME": "/nonexistent/mem"})
    seen = observe_machine(RuntimeRequest(run_id="demo", store="s3://bucket/runs", device="cpu"), settings)
    assert seen.store.problem == ""
    assert seen.store.endpoint == f"{endpoint} (AWS_ENDPOINT_URL)"
    assert seen.store_folder is None
