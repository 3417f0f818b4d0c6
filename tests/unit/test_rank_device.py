"""A rank's model, its current device, its memory readings and its random numbers are all of the device that its place names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mem_core.domain.errors import InternalError
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.deepspeed.trainable import EVERY_PARAMETER, build_rank_model
from mem_core.runtime.ranks.local.places import local_place
from mem_core.runtime.ranks.place import Meeting, RankPlace
from mem_core.runtime.ranks.worker.device import CpuDevice, CudaDevice, open_device
from mem_core.runtime.ranks.worker.main import rank_variables
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

MEETING = Meeting(init_method="tcp://10.0.0.2:29400", master_address="10.0.0.2", master_port=29400, interface="eth1")


class FakeCuda:
    """torch.cuda of a machine with three devices: device N holds (N + 1) x 1,000 bytes; without a number the current one is meant."""

    def __init__(self) -> None:
        self.current = 0
        self.default_generators = tuple(torch.Generator() for _ in range(3))
        self.peaks_reset: list[int] = []
        self.caches_emptied = 0

    def set_device(self, index: int) -> None:
        self.current = index

    def memory_stats(self, index: int | None = None) -> dict[str, int]:
        held = 1_000 * (1 + (self.current if index is None else index))
        names = ("allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
        counts = {f"{name}.all.{when}": held for name in names for when in ("current", "peak")}
        return counts | {"num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        self.peaks_reset.append(self.current if index is None else index)

    def mem_get_info(self, index: int | None = None) -> tuple[int, int]:
        held = self.memory_stats(index)["allocated_bytes.all.current"]
        return 10_000 - held, 10_000

    def get_device_properties(self, index: int | None = None) -> object:
        return object()

    def empty_cache(self) -> None:
        self.caches_emptied += 1


class Elsewhere(CudaDevice):
    """A device that every torch has and that is not the default one."""

    torch_device = torch.device("meta")

    def __init__(self) -> None:
        pass


def place_on(local_rank: int, device: str) -> RankPlace:
    """Rank 5 of 6, somewhere on the second machine."""
    return RankPlace(
        rank=5, num_ranks=6, local_rank=local_rank, device=device, meeting=MEETING, heartbeat_path="/live/beat", board_path="/live/board"
    )  # fmt: skip


def test_every_role_is_played_by_the_device_of_the_place() -> None:
    """Rank 5, which is local rank 2: nothing of it is on device 0, nor on device 5."""
    cuda = FakeCuda()
    device = open_device(place_on(2, "cuda:2"), cuda)
    assert device.torch_device == torch.device("cuda", 2)
    device.seed(7)
    reader = device.memory_reader(None)
    assert (reader.read().used_bytes, reader.read().peak_bytes) == (3_000, 3_000), "device 0 is still the current one"
    (limit,) = reader.limits([reader.read()])
    assert (limit.name, limit.limit_bytes) == ("device 2 free", 10_000)
    assert cuda.peaks_reset == [2, 2, 2]
    assert device.probe().usage().used_bytes == 3_000
    assert "allocated 3000 (peak 3000)" in device.memory_summary()
    assert [generator.initial_seed() == 7 for generator in cuda.default_generators] == [False, False, True]
    assert cuda.current == 0
    device.use()
    assert cuda.current == 2


def test_dropout_on_the_host_draws_the_numbers_that_it_always_drew() -> None:
    """The seed reaches the host's generator on both kinds of device, and a CPU rank touches nothing else."""
    cuda = FakeCuda()
    torch.default_generator.manual_seed(41)
    expected = torch.rand(3)
    for device in (open_device(place_on(0, "cpu"), cuda), open_device(place_on(1, "cuda:1"), cuda)):
        device.seed(41)
        assert torch.equal(torch.rand(3), expected)
    device = open_device(place_on(2, "cpu"), cuda)
    device.use()
    device.seed(3)
    assert device.torch_device == torch.device("cpu")
    assert isinstance(device, CpuDevice)
    assert cuda.current == 0


def test_the_model_is_built_on_the_device_of_the_rank() -> None:
    """Each parameter and buffer, ready to be trained."""
    request = RuntimeRequest.model_validate({"run_id": "x", "device": "cpu"})
    spec = WorkerSpec(
        request=request, device="cuda", dtype="float32", num_threads=1, data_folder="", validation_folder=None, pad_token_id=0,
        default_plan=MemoryPlan(micro_batch_rows=1),
    )  # fmt: skip
    model = build_rank_model(spec, spec.default_plan, Elsewhere(), EVERY_PARAMETER)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert model.training


def test_libraries_read_the_place_in_their_environment() -> None:
    """LOCAL_RANK is the number on the machine, and the address is never a guess."""
    assert rank_variables(place_on(1, "cuda:1")) == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth1",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"rank": 6}, {"rank": -1}, {"local_rank": -1}, {"device": "cuda:0"}, {"device": "cuda"}, {"device": ""}]
)
def test_a_place_that_cannot_be_is_refused_at_birth(change: dict[str, Any]) -> None:
    """DeepSpeed takes its device from LOCAL_RANK: a place that says something else is an error before anything starts."""
    values = {"rank": 1, "num_ranks": 6, "local_rank": 1, "device": "cuda:1"} | change
    with pytest.raises(InternalError, match=next(iter(change))):
        RankPlace(meeting=MEETING, heartbeat_path="", board_path="", **values)


def test_ranks_of_one_machine_have_a_device_each_and_one_meeting_point(tmp_path: Path) -> None:
    """Four ranks, four devices, four heartbeats; one rendezvous, one page."""
    places = [local_place(tmp_path, "cuda", rank, 4) for rank in range(4)]
    assert [place.device for place in places] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert len({place.meeting for place in places}) == len({place.board_path for place in places}) == 1
    assert len({place.heartbeat_path for place in places}) == 4
    assert {local_place(tmp_path, "cpu", rank, 4).device for rank in range(4)} == {"cpu"}


def test_a_setting_of_the_allocator_reaches_torch() -> None:
    """The device hands it on; the host has none and lets it pass. This torch knows the setting by that name."""
    asked: list[str] = []
    CudaDevice(1, FakeCuda(), asked.append).set_allocator("expandable_segments:True")
    assert asked == ["expandable_segments:True"]
    CpuDevice().set_allocator("expandable_segments:True")
    assert callable(torch._C._accelerator_setAllocatorSettings)
