"""Notices that are asked for: who is asked where, what counts as a notice, and what follows."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator
from orc.runtime.core.context import current_context, reset_default
from orc.runtime.preemption import notices
from orc.runtime.preemption.notices import Ec2Spot, GoogleCloud, NoticeFile, Notices, SlurmTimeLimit, sources
from orc.runtime.preemption.preemption import Preempted


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server: answers by path in ``answers``, every request in ``requests``."""
    monkeypatch.setattr(notices, "REQUEST_S", 60.0)

    class Handler(BaseHTTPRequestHandler):
        answers, requests = {}, []

        def answer(self):
            self.requests.append((self.command, self.path, dict(self.headers)))
            status, body = self.answers.get(self.path, (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = answer

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Handler.host = f"127.0.0.1:{server.server_port}"
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_threads_left():
    yield
    notices.close_all()


def kinds(env, tmp_path, **options):
    return [type(source) for source in sources(env, dmi=tmp_path, **options)]


def test_nobody_is_asked_where_no_platform_is_detected(tmp_path):
    assert kinds({"PATH": "/bin"}, tmp_path) == []


def test_platforms_are_detected_by_machine_and_environment(tmp_path):
    assert kinds({"TPU_NAME": "pod"}, tmp_path) == [GoogleCloud]
    assert kinds({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "2000000000"}, tmp_path) == [SlurmTimeLimit]
    assert kinds({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "2000000000", "ORC_MARKER": "m"}, tmp_path) == []
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert kinds({}, tmp_path) == [Ec2Spot]
    assert kinds({"AWS_EC2_METADATA_DISABLED": "true"}, tmp_path) == []
    (tmp_path / "sys_vendor").write_text("Google\n")
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert kinds({}, tmp_path, notice_file="/x") == [NoticeFile, GoogleCloud]


def test_a_spot_instance_is_told_when_it_ends(metadata):
    metadata.answers["/latest/api/token"] = (200, "t0ken")
    spot = Ec2Spot(f"http://{metadata.host}")
    assert spot.poll() is None
    metadata.answers["/latest/meta-data/spot/instance-action"] = (
        200,
        '{"action": "stop", "time": "2030-01-01T00:00Z"}',
    )
    assert spot.poll() == "stop at 2030-01-01T00:00Z"
    methods = [method for method, _, _ in metadata.requests]
    assert methods == ["PUT", "GET", "GET"]  # the token is asked for once
    headers = {name.lower(): value for name, value in metadata.requests[-1][2].items()}
    assert headers["x-aws-ec2-metadata-token"] == "t0ken"


@pytest.mark.parametrize(
    ("preempted", "event", "notice"),
    [
        ("FALSE", "NONE", None),
        ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("TRUE", "NONE", "the machine is preempted"),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance: TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_google_cloud_tells_preemption_and_maintenance(metadata, preempted, event, notice):
    root = "/computeMetadata/v1/instance"
    metadata.answers[f"{root}/preempted"] = (200, preempted)
    metadata.answers[f"{root}/maintenance-event"] = (200, event)
    assert GoogleCloud(metadata.host).poll() == notice
    assert metadata.requests[0][2]["Metadata-Flavor"] == "Google"


def test_a_proxy_is_never_asked(metadata, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert GoogleCloud(metadata.host).poll() is None


def test_the_end_of_a_slurm_job_is_told_in_time(monkeypatch):
    monkeypatch.setattr(notices, "time", SimpleNamespace(time=lambda: 5000.0))
    assert SlurmTimeLimit(6000).poll() is None
    assert SlurmTimeLimit(5060).poll() == "the job ends in 60 s"


def test_a_service_that_does_not_answer_is_asked_three_times():
    class Broken:
        name, asked = "broken", 0

        def poll(self):
            self.asked += 1
            raise ConnectionRefusedError("nobody there")

    broken = Broken()
    asking = Notices(current_context(cpu=True), [broken], poll_s=0.01)
    asking.start()
    asking._thread.join(timeout=60)
    assert not asking._thread.is_alive()
    assert broken.asked == 3


def test_a_notice_stops_and_saves_the_run(tmp_path, monkeypatch, capfd):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(notices, "POLL_S", 0.01)
    monkeypatch.setenv("ORC_NOTICE_FILE", str(tmp_path / "notice"))
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    reset_default()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.randn(5000, 3)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)

    def train():
        for index, (x,) in enumerate(loader):
            accelerator.backward(model(x).mean())
            optimizer.step()
            if index == 3:
                (tmp_path / "unseen").write_text("node 7 goes down\n")
                (tmp_path / "unseen").rename(tmp_path / "notice")  # with its text, whenever it is looked at
            time.sleep(0.002)

    with pytest.raises(Preempted, match="saved to"):
        train()
    assert 3 < optimizer.steps < 5000
    assert "preemption notice from notice file: node 7 goes down" in capfd.readouterr().err
    assert (tmp_path / "checkpoints/checkpoint_0").is_dir()
