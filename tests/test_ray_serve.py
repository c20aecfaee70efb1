"""Ray Serve on this machine: two replicas behind one address, one of which is killed.

It costs 20 to 30 seconds: a controller, a proxy and six replicas with their engines start one
after the other, and the proxy passes on thousands of events.
"""

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from conftest import make_model
from ray_clusters import has_ended, processes_under, shared_cluster
from reference import make_llm
from waiting import FOREVER, LIMIT, wait_until

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.errors import RankError
from nanovllm.server.options import KEY, ServerOptions

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from nanovllm.ray import ServerReplica, build, serving_app  # noqa: E402
from nanovllm.ray.serve import OF_DEPLOYMENTS, _by_owner  # noqa: E402

EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_serve.py"
OPTIONS: dict[str, Any] = dict(device="cpu", dtype="float32", max_num_seqs=8, cpu_kvcache_gib=0.05)
# Ray notices soon that a replica has ended; a replica that takes long is not replaced.
PERIODS: dict[str, Any] = dict(
    health_check_period_s=1, health_seconds=FOREVER, drain_seconds=FOREVER
)
KEYS = {"Authorization": "Bearer secret"}
HI = [{"role": "user", "content": "Hi"}]
ENDLESS: dict[str, Any] = dict(  # for minutes
    prompt=[1, 2], ignore_eos=True, temperature=0, stream=True, max_tokens=60000
)


def processes(word: str) -> set[int]:
    """The processes under this one with a word in their command."""
    return {pid for pid, command in processes_under(os.getpid()).items() if word in command}


class Cluster(NamedTuple):
    """The served application."""

    address: str
    folder: Path
    prefix: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}{self.prefix}"

    def replicas(self) -> set[int]:
        """The processes of replicas."""
        return processes("ServeReplica")

    def engines(self) -> set[int]:
        """The processes of engines."""
        return processes("nanovllm.engine_main")

    def logs(self, application: str = "default") -> list[str]:
        """The log of each replica that there has been."""
        files = self.folder.glob(f"session_2*/logs/serve/replica_{application}_nanovllm_*.log")
        return [file.read_text() for file in files]

    def num_running(self) -> int:
        """How many requests the replicas of the example have."""
        names = [
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["name"].startswith("SERVE_REPLICA::default#")
        ]
        replicas = [ray.get_actor(name, namespace="serve") for name in names]
        return sum(ray.get([one.get_num_ongoing_requests.remote() for one in replicas]))

    def engine_seconds(self) -> float:
        """How many seconds of processors the engines have used."""
        fields = [Path(f"/proc/{pid}/stat").read_text().split() for pid in self.engines()]
        return sum(int(one[13]) + int(one[14]) for one in fields) / os.sysconf("SC_CLK_TCK")

    def wait_until_computing(self) -> None:
        """Wait until an engine computes: health checks take far less than this."""
        start = self.engine_seconds()
        wait_until("no engine has the request", lambda: self.engine_seconds() > start + 0.3)

    def num_left(self) -> int:
        """How many requests have ended because their clients left, as the logs say."""
        return len(re.findall(r"/v1/completions \S+ 499 ", "".join(self.logs())))

    def wait_until_left(self, number: int) -> None:
        wait_until("the request goes on", lambda: self.num_left() == number)

    @contextlib.contextmanager
    def asked(self, path: str = "/v1/completions", **body: Any) -> Iterator[HTTPConnection]:
        """A request whose response has not been read, and whose client leaves after the block."""
        with contextlib.closing(HTTPConnection(self.address, timeout=LIMIT)) as connection:
            headers = {**KEYS, "Content-Type": "application/json"}
            connection.request("POST", self.prefix + path, json.dumps(body), headers)
            yield connection

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=KEYS, timeout=LIMIT)

    def answers(self, number: int) -> bool:
        """Whether requests are answered, each at the third try at the latest, as clients retry."""
        for _ in range(number):
            tries = (self.post(prompt="abc", max_tokens=4).status_code for _ in range(3))
            if 200 not in tries:
                return False
        return True

    def has_both(self) -> bool:
        """Whether there are two replicas, and their engines."""
        return len(self.replicas()) == len(self.engines()) == 2

    def wait_for_replicas(self) -> None:
        """Wait until both replicas are ready."""
        wait_until("a replica is not replaced", self.has_both)
        wait_until(
            "no replica is ready",
            lambda: serve.status().applications["default"].status == "RUNNING",
        )

    @contextlib.contextmanager
    def stream(self, **body: Any) -> Iterator[Iterator[Any]]:
        """A request's events."""
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers=KEYS, timeout=LIMIT
        ) as response:
            assert response.status_code == 200, response.read()
            yield (json.loads(event) for event in _data(response.iter_lines()))


