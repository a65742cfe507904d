"""Models by their names on the Hub: the real client against a small Hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "a" * 40
BERT = {"model_type": "bert", "vocab_size": 28996}  # bert-base-cased; the rest are defaults
OWN = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"},
}
OWN_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
class OwnConfig(PretrainedConfig):
    model_type = "own"
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(512, 512, bias=False)
        self.post_init()
"""
# The library each repository names, and its files.
HUB = {
    "google-bert/bert-base-cased": ("transformers", {"config.json": json.dumps(BERT)}),
    "someone/untold": (None, {"config.json": json.dumps(BERT)}),
    "someone/own": ("transformers", {"config.json": json.dumps(OWN), "own_code.py": OWN_CODE}),
    "someone/voice": ("speechbrain", {}),
    "timm/resnet50.a1_in1k": ("timm", {"config.json": json.dumps({"architecture": "resnet50"})}),
}
# timm 1.0.31 as far as it is called: with PyPI's torchvision it does not load beside a torch for CPUs alone. Where
# torchvision's operators are declared by hand, the real one gives the same rows.
TIMM = """
from torch import nn
def conv(i, o, k=1, s=1):
    return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o))
def create_model(model_name, pretrained=False, **kwargs):
    if model_name not in ("resnet50", "hf-hub:timm/resnet50.a1_in1k"):
        raise RuntimeError(f"Unknown model ({model_name})")
    assert not pretrained
    layers, width = [conv(3, 64, 7, 2)], 64
    for inner, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            block = [conv(width, inner), conv(inner, inner, 3), conv(inner, 4 * inner)]
            layers.append(nn.ModuleList(block + ([conv(width, 4 * inner)] if index == 0 else [])))
            width = 4 * inner
    return nn.Sequential(*layers, nn.Linear(width, kwargs.get("num_classes", 1000)))
"""
PROGRAM = """
import json, sys
from orc.runtime.weights.named_models import ModelNotFound, empty_model
from orc.runtime.memory.sizes import estimate_memory
def row(arguments):
    try:
        model = empty_model(*arguments)
    except ModelNotFound as error:
        return str(error)
    assert all(value.is_meta for value in model.parameters())
    return estimate_memory(model, ["float32"])[0].row()
for line in sys.stdin:
    print(json.dumps([row(arguments) for arguments in json.loads(line)]), flush=True)
"""


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/")
        body = None
        for name, (library, files) in HUB.items():
            if path in (f"api/models/{name}", f"api/models/{name}/revision/{REVISION}"):
                info = {"id": name, "modelId": name, "sha": REVISION, "tags": [], "siblings": [], "private": False}
                body = json.dumps(info | ({"library_name": library} if library else {}))
            for revision in ("main", REVISION):
                body = files.get(path.removeprefix(f"{name}/resolve/{revision}/"), body)
        data = (body or "").encode()
        self.send_response(404 if body is None else 200)
        if body is None:
            self.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in path else "RepoNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def test_models_are_made_of_what_the_hub_says(tmp_path):
    (tmp_path / "timm.py").write_text(TIMM)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(tmp_path / "home")}
    env |= {"PYTHONPATH": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def ask(*arguments):
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    local = tmp_path / "config.json"
    local.write_text(json.dumps({"architecture": "resnet50", "num_classes": 10}))
    bert, untold, told, own, trusted, voice, resnet, tuned, gone = ask(
        ["google-bert/bert-base-cased"],
        ["someone/untold"],
        ["someone/untold", "transformers"],
        ["someone/own"],
        ["someone/own", None, True],
        ["someone/voice"],
        ["timm/resnet50.a1_in1k"],
        [str(local)],
        ["someone/nothing"],
    )
    assert bert == told
    assert bert[2:] == ["413.18 MB", "1.61 GB"]
    assert "library_name" in untold
    assert "trust_remote_code" in own
    assert trusted == ["float32", "1.0 MB", "1.0 MB", "4.0 MB"]
    assert "speechbrain" in voice
    assert resnet == ["float32", "9.0 MB", "97.7 MB", "390.78 MB"]
    assert tuned == ["float32", "9.0 MB", "89.96 MB", "359.83 MB"], "it has 10 classes"
    assert "someone/nothing" in gone
    assert "config.json" in gone
    server.shutdown()
    server.server_close()
    cached, absent, image = ask(
        ["google-bert/bert-base-cased", "transformers"],
        ["someone/nothing", "transformers"],
        ["timm/resnet50.a1_in1k", "timm"],
    )
    process.communicate()
    assert cached == bert, "what was downloaded before is enough"
    assert "the Hub cannot be asked" in absent
    assert "the Hub cannot be asked" in image
