"""The policy file: what it may look like, and what is said when it is wrong."""
from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_swap.errors import SettingError
from mindspeed_swap.smart_swap.knobs import AUTO, KNOBS, SwapPolicyPref
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.policy_file import SHIPPED, read_policy_file
from mindspeed_swap.units import GIB, MIB

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("swap_policy_*.py"))

# Verbatim from the feature's description.
FOUR_LINES = """\
self.policy_v2 = True  # True是开启，False是关闭
self.policy_pref = SwapPolicyPref.BETTER_PERFORMANCE  # BETTER_PERFORMANCE是选择activation，BETTER_MEMORY_SAVING是选择activation和optimizer两个部分
self.swap_bucket_size = -1  # 控制swap每层tensor的大小，单位Bytes。默认-1，小于零即视为全选。
self.num_attn_layers_per_stage = 1  # 指定SwapStage划分粒度。默认1，即每个SwapStage包含一个attention layer。
"""  # noqa: E501

# The shape of the file that users of MindSpeed have: an Enum of its own, sizes for a 64 GB device, a helper value.
LIKE_MINDSPEED = """\
# a licence header
from enum import Enum, auto
import torch_npu
from mindspeed.core.memory.smart_swap.swap_utils import print_with_rank


class SwapPolicyPref(Enum):
    '''what to prefer'''

    BETTER_PERFORMANCE = auto()
    BETTER_MEMORY_SAVING = auto()


class SwapPolicyConfig:
    def __init__(self):
        self.rank = 0
        self.save_policy = False
        self.save_profiler_data = False
        self.print_level = 1
        self.print_rank = 0
        self.output_root_path = "./swap_output"
        self.warmup_step = 2
        self.stable_step = 10
        self.op_diff_thresh = 0.05
        self.tensor_size_thresh = 2**31 - 1
        self.enable_custom_record_stream = True
        self.free_stage_delay = 4
        self.swap_in_free_stage_delay = 2
        self.tensor_freq_thresh = 8
        self.bandwidth_arg = 1
        self.D2H_bandwidth = 64 / 2.5 * 1000 * self.bandwidth_arg
        self.H2D_bandwidth = 64 / 2.5 * 1000 * self.bandwidth_arg
        self.target_mode = False
        self.reduction_memory = 3 * 1024 * 1024 * 1024
        self.target_memory = 40 * 1024 * 1024 * 1024
        self.tensor_size_filter = 20 * 1024 * 1024
        self.redundant_memory = 2 * 1024 * 1024 * 1024
        self.size_coverage_weight = 2
        self.adjust_memory = 300 * 1024 * 1024
        self.adjust_step_duration = 1
        self.adjust_size_coverage_weight = 0
        self.policy_v2 = True
        self.policy_pref = SwapPolicyPref.BETTER_PERFORMANCE
        self.swap_bucket_size = -1
        self.num_attn_layers_per_stage = 1

    def __str__(self):
        return str(self.__dict__)


swap_policy_config = SwapPolicyConfig()
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str, name: str = "policy.py"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return read_policy_file(path)

    return read


def in_class(*lines: str) -> str:
    return "class SwapPolicyConfig:\n    def __init__(self):\n" + "".join(f"        {line}\n" for line in lines)


def test_as_shipped_every_knob_has_the_value_of_the_table():
    shipped = read_policy_file(SHIPPED)
    assert shipped == {name: knob.default for name, knob in KNOBS.items() if knob.effect}
    assert Policy.of(shipped) == Policy()
    source = SHIPPED.read_text()
    assert all(name in source for name in KNOBS if name not in ("tensor_freq_thresh", "bandwidth_arg",
               "logical_layer_num", "duration_time"))  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_ready_ones_load(path):
    assert len(CONFIGS) == 4
    assert Policy.of(read_policy_file(path)).line


def test_the_four_lines_of_the_description_bare_and_pasted_into_the_class(read):
    expected = {
        "policy_v2": True, "policy_pref": SwapPolicyPref.BETTER_PERFORMANCE, "swap_bucket_size": -1,
        "num_attn_layers_per_stage": 1,
    }  # fmt: skip
    assert read(FOUR_LINES) == expected
    assert read("\n".join("    " + line for line in FOUR_LINES.splitlines())) == expected
    shipped = SHIPPED.read_text().replace("\n\n\nswap_policy_config", "\n" + "".join(
        f"        {line}\n" for line in FOUR_LINES.splitlines()) + "\n\nswap_policy_config")  # fmt: skip
    assert read(shipped)["swap_bucket_size"] == -1


def test_mindspeeds_own_loads_without_its_imports(read):
    settings = read(LIKE_MINDSPEED)
    assert settings["policy_pref"] is SwapPolicyPref.BETTER_PERFORMANCE
    policy = Policy.of(settings)
    assert (policy.warmup_step, policy.stable_step, policy.tries) == (2, 10, 8)
    assert policy.redundant_memory == 2 * GIB and policy.reduction_memory == 3 * GIB and policy.target_memory is None
    assert policy.tensor_size_filter == 20 * MIB and policy.adjust_memory == 300 * MIB
    assert policy.d2h_bytes_per_ms == pytest.approx(25600 * MIB / 1000)


def test_its_own_enum_and_none_of_the_object_at_the_end(read):
    text = in_class("self.policy_pref = SwapPolicyPref.BETTER_MEMORY_SAVING")
    assert Policy.of(read(text)).saves_most
    assert not Policy.of({**read(text), "policy_v2": False}).saves_most, "a preference of v2"


@pytest.mark.parametrize(
    "line, says",
    [
        ("self.swap_bucket_sise = 1", "swap_bucket_sise is unknown: did you mean swap_bucket_size?"),
        ("self.zzz = 1", "zzz is unknown"),
        ("self.warmup_step = '2'", "warmup_step = '2': expected a whole number, at least 1"),
        ("self.warmup_step = 0", "warmup_step = 0: expected a whole number, at least 1"),
        ("self.policy_v2 = 1", "policy_v2 = 1: expected True or False"),
        ("self.policy_pref = 2", "policy_pref = 2: expected one of SwapPolicyPref.BETTER_PERFORMANCE"),
        ("self.target_memory = -1", "target_memory = -1: expected a whole number of bytes, or AUTO"),
        ("self.target_memory = '40 GB'", "target_memory = '40 GB': expected a whole number of bytes, or AUTO"),
        ("self.swap_bucket_size = 0.5", "swap_bucket_size = 0.5: expected a whole number of bytes"),
        ("self.D2H_bandwidth = 0", "D2H_bandwidth = 0: expected a number of MiB per second above 0, or AUTO"),
        ("self.warmup_step = float('nan')", "warmup_step = nan: expected a whole number, at least 1"),
        ("self.target_memory = float('inf')", "target_memory = inf: expected a whole number of bytes, or AUTO"),
        ("self.target_memory = 10**400", "target_memory = 1000"),
        ("self.D2H_bandwidth = float('nan')", "D2H_bandwidth = nan: expected a number of MiB per second above 0"),
        ("self.op_diff_thresh = AUTO", "op_diff_thresh = AUTO: expected a number"),
        ("self.warmup_step = True", "warmup_step = True: expected a whole number"),
        ("self.target_memory = 40 * GB", "NameError: name 'GB' is not defined"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(read, line, says):
    with pytest.raises(SettingError) as error:
        read("# a comment\n" + in_class("self.policy_v2 = True", line, "self.print_level = 1"))
    assert str(error.value).startswith(str(error.value).split(":")[0])
    assert f"policy.py:5: {says}" in str(error.value)


def test_a_syntax_error_names_the_line(read):
    with pytest.raises(SettingError, match=r"policy\.py:4: .*"):
        read(in_class("self.policy_v2 = True", "self.print_level = = 1"))


@pytest.mark.parametrize("name", ["swap.yaml", "policy.py"])
def test_a_swap_config_yaml_is_recognised(read, name):
    with pytest.raises(SettingError, match="did you mean --swap-config?"):
        read("swap_config:\n  swap: True\n  default_prefetch: 1\n", name)


def test_no_such_file(tmp_path):
    with pytest.raises(SettingError, match=r"--swap-policy-config .*none\.py: cannot be read"):
        read_policy_file(tmp_path / "none.py")


def test_a_float_that_is_whole_is_a_number_of_bytes(read):
    assert Policy.of(read(in_class("self.target_mode = True", "self.target_memory = 2.5 * 1024**3"))).target_memory == (
        5 * GIB // 2
    )


def test_stable_before_the_first_try_is_an_error():
    with pytest.raises(SettingError, match="stable_step = 2: must be above warmup_step = 2"):
        Policy.of({"stable_step": 2})


def test_auto_is_one_value():
    assert repr(AUTO) == "AUTO"
    assert Policy.of({"target_mode": True, "target_memory": AUTO}).targets(1000, 5000) == (980, 1000)