def _data(lines: Iterator[str]) -> Iterator[str]:
    """The data of events, until the last one."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield line.removeprefix("data: ")
    raise ConnectionError("the stream has no end")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can write for minutes, with a chat template."""
    path = make_model(tmp_path_factory.mktemp("long"), max_position_embeddings=65536)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return make_llm(model, max_num_seqs=8)


@pytest.fixture(scope="module")
def example() -> Any:
    """The example script as a module."""
    spec = importlib.util.spec_from_file_location("ray_serve", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster(example: Any, model: Path) -> Iterator[Cluster]:
    """The example, with two replicas; no process may be left of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    folder = shared_cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.serve._private.api.HTTP_PROXY_TIMEOUT", 600)
        patch.setattr(example, "serving_app", functools.partial(serving_app, **PERIODS))
        url = example.start(
            [f"--model={model}", "--replicas=2", f"--port={port}", "--api-key=secret", *flags]
        )
        cluster = Cluster(url.removeprefix("http://"), folder)
        wait_until("there are not two replicas", cluster.has_both)
        yield cluster
        serve.shutdown()
        wait_until("replicas are left", lambda: not cluster.replicas())
        wait_until("engines are left", lambda: not cluster.engines())


@pytest.mark.slow
def test_replicas_answer_as_the_library_does(cluster: Cluster, llm: LLM) -> None:
    """All at the same time, so that both replicas have something to do."""
    asked = [
        dict(max_tokens=12, seed=seed, temperature=1.1 * (seed % 2), top_k=20, n=2, ignore_eos=True)
        for seed in range(12)
    ]
    params = [SamplingParams(**one) for one in asked]  # type: ignore[arg-type]
    expected = llm.generate(["abc"] * 12, params, use_tqdm=False)
    chats = llm.chat([HI] * 12, params, use_tqdm=False)
    with ThreadPoolExecutor(24) as threads:
        completed = [threads.submit(cluster.post, prompt="abc", **one) for one in asked]
        chatted = [
            threads.submit(cluster.post, "/v1/chat/completions", messages=HI, **one)
            for one in asked
        ]
    for future, output in zip(completed, expected, strict=True):
        choices = future.result().json()["choices"]
        assert [c["token_ids"] for c in choices] == [o.token_ids for o in output.outputs]
        assert [c["text"] for c in choices] == [o.text for o in output.outputs]
    for future, output in zip(chatted, chats, strict=True):
        choices = future.result().json()["choices"]
        assert [c["token_ids"] for c in choices] == [o.token_ids for o in output.outputs]
        assert [c["message"]["content"] for c in choices] == [o.text for o in output.outputs]
    wait_until(
        "a replica has got no requests, or has not logged them",
        lambda: (
            sum("/v1/completions" in log and " 3+24 tokens" in log for log in cluster.logs()) == 2
        ),
    )


@pytest.mark.slow
def test_all_of_the_server_is_behind_the_proxy(cluster: Cluster) -> None:
    def get(path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{cluster.url}{path}", headers=headers, timeout=LIMIT)

    assert get("/health").status_code == 200
    assert "<title>" in get("/").text and "vllm:num_requests_running" in get("/metrics").text
    assert get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    assert get("/v1/models", **KEYS).json()["data"][0]["max_model_len"] == 65536
    assert cluster.post("/tokenize", prompt="abc").json()["tokens"] == [64, 65, 66]
    bad = cluster.post(prompt="a", temprature=1)
    assert bad.status_code == 400
    assert "did you mean 'temperature'?" in bad.json()["error"]["message"]


@pytest.mark.slow
def test_events_come_one_by_one(cluster: Cluster) -> None:
    before = cluster.num_left()
    with cluster.stream(**ENDLESS) as events:
        texts = [next(events)["choices"][0]["text"] for _ in range(20)]
    assert all(len(text) < 100 for text in texts), "tokens were collected"
    wait_until("all of the stream was computed", lambda: cluster.num_left() > before)


@pytest.mark.slow
def test_clients_that_leave_end_their_requests(cluster: Cluster) -> None:
    """Ray tells the application that they have left, or cancels it."""
    left = cluster.num_left()
    for _ in range(4):
        with cluster.stream(**ENDLESS) as events:
            next(events)
        cluster.wait_until_left(left := left + 1)
        wait_until("a replica has a request", lambda: cluster.num_running() == 0)
        with cluster.asked(**{**ENDLESS, "stream": False}):
            cluster.wait_until_computing()
        cluster.wait_until_left(left := left + 1)


class Reading(NamedTuple):
    """A stream that a thread reads until it is told to leave; the texts of its events until now."""

    texts: list[str]
    leave: threading.Event

    def read(self, cluster: Cluster, **body: Any) -> None:
        """Read the stream; it raises what ends it early."""
        with cluster.stream(**body) as events:
            for event in events:
                if "error" in event:
                    raise ConnectionError(event["error"]["message"])
                self.texts.append(event["choices"][0]["text"])
                if self.leave.is_set():
                    return

    def wait_until_begun(self, stream: "Future[None]") -> None:
        """Wait for the first event; raise what kept it from coming."""
        wait_until("the stream does not begin", lambda: self.texts or stream.done())
        if stream.done():
            stream.result()


def new_reading() -> Reading:
    return Reading([], threading.Event())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["replica", "engine"])
def test_a_killed_replica_is_replaced_and_disturbs_no_other(
    cluster: Cluster, llm: LLM, what: str
) -> None:
    cluster.wait_for_replicas()
    replicas, engines = cluster.replicas(), cluster.engines()
    readings = [new_reading() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        streams = []
        for reading in readings:  # one after the other, so that each replica gets some
            streams.append(threads.submit(reading.read, cluster, **ENDLESS))
            reading.wait_until_begun(streams[-1])
        killed = min(replicas if what == "replica" else engines)
        os.kill(killed, signal.SIGKILL)
        if what == "replica":  # requests do not wait for the new one
            assert cluster.answers(10)
        wait_until("no stream ends", lambda: any(stream.done() for stream in streams))
        wait_until("the replica has not ended", lambda: len(replicas & cluster.replicas()) == 1)
        lengths = [len(reading.texts) for reading in readings]
        wait_until(
            "the other replica's streams do not go on",
            lambda: all(
                stream.done() or len(reading.texts) >= length + 100
                for stream, reading, length in zip(streams, readings, lengths, strict=True)
            ),
        )
        for reading in readings:
            reading.leave.set()
        errors = [stream.exception() for stream in streams]
    texts = [
        "".join(reading.texts)
        for reading, error in zip(readings, errors, strict=True)
        if error is None
    ]
    assert 0 < len(texts) < 4, "streams of both replicas"
    assert all(isinstance(error, ConnectionError | httpx.HTTPError) for error in errors if error)
    longest = max(map(len, texts))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2 * longest)
    (expected,) = llm.generate([[1, 2]], params, use_tqdm=False)
    assert len(expected.text) > longest
    assert all(expected.text.startswith(text) for text in texts)
    cluster.wait_for_replicas()
    (gone,) = engines - cluster.engines()
    wait_until("the engine of a killed replica is left", lambda: has_ended(gone))
    assert cluster.answers(20)


def delete(application: str) -> None:
    """Delete an application if there is one, however long it takes."""
    serve.delete(application, _blocking=False)
    wait_until("it is not deleted", lambda: application not in serve.status().applications)


@pytest.mark.slow
def test_running_requests_finish_when_the_application_is_deleted(cluster: Cluster) -> None:
    """It is the last test that needs the application."""
    cluster.wait_for_replicas()
    reading = new_reading()
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(reading.read, cluster, **{**ENDLESS, "max_tokens": 2000})
        reading.wait_until_begun(stream)
        engines = cluster.engines()
        delete("default")
        stream.result()
    wait_until("engines are left", lambda: all(map(has_ended, engines)))


@pytest.mark.slow
def test_load_adds_a_replica(cluster: Cluster, model: Path) -> None:
    """Of another application, which has its own path; its first engine stops meanwhile."""
    delete("default")
    scaling = dict(
        min_replicas=1, max_replicas=2, target_ongoing_requests=1, upscale_delay_s=0.5,
        look_back_period_s=1, metrics_interval_s=0.2,
    )  # fmt: skip
    app = serving_app(
        str(model), **OPTIONS, **PERIODS, api_key=["secret"], autoscaling_config=scaling
    )
    serve.run(app, name="scaled", route_prefix="/scaled")
    wait_until("there is not one replica", lambda: len(cluster.engines()) == 1)
    scaled, (engine,) = cluster._replace(prefix="/scaled"), cluster.engines()
    body = dict(prompt="abc", max_tokens=4)

    def num_asked() -> int:
        """How many replicas have logged that they were asked."""
        return sum("/v1/completions " in log for log in cluster.logs("scaled"))

    with contextlib.ExitStack() as stack:
        os.kill(engine, signal.SIGSTOP)
        try:
            waiting = [stack.enter_context(scaled.asked(**body)) for _ in range(4)]
            wait_until("no replica is added", lambda: len(cluster.engines()) == 2)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert [one.getresponse().status for one in waiting] == [200] * 4
    wait_until("requests do not reach both", lambda: scaled.answers(2) and num_asked() == 2)
    delete("scaled")


@pytest.mark.slow
def test_a_replica_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its health check fails, and as Ray asks for that seldom, its process ends."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)

    async def live(kills: bool) -> None:
        engine = dict(model=EMBEDDED_MODEL, **OPTIONS)
        before = processes("nanovllm.engine_main")
        replica = ServerReplica(engine, ServerOptions(), {})
        await replica.__serve_build_asgi_app__()
        await replica.check_health()
        (pid,) = processes("nanovllm.engine_main") - before
        if kills:
            os.kill(pid, signal.SIGKILL)
            while not statuses:
                await asyncio.sleep(0.05)
            with pytest.raises(RankError, match="was killed by SIGKILL"):
                await replica.check_health()
        replica.__del__()
        assert not Path(f"/proc/{pid}").exists()

    for kills in (False, True):
        asyncio.run(asyncio.wait_for(live(kills), LIMIT))
        assert statuses == [1] * kills


@pytest.mark.slow
def test_a_replica_whose_engine_hangs_is_not_healthy() -> None:
    async def live() -> None:
        engine = dict(model=EMBEDDED_MODEL, **OPTIONS)
        before = processes("nanovllm.engine_main")
        replica = ServerReplica(engine, ServerOptions(health_seconds=0.2), {})
        await replica.__serve_build_asgi_app__()
        (pid,) = processes("nanovllm.engine_main") - before
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(asyncio.TimeoutError):
            await replica.check_health()
        os.kill(pid, signal.SIGCONT)
        replica.__del__()

    asyncio.run(asyncio.wait_for(live(), LIMIT))


def options_of_app(app: Any) -> tuple[Any, dict[str, Any]]:
    """What Ray keeps of an application: its deployment, and what replicas are made with."""
    deployment = app._bound_deployment
    return deployment, deployment.init_kwargs


def test_options_are_passed_through() -> None:
    scaling = dict(min_replicas=1, max_replicas=4, target_ongoing_requests=20, upscale_delay_s=3)
    app = serving_app(
        "m", device="cuda", tensor_parallel_size=2, max_num_seqs=9, engine_seed=4, seed=3,
        temperature=0.5, max_waiting=7, api_key=["a"], drain_seconds=5, autoscaling_config=scaling,
        max_queued_requests=50,
    )  # fmt: skip
    deployment, made_with = options_of_app(app)
    config = deployment._deployment_config
    assert {name: getattr(config.autoscaling_config, name) for name in scaling} == scaling
    assert (config.max_queued_requests, config.graceful_shutdown_timeout_s) == (50, 15)
    assert config.health_check_timeout_s == 40
    assert deployment.ray_actor_options == {"num_gpus": 2, "num_cpus": 1}
    assert made_with["engine"] == dict(
        model="m", device="cuda", tensor_parallel_size=2, max_num_seqs=9, seed=4
    )
    assert made_with["sampling"] == dict(seed=3, temperature=0.5)
    assert (made_with["server"].max_waiting, list(made_with["server"].api_key)) == (7, ["a"])


def test_the_number_of_ongoing_requests_is_for_the_engine_to_limit() -> None:
    """Ray's own default is five, of which an engine could make no batch."""
    deployment, _ = options_of_app(serving_app(device="cpu"))
    assert deployment.max_ongoing_requests > 10**6
    deployment, _ = options_of_app(serving_app(device="cpu", max_ongoing_requests=8))
    assert deployment.max_ongoing_requests == 8


def test_the_key_of_the_environment_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "k")
    _, made_with = options_of_app(serving_app(device="cpu"))
    assert list(made_with["server"].api_key) == ["k"]


