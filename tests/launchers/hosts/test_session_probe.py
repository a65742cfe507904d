"""What runs on the nodes with bare Python, sent as text or beside the agent."""

from __future__ import annotations

from pathlib import Path

from orc.launchers.hosts.session_probe import device_memory


def test_the_memory_of_a_gpu_is_what_its_rank_has_told_of_in_numbers(tmp_path: Path) -> None:
    (tmp_path / "device-3.json").write_text('{"name": "L4", "memory_allocated": 3, "memory_reserved": "much"}')
    assert device_memory(str(tmp_path), "3") == {"memory_allocated": 3}
    assert device_memory(str(tmp_path), "4") == device_memory(str(tmp_path), "") == {}
