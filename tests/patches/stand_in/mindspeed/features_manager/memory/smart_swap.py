from mindspeed.features_manager.feature import MindSpeedFeature


class SmartSwapFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("smart-swap")

    def register_args(self, parser):
        parser.add_argument_group(self.feature_name).add_argument("--smart-swap", action="store_true")

    def register_patches(self, patch_manager, args):
        from mindspeed.core.memory.smart_swap.swap_adaptor import train_step_wrapper

        patch_manager.register_patch("megatron.training.training.train_step", train_step_wrapper)