def test_arguments_of_ray_are_read_as_json() -> None:
    app = build(
        {
            "model": "m", "device": "cpu", "num_replicas": "3", "temperature": "0.5",
            "autoscaling_config": "null", "ray_actor_options": '{"num_cpus": 4}',
            "enable_prefix_caching": "false", "max_num_seqs": 7,
        }
    )  # fmt: skip
    deployment, made_with = options_of_app(app)
    assert (deployment.num_replicas, made_with["sampling"]) == (3, {"temperature": 0.5})
    assert deployment.ray_actor_options == {"num_cpus": 4, "num_gpus": 0}
    assert made_with["engine"] == dict(
        model="m", device="cpu", enable_prefix_caching=False, max_num_seqs=7
    )


def test_no_two_options_share_a_name() -> None:
    given = _by_owner(dict.fromkeys(OF_DEPLOYMENTS))
    assert set(given["deployment"]) == set(OF_DEPLOYMENTS)
    assert _by_owner(dict(seed=1, engine_seed=2))["engine"] == {"seed": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(num_replica=2), "unknown option 'num_replica'; did you mean 'num_replicas'?"),
        (dict(max_num_sequences=2), "did you mean 'max_num_seqs'?"),
        (dict(max_num_seqs=0), "max_num_seqs must be >= 1, got 0"),
        (dict(temperature=-1), "temperature must be"),
        (dict(max_waiting=-1), "max_waiting must be >= 0, got -1"),
        (dict(api_key="k"), "api_key must be a list of printable texts"),
        (dict(port=80), "port is an option of Ray's proxies: serve.start(http_options={...})"),
        (dict(root_path="/x"), "serve.run(..., route_prefix=...)"),
        (dict(user_config={}), "unknown option 'user_config'"),
        (dict(device="cuda:1"), "device must be 'auto', 'cpu' or 'cuda' with Ray, got 'cuda:1'"),
        (dict(num_replicas=-1), "num_replicas"),
        (dict(autoscaling_config={"max_replica": 2}), "did you mean 'max_replicas'?"),
        (dict(autoscaling_config={"min_replicas": 3, "max_replicas": 2}), "max_replicas (2)"),
        (dict(ray_actor_options=5), "ray_actor_options must be a dict, got 5"),
        (dict(ray_actor_options={"num_cpu": 5}), "num_cpu"),
        (dict(ray_actor_options={"num_gpus": 1}), "num_gpus must be 0 for an engine on CPUs"),
        (
            dict(device="cuda", tensor_parallel_size=2, ray_actor_options={"num_gpus": 1}),
            "num_gpus must be tensor_parallel_size, 2, got 1",
        ),
        (
            dict(device="auto", ray_actor_options={"num_gpus": 2}),
            "num_gpus must be tensor_parallel_size, 1, got 2",
        ),
        (dict(device="auto", ray_actor_options={"num_gpus": "1"}), "num_gpus must be a number"),
        (
            dict(max_connections=9),
            "max_connections is an option of Ray's proxies: they have limits",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_deployed(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        serving_app(**{"device": "cpu", **options})


def test_a_rank_may_have_a_part_of_a_gpu() -> None:
    deployment, made_with = options_of_app(serving_app(ray_actor_options={"num_gpus": 0.5}))
    assert deployment.ray_actor_options["num_gpus"] == 0.5
    assert made_with["engine"]["device"] == "cuda"


def test_ray_is_started_where_the_device_depends_on_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(ray, "init", lambda: started.append(True))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0 * len(started)})
    assert options_of_app(serving_app(device="cpu"))[1]["engine"]["device"] == "cpu"
    assert not started
    for _ in range(2):
        deployment, made_with = options_of_app(serving_app(tensor_parallel_size=2))
        assert deployment.ray_actor_options == {"num_gpus": 2, "num_cpus": 1}
        assert made_with["engine"]["device"] == "cuda"
    assert started == [True]


@pytest.mark.parametrize(
    ("flags", "words"), [(["--replicas=-1"], "num_replicas"), (["--max-num-seqs=0"], ">= 1")]
)
def test_the_example_reports_mistakes(
    example: Any, flags: list[str], words: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        example.start(["--device=cpu", *flags])
    assert words in capsys.readouterr().err


def test_the_example_scales(example: Any) -> None:
    args = example.make_parser().parse_args(
        ["--device=cpu", "--max-replicas=4", "--max-num-seqs=10", "--num-cpus=2"]
    )
    deployment, _ = options_of_app(example.application(args))
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert scaling.target_ongoing_requests == 5
    assert deployment.ray_actor_options == {"num_cpus": 2, "num_gpus": 0}


def test_without_ray_serve_the_error_names_the_extra() -> None:
    script = "import sys; sys.modules['ray.serve'] = None; from nanovllm.ray import serving_app"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=LIMIT)
    assert b"ImportError: nanovllm.ray needs nanovllm[ray-serve]: " in done.stderr
