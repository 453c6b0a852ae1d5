"""The policy of ``--smart-swap``: edit this file, or copy it and give ``--swap-policy-config FILE``.

It is a Python program: whatever stands in it is executed, so use only files that you trust. It is read when arguments
have been parsed; a name that does not exist or a value of another type is an error with file and line.

AUTO means: derived from what was measured, by the rule told here. A number given is obeyed.
"""
from mindspeed_swap.smart_swap import AUTO, SwapPolicyPref


class SwapPolicyConfig:
    def __init__(self):
        # ---- phases: WarmUp, SearchPolicy, Stable
        # Steps that are only recorded. The first step has no optimizer state yet, so it is never planned from.
        self.warmup_step = 2
        # Step at which Stable begins, warmup_step included: between them plans are tried, one per step.
        # AUTO: tries go on while they gain or promise to, 8 at most, and the best one measured stays.
        self.stable_step = AUTO
        # Share by which the number of saved tensors of a step may differ from the recorded step. Two steps in a row
        # beyond it are another workload: the search begins again.
        self.op_diff_thresh = 0.05

        # ---- how much: the least of what follows is the target for the peak of a step
        # Bytes left free of the device, or of MINDSPEED_SWAP_DEVICE_CAPACITY: steps differ a little.
        # AUTO: 2 % of it (of the target, where that is lower), less where there is no other way or once a step has
        # been as predicted.
        self.redundant_memory = AUTO
        # Bytes added to that after a try that ran out of memory all the same. AUTO: as much as there was.
        self.adjust_memory = AUTO
        # Where memory does not run out: True lowers the peak to target_memory bytes (0: moves all that may move), False
        # by reduction_memory bytes. AUTO: no lower than the device demands, so with room to spare nothing moves.
        # --swap-memory-target GB is target_mode = True with target_memory = GB * 1024**3.
        self.target_mode = False
        self.target_memory = AUTO
        self.reduction_memory = AUTO

        # ---- of what
        # True: SwapStages, each with a bucket. False: any tensor may go (the same planner, without buckets).
        self.policy_v2 = True
        # Of v2. BETTER_PERFORMANCE moves activations, BETTER_MEMORY_SAVING the optimizer's state as well.
        self.policy_pref = SwapPolicyPref.BETTER_PERFORMANCE
        # Of v2: most bytes moved per SwapStage, first saved first. -1: no cap. 0: none. The target decides how much of
        # it goes.
        self.swap_bucket_size = -1
        # Of v2: transformer layers per SwapStage. What is saved outside the layers is a stage of its own.
        self.num_attn_layers_per_stage = 1
        # Bytes; smaller tensors are not planned for. AUTO: 64 KiB, below that a copy costs more than it frees.
        self.tensor_size_filter = AUTO

        # ---- at which speed: MiB per second. AUTO: as measured at start.
        self.D2H_bandwidth = AUTO
        self.H2D_bandwidth = AUTO

        # ---- what is told
        self.print_level = 1  # 0, 1: one line per thing worth knowing; 2: none
        self.print_rank = 0  # 0: rank 0, and others where it concerns only them; -1: all
        # Plan as a file for --swap-plan; figures and Perfetto trace as of --swap-report-dir. Both in output_root_path.
        self.save_policy = False
        self.save_profiler_data = False
        self.output_root_path = "./swap_output"

        # Names of MindSpeed's file to which nothing here corresponds are accepted, and said to have no effect: rank,
        # tensor_size_thresh, enable_custom_record_stream, free_stage_delay, swap_in_free_stage_delay (releases wait for
        # their own copy), size_coverage_weight, adjust_size_coverage_weight, adjust_step_duration (plans are chosen by
        # simulated time, not by a score).


swap_policy_config = SwapPolicyConfig()
