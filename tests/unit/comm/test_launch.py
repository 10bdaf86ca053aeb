"""What the environment says about the world, and what is refused."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_zoo.comm import ancestors, launch
from moe_zoo.comm.launch import RANK_VARIABLES, World, check_world, read_world
from moe_zoo.spec.errors import PlanError

FOUR = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in os.environ:
        if (
            name.startswith(("ACCELERATE_", "MOE_ZOO_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_"))
            or name in RANK_VARIABLES
        ):
            monkeypatch.delenv(name)
    monkeypatch.setattr("sys.argv", ["moe_zoo", "train", "r.yaml"])
    monkeypatch.setattr("sys.orig_argv", ["python", "recipes/", "r.yaml"])


def set_variables(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_no_launcher_is_a_world_of_one():
    assert read_world() == World(0, 1, 0, 1, "none")
    check_world(read_world())


@pytest.mark.parametrize(
    ("extra", "launcher"),
    [({}, "torchrun"), ({"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate"), ({"MOE_ZOO_LAUNCHED": "1"}, "moe-zoo")],
)
def test_the_environment_names_rank_world_and_launcher(monkeypatch, extra, launcher):
    set_variables(monkeypatch, FOUR | extra)
    assert read_world() == World(3, 4, 1, 2, launcher)
    check_world(read_world(), expected=4)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "environment: RANK, WORLD_SIZE without LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; a launcher "
            "sets them all; start with torchrun or accelerate launch, or unset RANK WORLD_SIZE to run one process",
        ),
        (FOUR | {"RANK": "x"}, "environment: RANK='x'; must be a whole number; unset it"),
    ],
)
def test_half_an_environment_is_refused(monkeypatch, variables, text):
    set_variables(monkeypatch, variables)
    with pytest.raises(PlanError) as refused:
        read_world()
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("variables", "expected", "text"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "4"},
            None,
            "launch: SLURM_STEP_NUM_TASKS=4 and no RANK; each of these processes would train alone; "
            "start one torchrun per node and let it start the ranks",
        ),
        (
            {},
            2,
            "expect.world: 2; 1 process was started; run moe-zoo train r.yaml --processes 2, or set expect=null",
        ),
        (
            FOUR,
            2,
            "expect.world: 2; 4 processes were started; run torchrun --nproc-per-node 2 recipes/ r.yaml, "
            "or set expect=null",
        ),
        (
            {"ACCELERATE_MIXED_PRECISION": "no"},
            2,
            "expect.world: 2; 1 process was started; run accelerate launch --multi_gpu --num_processes 2 recipes/ "
            "r.yaml, or set expect=null",
        ),
    ],
)
def test_a_world_that_was_not_meant_is_refused(monkeypatch, variables, expected, text):
    set_variables(monkeypatch, variables)
    with pytest.raises(PlanError) as refused:
        check_world(read_world(), expected)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--cpu", "--num_processes", "2", "recipes/"], 2),
        (["--cpu", "--num-processes=3", "recipes/"], 3),
        (["--config_file", "{config}", "recipes/"], 5),
        (["--config_file={config}", "--num_processes", "1", "recipes/"], 1),
        (["recipes/"], None),
    ],
)
def test_the_number_accelerate_was_asked_for_is_read_from_its_command_line(tmp_path, monkeypatch, words, asked):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-default-config"))
    (tmp_path / "config.yaml").write_text("num_processes: 5")
    assert ancestors._asked([word.format(config=tmp_path / "config.yaml") for word in words]) == asked


def test_accelerates_default_config_counts_where_no_other_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_processes: 7")
    assert ancestors._asked(["recipes/"]) == 7


def test_a_process_alone_gets_a_group_that_no_other_can_join(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("LOCAL_RANK")  # set by the group and, so recorded, unset after the test
    device = launch.init_process_group(World(), timeout_s=5)
    try:
        assert (dist.get_world_size(), device.type) == (1, "cuda" if torch.cuda.is_available() else "cpu")
        assert launch.init_process_group(World()) == device, "a group that exists is kept"
        assert os.environ["LOCAL_RANK"] == "0", "DeepSpeed refuses without it"
    finally:
        launch.destroy()
    assert not dist.is_initialized()
    launch.destroy()


def test_threads_are_the_cores_shared_among_the_ranks_of_a_node(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        cores = len(os.sched_getaffinity(0))
        launch._set_threads(World())
        assert torch.get_num_threads() == cores
        launch._set_threads(World(world=2 * cores, ranks_per_node=2 * cores))
        assert torch.get_num_threads() == 1
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        launch._set_threads(World())
        assert torch.get_num_threads() == 1, "what the user chose stays"
    finally:
        torch.set_num_threads(before)


def test_each_attempt_has_keys_of_its_own(monkeypatch):
    with_port = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5))
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(with_port.port)}
    set_variables(monkeypatch, variables | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"})
    first = launch._store(World(), timedelta(seconds=5))
    first.set("address", "of the dead")
    assert first.check(["address"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not launch._store(World(), timedelta(seconds=5)).check(["address"])
